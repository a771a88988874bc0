"""Pieces: which tensors hold which rectangle of which weight, and that sharding changes no bit."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from logra.errors import LograError
from logra.hashing import derive_key
from logra.merge_rule import MergeRule
from logra.sync import Piece, Placement, Replica, fused_rows, module_layout
from logra.update import PolicyUpdate, SignFactor, round_factors


class Conv1D(nn.Module):
    """transformers' module of this name: stores [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


def make_update(seed: int, shapes: dict[str, tuple[int, int]], step: int, tensors=None) -> PolicyUpdate:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for index, (name, shape) in enumerate(shapes.items()):
        rank, side = 1 + (seed + index) % 7, (None, "in", "out")[(seed + index) % 3]
        weights[name] = round_factors(
            None if side == "out" else torch.randn(shape[0], rank, generator=generator) * 0.03,
            None if side == "in" else torch.randn(rank, shape[1], generator=generator),
            signs=None if side is None else SignFactor(seed, step, "parent", side),
            shape=shape,
            factor_bits=4 if (seed + index) % 2 else 8,
            key=derive_key("layout test", seed, index),
            decay=0.998 if seed % 2 else 1.0,
        )
    return PolicyUpdate(step, step + 1, 0, step, weights, tensors or {})


def settle(whole: torch.Tensor, update: PolicyUpdate, name: str) -> None:
    """The last line of the merge rule, on a whole weight."""
    rule = MergeRule.of(update.weight_storage, seed=update.seed, version=update.version, name=name)
    rule.settle_(whole, *[tuple(whole.shape), *((0, size) for size in whole.shape)])


NAMES = ("q", "k", "v", "gate", "up", "o", "down")


@settings(max_examples=60)
@given(data=st.data(), num_ranks=st.sampled_from([1, 2, 4, 8]), storage=st.sampled_from(["fp32", "split32", "split24"]))
def test_any_slicing_gives_the_bits_of_the_whole(data, num_ranks, storage):
    # Catches shards that take a wrong slice of a factor, of an exponent or of the signs, and fused blocks that are out of
    # order. Cuts are anywhere, so shards may be empty; q, k, v and gate, up are fused on every rank. With the rule of
    # split24, which any storage may follow, catches noise that is counted from the first element of a shard.
    sizes = st.integers(1, 40)
    width = data.draw(sizes)
    shapes = {name: (data.draw(sizes), width) for name in NAMES[:5]}
    shapes |= {name: (width, data.draw(sizes)) for name in NAMES[5:]}
    base = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in shapes.items()}
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16

    rule = "split24" if storage == "split24" else data.draw(st.sampled_from(["fp32", "split24"]))

    def draw_cuts(size: int) -> list[tuple[int, int]]:
        edges = [0, *sorted(data.draw(st.integers(0, size)) for _ in range(num_ranks - 1)), size]
        return list(itertools.pairwise(edges))

    cuts = {name: draw_cuts(shapes[name][0 if name in NAMES[:5] else 1]) for name in NAMES}
    replicas = []
    for rank in range(num_ranks):
        pieces: dict[str, Piece] = {}
        for group in (NAMES[:3], NAMES[3:5]):
            parts = [(name, cuts[name][rank], (0, width)) for name in group]
            rows = sum(stop - start for _, (start, stop), _ in parts)
            pieces |= fused_rows(torch.empty(rows, width, dtype=dtype), parts)
        for name in NAMES[5:]:
            start, stop = cuts[name][rank]
            pieces[name] = Piece(torch.empty(width, stop - start, dtype=dtype), (0, width), (start, stop))
        replica = Replica({name: Placement(shapes[name], (pieces[name],)) for name in NAMES}, storage=storage)
        replica.load(base, 0)
        replicas.append(replica)

    expected = {name: value.clone() for name, value in base.items()}
    for step in range(2):
        update = replace(make_update(data.draw(st.integers(0, 1000)), shapes, step), weight_storage=rule)
        for name, weight in update.weights.items():
            weight.apply_(expected[name])
            settle(expected[name], update, name)
        for replica in replicas:
            replica.apply(update)
    for replica in replicas:
        for name, placement in replica.layout.items():
            (piece,) = placement.pieces
            part = expected[name][slice(*piece.rows), slice(*piece.columns)]
            assert torch.equal(piece.value(0, piece.tensor.shape[0]), part), name
            assert piece.lo is None or piece.lo.dtype == (torch.int8 if storage == "split24" else torch.int16)


