"""What a pattern selects, and what is refused by name."""

import pytest
import torch
from torch import nn

from logra.errors import TargetError
from logra.sketch import find_targets


def fqns(model, patterns):
    return [target.fqn for target in find_targets(model, patterns)]


def test_patterns_match_tails_paths_and_wildcards(tiny_lm):
    assert fqns(tiny_lm, "q_proj") == ["layers.0.q_proj.weight", "layers.1.q_proj.weight"]
    assert fqns(tiny_lm, ("layers.1.*",)) == [f"layers.1.{name}_proj.weight" for name in "qko"]
    assert fqns(tiny_lm, ("0.o_proj", "q_proj"))[0] == "layers.0.q_proj.weight"  # model order, no duplicates
    # A tail must start at a segment: "proj" is no tail of "q_proj".
    with pytest.raises(TargetError, match="'proj' matches no module"):
        find_targets(tiny_lm, "proj")


def test_all_linear_leaves_the_output_embedding_out(tiny_lm):
    assert len(fqns(tiny_lm, "all-linear")) == 6
    assert "lm_head.weight" not in fqns(tiny_lm, "all-linear")


def test_wrapper_segments_are_not_part_of_a_name(tiny_lm):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    tiny_lm.layers[0] = checkpoint_wrapper(tiny_lm.layers[0])
    assert fqns(tiny_lm, "q_proj") == ["layers.0.q_proj.weight", "layers.1.q_proj.weight"]
    assert find_targets(tiny_lm, "q_proj")[0].parent == "layers.0"


def test_one_pattern_without_a_match_is_an_error_that_lists_what_there_is(tiny_lm):
    with pytest.raises(TargetError, match=r"'gate_proj' matches no module of TinyLM.*k_proj, lm_head, o_proj, q_proj"):
        find_targets(tiny_lm, ("q_proj", "gate_proj"))
    with pytest.raises(TargetError, match="empty"):
        find_targets(tiny_lm, ())


def test_tied_weight_is_refused_and_named(tiny_lm):
    tiny_lm.lm_head.weight = tiny_lm.embed.weight
    with pytest.raises(TargetError, match=r"'lm_head.weight' is tied to 'embed.weight'"):
        find_targets(tiny_lm, ("lm_head",))


def test_one_module_under_two_names_is_not_tied(tiny_lm):
    tiny_lm.alias = tiny_lm.layers[0].q_proj
    assert len(find_targets(tiny_lm, ("layers.*.q_proj",))) == 2


def test_other_module_types_are_refused(tiny_lm):
    with pytest.raises(TargetError, match="'embed' is a Embedding"):
        find_targets(tiny_lm, ("embed",))


def test_compiled_models_are_refused(tiny_lm):
    compiled = torch.compile(tiny_lm, backend="eager")
    with pytest.raises(TargetError, match="already compiled"):
        find_targets(compiled, "q_proj")
    tiny_lm.layers[0].compile(backend="eager")
    with pytest.raises(TargetError, match=r"'layers.0' is already compiled"):
        find_targets(tiny_lm, "q_proj")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 8))


@pytest.mark.parametrize("patterns", [("down_proj",), "all-linear", ("down_proj", "q_proj")])
def test_fused_experts_are_refused_never_skipped(tiny_lm, patterns):
    tiny_lm.experts = Experts()
    with pytest.raises(TargetError, match=r"fused expert weights \('experts.down_proj'"):
        find_targets(tiny_lm, patterns)


def test_a_forward_of_its_own_is_refused(tiny_lm):
    """Training would run the plain linear map and rollouts the module's own: two models."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    tiny_lm.layers[0].q_proj = Doubled(40, 56)
    with pytest.raises(TargetError, match=r"'layers.0.q_proj' \(Doubled\) has a forward of its own"):
        find_targets(tiny_lm, "q_proj")
    tiny_lm.layers[0].q_proj = nn.Linear(40, 56)
    tiny_lm.layers[0].q_proj.forward = lambda x: x
    with pytest.raises(TargetError, match="forward of its own"):
        find_targets(tiny_lm, "q_proj")


def test_a_position_embedding_is_no_expert(tiny_lm):
    tiny_lm.position = nn.Parameter(torch.zeros(1, 11, 40))
    assert len(find_targets(tiny_lm, "all-linear")) == 6


def test_convolutions_are_not_experts(tiny_lm):
    tiny_lm.conv = nn.Conv1d(4, 4, 3)
    assert len(find_targets(tiny_lm, "all-linear")) == 6


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(56 * 40), "flattened or emptied"),
        (torch.zeros(0), "flattened or emptied"),
        (torch.zeros(56, 40, dtype=torch.float16), "float16"),
        (torch.zeros(56, 40, device="meta"), "meta device"),
    ],
)
def test_unusable_weights_are_refused(tiny_lm, weight, message):
    tiny_lm.layers[1].q_proj.weight = nn.Parameter(weight)
    with pytest.raises(TargetError, match=rf"'layers.1.q_proj'.*{message}"):
        find_targets(tiny_lm, "q_proj")


def test_peft_adapters_are_refused(tiny_lm):
    import peft

    model = peft.get_peft_model(tiny_lm, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TargetError, match="peft adapter"):
        find_targets(model, "q_proj")
