"""A reference trainer in numpy, and every kind of replica behind one interface, for all tests of the package."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from logra.hashing import derive_key, hash_words
from logra.sync import BaseModel, Manifest, Piece, Placement, Replica, fused_rows, module_layout
from logra.sync.layout import weights_digest
from logra.tensor_delta import TensorDelta
from logra.update import LowRankUpdate, PolicyUpdate, SignFactor, round_factors

RUN_ID = "run-under-test"
WIDTH, HEADS, KEYS, INNER, VOCAB = 12, 10, 6, 14, 9
QKV = ("layer.q_proj.weight", "layer.k_proj.weight", "layer.v_proj.weight")
GATE_UP = ("layer.gate_proj.weight", "layer.up_proj.weight")
BY_COLUMNS = ("layer.o_proj.weight", "layer.down_proj.weight")
TARGETS = (*QKV, *GATE_UP, *BY_COLUMNS)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS, bias=False)
        self.k_proj = nn.Linear(WIDTH, KEYS, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEYS, bias=False)
        self.o_proj = nn.Linear(HEADS, WIDTH, bias=False)
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)


class Policy(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = Layer()
        self.norm = nn.LayerNorm(WIDTH, bias=False)


def reference_nudge(value: np.ndarray) -> np.ndarray:
    bits = value.view(np.uint32)
    tie = (bits & 0xFFFF) == 0x8000
    odd = ((bits >> 16) & 1) == 1
    return np.where(tie & odd, bits + 1, np.where(tie, bits - 1, bits)).astype(np.uint32).view(np.float32)


def reference_round24(value: np.ndarray, seed: int, version: int, name: str) -> np.ndarray:
    """docs/sync.md, in integers of 64 bits, with the words of `hash_words`."""
    index = torch.arange(value.size).view(value.shape)
    words = hash_words(derive_key("split24", seed, version, name), index).numpy()
    bits = (value.view(np.uint32).astype(np.int64) + words % 256) // 256 * 256
    bits += (bits % 65536 == 0x8000) * np.where(words >> 8 & 1, 256, -256)
    return bits.astype(np.uint32).view(np.float32)


def reference_change(update: LowRankUpdate) -> np.ndarray:
    """dW from its formula in float64, where the integers and the powers of two are exact."""
    num_out, num_in = update.shape
    factors = [update.factor_out, update.factor_in]
    if update.signs is not None and update.signs.side == "out":
        factors[0] = update.signs.matrix(update.rank, num_out)
    if update.signs is not None and update.signs.side == "in":
        factors[1] = update.signs.matrix(update.rank, num_in)
    left, right = (factor.double().numpy() for factor in factors)
    scale_out, scale_in = (2.0 ** e.double().numpy() for e in (update.exponent_out, update.exponent_in))
    return ((scale_out[:, None] * (left @ right)) * scale_in).astype(np.float32)


class Run:
    """The slow trainer: canonical fp32 weights of every version, and the updates between them.

    Args:
        storage: merge rule. The base of a split32 or split24 run is exact in bf16, as a bf16 checkpoint is.
        num_updates: length.
        seed: of everything.
        digest_every: versions with a digest.
    """

    def __init__(self, storage: str = "fp32", num_updates: int = 6, seed: int = 0, digest_every: int = 2) -> None:
        self.storage, self.seed = storage, seed
        model = Policy(seed)
        if storage != "fp32":
            model = model.to(torch.bfloat16)
        else:
            # Values whose low half is a tie, so that the merge rules differ.
            for parameter in model.parameters():
                bits = parameter.data.view(torch.int32)
                bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
        self.base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.weights = [{name: value.float() for name, value in self.base.items()}]
        self.updates: list[PolicyUpdate] = []
        for step in range(num_updates):
            self._advance(step, digest_every)
        self.manifest = Manifest(
            run_id=RUN_ID,
            weight_storage=storage,
            seed=seed,
            base=BaseModel(
                model="policy",
                digest=digest_of(self.weights[0]),
                digest_bf16=digest_of({name: w.bfloat16().float() for name, w in self.weights[0].items()}),
            ),
        )

    def _advance(self, step: int, digest_every: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        after = dict(self.weights[-1])
        weights = {}
        for index, name in enumerate(TARGETS):
            weights[name] = random_update(tuple(after[name].shape), step, index, self.seed, generator)
            decayed = after[name].numpy() * np.float32(weights[name].decay)
            merged = decayed - reference_change(weights[name])
            if self.storage == "split32":
                merged = reference_nudge(merged)
            elif self.storage == "split24":
                merged = reference_round24(merged, self.seed, step + 1, name)
            after[name] = torch.from_numpy(merged.copy())
        tensors, deltas = {}, {}
        if step % 2:
            old = after["norm.weight"].to(self.base["norm.weight"].dtype)
            value = (after["norm.weight"] + 0.01 * step).to(old.dtype)
            after["norm.weight"] = value.float()
            # As a publisher does: the value first, deltas from then on.
            if step == 1:
                tensors["norm.weight"] = value
            else:
                deltas["norm.weight"] = TensorDelta.between(old, value)
        self.weights.append(after)
        digest = digest_of(after) if digest_every and (step + 1) % digest_every == 0 else None
        self.updates.append(
            PolicyUpdate(step, step + 1, self.seed, step, weights, tensors, RUN_ID, digest, self.storage, deltas)
        )


def random_update(
    shape: tuple[int, int], step: int, index: int, seed: int, generator: torch.Generator
) -> LowRankUpdate:
    rank = 1 + (step + index) % 5
    side = (None, "in", "out")[(step + index) % 3]
    scale = 0.02 if side is None else 0.004
    out_factor = torch.randn(shape[0], rank, generator=generator) * scale
    in_factor = torch.randn(rank, shape[1], generator=generator)
    return round_factors(
        None if side == "out" else out_factor,
        None if side == "in" else in_factor * (scale if side == "out" else 1.0),
        signs=None if side is None else SignFactor(seed, step, f"layer.{index}", side),
        shape=shape,
        factor_bits=4 if (step + index) % 2 else 8,
        key=derive_key("test", seed, step, index),
        decay=0.999 if step % 3 == 2 else 1.0,
    )


def whole(layout: Mapping[str, Placement]) -> dict[str, Piece]:
    return {name: placement.pieces[0] for name, placement in layout.items()}


def digest_of(weights: Mapping[str, Tensor]) -> str:
    layout = {name: whole_placement(value.float()) for name, value in weights.items()}
    digest = weights_digest(layout)
    assert digest is not None
    return digest


def whole_placement(value: Tensor) -> Placement:
    matrix = value.reshape(value.shape[0], -1)
    return Placement(tuple(value.shape), (Piece(matrix, (0, matrix.shape[0]), (0, matrix.shape[1])),))


class Follower:
    """One replica, or the replicas of all ranks, seen as one policy."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas

    @property
    def version(self) -> int:
        versions = {replica.version for replica in self.replicas}
        assert len(versions) == 1
        return versions.pop()

    def apply(self, update: PolicyUpdate) -> None:
        for replica in self.replicas:
            replica.apply(update)

    def catch_up(self, log, until=None) -> int:
        counts = {replica.catch_up(log, until) for replica in self.replicas}
        assert len(counts) == 1
        return counts.pop()

    def load(self, weights, version) -> None:
        for replica in self.replicas:
            replica.load(weights, version)

    def weights(self) -> dict[str, Tensor]:
        """Assembled from the pieces, fp32."""
        result: dict[str, Tensor] = {}
        for replica in self.replicas:
            for name, placement in replica.layout.items():
                matrix = result.setdefault(name, torch.full(placement.matrix_shape, torch.nan))
                for piece in placement.pieces:
                    matrix[slice(*piece.rows), slice(*piece.columns)] = piece.value(0, piece.tensor.shape[0])
        shapes = {name: p.shape for replica in self.replicas for name, p in replica.layout.items()}
        return {name: matrix.view(shapes[name]) for name, matrix in result.items()}


