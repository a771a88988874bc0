"""Responses to one prompt share its keys and values: the same numbers, on fewer tokens."""

import pytest
import torch

import logra.trust.forward as forward_module
from logra.trust import TrustRegion
from logra.trust.measure import difference_kl, predicted_kl, realised_kl
from logra.trust.shared_prefix import cache_argument, split_prefixes

SHARING = ("llama", "qwen2", "qwen3", "gpt2")
WINDOWED = ("gemma2", "gemma3")


def groups(*, seed: int = 5) -> dict[str, torch.Tensor]:
    """Two prompts of 4 and 7 tokens, three responses of different lengths to each, prompts padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.zeros(6, 20, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    for group, length in enumerate((4, 7)):
        prompt = torch.randint(3, 64, (length,), generator=generator)
        for sample in range(3):
            row, response = 3 * group + sample, (9, 5, 12)[sample]
            batch["input_ids"][row, 7 - length : 7] = prompt
            batch["input_ids"][row, 7 : 7 + response] = torch.randint(3, 64, (response,), generator=generator)
            batch["attention_mask"][row, 7 - length : 7 + response] = 1
            batch["loss_mask"][row, 7 : 7 + response] = 1
    return batch


def make_probe(**changes):
    return TrustRegion().make_probe(**{**groups(), **changes}, temperature=0.7)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("family", SHARING)
def test_sharing_changes_no_number(tiny, monkeypatch, family, measure):
    """Catches a wrong row's prompt, positions counted from the padding, and columns off by the prefix.

    The models hold their norms and attention softmax in fp32, hence the tolerance; the difference quotient divides that
    rounding by a step of 1/128.
    """
    model = tiny.model(family)
    assert cache_argument(model) == "cache"
    deltas = tiny.propose(model, ratio=1e-2)
    shared = measure(model, make_probe(), deltas)
    monkeypatch.setattr(forward_module, "split_prefixes", lambda batch: None)
    assert measure(model, make_probe(), deltas) == pytest.approx(shared, rel=1e-2 if measure is difference_kl else 1e-4)


@pytest.mark.parametrize("family", SHARING)
def test_prompts_are_run_once(tiny, family):
    """Two prompts without their last token, then six rests. Catches a silent way back to whole rows."""
    model = tiny.model(family)
    shapes = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    realised_kl(model, make_probe(), tiny.propose(model, ratio=1e-2))
    assert set(shapes) >= {(2, 6), (6, 13)}
    assert (6, 19) not in shapes


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_windows_are_not_shared(tiny, family):
    """Their layers keep a window of keys only; rows are run whole, and the numbers are there.

    In fp32: a float64 model of transformers turns rows of pure padding into NaN, where its softmax is fp32.
    """
    model = tiny.model(family).float()
    assert realised_kl(model, make_probe(), tiny.propose(model, ratio=1e-2)) > 0
    assert cache_argument(model) is None


def test_split_by_hand():
    """A two-token prompt before three and one response tokens, a one-token tail difference apart."""
    probe = TrustRegion().make_probe(
        input_ids=torch.tensor([[5, 6, 7, 8, 9], [5, 6, 4, 0, 0]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        loss_mask=torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]),
        temperature=1.0,
    )
    split = split_prefixes(probe.batches[0])  # rows are sorted by length: the short one first
    assert split.prefix_ids.tolist() == [[5]]
    assert split.kind.tolist() == [0, 0]
    assert split.rest_ids.tolist() == [[6, 4, 0, 0], [6, 7, 8, 9]]
    assert split.rest_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert split.rest_positions.tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert split.columns.tolist() == [0, 0, 1, 2]


def test_prompts_of_one_token_and_different_prompts_are_left_whole(tiny):
    batch = groups()
    batch["loss_mask"][:, 1:] = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]
    assert split_prefixes(make_probe(**batch).batches[0]) is None  # everything but the first token is generated
    assert split_prefixes(TrustRegion().make_probe(**tiny.batch(), temperature=1.0).batches[0]) is None
