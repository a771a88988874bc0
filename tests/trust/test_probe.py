"""Selection, alignment and refusals of the probe."""

import pytest
import torch

import logra.trust.probe as probe_module
from logra.errors import ProbeError
from logra.trust import TrustRegion

LENGTHS = (9, 5, 12, 7)  # generated tokens of the rows of tiny.batch()


def make(tiny, *, region: dict | None = None, seed: int = 0, **changes):
    batch = {**tiny.batch(), "temperature": 1.0, **changes}
    generator = torch.Generator().manual_seed(seed)
    return TrustRegion(**(region or {})).make_probe(**batch, generator=generator)


@pytest.mark.parametrize("seed", range(6))
def test_stops_at_the_first_response_that_meets_both_minima(tiny, seed):
    """Catches `or` in place of `and`, and one response too many: expected rows come from the permutation itself."""
    probe = make(tiny, region={"min_responses": 2, "min_tokens": 15}, seed=seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
    count = next(n for n in range(1, 5) if n >= 2 and sum(LENGTHS[row] for row in order[:n]) >= 15)
    assert sorted(probe.selected.tolist()) == sorted(order[:count])
    assert probe.num_responses == count
    assert probe.num_tokens == sum(LENGTHS[row] for row in order[:count])


def test_min_responses_alone(tiny):
    probe = make(tiny, region={"min_responses": 3, "min_tokens": 1})
    assert probe.num_responses == 3


def test_uses_everything_when_there_is_too_little(tiny):
    """128 tokens are wanted by default, 33 exist."""
    probe = make(tiny)
    assert (probe.num_responses, probe.num_tokens) == (4, 33)


def test_rows_without_generated_tokens_are_passed_over(tiny):
    """Catches a prompt-only row counted as one of the two responses."""
    loss_mask = tiny.batch()["loss_mask"]
    loss_mask[1] = 0
    loss_mask[3] = 0
    probe = make(tiny, region={"min_responses": 2, "min_tokens": 1}, loss_mask=loss_mask)
    assert sorted(probe.selected.tolist()) == [0, 2]


def test_cap_keeps_the_first_tokens_and_drops_what_follows(tiny):
    """Catches a cap on the loss mask alone, which would still run (and store) the whole response."""
    probe = make(tiny, region={"max_response_tokens": 4})
    assert (probe.num_responses, probe.num_tokens) == (4, 16)
    (batch,) = probe.batches
    assert batch.input_ids.shape == (4, 10)  # longest prompt 6 + 4


def test_columns_are_those_of_the_predecessors(tiny):
    """Catches an off-by-one: the first generated token of a row with a prompt of p tokens is predicted at column p - 1."""
    source = tiny.batch(left=2)
    probe = make(tiny, **source)
    (batch,) = probe.batches
    for place, row in enumerate(probe.selected.tolist()):
        real = source["attention_mask"][row].bool()
        length = int(real.sum())
        assert torch.equal(batch.input_ids[place, :length], source["input_ids"][row][real])
        assert batch.attention_mask[place].tolist() == [1] * length + [0] * (batch.input_ids.shape[1] - length)
        expected = source["loss_mask"][row][real].nonzero().flatten() - 1
        assert torch.equal(batch.columns[batch.rows == place], expected)


def test_padding_of_the_batch_does_not_matter(tiny):
    """Bit-equal inputs whatever the padding, on either side."""
    plain, padded = make(tiny), make(tiny, **tiny.batch(left=5, right=3))
    for one, other in zip(plain.batches, padded.batches, strict=True):
        for name in ("input_ids", "attention_mask", "rows", "columns"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_long_selections_are_split(tiny, monkeypatch):
    """Catches an unbounded forward, and tokens lost or doubled at the borders."""
    monkeypatch.setattr(probe_module, "FORWARD_TOKENS", 30)
    probe = make(tiny)
    assert len(probe.batches) > 1
    assert all(batch.input_ids.numel() <= 30 for batch in probe.batches)
    assert sum(batch.columns.numel() for batch in probe.batches) == 33
    assert sum(batch.input_ids.shape[0] for batch in probe.batches) == 4


def test_a_response_longer_than_a_forward_still_runs(tiny, monkeypatch):
    monkeypatch.setattr(probe_module, "FORWARD_TOKENS", 1)
    assert [batch.input_ids.shape[0] for batch in make(tiny).batches] == [1, 1, 1, 1]


def test_two_responses_of_full_length_run_one_after_the_other():
    """Catches a bound that lets the probe's activations grow beyond those of a response of 2,048 tokens."""
    ids = torch.ones(3, 2048, dtype=torch.int64)
    generated = torch.ones_like(ids)
    generated[:, 0] = 0
    probe = TrustRegion(min_responses=3).make_probe(
        input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=generated, temperature=1.0
    )
    assert [batch.input_ids.shape for batch in probe.batches] == 3 * [(1, 2048)]


def test_draws_are_a_function_of_the_seed(tiny):
    """Catches use of the global generator: it must neither matter nor move."""
    region = TrustRegion(min_responses=1, min_tokens=1, seed=5)
    state = torch.get_rng_state()
    first = region.make_probe(**tiny.batch(), temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(region.make_probe(**tiny.batch(), temperature=1.0).selected, first.selected)
    drawn = {make(tiny, region={"min_responses": 1, "min_tokens": 1}, seed=s).selected.item() for s in range(20)}
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), None, "1"])
def test_refuses_temperature(tiny, temperature):
    with pytest.raises(ProbeError, match="temperature"):
        make(tiny, temperature=temperature)


