"""Where canonical weights live in vLLM's layers."""

import pytest
import torch
from torch import nn

from logra.integrations.vllm.layout import engine_layout


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_pieces_of_all_workers_are_the_canonical_weights(tools, trainer, num_ranks):
    # Catches rows of the wrong head, a key head that is repeated over ranks (4 ranks, 2 key heads) taken from the wrong
    # one, columns instead of rows, vocabulary padding seen as rows, and a bias that is cut although it is whole.
    weights = trainer.weights[0]
    layouts = [engine_layout(tools.build_engine(weights, rank, num_ranks)) for rank in range(num_ranks)]
    assert all(not layout.refused for layout in layouts)
    tools.assert_same_bits(tools.assemble([layout.placements for layout in layouts]), weights)


def test_pieces_are_the_parameters_themselves(tools, trainer):
    # Catches a copy: updates would go nowhere, or captured pointers would go stale.
    engine = tools.build_engine(trainer.weights[0])
    storages = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters()}
    placements = engine_layout(engine).placements
    assert {piece.tensor.untyped_storage().data_ptr() for p in placements.values() for piece in p.pieces} == storages


def test_a_fused_weight_of_the_checkpoint_itself(tools):
    # Some models stack q, k and v in the checkpoint: one canonical weight, whose rows on a rank are three ranges.
    whole = torch.arange(8.0)[:, None].expand(8, 3).contiguous()  # q 4 rows, k 2, v 2; head size 1
    for rank, rows in enumerate(([0, 1, 4, 6], [2, 3, 5, 7])):
        qkv = tools.layers.QKVParallelLinear(
            whole[rows],
            tp_rank=rank,
            tp_size=2,
            total_num_heads=4,
            total_num_kv_heads=2,
            num_heads=2,
            num_kv_heads=1,
            num_kv_head_replicas=1,
            head_size=1,
        )
        placement = engine_layout(tools.tree(qkv_proj=qkv)).placements["qkv_proj.weight"]
        assert placement.shape == (8, 3)
        assert [piece.rows for piece in placement.pieces] == [
            (2 * rank, 2 * rank + 2), (4 + rank, 5 + rank), (6 + rank, 7 + rank)
        ]  # fmt: skip
        for piece in placement.pieces:
            assert torch.equal(piece.tensor, whole[slice(*piece.rows)])


def test_the_bias_of_a_row_parallel_layer_is_whole(tools):
    layer = tools.layers.RowParallelLinear(torch.zeros(6, 4), torch.zeros(6), tp_rank=1, tp_size=2)
    placements = engine_layout(tools.tree(o_proj=layer)).placements
    assert placements["o_proj.weight"].shape == (6, 8)
    assert placements["o_proj.weight"].pieces[0].columns == (4, 8)
    assert placements["o_proj.bias"].shape == (6,)
    assert placements["o_proj.bias"].pieces[0].rows == (0, 6)


class Fp8LinearMethod:
    pass


def quantised(layer):
    layer.quant_method = Fp8LinearMethod()
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(1), requires_grad=False)


def packed(layer):
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def half(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.float16), requires_grad=False)


def of_another_kind(layer):
    layer.__class__ = type("GroupedQKVParallelLinear", (type(layer),), {})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(quantised, "Fp8LinearMethod"), (packed, "packed"), (half, "float16"), (of_another_kind, "GroupedQKV")],
)
def test_what_cannot_be_updated_is_refused_by_the_names_of_the_checkpoint(tools, trainer, spoil, reason):
    # Catches a quantised qkv_proj that is refused under its own name: an update says q_proj.
    engine = tools.build_engine(trainer.weights[0])
    spoil(engine.model.layers[0].self_attn.qkv_proj)
    layout = engine_layout(engine)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        assert reason in layout.refused[name]
        assert name not in layout.placements


def test_scalars_and_other_shapes_have_a_place_too(tools):
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    module.kernel = nn.Parameter(torch.zeros(3, 2, 4))
    placements = engine_layout(tools.tree(conv=module)).placements
    assert placements["conv.scale"].shape == ()
    assert placements["conv.kernel"].shape == (3, 2, 4)
    assert placements["conv.kernel"].matrix_shape == (3, 8)
