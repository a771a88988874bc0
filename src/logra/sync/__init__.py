"""Policy synchronisation: an append-only log of updates, a publisher, and replicas that follow bit for bit."""

from logra.sync.digest import ChecksumPart, combine_parts
from logra.sync.drift import Drift
from logra.sync.fsspec_log import FsspecLog
from logra.sync.http_client import HTTPLog
from logra.sync.http_server import LogServer
from logra.sync.layout import Piece, Placement, fused_rows, module_layout
from logra.sync.log import DirectoryLog
from logra.sync.manifest import BaseModel, Manifest
from logra.sync.publisher import Publisher
from logra.sync.replica import Replica

__all__ = [
    "BaseModel",
    "ChecksumPart",
    "DirectoryLog",
    "Drift",
    "FsspecLog",
    "HTTPLog",
    "LogServer",
    "Manifest",
    "Piece",
    "Placement",
    "Publisher",
    "Replica",
    "combine_parts",
    "fused_rows",
    "module_layout",
]
