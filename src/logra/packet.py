"""The bytes of a `PolicyUpdate`: what a publisher sends, a log stores and a replica verifies.

    offset  size  field (integers little-endian, unsigned)
         0     8  magic "LOGRAUPD"
         8     4  format version, 2
        12     8  base_version
        20     8  version
        28     8  seed
        36     8  update_index
        44     8  size of the payload before compression, bytes
        52    32  digest: SHA-256 of bytes 0..51 and of the payload before compression
        84     -  the payload, one zstd frame
       -32    32  seal: SHA-256 of everything before it

The payload is a safetensors container with the tensors of every update and one metadata entry "logra", a JSON text that
describes them. Weight number i (in the order of the sorted names) owns

    w{i}.factor_out, w{i}.factor_in    factor_bits 8: int8 as it is; factor_bits 4: uint8 [ceil(n / 2)], element 2j of
                                       the row-major factor in the low four bits, 2j + 1 in the high four bits, both in
                                       two's complement; a missing last element is 0
    w{i}.exponent_out, .exponent_in    int8, which always fits, since exponents lie in [-60, 50]

changed tensor number i owns t{i}, of any real dtype that safetensors holds, bit for bit, and delta number i owns d{i}, the
byte planes of `logra.tensor_delta`. The description also holds
the run id, the merge rule and, where the publisher computed it, the digest of all weights after the update.
docs/sync.md has all of this field by field, for whoever writes a reader.

Contract: the digest identifies the content and is the same whatever the order of names or the compression; the seal
catches every damaged byte before anything is parsed. Nothing is unpickled. Refuses whatever is not exactly this format
with `PacketError` and no other exception, also for bytes that were made to deceive; sizes are checked before memory is
allocated.
"""

import hashlib
import json
import struct
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load, save
from torch import Tensor

from logra.errors import LograError, PacketError
from logra.tensor_delta import DELTA_DTYPES, TensorDelta
from logra.update import LowRankUpdate, PolicyUpdate, SignFactor

FORMAT_VERSION = 2
# Largest payload that `decode` unpacks. A 4-bit update of 70B parameters at rank 32 takes about 0.2 GiB.
MAX_PAYLOAD_BYTES = 2**34

_MAGIC = b"LOGRAUPD"
_PREFIX = struct.Struct("<8sIQQQQQ")
_HASH_BYTES = hashlib.sha256().digest_size
_BODY_START = _PREFIX.size + _HASH_BYTES
_ZSTD_LEVEL = 3
_METADATA_KEY = "logra"
_WEIGHT_FIELDS = {"name": str, "shape": list, "rank": int, "factor_bits": int, "decay": float, "signs": dict | None}
_DESCRIPTION_FIELDS = {
    "weights": list,
    "tensors": list,
    "deltas": list,
    "run_id": str,
    "weights_digest": str | None,
    "weight_storage": str,
}
_DELTA_FIELDS = {"name": str, "dtype": str}
_SIGN_FIELDS = {"seed": int, "update_index": int, "name": str, "side": str}
_FLOAT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_SIGNED_DTYPES = {torch.int64, torch.int32, torch.int16, torch.int8}
_UNSIGNED_DTYPES = {torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool}
_TENSOR_DTYPES = _FLOAT_DTYPES | _SIGNED_DTYPES | _UNSIGNED_DTYPES


def encode(update: PolicyUpdate) -> bytes:
    """The packet of an update.

    Args:
        update: any update; its tensors may be on any device.

    Returns:
        The bytes described in the module docstring; the same bytes for the same content.

    Raises:
        LograError: a tensor whose dtype or layout the format does not hold, or a payload above MAX_PAYLOAD_BYTES.
    """
    prefix, payload = _content(update)
    head = prefix + _digest(prefix, payload) + zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(payload)
    return head + hashlib.sha256(head).digest()


def digest(update: PolicyUpdate) -> str:
    """SHA-256 of the content, 64 hexadecimal digits: the digest field of its packet."""
    return _digest(*_content(update)).hex()


