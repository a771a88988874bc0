"""`DirectoryLog`: updates as files of a folder, one a version.

    manifest.json                        the run and its base model, see `logra.sync.manifest`
    000000000001.update                  the packet that leads to version 1, see `logra.packet`
    000000000002.update                  ...
    anchors/000000000100.safetensors     full weights at version 100, see `logra.sync.anchor`

Nothing is ever changed or deleted. Every file is written under a temporary name, fsynced and renamed, and the folder is
fsynced, before an append is acknowledged: a process that is killed at any moment leaves a log that holds every
acknowledged update and is readable; at most the one that was being written is missing or, if the kill came between the
rename and the answer, present and whole. Readers may follow while a writer appends.

Refuses, with `SyncError`: gaps, updates of another run, seed or merge rule, other content for a version that exists, and a
folder that holds anything else.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from logra import packet
from logra.errors import PacketError, SyncError
from logra.sync import anchor, durable
from logra.sync.manifest import BaseModel, Manifest
from logra.update import PolicyUpdate

MANIFEST = "manifest.json"
UPDATE_SUFFIX = ".update"
ANCHOR_FOLDER = "anchors"
ANCHOR_SUFFIX = ".safetensors"


class DirectoryLog:
    """A log in a folder.

    Args:
        path: the folder. It may be missing or empty: the log then begins with `start`, or with the first update.
        manifest: start the log with it, or check that it is the log of this run.

    Raises:
        SyncError: the folder holds other files, the log of another run, or a log with gaps.

    Example:
        >>> log = logra.sync.DirectoryLog("run/updates")
        >>> for update in log.read_since(replica.version):
        ...     replica.apply(update)
    """

    def __init__(self, path: str | Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self._manifest: Manifest | None = None
        self._latest = -1
        if self.manifest is None:
            self._check_empty()
        if manifest is not None:
            self.start(manifest)

    @property
    def manifest(self) -> Manifest | None:
        """What the log says about itself; None before it has begun."""
        if self._manifest is None and (self.path / MANIFEST).is_file():
            manifest = Manifest.from_json((self.path / MANIFEST).read_bytes())
            # In this order: threads of a server that see the manifest rely on the version.
            self._latest = self._last_of_folder(manifest.base.version)
            self._manifest = manifest
        return self._manifest

    def start(self, manifest: Manifest) -> None:
        """Begin the log of a run; does nothing where it has begun with the same manifest.

        Raises:
            SyncError: the folder holds another log or other files, or cannot be written.
        """
        with durable.explained(f"starting the log {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            with durable.locked(self.path) as directory:
                if self.manifest is None:
                    self._check_empty()
                    durable.write_bytes(self.path / MANIFEST, manifest.to_json().encode(), directory)
        if self.manifest != manifest:
            raise SyncError(
                f"{self.path} is the log of run {self._started().run_id!r} from {self._started().base}; it cannot become "
                f"that of {manifest.run_id!r} from {manifest.base}. Choose another folder"
            )

    def append(self, update: PolicyUpdate) -> int:
        """Add the update that leads to the next version.

        Args:
            update: with the run id of the log. The first update of a log that has not begun begins it, with an
                unnamed base model.

        Returns:
            Bytes of its packet. On return it is durable.

        Raises:
            SyncError: a gap, another run, other content for a version that exists, or the file system failed; the log is
                as it was, or holds the update whole.
        """
        return self._append(update, update.to_bytes())

    def append_packet(self, data: bytes, *, version: int, max_payload_bytes: int) -> None:
        """Add a packet as it came over a wire; like `append`, and checks the packet first.

        Args:
            data: the packet.
            version: that it must lead to.
            max_payload_bytes: largest payload before compression that is accepted, bytes.

        Raises:
            PacketError: the packet is damaged or leads to another version.
        """
        update = packet.decode(data, max_payload_bytes=min(max_payload_bytes, packet.MAX_PAYLOAD_BYTES))
        if update.version != version:
            raise PacketError(f"append: the packet leads to version {update.version}, not {version}")
        self._append(update, data)

    def read_since(self, version: int) -> Iterator[PolicyUpdate]:
        """The updates after `version` that are there now, in order. Call again to follow a writer.

        Raises:
            SyncError: the log does not reach back to `version`, or a file is missing.
            PacketError: a file is damaged or holds another update than its name says.
        """
        manifest, latest = self._started(), self.latest()
        if not manifest.base.version <= version <= latest:
            raise SyncError(
                f"{self.path} holds versions {manifest.base.version} to {latest} of run {manifest.run_id!r}; it has "
                f"nothing to continue version {version} with"
            )
        for number in range(version + 1, latest + 1):
            yield self.read(number)

    def latest(self) -> int:
        """The newest version; that of the base model where there is no update yet."""
        self._started()
        version = self._latest
        while self._path_of(version + 1).exists():
            version += 1
        self._latest = version
        return version

    def read(self, version: int) -> PolicyUpdate:
        """The update that leads to `version`. Raises like `read_since`."""
        update = PolicyUpdate.from_bytes(self.read_packet(version))
        if update.version != version:
            raise PacketError(f"{self._path_of(version)} holds the update to version {update.version}")
        check_belongs(update, self._started())
        return update

    def read_packet(self, version: int) -> bytes:
        """The bytes of the update that leads to `version`, unchecked."""
        try:
            return self._path_of(version).read_bytes()
        except OSError as error:
            raise SyncError(f"{self.path}: version {version} cannot be read ({error}); the log has a gap") from error

    # ---- anchors ----

    def write_anchor(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Store all weights that the run may change, as they are at `version`; durable on return.

        Args:
            version: a version of the log.
            weights: {name: canonical weight}: all targets, fp32, and all other trainable tensors.

        Raises:
            SyncError: the log has no such version, it has an anchor with other weights, or the file system failed.
        """
        manifest = self._started()
        if not manifest.base.version <= version <= self.latest():
            raise SyncError(f"{self.path}: there is no version {version} to anchor; the newest is {self.latest()}")
        folder, path = self.path / ANCHOR_FOLDER, self.anchor_path(version)
        with durable.explained(f"{self.path}: writing the anchor of version {version}"):
            folder.mkdir(exist_ok=True)
            with durable.locked(self.path) as outer, durable.locked(folder) as directory:
                durable.sync_directory(outer)
                if not path.exists():
                    anchor.write(path, directory, weights, run_id=manifest.run_id, version=version)
                elif anchor.digest_of(weights) != anchor.digest_of(self.read_anchor(version)):
                    raise SyncError(f"{path} holds other weights; an anchor is never replaced")

    def latest_anchor(self, at_most: int) -> int | None:
        """The newest version up to `at_most` that has an anchor; None without one."""
        return max((version for version in self.anchors() if version <= at_most), default=None)

    def anchors(self) -> list[int]:
        """The versions that have an anchor, in order.

        Raises:
            SyncError: a file of the folder is named like none.
        """
        return _versions_of(self.path / ANCHOR_FOLDER, ANCHOR_SUFFIX)

    def read_anchor(self, version: int) -> dict[str, Tensor]:
        """The weights of an anchor, on the CPU.

        Raises:
            SyncError: it is missing, damaged, or of another run or version.
        """
        return anchor.read(self.anchor_path(version), run_id=self._started().run_id, version=version)

    # ---- inside ----

    def _append(self, update: PolicyUpdate, data: bytes) -> int:
        if self.manifest is None:
            if not update.run_id:
                raise SyncError("append: the update has no run id; publish it with a Publisher, which gives it one")
            base = BaseModel(version=update.base_version)
            self.start(
                Manifest(run_id=update.run_id, weight_storage=update.weight_storage, seed=update.seed, base=base)
            )
        check_belongs(update, self._started())
        path = self._path_of(update.version)
        what = f"{self.path}: appending version {update.version}"
        with durable.explained(what, len(data)), durable.locked(self.path) as directory:
            latest = self.latest()
            if update.version > latest + 1:
                raise SyncError(f"append: the log is at version {latest}; version {update.version} leaves a gap")
            if update.version == latest + 1:
                durable.write_bytes(path, data, directory)
            else:
                self._check_same(update)
                # The first attempt may have failed between the rename and the fsync of the folder.
                durable.sync_directory(directory)
        return len(data)

    def _check_same(self, update: PolicyUpdate) -> None:
        version = update.version
        if version <= self._started().base.version or self.read(version).digest != update.digest:
            raise SyncError(
                f"append: {self.path} is at version {self._latest} and holds another update to version {version}. A run "
                f"that was resumed from an older checkpoint, or a second run, needs a folder of its own"
            )

    def _started(self) -> Manifest:
        if (manifest := self.manifest) is None:
            raise SyncError(
                f"{self.path} holds no update log: nothing has been published there yet, or the path is wrong"
            )
        return manifest

    def _check_empty(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise SyncError(f"{self.path} is a file; a log is a folder. Choose another path")
        files = self.path.iterdir() if self.path.exists() else ()
        others = sorted(file.name for file in files if not file.name.startswith(durable.TEMPORARY_PREFIX))
        if others:
            raise SyncError(
                f"{self.path} has no {MANIFEST} and holds other files ({others[0]!r}); choose another folder"
            )

    def _last_of_folder(self, base_version: int) -> int:
        versions = _versions_of(self.path, UPDATE_SUFFIX)
        expected = list(range(base_version + 1, base_version + 1 + len(versions)))
        if versions != expected:
            missing = sorted(set(range(base_version + 1, versions[-1])) - set(versions))
            raise SyncError(
                f"{self.path} has gaps or surplus files: versions {missing[:5]} are missing up to {versions[-1]}"
            )
        return versions[-1] if versions else base_version

    def _path_of(self, version: int) -> Path:
        return self.path / f"{file_stem(version)}{UPDATE_SUFFIX}"

    def anchor_path(self, version: int) -> Path:
        """The file of the anchor of a version, which may be missing."""
        return self.path / ANCHOR_FOLDER / f"{file_stem(version)}{ANCHOR_SUFFIX}"


def file_stem(version: int) -> str:
    """The names of files without their endings."""
    return f"{version:012d}"


def _versions_of(folder: Path, suffix: str) -> list[int]:
    """The versions that files of a folder are named for, in order.

    Raises:
        SyncError: a name that begins like one is not of the form.
    """
    versions = []
    for file in folder.glob(f"[0-9]*{suffix}"):
        if re.fullmatch("[0-9]{12,}", file.stem) is None:
            raise SyncError(
                f"{folder} holds {file.name!r}, which no log writes: the names are {file_stem(1)}{suffix} and so on. Move it "
                f"elsewhere"
            )
        versions.append(int(file.stem))
    return sorted(versions)


def check_belongs(update: PolicyUpdate, manifest: Manifest) -> None:
    """Refuse an update of another run, seed or merge rule."""
    for name in ("run_id", "weight_storage", "seed"):
        expected, found = getattr(manifest, name), getattr(update, name)
        if expected is not None and found != expected:
            raise PacketError(f"update to version {update.version}: {name} is {found!r}; the log has {expected!r}")