def cuts(size: int, num_ranks: int, lopsided: bool) -> list[tuple[int, int]]:
    """Ranges of the ranks: even, or uneven with empty ones where there are more ranks than rows."""
    edges = [size * rank // num_ranks for rank in range(num_ranks + 1)]
    if lopsided:
        edges = [0] + [min(size, edge + 1) for edge in edges[1:-1]] + [size]
    return list(itertools.pairwise(edges))


def rank_layout(
    weights: Mapping[str, Tensor], rank: int, num_ranks: int, dtype: torch.dtype, *, lopsided: bool = True
) -> dict[str, Placement]:
    """What one rank of a tensor-parallel engine holds: fused qkv and gate_up by rows, o and down by columns, the
    embedding by rows, the norm on every rank.
    """
    pieces: dict[str, tuple[Piece, ...]] = {}

    def part(name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        return weights[name].to(dtype)[slice(*rows), slice(*columns)].clone()

    def row_range(name: str) -> tuple[int, int]:
        return cuts(weights[name].shape[0], num_ranks, lopsided)[rank]

    for group in (QKV, GATE_UP):
        parts = [(name, row_range(name), (0, weights[name].shape[1])) for name in group]
        fused = nn.Parameter(torch.cat([part(*entry) for entry in parts]))
        pieces |= {name: (piece,) for name, piece in fused_rows(fused, parts).items()}
    for name in BY_COLUMNS:
        rows, columns = (0, weights[name].shape[0]), cuts(weights[name].shape[1], num_ranks, lopsided)[rank]
        pieces[name] = (Piece(part(name, rows, columns), rows, columns),)
    rows, columns = row_range("embed.weight"), (0, WIDTH)
    pieces["embed.weight"] = (Piece(part("embed.weight", rows, columns), rows, columns),)
    pieces["norm.weight"] = (Piece(weights["norm.weight"].to(dtype)[:, None].clone(), (0, WIDTH), (0, 1)),)
    return {name: Placement(tuple(weights[name].shape), pieces[name]) for name in weights}


def build(kind: str, run: Run, version: int = 0) -> Follower:
    """A follower of the run that holds its weights of `version`."""
    storage = kind.split("-")[0]
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    weights = run.weights[version]
    if kind.endswith("module"):
        model = Policy().to(dtype)
        for name, piece in whole(module_layout(model)).items():
            piece.tensor.copy_(weights[name].view_as(piece.tensor))
        follower = Follower([Replica(model, version, storage)])
    else:
        num_ranks = int(kind.rpartition("-")[2])
        layouts = [rank_layout(weights, rank, num_ranks, dtype) for rank in range(num_ranks)]
        follower = Follower([Replica(layout, version, storage) for layout in layouts])
    if storage in ("split32", "split24"):
        follower.load(weights, version)  # the low plane of a base in fp32
    return follower


STORAGES = ("fp32", "split32", "split24")
EXACT_KINDS = (
    "fp32-module", "split32-module", "split24-module", "fp32-shards-2", "split32-shards-3", "split24-shards-3",
)  # fmt: skip
KINDS = (*EXACT_KINDS, "bf16-module", "bf16-shards-2")


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype == torch.float32
        assert torch.equal(value.contiguous().view(torch.int32), expected[name].contiguous().view(torch.int32)), name


class Tools:
    """What the tests share: fixtures instead of imports, since tests are no package."""

    Run, Follower, Policy = Run, Follower, Policy
    build, assert_same_bits = staticmethod(build), staticmethod(assert_same_bits)
    rank_layout, digest_of, cuts = staticmethod(rank_layout), staticmethod(digest_of), staticmethod(cuts)
    targets = TARGETS
    run_id = RUN_ID


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def runs() -> dict[str, Run]:
    """One run of six updates for each merge rule; nobody changes them."""
    return {storage: Run(storage) for storage in STORAGES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kind of replica follows every run; those of 24 bits follow runs of 24 bits alone."""
    for fixture, kinds in (("kind", KINDS), ("exact_kind", EXACT_KINDS)):
        if {"run", fixture} <= set(metafunc.fixturenames):
            pairs = [
                (storage, kind)
                for storage in STORAGES
                for kind in kinds
                if storage == "split24" or not kind.startswith("split24")
            ]
            metafunc.parametrize(("run", fixture), pairs, indirect=True)
            return
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", STORAGES, indirect=True)


@pytest.fixture
def run(request, runs) -> Run:
    return runs[request.param]


@pytest.fixture
def exact_kind(request) -> str:
    return request.param


@pytest.fixture
def kind(request) -> str:
    return request.param


@pytest.fixture
def log(tmp_path, run):
    """The log of the run."""
    from logra.sync import DirectoryLog

    log = DirectoryLog(tmp_path / "updates", run.manifest)
    for update in run.updates:
        log.append(update)
    return log
