"""Files that are whole or absent, whatever happens: written under a temporary name, fsynced, renamed, directory fsynced.

A reader never sees a temporary file (its name starts with ".tmp-"), and a writer that was killed leaves at most one,
which the next writer removes. POSIX only: the lock is `flock`, which the system releases when its holder dies.
"""

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from logra.errors import SyncError

TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold the exclusive lock of a directory, and remove what killed writers left in it.

    Yields:
        A file descriptor of the directory.
    """
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in directory.glob(TEMPORARY_PREFIX + "*"):
            leftover.unlink()
        yield descriptor
    finally:
        os.close(descriptor)


def try_writing(directory: Path) -> None:
    """Make a folder and a file in it, before long work whose result is to lie there; leaves what was there as it was.

    Raises:
        OSError: one of them cannot be made.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        # Permissions do not tell of a read-only disk or a name that is not allowed: only trying does.
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_bytes(path: Path, data: bytes, directory: int) -> None:
    """Write a file durably. On return it survives a crash of the process and of the machine.

    Args:
        path: where; must not exist.
        data: the content.
        directory: descriptor of the locked directory of `path`.

    Raises:
        OSError: it could not be written. Then the file is either absent, or whole and possibly not yet durable.
    """
    write_file(path, lambda temporary: _write_all(temporary, data), directory)


def write_file(path: Path, write: Callable[[Path], None], directory: int) -> None:
    """Like `write_bytes`, for a file that `write` creates at the path it is given."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        write(temporary)
        _fsync(temporary)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def sync_directory(directory: int) -> None:
    """Make the names in a folder durable.

    Args:
        directory: its descriptor.
    """
    os.fsync(directory)


@contextlib.contextmanager
def explained(what: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the file system into a SyncError that says what to do.

    Args:
        what: was being written, and what the state is now.
        num_bytes: size of what was being written, bytes.
    """
    try:
        yield
    except OSError as error:
        size = "" if num_bytes is None else f" ({num_bytes} bytes)"
        advice = "make the folder writable again and publish the same update once more"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full: free some space and publish the same update once more"
        raise SyncError(f"{what}{size} failed: {error}. Nothing that was acknowledged is lost; {advice}") from error


def _write_all(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