def test_refuses_no_generated_tokens(tiny):
    with pytest.raises(ProbeError, match="at least one generated token"):
        make(tiny, loss_mask=torch.zeros(4, 18, dtype=torch.int64))
    with pytest.raises(ProbeError, match="at least one generated token"):
        make(tiny, **{name: tensor[:0] for name, tensor in tiny.batch().items()})


@pytest.mark.parametrize("name", ["attention_mask", "loss_mask"])
def test_refuses_shapes_that_differ(tiny, name):
    """The usual slip: a completion mask [batch, completion] beside ids of prompt and completion."""
    with pytest.raises(ProbeError, match=rf"{name} has shape \(4, 12\)"):
        make(tiny, **{name: tiny.batch()[name][:, 6:]})


@pytest.mark.parametrize("name", ["attention_mask", "loss_mask"])
def test_refuses_mask_values(tiny, name):
    with pytest.raises(ProbeError, match=f"{name} has values other than"):
        make(tiny, **{name: tiny.batch()[name] * 2})


def test_refuses_ids_that_are_not_integers_or_not_a_matrix(tiny):
    with pytest.raises(ProbeError, match="input_ids"):
        make(tiny, input_ids=tiny.batch()["input_ids"].float())
    with pytest.raises(ProbeError, match="input_ids"):
        make(tiny, **{name: tensor[0] for name, tensor in tiny.batch().items()})


def test_refuses_masked_out_tokens(tiny):
    loss_mask = tiny.batch(right=1)["loss_mask"]
    loss_mask[1, -1] = 1
    with pytest.raises(ProbeError, match="row 1, column 18, where attention_mask is 0"):
        make(tiny, **{**tiny.batch(right=1), "loss_mask": loss_mask})


def test_refuses_tokens_without_a_predecessor(tiny):
    """Row 0 of the batch starts at column 3: its first token has nothing before it but padding."""
    loss_mask = tiny.batch()["loss_mask"]
    loss_mask[0, 3] = 1
    with pytest.raises(ProbeError, match="row 0, column 3, which has no attended token before it"):
        make(tiny, loss_mask=loss_mask)
    loss_mask = tiny.batch()["loss_mask"]
    loss_mask[1, 0] = 1
    with pytest.raises(ProbeError, match="row 1, column 0, which has no attended token before it"):
        make(tiny, loss_mask=loss_mask)


def test_accepts_boolean_masks(tiny):
    batch = tiny.batch()
    probe = make(tiny, attention_mask=batch["attention_mask"].bool(), loss_mask=batch["loss_mask"].bool())
    assert probe.num_tokens == 33
