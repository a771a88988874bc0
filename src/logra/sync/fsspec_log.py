"""`FsspecLog`: the files of a `DirectoryLog` in any storage that fsspec reaches: object stores, shared file systems.

    logra.sync.FsspecLog("s3://bucket/run/updates")          with the package of the storage, here s3fs, installed

Names and contents are those of `logra.sync.log`: a folder that is copied to a bucket, or back, stays the same log. An append
is acknowledged when the storage has acknowledged the object.

Contract: the storage makes an object visible whole or not at all, as object stores do; in local folders, which do not,
files are written under a temporary name and renamed. It has no lock: there is one writer at a time, which is found out
afterwards only, by the digest of a version that another has written. Readers may follow while a writer appends; whatever
a storage damages or cuts short is found by the seal of the packet.

Refuses, with `SyncError`, what `DirectoryLog` refuses, and whatever the storage fails to do.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from logra.errors import PacketError, SyncError
from logra.sync import anchor
from logra.sync.durable import TEMPORARY_PREFIX
from logra.sync.log import ANCHOR_FOLDER, ANCHOR_SUFFIX, MANIFEST, UPDATE_SUFFIX, check_belongs, file_stem
from logra.sync.manifest import BaseModel, Manifest
from logra.update import PolicyUpdate


class FsspecLog:
    """A log in a storage of fsspec.

    Args:
        url: of its folder, with the protocol of the storage: "s3://bucket/folder", "memory://folder", "file:///folder".
        manifest: start the log with it, or check that it is the log of this run.
        storage_options: keyword arguments of the storage (keys, endpoints), see fsspec.

    Raises:
        SyncError: fsspec or the package of the storage is missing, the storage cannot be reached, or it holds the log of
            another run, other files, or a log with gaps.

    Example:
        >>> log = logra.sync.FsspecLog("memory://run/updates")
        >>> publisher = logra.sync.Publisher(log, opt)
    """

    def __init__(
        self, url: str, manifest: Manifest | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise SyncError("FsspecLog needs the package fsspec: pip install 'logra[fsspec]'") from error
        self.url = url
        try:
            # A listing that is remembered would hide what a writer has added.
            options = {"use_listings_cache": False, **(storage_options or {})}
            self._storage, self._path = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, OSError) as error:
            raise SyncError(f"FsspecLog: url={url!r} cannot be opened: {error}") from error
        self._path = self._path.rstrip("/")
        self._manifest: Manifest | None = None
        self._latest = -1
        if self.manifest is None:
            self._check_empty()
        if manifest is not None:
            self.start(manifest)

    @property
    def manifest(self) -> Manifest | None:
        """What the log says about itself; None before it has begun."""
        if self._manifest is None:
            data = self._read(MANIFEST)
            if data is not None:
                manifest = Manifest.from_json(data)
                self._latest = self._last_of_storage(manifest.base.version)
                self._manifest = manifest
        return self._manifest

    def start(self, manifest: Manifest) -> None:
        """Begin the log of a run; does nothing where it has begun with the same manifest.

        Raises:
            SyncError: the storage holds another log or other files, or cannot be written.
        """
        if self.manifest is None:
            self._check_empty()
            self._write(MANIFEST, manifest.to_json().encode())
        if self.manifest != manifest:
            raise SyncError(f"{self.url} is the log of run {self._started().run_id!r}; choose another folder")

    def append(self, update: PolicyUpdate) -> int:
        """Add the update that leads to the next version; like `DirectoryLog.append`.

        Returns:
            Bytes of its packet. On return the storage has it.

        Raises:
            SyncError: a gap, another run, other content for a version that exists, or the storage failed. After a failure
                append the same update again.
        """
        if self.manifest is None:
            if not update.run_id:
                raise SyncError("append: the update has no run id; publish it with a Publisher, which gives it one")
            base = BaseModel(version=update.base_version)
            self.start(
                Manifest(run_id=update.run_id, weight_storage=update.weight_storage, seed=update.seed, base=base)
            )
        check_belongs(update, self._started())
        data, latest = update.to_bytes(), self.latest()
        if update.version > latest + 1:
            raise SyncError(f"append: the log is at version {latest}; version {update.version} leaves a gap")
        if update.version == latest + 1:
            self._write(_update_name(update.version), data)
        elif update.version <= self._started().base.version or self.read(update.version).digest != update.digest:
            raise SyncError(
                f"append: {self.url} is at version {latest} and holds another update to version {update.version}. Does "
                f"another run write there?"
            )
        return len(data)

    def read_since(self, version: int) -> Iterator[PolicyUpdate]:
        """The updates after `version` that are there now, in order. Call again to follow a writer.

        Raises:
            SyncError: the log does not reach back to `version`, an object is missing, or the storage failed.
            PacketError: an object is damaged or holds another update than its name says.
        """
        manifest, latest = self._started(), self.latest()
        if not manifest.base.version <= version <= latest:
            raise SyncError(f"{self.url} ends at version {latest}; it has nothing to continue version {version} with")
        for number in range(version + 1, latest + 1):
            yield self.read(number)

    def latest(self) -> int:
        """The newest version; that of the base model where there is no update yet."""
        self._started()
        version = self._latest
        while self._exists(_update_name(version + 1)):
            version += 1
        self._latest = version
        return version

    def read(self, version: int) -> PolicyUpdate:
        """The update that leads to `version`. Raises like `read_since`."""
        data = self._read(_update_name(version))
        if data is None:
            raise SyncError(f"{self.url}: version {version} is missing; the log has a gap")
        update = PolicyUpdate.from_bytes(data)
        if update.version != version:
            raise PacketError(f"{self.url}: {_update_name(version)} holds the update to version {update.version}")
        check_belongs(update, self._started())
        return update

    # ---- anchors ----

    def write_anchor(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Store all weights that the run may change, as they are at `version`. Raises like `DirectoryLog.write_anchor`."""
        manifest, latest = self._started(), self.latest()
        if not manifest.base.version <= version <= latest:
            raise SyncError(f"{self.url}: there is no version {version} to anchor; the newest is {latest}")
        name = _anchor_name(version)
        if not self._exists(name):
            self._write(name, anchor.to_bytes(weights, run_id=manifest.run_id, version=version))
        elif anchor.digest_of(weights) != anchor.digest_of(self.read_anchor(version)):
            raise SyncError(f"{self.url}/{name} holds other weights; an anchor is never replaced")

    def latest_anchor(self, at_most: int) -> int | None:
        """The newest version up to `at_most` that has an anchor; None without one."""
        versions = _versions(self._list(ANCHOR_FOLDER), ANCHOR_SUFFIX)
        return max((version for version in versions if version <= at_most), default=None)

    def read_anchor(self, version: int) -> dict[str, Tensor]:
        """The weights of an anchor, on the CPU.

        Raises:
            SyncError: it is missing, damaged, or of another run or version.
        """
        name = _anchor_name(version)
        data = self._read(name)
        if data is None:
            raise SyncError(f"{self.url} has no anchor of version {version}")
        return anchor.from_bytes(data, f"{self.url}/{name}", run_id=self._started().run_id, version=version)

    # ---- inside ----

    def _started(self) -> Manifest:
        if (manifest := self.manifest) is None:
            raise SyncError(f"{self.url} holds no update log: nothing has been published there, or the url is wrong")
        return manifest

    def _check_empty(self) -> None:
        others = [name for name in self._list("") if not name.startswith(TEMPORARY_PREFIX)]
        if others:
            raise SyncError(
                f"{self.url} has no {MANIFEST} and holds other files ({others[0]!r}); choose another folder"
            )

    def _last_of_storage(self, base_version: int) -> int:
        versions = sorted(_versions(self._list(""), UPDATE_SUFFIX))
        if versions != list(range(base_version + 1, base_version + 1 + len(versions))):
            raise SyncError(f"{self.url} has gaps or surplus files among versions {versions[0]} to {versions[-1]}")
        return versions[-1] if versions else base_version

    def _list(self, folder: str) -> list[str]:
        """Names of the files in a folder of the log; none where there is no such folder."""
        path = f"{self._path}/{folder}".rstrip("/")
        with self._explained(f"listing {folder or 'the log'}"):
            self._storage.invalidate_cache()
            try:
                entries = self._storage.ls(path, detail=True)
            except FileNotFoundError:
                return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

    def _exists(self, name: str) -> bool:
        with self._explained(f"looking for {name}"):
            self._storage.invalidate_cache()
            return bool(self._storage.isfile(f"{self._path}/{name}"))

    def _read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        with self._explained(f"reading {name}"):
            try:
                return bytes(self._storage.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        folder, _, last = path.rpartition("/")
        with self._explained(f"writing {name} ({len(data)} bytes)"):
            self._storage.makedirs(folder, exist_ok=True)
            if "file" not in _protocols(self._storage):
                self._storage.pipe_file(path, data)
                return
            temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
            try:
                self._storage.pipe_file(temporary, data)
                self._storage.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._storage.rm_file(temporary)
                raise

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Whatever a storage raises, which may be the error of any library, as a SyncError."""
        try:
            yield
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(
                f"{self.url}: {what} failed ({type(error).__name__}: {error}). Nothing that was acknowledged is lost; try "
                f"again"
            ) from error


def _protocols(storage: Any) -> tuple[str, ...]:
    return (storage.protocol,) if isinstance(storage.protocol, str) else tuple(storage.protocol)


def _update_name(version: int) -> str:
    return file_stem(version) + UPDATE_SUFFIX


def _anchor_name(version: int) -> str:
    return f"{ANCHOR_FOLDER}/{file_stem(version)}{ANCHOR_SUFFIX}"


def _versions(names: list[str], suffix: str) -> list[int]:
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return [int(stem) for stem in stems if stem.isascii() and stem.isdecimal()]