def decode(data: bytes, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> PolicyUpdate:
    """The update of a packet, with its tensors on the CPU.

    Args:
        data: the whole packet.
        max_payload_bytes: largest payload before compression that is accepted, bytes.

    Raises:
        PacketError: the packet is damaged, truncated, too large, of another format version or inconsistent.
    """
    prefix, stored_digest, body = _open(data)
    base_version, version, seed, update_index, payload_bytes = _PREFIX.unpack(prefix)[2:]
    if payload_bytes > max_payload_bytes:
        raise PacketError(f"packet: payload has {payload_bytes} bytes; allowed are at most {max_payload_bytes}")
    payload = _decompress(body, payload_bytes)
    if _digest(prefix, payload) != stored_digest:
        raise PacketError("packet: digest does not match the content; the packet was not made by this library")
    try:
        tensors = load(payload)
    except Exception as error:  # whatever the parser raises on bytes that were made to deceive
        raise PacketError(f"packet: the payload is not a safetensors container ({error})") from error
    description = _description(payload)
    weight_records, tensor_names = description.pop("weights"), description.pop("tensors")
    delta_records = description.pop("deltas")
    try:
        weights = dict(_decode_weight(index, record, tensors) for index, record in enumerate(weight_records))
        others = {name: _take(tensors, f"t{index}", None) for index, name in enumerate(tensor_names)}
        deltas = dict(_decode_delta(index, record, tensors) for index, record in enumerate(delta_records))
        counts = [(weights, weight_records), (others, tensor_names), (deltas, delta_records)]
        if tensors or any(len(found) < len(listed) for found, listed in counts):
            raise PacketError(f"packet: names occur twice, or tensors {sorted(tensors)} belong to no name")
        update = PolicyUpdate(base_version, version, seed, update_index, weights, others, deltas=deltas, **description)
    except PacketError:
        raise
    except LograError as error:
        raise PacketError(f"packet: {error}") from error
    # Both are known here; filling the cached properties saves encoding the update again.
    vars(update).update(digest=stored_digest.hex(), num_bytes=len(data))
    return update


def _content(update: PolicyUpdate) -> tuple[bytes, bytes]:
    """The prefix (without the digest) and the payload before compression."""
    weight_records, tensors = [], {}
    for index, name in enumerate(sorted(update.weights)):
        weight = update.weights[name]
        weight_records.append(
            {
                "name": name,
                "shape": list(weight.shape),
                "rank": weight.rank,
                "factor_bits": weight.factor_bits,
                "decay": float(weight.decay),
                "signs": None if weight.signs is None else vars(weight.signs),
            }
        )
        for side, factor in (("out", weight.factor_out), ("in", weight.factor_in)):
            if factor is not None:
                factor = factor.cpu()
                tensors[f"w{index}.factor_{side}"] = _pack4(factor) if weight.factor_bits == 4 else factor
        tensors[f"w{index}.exponent_out"] = weight.exponent_out.to("cpu", torch.int8)
        tensors[f"w{index}.exponent_in"] = weight.exponent_in.to("cpu", torch.int8)
    tensor_names = sorted(update.tensors)
    for index, name in enumerate(tensor_names):
        tensors[f"t{index}"] = _plain(name, update.tensors[name])
    delta_records = []
    for index, (name, delta) in enumerate(sorted(update.deltas.items())):
        tensors[f"d{index}"] = delta.planes()
        delta_records.append({"name": name, "dtype": str(delta.dtype).removeprefix("torch.")})
    fields = {
        "weights": weight_records,
        "tensors": tensor_names,
        "deltas": delta_records,
        "run_id": update.run_id,
        "weights_digest": update.weights_digest,
        "weight_storage": update.weight_storage,
    }
    description = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    payload = save(_unshared(tensors), {_METADATA_KEY: description})
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise LograError(f"packet: payload has {len(payload)} bytes; allowed are at most {MAX_PAYLOAD_BYTES}")
    numbers = (update.base_version, update.version, update.seed, update.update_index, len(payload))
    return _PREFIX.pack(_MAGIC, FORMAT_VERSION, *numbers), payload


def _plain(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _TENSOR_DTYPES or tensor.layout != torch.strided:
        allowed = sorted(str(dtype) for dtype in _TENSOR_DTYPES)
        raise LograError(f"packet: tensor {name!r} is {tensor.dtype}, {tensor.layout}; allowed are dense {allowed}")
    return tensor.detach().cpu()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values, contiguous, each in a storage of its own: safetensors refuses views of one storage."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _digest(prefix: bytes, payload: bytes) -> bytes:
    hasher = hashlib.sha256(prefix)
    hasher.update(payload)
    return hasher.digest()


def _open(data: bytes) -> tuple[bytes, bytes, memoryview]:
    """Check magic, format version and seal; return prefix, digest and compressed payload."""
    if not isinstance(data, bytes):
        raise PacketError(f"packet: data is {type(data).__name__}; allowed is bytes")
    if len(data) < _BODY_START + _HASH_BYTES:
        raise PacketError(f"packet: {len(data)} bytes are too few for the header; the packet is truncated")
    magic, format_version = _PREFIX.unpack_from(data)[:2]
    if magic != _MAGIC:
        raise PacketError(f"packet: starts with {magic!r}; an update starts with {_MAGIC!r}")
    if format_version != FORMAT_VERSION:
        raise PacketError(f"packet: format version is {format_version}; this library reads {FORMAT_VERSION}")
    view = memoryview(data)
    if hashlib.sha256(view[:-_HASH_BYTES]).digest() != view[-_HASH_BYTES:]:
        raise PacketError("packet: seal does not match; the packet is damaged or truncated, fetch it again")
    return data[: _PREFIX.size], data[_PREFIX.size : _BODY_START], view[_BODY_START:-_HASH_BYTES]


def _decompress(body: memoryview, payload_bytes: int) -> bytes:
    try:
        declared_bytes = zstandard.frame_content_size(body)
        if declared_bytes != payload_bytes:
            raise PacketError(f"packet: zstd frame holds {declared_bytes} bytes; the header says {payload_bytes}")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=payload_bytes, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise PacketError(f"packet: the payload cannot be decompressed ({error})") from error


def _description(payload: bytes) -> dict[str, Any]:
    """What the metadata of the container says: _DESCRIPTION_FIELDS, of these types and not checked any further."""
    (header_bytes,) = struct.unpack_from("<Q", payload)
    try:
        header = json.loads(payload[8 : 8 + header_bytes])
        metadata = _fields("metadata", header.get("__metadata__"), {_METADATA_KEY: str})
        description = json.loads(metadata[_METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise PacketError(f"packet: the description is not valid JSON ({error})") from error
    fields = _fields("description", description, _DESCRIPTION_FIELDS)
    if not all(isinstance(name, str) for name in fields["tensors"]):
        raise PacketError("packet: description.tensors holds something other than names")
    return fields


def _fields(where: str, record: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """`record`, if it is a dict with exactly these keys and types."""
    if not isinstance(record, dict) or record.keys() != kinds.keys():
        raise PacketError(f"packet: {where} must be an object with the fields {sorted(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise PacketError(f"packet: {where}.{name} is {record[name]!r:.80}; allowed is {kind}")
    return record


def _decode_weight(index: int, record: Any, tensors: dict[str, Tensor]) -> tuple[str, LowRankUpdate]:
    fields = _fields(f"weights[{index}]", record, _WEIGHT_FIELDS)
    shape, rank, bits = fields["shape"], fields["rank"], fields["factor_bits"]
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape) or rank < 1:
        raise PacketError(f"packet: weights[{index}] has shape {shape} and rank {rank}; allowed are sizes above 0")
    signs = None
    if fields["signs"] is not None:
        signs = SignFactor(**_fields(f"weights[{index}].signs", fields["signs"], _SIGN_FIELDS))
    num_out, num_in = shape
    factors: dict[str, Tensor | None] = {"out": None, "in": None}
    for side, factor_shape in (("out", (num_out, rank)), ("in", (rank, num_in))):
        if signs is None or signs.side != side:
            factors[side] = _take_factor(tensors, f"w{index}.factor_{side}", factor_shape, bits)
    exponent_out = _take(tensors, f"w{index}.exponent_out", (torch.int8, (num_out,))).to(torch.int16)
    exponent_in = _take(tensors, f"w{index}.exponent_in", (torch.int8, (num_in,))).to(torch.int16)
    weight = LowRankUpdate(
        (num_out, num_in), rank, bits, factors["out"], factors["in"], exponent_out, exponent_in, signs, fields["decay"]
    )
    return fields["name"], weight


def _decode_delta(index: int, record: Any, tensors: dict[str, Tensor]) -> tuple[str, TensorDelta]:
    fields = _fields(f"deltas[{index}]", record, _DELTA_FIELDS)
    if fields["dtype"] not in DELTA_DTYPES:
        raise PacketError(f"packet: deltas[{index}].dtype is {fields['dtype']!r:.40}; allowed are {list(DELTA_DTYPES)}")
    return fields["name"], TensorDelta.from_planes(DELTA_DTYPES[fields["dtype"]], _take(tensors, f"d{index}", None))


def _take_factor(tensors: dict[str, Tensor], name: str, shape: tuple[int, int], factor_bits: int) -> Tensor:
    num_elements = shape[0] * shape[1]
    if factor_bits != 4:
        return _take(tensors, name, (torch.int8, shape))
    packed = _take(tensors, name, (torch.uint8, ((num_elements + 1) // 2,)))
    factor = _unpack4(packed)
    if num_elements % 2 and int(factor[-1]) != 0:
        raise PacketError(f"packet: {name} has padding that is not zero")
    return factor[:num_elements].view(shape)


def _take(tensors: dict[str, Tensor], name: str, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> Tensor:
    """Remove and return a tensor of the container, of the expected dtype and shape (None: any)."""
    if name not in tensors:
        raise PacketError(f"packet: tensor {name} is missing")
    tensor = tensors.pop(name)
    if expected is not None and (tensor.dtype, tuple(tensor.shape)) != expected:
        raise PacketError(f"packet: {name} is {tensor.dtype} {tuple(tensor.shape)}; expected {expected}")
    return tensor


def _pack4(factor: Tensor) -> Tensor:
    """int8 in [-8, 7], any shape, to uint8 [ceil(n / 2)]."""
    pairs = torch.nn.functional.pad(factor.flatten().contiguous(), (0, factor.numel() % 2)).numpy().view("<u2")
    return torch.from_numpy(((pairs & 15) | ((pairs >> 4) & 0xF0)).astype(np.uint8))


def _unpack4(packed: Tensor) -> Tensor:
    """uint8 [n] to int8 [2 n] in [-8, 7]."""
    pairs = packed.numpy().astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    elements = pairs.view(np.int8)
    elements ^= 8  # two's complement of four bits, in two steps
    elements -= 8
    return torch.from_numpy(elements)
