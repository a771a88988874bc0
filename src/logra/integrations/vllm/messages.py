"""What a trainer says to an engine: plain JSON objects, the same over HTTP, vLLM's in-process calls and RPC.

    init_info    {"manifest": text, "storage": ..., "low_plane": ..., "expect_version": int | null, "anchor_follows": bool}
    update_info  {"packet": base64}                                        one PolicyUpdate
                 {"anchor": base64, "seal": SHA-256, "version": int, "is_last": bool}      a part of full weights

Binary content is base64 in JSON; in-process calls may pass bytes. Errors travel as text, since that is all that vLLM's
endpoints and remote calls pass on: `[logra:SyncError] message`.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from safetensors.torch import load
from torch import Tensor

from logra import errors
from logra.errors import LograError, PacketError, SyncError

EngineStorage = Literal["auto", "exact", "bf16"]
LowPlane = Literal["host", "device"]

_STORAGES = ("auto", "exact", "bf16")
_LOW_PLANES = ("host", "device")
_ERROR = re.compile(r"\[logra:(\w+)\] (.*?)(?:\[/logra\]|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """Joins a run, and checks that the engine is where the trainer believes it is.

    Attributes:
        manifest: text of the run's `logra.sync.Manifest`.
        storage: "exact" keeps what bf16 weights cannot hold in a low plane; "bf16" lets it go, and reports the drift;
            "auto" is exact.
        low_plane: where the low plane lies: "host" (pinned memory where there is a GPU) or "device".
        expect_version: refuse unless the engine follows this run and is at this version; None checks nothing.
        anchor_follows: do not look at the weights, they are about to be replaced.

    Raises:
        SyncError: a value that is not allowed.
    """

    manifest: str
    storage: EngineStorage = "auto"
    low_plane: LowPlane = "host"
    expect_version: int | None = None
    anchor_follows: bool = False

    def __post_init__(self) -> None:
        if self.storage not in _STORAGES or self.low_plane not in _LOW_PLANES:
            raise SyncError(
                f"init_info: storage={self.storage!r}, low_plane={self.low_plane!r}; allowed are {', '.join(_STORAGES)} "
                f"and {', '.join(_LOW_PLANES)}"
            )


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """One update, or one part of an anchor.

    Attributes:
        packet: bytes of `PolicyUpdate.to_bytes()`, or their base64.
        anchor: bytes of a safetensors container {canonical name: weight}, or their base64.
        seal: SHA-256 of the bytes of the anchor, 64 hexadecimal digits.
        version: of the anchor.
        is_last: no further part of this anchor follows.

    Raises:
        SyncError: neither or both of packet and anchor, or an anchor without seal or version.
    """

    packet: bytes | str | None = None
    anchor: bytes | str | None = None
    seal: str | None = None
    version: int | None = None
    is_last: bool = True

    def __post_init__(self) -> None:
        if (self.packet is None) == (self.anchor is None):
            raise SyncError("update_info: give either packet or anchor")
        if self.anchor is not None and (self.seal is None or self.version is None):
            raise SyncError("update_info: an anchor needs seal and version")


def anchor_info(data: bytes, version: int, *, is_last: bool) -> dict[str, Any]:
    """update_info of a part of an anchor, with its bytes as they are."""
    return {"anchor": data, "seal": hashlib.sha256(data).hexdigest(), "version": version, "is_last": is_last}


def opened_anchor(info: UpdateInfo) -> dict[str, Tensor]:
    """{canonical name: weight} of a part of an anchor, on the CPU.

    Raises:
        PacketError: it is damaged.
    """
    assert info.anchor is not None
    data = to_bytes(info.anchor)
    if hashlib.sha256(data).hexdigest() != info.seal:
        raise PacketError("anchor: the seal does not match; it is damaged or truncated, send it again")
    try:
        return load(data)
    except Exception as error:  # whatever the parser raises on bytes that were made to deceive
        raise PacketError(f"anchor: not a safetensors container ({error})") from error


def to_text(data: bytes) -> str:
    """Bytes as JSON can hold them."""
    return base64.b64encode(data).decode("ascii")


def to_bytes(data: bytes | str) -> bytes:
    """Bytes of a message.

    Raises:
        PacketError: a text that is no base64.
    """
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PacketError(f"update_info: the content is no base64 ({error})") from error


@contextmanager
def telling_errors() -> Iterator[None]:
    """Inside the engine: errors leave with their type in the text."""
    try:
        yield
    except LograError as error:
        raise type(error)(f"[logra:{type(error).__name__}] {error}[/logra]") from error


@contextmanager
def hearing_errors() -> Iterator[None]:
    """Outside: what `telling_errors` wrote becomes an error of that type again; everything else passes."""
    try:
        yield
    except Exception as error:
        found = _ERROR.search(str(error))
        if found is None:
            raise
        kind = getattr(errors, found[1], SyncError)
        raise kind(f"the engine answers: {found[2]}") from None
