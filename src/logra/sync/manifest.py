"""The manifest of an update log: which run it belongs to, and which weights its first update changes.

It is a JSON text, written once, before the first update. Everything a reader must know to refuse a wrong replica, and
to rebuild weights from the base model and the log, stands in it. Refuses unknown fields: `format_version` says what a
reader must understand.
"""

import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from logra import packet
from logra.errors import SyncError
from logra.merge_rule import WEIGHT_STORAGES

LOG_FORMAT_VERSION = 1
_FORMAT = "logra-update-log"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The weights that the first update of a log changes.

    Attributes:
        model: folder or hub id of the model; None where nobody said.
        revision: revision on the hub; None for a folder.
        version: policy version of these weights, >= 0.
        digest: digest of all weights, see docs/sync.md; None where nobody computed it.
        digest_bf16: digest of all weights after rounding each to bf16, which a replica without a low plane can check.
    """

    model: str | None = None
    revision: str | None = None
    version: int = 0
    digest: str | None = None
    digest_bf16: str | None = None

    def __post_init__(self) -> None:
        _require(isinstance(self.version, int) and 0 <= self.version < 2**63, "base.version", self.version)
        for name in ("model", "revision"):
            _require(isinstance(getattr(self, name), str | None), f"base.{name}", getattr(self, name))
        for name in ("digest", "digest_bf16"):
            value = getattr(self, name)
            valid = value is None or (isinstance(value, str) and bool(_DIGEST.fullmatch(value)))
            _require(valid, f"base.{name}", value)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a log says about itself.

    Attributes:
        run_id: names the run, 1 to 128 printable ASCII characters; every packet of the log carries it.
        weight_storage: "fp32", "split32" or "split24", the merge rule of the run.
        seed: projection seed of the run; None where it is not known. Every packet has it.
        base: the weights that the first update changes.

    Raises:
        SyncError: a field with a value that is not allowed.
    """

    run_id: str
    weight_storage: str = "fp32"
    seed: int | None = None
    base: BaseModel = field(default_factory=BaseModel)

    def __post_init__(self) -> None:
        valid = isinstance(self.run_id, str) and bool(re.fullmatch("[!-~]{1,128}", self.run_id))
        _require(valid, "run_id", self.run_id)
        _require(self.weight_storage in WEIGHT_STORAGES, "weight_storage", self.weight_storage)
        _require(self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**63), "seed", self.seed)

    def check_follows(self, whose: str, *, weight_storage: str, seed: int) -> None:
        """Refuse an optimizer, or an update of one, that trains by another merge rule or seed than the run.

        Args:
            whose: the beginning of the error, as "Publisher: the optimizer's".
            weight_storage: of the optimizer or the update.
            seed: likewise.

        Raises:
            SyncError: with both values. A seed that the manifest does not know is not compared.
        """
        for name, found in (("weight_storage", weight_storage), ("seed", seed)):
            expected = getattr(self, name)
            if expected is not None and found != expected:
                raise SyncError(
                    f"{whose} {name} is {found!r}, the log's is {expected!r} (run {self.run_id!r}). Train with "
                    f"{name}={expected!r}, or start a log in a new folder"
                )

    def to_json(self) -> str:
        """The text of the manifest."""
        content = {
            "format": _FORMAT,
            "format_version": LOG_FORMAT_VERSION,
            "packet_format_version": packet.FORMAT_VERSION,
            **asdict(self),
        }
        return json.dumps(content, indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """The manifest of a text.

        Raises:
            SyncError: the text is no manifest, or one of another format version.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SyncError(f"manifest: not valid JSON ({error})") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise SyncError("manifest: this is not the manifest of an update log")
        for name, readable in (
            ("format_version", LOG_FORMAT_VERSION),
            ("packet_format_version", packet.FORMAT_VERSION),
        ):
            if (found := content.pop(name, None)) != readable:
                raise SyncError(f"manifest: {name} is {found!r}; this library reads {readable}")
        try:
            base = BaseModel(**content.pop("base"))
            return Manifest(base=base, **content)
        except (TypeError, KeyError) as error:
            raise SyncError(f"manifest: a field is missing or not known ({error})") from error


def new_run_id() -> str:
    """A run id that no other run has: 128 random bits in hexadecimal digits."""
    return secrets.token_hex(16)


def _require(condition: Any, name: str, value: Any) -> None:
    if not condition:
        raise SyncError(f"manifest: {name} is {value!r:.140}, which is not allowed")
