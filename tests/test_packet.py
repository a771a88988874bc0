"""The packet codec: lossless round trips, one identity per content, and refusal of everything that is not a packet."""

import contextlib
import hashlib
import itertools
import json
import math
import random
import struct
from dataclasses import replace
from typing import Literal

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from logra import packet
from logra.errors import LograError, PacketError
from logra.rounding import MAX_EXPONENT, MIN_EXPONENT, QMAX
from logra.tensor_delta import TensorDelta
from logra.update import LowRankUpdate, PolicyUpdate, SignFactor

# Where the payload size, the digest and the compressed payload start, from the table in the docstring of `packet`.
SIZE_AT, DIGEST_AT, BODY_AT, HASH_BYTES = 44, 52, 84, 32


def make_weight(
    seed: int, shape: tuple[int, int], rank: int, factor_bits: int, side: Literal["in", "out"] | None
) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    qmax = QMAX[factor_bits]

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator)

    return LowRankUpdate(
        shape=shape,
        rank=rank,
        factor_bits=factor_bits,
        factor_out=None if side == "out" else integers(-qmax, qmax, shape[0], rank).to(torch.int8),
        factor_in=None if side == "in" else integers(-qmax, qmax, rank, shape[1]).to(torch.int8),
        exponent_out=integers(MIN_EXPONENT, MAX_EXPONENT, shape[0]).to(torch.int16),
        exponent_in=integers(MIN_EXPONENT, MAX_EXPONENT, shape[1]).to(torch.int16),
        signs=None if side is None else SignFactor(seed, 5, f"layers.{seed}", side),
        decay=1.0 if seed % 2 else 0.75,
    )


