"""A second reader, written from docs/sync.md with numpy and no code of the library: the page is complete and right."""

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard

M32, M64 = 2**32 - 1, 2**64


def key(*parts) -> int:
    data = b""
    for part in parts:
        text = str(part).encode()
        data += (b"s" if isinstance(part, str) else b"i") + struct.pack("<Q", len(text)) + text
    return struct.unpack("<Q", hashlib.sha256(data).digest()[:8])[0]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & M32
    x ^= x >> 15
    x = x * 0xD35A2D97 & M32
    return x ^ x >> 15


def word(stream: int, i: int) -> int:
    k = key(stream)
    return mix(mix((i & M32) ^ (k & M32)) ^ ((k >> 32) + 0x9E3779B9 * (i >> 32) & M32))


def sign(stream: int, width: int, row: int, column: int) -> int:
    return 1 if word(stream, row * -(-width // 32) + column // 32) >> (column % 32) & 1 else -1


def factor(tensors, entry, index: int, side: str, shape: tuple[int, int]) -> np.ndarray:
    signs = entry["signs"]
    if signs is not None and signs["side"] == side:
        width = shape[0] if side == "out" else shape[1]
        stream = key("projection", signs["seed"], signs["update_index"], signs["name"], side, width)
        place = (lambda i, j: (j, i)) if side == "out" else (lambda i, j: (i, j))
        values = [[sign(stream, width, *place(i, j)) for j in range(shape[1])] for i in range(shape[0])]
        return np.array(values, dtype=np.float32)
    stored = tensors[f"w{index}.factor_{side}"]
    if entry["factor_bits"] == 4:
        nibbles = np.stack([stored & 15, stored >> 4], axis=1).ravel()[: shape[0] * shape[1]].astype(np.int64)
        stored = np.where(nibbles > 7, nibbles - 16, nibbles).reshape(shape)
    return stored.astype(np.float32)


def read_packet(data: bytes) -> tuple[dict, dict, tuple]:
    assert data[:8] == b"LOGRAUPD"
    version_of_format, *numbers, size = struct.unpack_from("<IQQQQQ", data, 8)
    assert version_of_format == 2
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    payload = zstandard.ZstdDecompressor().decompress(data[84:-32])
    assert len(payload) == size
    assert hashlib.sha256(data[:52] + payload).digest() == data[52:84]
    header = json.loads(payload[8 : 8 + struct.unpack_from("<Q", payload)[0]])
    # numpy has no bf16, whose values fp32 holds.
    tensors = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in safetensors.torch.load(payload).items()
    }
    return json.loads(header["__metadata__"]["logra"]), tensors, tuple(numbers)


def merge(weight: np.ndarray, tensors, entry, index: int, storage: str, seed: int, version: int) -> np.ndarray:
    (num_out, num_in), rank = entry["shape"], entry["rank"]
    product = factor(tensors, entry, index, "out", (num_out, rank)) @ factor(
        tensors, entry, index, "in", (rank, num_in)
    )
    scale_out, scale_in = (
        np.float32(2.0) ** tensors[f"w{index}.exponent_{side}"].astype(np.float32) for side in ("out", "in")
    )
    merged = weight * np.float32(entry["decay"]) - product * scale_out[:, None] * scale_in
    bits = merged.view(np.uint32)
    if storage == "split32":
        tie = (bits & 0xFFFF) == 0x8000
        bits = np.where(tie, np.where(bits >> 16 & 1, bits + 1, bits - 1), bits).astype(np.uint32)
    elif storage == "split24":
        stream = key("split24", seed, version, entry["name"])
        bits = np.array([round24(b, word(stream, i)) for i, b in enumerate(bits.ravel().tolist())], dtype=np.uint32)
    return bits.view(np.float32).reshape(num_out, num_in)


def round24(b: int, w: int) -> int:
    b = (b + w % 256) & ~0xFF
    if b & 0xFFFF == 0x8000:
        b += 256 if w >> 8 & 1 else -256
    return b


def move(weight: np.ndarray, planes: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor after a delta. A bf16 value is the upper half of the fp32 value that stands for it here."""
    bits = weight.view(np.uint32) if dtype == "float32" else (weight.view(np.uint32) >> 16).astype(np.uint16)
    width = 8 * bits.itemsize
    moved = []
    for old, *column in zip(bits.ravel().tolist(), *planes.reshape(len(planes), -1).tolist(), strict=True):
        zigzag = sum(byte << 8 * k for k, byte in enumerate(column))
        step = zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1 >> 1)
        flip = 2 ** (width - 1) - 1
        number = old if old < 2 ** (width - 1) else (old ^ flip) - 2**width
        number = (number + step) % 2**width
        moved.append(number if number < 2 ** (width - 1) else number ^ flip)
    new = np.array(moved, dtype=np.uint32) << (32 - width)
    return new.astype(np.uint32).view(np.float32).reshape(weight.shape)


def digest(weights: dict[str, np.ndarray]) -> str:
    hasher = hashlib.sha256(b"LOGRAWTS")

    def multiplier(side: str, i: int) -> int:
        stream = key("weights digest", side)
        return word(stream, 2 * i) + 2**32 * word(stream, 2 * i + 1) | 1

    for name in sorted(weights):
        value = weights[name].astype(np.float32)
        bits = value.reshape(value.shape[0], -1).view(np.int32)
        columns = [multiplier("column", j) for j in range(bits.shape[1])]
        total = sum(
            multiplier("row", i) * sum(u * int(x) for u, x in zip(columns, row, strict=True))
            for i, row in enumerate(bits)
        )
        hasher.update(struct.pack("<I", len(name.encode())) + name.encode() + struct.pack("<I", value.ndim))
        hasher.update(struct.pack(f"<{value.ndim}Q", *value.shape) + struct.pack("<Q", total % M64))
    return hasher.hexdigest()


def test_the_page_is_enough_to_follow_a_run(run, log):
    # Catches a page, or a format, that has changed without the other.
    manifest = json.loads((log.path / "manifest.json").read_text())
    assert (manifest["format"], manifest["run_id"]) == ("logra-update-log", run.manifest.run_id)
    weights = {name: value.numpy().copy() for name, value in run.weights[0].items()}
    assert digest(weights) == manifest["base"]["digest"]
    num_digests = num_deltas = 0
    for version in range(1, 7):
        description, tensors, numbers = read_packet((log.path / f"{version:012d}.update").read_bytes())
        assert numbers == (version - 1, version, manifest["seed"], version - 1)
        assert description["run_id"] == manifest["run_id"]
        rule = (description["weight_storage"], manifest["seed"], version)
        for index, entry in enumerate(description["weights"]):
            weights[entry["name"]] = merge(weights[entry["name"]], tensors, entry, index, *rule)
        for index, name in enumerate(description["tensors"]):
            value = tensors[f"t{index}"]
            weights[name] = value.astype(np.float32)
        for index, entry in enumerate(description["deltas"]):
            weights[entry["name"]] = move(weights[entry["name"]], tensors[f"d{index}"], entry["dtype"])
            num_deltas += 1
        if description["weights_digest"] is not None:
            assert digest(weights) == description["weights_digest"]
            num_digests += 1
    assert (num_digests, num_deltas) == (3, 2)
    for name, value in weights.items():
        assert np.array_equal(value.view(np.uint32), run.weights[6][name].numpy().view(np.uint32)), name


def test_the_page_is_enough_to_read_an_anchor(run, log):
    log.write_anchor(4, run.weights[4])
    data = (log.path / "anchors" / "000000000004.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    weights = {name: tensor.numpy() for name, tensor in safetensors.torch.load(data).items()}
    assert json.loads(header["__metadata__"]["logra"]) == {
        "run_id": run.manifest.run_id,
        "version": 4,
        "digest": digest(weights),
    }
    assert weights.keys() == run.weights[4].keys()


@pytest.mark.parametrize(
    "name",
    ["LOGRAUPD", "LOGRAWTS", "0x21F0AAAD", "0xD35A2D97", "0x9E3779B9", "X-Content-SHA256", "round24"],
)
def test_the_page_names_what_this_reader_uses(name):
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "sync.md"
    assert name in page.read_text(encoding="utf-8")