def test_a_weight_may_live_in_many_pieces():
    # Catches code that assumes one piece: a 2 x 2 grid of tiles on one rank.
    shapes = {"w": (9, 11)}
    base = torch.randn(9, 11)
    tiles = [
        Piece(base[slice(*rows), slice(*columns)].clone(), rows, columns)
        for rows in ((0, 4), (4, 9))
        for columns in ((0, 3), (3, 11))
    ]
    replica = Replica({"w": Placement((9, 11), tuple(tiles))})
    whole = Replica({"w": Placement((9, 11), (Piece(base.clone(), (0, 9), (0, 11)),))})
    update = make_update(1, shapes, 0)
    for one in (replica, whole):
        one.apply(update)
    assert replica.digest() == whole.digest() is not None
    for piece in tiles:
        expected = whole.weights()["w"][slice(*piece.rows), slice(*piece.columns)]
        assert torch.equal(piece.tensor, expected)


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_modules_that_store_the_transpose(storage):
    # Catches an update merged into [in, out] as if it were [out, in]; the matrix is square, so shapes do not tell.
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Conv1D(8, 8), "frozen": Conv1D(6, 6)}).to(dtype)
    replica = Replica(model, storage=storage)
    assert replica.layout["attn.weight"].transposed and not replica.layout["attn.bias"].transposed
    stored = model["frozen"].weight.detach() + 1
    expected = model["attn"].weight.detach().float().T.clone()
    update = make_update(3, {"attn.weight": (8, 8)}, 0, {"frozen.weight": stored})
    rule = storage if storage == "split24" else "fp32"
    update = replace(update, weight_storage=rule)
    update.weights["attn.weight"].apply_(expected)
    settle(expected, update, "attn.weight")
    replica.apply(update)
    assert torch.equal(replica.weights()["attn.weight"].float(), expected)
    assert torch.equal(model["attn"].weight.float(), expected.T.to(dtype).float())
    # A changed tensor that is no target travels as the checkpoint stores it.
    assert torch.equal(model["frozen"].weight, stored)


def test_parameters_are_changed_in_place():
    # Catches a merge that replaces tensors: captured graphs and the module would keep the old ones.
    model = nn.Linear(6, 5)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    update = make_update(2, {"weight": (5, 6)}, 0, {"bias": torch.ones(5)})
    Replica(model).apply(update)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert torch.equal(model.bias, torch.ones(5))


def test_names_have_no_wrapper_segments_and_ties_appear_once():
    inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    inner[1].weight = inner[0].weight
    model = nn.ModuleDict({"_orig_mod": inner, "embed": nn.Embedding(3, 4)})
    assert list(module_layout(model)) == ["0.weight", "embed.weight"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_what_no_replica_can_hold_is_refused_by_name(dtype):
    model = nn.ModuleDict({"good": nn.Linear(2, 2), "packed": nn.Linear(2, 2)})
    model["packed"].weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
    with pytest.raises(LograError, match=r"'packed.weight' is Parameter of torch"):
        module_layout(model)
    with pytest.raises(LograError, match=r"'weight' is on the meta device"):
        module_layout(nn.Linear(2, 2, device="meta"))


def test_pieces_that_cannot_be_are_refused():
    tensor = torch.zeros(2, 3)
    with pytest.raises(LograError, match=r"need \(2, 4\)"):
        Piece(tensor, (0, 2), (0, 4))
    with pytest.raises(LograError, match="int32"):
        Piece(tensor.int(), (0, 2), (0, 3))
    with pytest.raises(LograError, match="leave the shape"):
        Placement((2, 3), (Piece(tensor, (1, 3), (0, 3)),))
    with pytest.raises(LograError, match="overlap"):
        Placement((4, 3), (Piece(tensor, (0, 2), (0, 3)), Piece(tensor.clone(), (1, 3), (0, 3))))
    with pytest.raises(LograError, match="the tensor has 2"):
        fused_rows(tensor, [("a", (0, 1), (0, 3))])
    with pytest.raises(LograError, match="occurs twice"):
        fused_rows(tensor, [("a", (0, 1), (0, 3)), ("a", (1, 2), (0, 3))])
    model = nn.Conv1d(2, 2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, 2).permute(0, 2, 1))
    with pytest.raises(LograError, match="cannot be seen as a matrix"):
        module_layout(model)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_low_planes_lie_where_the_piece_says(dtype):
    # The meta device stands for that of the weights. Catches a plane that is made beside them, and one that replaces
    # values that are there.
    weight = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    for on_host, device in ((True, "cpu"), (False, "meta")):
        piece = Piece(weight, (0, 4), (0, 6), low_on_host=on_host)
        piece.add_low(dtype)
        assert (piece.lo.device.type, piece.lo.dtype, tuple(piece.lo.shape)) == (device, dtype, (4, 6))
    there = torch.ones(4, 6, dtype=torch.int16)
    piece = Piece(weight, (0, 4), (0, 6), there)
    piece.add_low(dtype)
    assert piece.lo is there