def make_update() -> PolicyUpdate:
    weights = {
        "layers.0.q_proj.weight": make_weight(0, (7, 9), 3, 4, None),
        "layers.0.o_proj.weight": make_weight(1, (6, 5), 2, 8, None),
        "layers.1.q_proj.weight": make_weight(2, (4, 33), 5, 4, "in"),
        "layers.1.o_proj.weight": make_weight(3, (33, 4), 5, 8, "out"),
    }
    tensors = {"norm.weight": torch.randn(11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    return PolicyUpdate(
        base_version=41,
        version=42,
        seed=7,
        update_index=40,
        weights=weights,
        tensors=tensors,
        run_id="run-7",
        weights_digest="0123456789abcdef" * 4,
        weight_storage="split32",
        deltas={"norm.bias": TensorDelta(torch.float32, torch.tensor([[3, -1, 0], [70000, -(2**31), 2]]).int())},
    )


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def assert_same(actual: PolicyUpdate, expected: PolicyUpdate) -> None:
    for name in ("base_version", "version", "seed", "update_index", "run_id", "weights_digest", "weight_storage"):
        assert getattr(actual, name) == getattr(expected, name)
    assert actual.weights.keys() == expected.weights.keys()
    assert actual.tensors.keys() == expected.tensors.keys()
    assert actual.deltas.keys() == expected.deltas.keys()
    for name, delta in actual.deltas.items():
        assert delta.dtype == expected.deltas[name].dtype
        assert torch.equal(delta.difference, expected.deltas[name].difference)
    for name, weight in actual.weights.items():
        for field, value in vars(weight).items():
            other = vars(expected.weights[name])[field]
            if isinstance(value, Tensor):
                assert value.dtype == other.dtype
                assert torch.equal(value, other)
            else:
                assert value == other
    for name, tensor in actual.tensors.items():
        other = expected.tensors[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert raw_bytes(tensor) == raw_bytes(other)


names = st.text(min_size=0, max_size=12)
weight_updates = st.builds(
    make_weight,
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    rank=st.integers(1, 9),
    factor_bits=st.sampled_from([4, 8]),
    side=st.sampled_from([None, "in", "out"]),
)
DTYPES = sorted(packet._TENSOR_DTYPES, key=str)


@st.composite
def tensors_of_any_dtype(draw) -> Tensor:
    """Random bit patterns, NaN payloads and negative zeros included, seen as any dtype and any shape."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    high = 2 if dtype == torch.bool else 256
    size = (math.prod(shape) * dtype.itemsize,)
    return torch.randint(0, high, size, generator=generator, dtype=torch.uint8).view(dtype).view(shape)


@given(
    version=st.integers(0, 2**63 - 2),
    seed=st.integers(0, 2**63 - 1),
    update_index=st.integers(0, 2**63 - 1),
    weights=st.dictionaries(names, weight_updates, max_size=3),
    tensors=st.dictionaries(names, tensors_of_any_dtype(), max_size=3),
    run_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=128),
    weights_digest=st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    weight_storage=st.sampled_from(["fp32", "split32", "split24"]),
)
def test_round_trip_is_lossless(version, seed, update_index, weights, tensors, run_id, weights_digest, weight_storage):
    # Catches nibbles in the wrong order, lost signs, an odd element count, names that JSON changes, and casts.
    tensors = {name: tensor for name, tensor in tensors.items() if name not in weights}
    update = PolicyUpdate(
        version, version + 1, seed, update_index, weights, tensors, run_id, weights_digest, weight_storage
    )
    data = update.to_bytes()
    decoded = PolicyUpdate.from_bytes(data)
    assert_same(update, decoded)
    assert decoded.digest == update.digest == packet.digest(decoded)
    assert decoded.num_bytes == update.num_bytes == len(data)
    assert decoded.to_bytes() == data


def test_all_4_bit_values_survive_packing():
    # Catches a nibble that is read unsigned, in every pair of values and at odd and even positions.
    pairs = torch.tensor(list(itertools.product(range(-8, 8), repeat=2)), dtype=torch.int8)
    assert torch.equal(packet._unpack4(packet._pack4(pairs)).view(-1, 2), pairs)
    assert packet._pack4(torch.tensor([1, -1, 7], dtype=torch.int8)).tolist() == [0xF1, 0x07]


def test_4_bit_factors_take_half_a_byte_an_element():
    # Catches a packet that ships int8 for 4 bits. Incompressible factors: 0.5 byte an element, zstd adds under 2 %;
    # the header of the container and the description are allowed 2 kB.
    weight = make_weight(0, (500, 700), 32, 4, None)
    num_elements = 32 * 1200
    assert PolicyUpdate(0, 1, 0, 0, {"w": weight}).num_bytes < 0.5 * num_elements * 1.02 + 1200 + 2000


def test_the_layout_is_the_documented_one():
    # Catches a field that moves: packets in old logs must stay readable.
    update = make_update()
    data = update.to_bytes()
    magic, format_version, *numbers = struct.unpack_from("<8sIQQQQQ", data)
    payload = zstandard.ZstdDecompressor().decompress(data[BODY_AT:-HASH_BYTES])
    assert (magic, format_version) == (b"LOGRAUPD", 2)
    assert numbers == [41, 42, 7, 40, len(payload)]
    assert data[DIGEST_AT:BODY_AT] == hashlib.sha256(data[:DIGEST_AT] + payload).digest()
    assert data[DIGEST_AT:BODY_AT].hex() == update.digest
    assert data[-HASH_BYTES:] == hashlib.sha256(data[:-HASH_BYTES]).digest()


def test_digest_depends_on_the_content_only():
    # Catches a digest that changes with the order of a dict, or that misses a field.
    update = make_update()
    reordered = replace(update, weights=dict(reversed(list(update.weights.items()))))
    assert reordered.to_bytes() == update.to_bytes()
    weight = update.weights["layers.1.q_proj.weight"]
    assert weight.signs is not None
    variants = [
        replace(update, base_version=42, version=43),
        replace(update, seed=8),
        replace(update, update_index=41),
        replace(update, run_id="run-8"),
        replace(update, weights_digest=None),
        replace(update, weight_storage="fp32"),
        replace(update, tensors={"norm.weight": update.tensors["norm.weight"] + 1}),
        replace(update, tensors={"norm.extra": update.tensors["norm.weight"]}),
        replace(update, deltas={}),
        replace(update, weights={**update.weights, "layers.1.q_proj.weight": replace(weight, decay=0.5)}),
        replace(
            update,
            weights={**update.weights, "layers.1.q_proj.weight": replace(weight, signs=SignFactor(9, 5, "x", "in"))},
        ),
    ]
    assert len({update.digest, *(variant.digest for variant in variants)}) == len(variants) + 1


def test_views_parameters_and_shared_storage_can_be_sent():
    # Catches safetensors' refusal of non-contiguous and shared tensors, and gradients that leak into a packet.
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "a": base,
        "b": base,
        "c": base.T,
        "d": base[1:],
        "e": torch.nn.Parameter(torch.ones(2)),
        "f": base[0, 0],
    }
    update = PolicyUpdate(0, 1, 0, 0, {}, tensors)
    assert_same(replace(update, tensors={**tensors, "e": torch.ones(2)}), PolicyUpdate.from_bytes(update.to_bytes()))


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, 2).to_sparse()])
def test_tensors_that_the_format_cannot_hold_are_refused(tensor):
    with pytest.raises(LograError, match="tensor 'x' is"):
        PolicyUpdate(0, 1, 0, 0, {}, {"x": tensor}).to_bytes()


def test_every_truncation_is_refused():
    data = make_update().to_bytes()
    for length in [*range(200), *range(200, len(data), 7), *range(len(data) - 40, len(data))]:
        with pytest.raises(PacketError):
            PolicyUpdate.from_bytes(data[:length])
    with pytest.raises(PacketError, match="seal"):
        PolicyUpdate.from_bytes(data + b"\0")
    with pytest.raises(PacketError, match="bytearray"):
        PolicyUpdate.from_bytes(bytearray(data))  # pyright: ignore[reportArgumentType]


def test_every_bit_flip_is_refused():
    # Catches bytes that no checksum covers, such as reserved bits of the zstd frame.
    data = make_update().to_bytes()
    rng = random.Random(0)
    first_bits = [(position, 0) for position in range(BODY_AT + 20)]
    for position, bit in first_bits + [(rng.randrange(len(data)), rng.randrange(8)) for _ in range(1000)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        with pytest.raises(PacketError):
            PolicyUpdate.from_bytes(bytes(damaged))


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(PacketError):
        PolicyUpdate.from_bytes(data)


# ---- forgery: packets whose seal and digest are right and whose content is not


def seal(prefix: bytes, payload: bytes, body: bytes | None = None) -> bytes:
    """A packet with a correct digest and seal around any content."""
    body = zstandard.ZstdCompressor().compress(payload) if body is None else body
    head = prefix + hashlib.sha256(prefix + payload).digest() + body
    return head + hashlib.sha256(head).digest()


def forge_payload(payload: bytes, **fields: int) -> bytes:
    numbers = {"format": 2, "base": 41, "version": 42, "seed": 7, "index": 40, "size": len(payload), **fields}
    return seal(struct.pack("<8sIQQQQQ", b"LOGRAUPD", *numbers.values()), payload)


def payload_of(update: PolicyUpdate) -> bytes:
    return zstandard.ZstdDecompressor().decompress(update.to_bytes()[BODY_AT:-HASH_BYTES])


def parts_of(update: PolicyUpdate) -> tuple[dict[str, Tensor], dict]:
    payload = payload_of(update)
    header = json.loads(payload[8 : 8 + struct.unpack_from("<Q", payload)[0]])
    return load(payload), json.loads(header["__metadata__"]["logra"])


def test_forging_is_faithful():
    # The cases below prove nothing if the forged packet is refused for a mistake of the forger.
    update = make_update()
    assert_same(update, PolicyUpdate.from_bytes(forge_payload(payload_of(update))))
    tensors, description = parts_of(update)
    payload = save(tensors, {"logra": json.dumps(description)})
    assert_same(update, PolicyUpdate.from_bytes(forge_payload(payload)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 1}, "format version is 1"),
        ({"format": 0}, "format version is 0"),
        ({"version": 43}, r"version is 43; allowed is base_version \+ 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"size": 2**60}, "payload has 1152921504606846976 bytes"),
        ({"size": 10}, "the header says 10"),
    ],
)
def test_forged_header_fields_are_refused(fields, message):
    with pytest.raises(PacketError, match=message):
        PolicyUpdate.from_bytes(forge_payload(payload_of(make_update()), **fields))


def test_the_size_limit_is_checked_before_decompression():
    # Catches a decompression bomb: 64 MiB of zeros in a few kB, refused from the header alone.
    bomb = forge_payload(bytes(2**26))
    assert len(bomb) < 10_000
    with pytest.raises(PacketError, match="payload has 67108864 bytes"):
        packet.decode(bomb, max_payload_bytes=2**20)
    # The header lies about the size: the frame's own size is compared before anything is allocated.
    with pytest.raises(PacketError, match="zstd frame holds 67108864 bytes"):
        packet.decode(forge_payload(bytes(2**26), size=1000), max_payload_bytes=2**20)


def test_a_digest_of_other_content_is_refused():
    # Catches a digest that is copied from the header without being computed: a replica would vouch for what it is not.
    data = make_update().to_bytes()
    head = data[:DIGEST_AT] + bytes(HASH_BYTES) + data[BODY_AT:-HASH_BYTES]
    with pytest.raises(PacketError, match="digest does not match"):
        PolicyUpdate.from_bytes(head + hashlib.sha256(head).digest())


def test_forged_frames_are_refused():
    payload = payload_of(make_update())
    frame = zstandard.ZstdCompressor().compress(payload)
    prefix = make_update().to_bytes()[:DIGEST_AT]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(payload)
    for body in (b"", b"\0" * 20, frame[:-5], frame + b"\0", frame + frame, unsized):
        with pytest.raises(PacketError):
            PolicyUpdate.from_bytes(seal(prefix, payload, body))


REST = '"run_id":"","weights_digest":null,"weight_storage":"fp32"}'


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"weights":[],"tensors":[],"deltas":[],' + REST,
        '{"weights":{},"tensors":["norm.weight"],"deltas":[],' + REST,
        '{"weights":[],"tensors":[1],"deltas":[],' + REST,
        '{"weights":[null],"tensors":[],"deltas":[],' + REST,
        '{"weights":[],"tensors":[],"deltas":[],"more":1,' + REST,
        '{"weights":' + "9" * 5000 + ',"tensors":[],"deltas":[],' + REST,
        nested(100_000),
    ],
)
def test_forged_descriptions_are_refused(text):
    tensors, _ = parts_of(make_update())
    with pytest.raises(PacketError):
        PolicyUpdate.from_bytes(forge_payload(save(tensors, {"logra": text})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", None),
        ("run_id", 3),
        ("run_id", "a b"),
        ("run_id", "ü"),
        ("run_id", "x" * 129),
        ("run_id", "a\n"),
        ("weights_digest", "abc"),
        ("weights_digest", "A" * 64),
        ("weights_digest", 3),
        ("weight_storage", "bf16"),
        ("weight_storage", None),
        ("weight_storage", ""),
    ],
)
def test_forged_texts_are_refused(field, value):
    tensors, description = parts_of(make_update())
    description[field] = value
    with pytest.raises(PacketError, match=field):
        PolicyUpdate.from_bytes(forge_payload(save(tensors, {"logra": json.dumps(description)})))
    with pytest.raises(LograError, match=field):
        replace(make_update(), **{field: value})
    del description[field]
    with pytest.raises(PacketError, match="fields"):
        PolicyUpdate.from_bytes(forge_payload(save(tensors, {"logra": json.dumps(description)})))


SIGNS = {"seed": 0, "update_index": 0, "name": "a", "side": "in"}
BAD_FIELDS = {
    "name": [3, "layers.0.q_proj.weight", "norm.weight"],
    "shape": [[6], [6, 5, 1], [6, -5], [6.0, 5], [True, 5], [5, 6], [10**30, 10**30]],
    "rank": [0, True, 3, 10**400],
    "factor_bits": [4, 2],
    "decay": [1, 0.0, math.nan, math.inf, 0.1],
    "signs": [{}, SIGNS, {**SIGNS, "side": "left"}, {**SIGNS, "seed": "0"}],
    "extra": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD_FIELDS for value in BAD_FIELDS[field]])
def test_forged_weight_records_are_refused(field, value):
    # Record 0 is layers.0.o_proj.weight, 8 bits, shape (6, 5), rank 2.
    tensors, description = parts_of(make_update())
    assert description["weights"][0]["shape"] == [6, 5]
    description["weights"][0][field] = value
    with pytest.raises(PacketError):
        PolicyUpdate.from_bytes(forge_payload(save(tensors, {"logra": json.dumps(description)})))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("w0.factor_out", None),
        ("w0.exponent_in", None),
        ("t0", None),
        ("extra", torch.zeros(1)),
        ("w0.factor_out", torch.zeros(6, 2, dtype=torch.uint8)),
        ("w0.factor_out", torch.zeros(2, 6, dtype=torch.int8)),
        ("w0.factor_out", torch.full((6, 2), -128, dtype=torch.int8)),
        ("w0.exponent_out", torch.full((6,), 51, dtype=torch.int8)),
        ("w1.factor_out", torch.full((11,), 0x88, dtype=torch.uint8)),
        ("w1.factor_out", torch.full((11,), 0x11, dtype=torch.uint8)),
    ],
)
def test_forged_tensors_are_refused(name, tensor):
    # w1 is layers.0.q_proj.weight, 4 bits, factor_out 7 x 3 = 21 elements: -8 is no 4-bit value here, padding must be 0.
    tensors, description = parts_of(make_update())
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(PacketError):
        PolicyUpdate.from_bytes(forge_payload(save(tensors, {"logra": json.dumps(description)})))


def test_containers_without_the_metadata_are_refused():
    tensors, description = parts_of(make_update())
    for metadata in (None, {}, {"other": "x"}, {"logra": json.dumps(description), "other": "x"}):
        with pytest.raises(PacketError):
            PolicyUpdate.from_bytes(forge_payload(save(tensors, metadata)))
    for payload in (b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"):
        with pytest.raises(PacketError):
            PolicyUpdate.from_bytes(forge_payload(payload))


@settings(max_examples=300)
@given(positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), value=st.integers(0, 255))
def test_forged_payload_bytes_never_raise_anything_else(positions, value):
    # Behind a correct seal a changed byte may still decode, to other numbers; it must not raise another exception.
    payload = bytearray(payload_of(make_update()))
    for position in positions:
        payload[position % len(payload)] = value
    with contextlib.suppress(PacketError):
        PolicyUpdate.from_bytes(forge_payload(bytes(payload)))
