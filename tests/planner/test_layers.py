"""Few layers tell of many."""

import pytest
import torch

from logra.errors import ConfigError
from logra.memory.categories import CATEGORIES
from logra.memory.timeline import Event, Moments, Timeline
from logra.planner import layers, step
from logra.planner.layers import Depths, continued, depths, with_layers
from logra.planner.models import load_config
from logra.planner.options import PlanOptions


class Storage:
    """A storage's record."""

    def __init__(self, category):
        self.category = category


WEIGHT, SAVED, LOGITS, FACTOR = 1000, 70, 900, 40


def loops(num_layers, logits=LOGITS, order=lambda names: names):
    """A step as loops over layers: what forward saves stays until backward, recovery grows, an update shrinks."""
    events, sizes = [], {}

    def comes(name, phase, category, size):
        sizes[name] = category, size
        events.append(Event(phase, category, size))

    def goes(name, phase):
        category, size = sizes.pop(name)
        events.append(Event(phase, category, -size))

    for layer in range(num_layers):
        comes("scratch", "forward", "activations", 300)
        comes(("saved", layer), "forward", "activations", SAVED)
        goes("scratch", "forward")
    comes("logits", "forward", "logits", logits)
    comes("grad", "backward", "activations", 10)
    goes("logits", "backward")
    for name in order([("saved", layer) for layer in range(num_layers)]):
        goes(name, "backward")
    goes("grad", "backward")
    comes("norms", "recover", "recovery_scratch", 4 * num_layers)
    for layer in range(num_layers):
        for part in range(3):
            comes((layer, part), "recover", "recovery_scratch", FACTOR)
    goes("norms", "recover")
    for layer in range(num_layers):
        comes("block", "update", "recovery_scratch", 25)
        goes("block", "update")
        for part in range(3):
            goes((layer, part), "update")
    start = dict.fromkeys(CATEGORIES, 0) | {"weights": WEIGHT * num_layers + 5000}
    return Moments(start, events, start)


def told_in_full(moments):
    """The report that the timeline itself makes of these events."""
    timeline = Timeline()
    for category, size in moments.start.items():
        timeline.add(Storage(category), size, "forward")
    timeline.begin()
    for event in moments.events:
        timeline.add(Storage(event.category), event.num_bytes, event.phase)
    timeline.settle(moments.resident)
    return timeline.report()


@pytest.mark.parametrize("num_layers", [5, 9, 40])
@pytest.mark.parametrize("logits", [LOGITS, 50_000])
def test_the_report_is_that_of_all_layers(num_layers, logits):
    # With large logits, and with many layers, the highest moment is not where it is in the two small steps.
    expected = told_in_full(loops(num_layers, logits))
    assert continued(loops(3, logits), loops(4, logits), Depths(3, 4, num_layers)) == expected


def test_storages_that_go_in_another_order_are_the_same_step():
    expected = continued(loops(3), loops(4), Depths(3, 4, 10))
    assert continued(loops(3, order=lambda names: names[::-1]), loops(4), Depths(3, 4, 10)) == expected


def test_steps_that_are_not_alike_are_not_continued():
    other = loops(4)
    events = [event._replace(category="gradients") for event in other.events]
    assert continued(loops(3), Moments(other.start, events, other.resident), Depths(3, 4, 10)) is None
    assert continued(loops(4), loops(3), Depths(3, 4, 10)) is None


def test_which_layers_are_traced():
    config = load_config("qwen2.5-7b")
    found = depths(config)
    assert found is not None
    assert (found.smaller, found.larger, found.whole, found.num_periods) == (3, 4, 28, 25)
    assert with_layers(config, 3).num_hidden_layers == 3
    gemma = load_config("gemma-3-27b")  # five layers with a window, one without
    found = depths(gemma)
    assert found is not None
    assert (found.smaller, found.larger, found.num_periods) == (8, 14, 9)
    assert with_layers(gemma, 8).layer_types == gemma.layer_types[:8]
    assert depths(with_layers(config, 7)) is None  # 3 + 4 of 7 save nothing


def test_layers_of_other_parameters_are_not_continued(monkeypatch):
    config = with_layers(load_config("qwen2.5-1.5b"), 12)
    build = layers.decoder_layers

    def one_wider(model):
        found = build(model)
        found[5].extra = torch.nn.Linear(2, 2, device="meta")
        return found

    monkeypatch.setattr(layers, "decoder_layers", one_wider)
    assert depths(config) is None


def test_a_step_that_cannot_be_continued_says_what_to_do(monkeypatch):
    monkeypatch.setattr(step, "continued", lambda *_: None)
    monkeypatch.setattr(step, "_traced", lambda *_: (None, None))
    with pytest.raises(ConfigError, match="every_layer=True, --every-layer"):
        step.trace(load_config("qwen2.5-7b"), "adamw", PlanOptions())


@pytest.mark.plan
def test_a_real_step_of_many_layers():
    config = with_layers(load_config("qwen2.5-1.5b"), 8)
    few, every = (step.trace(config, "adamw", PlanOptions(every_layer=is_whole)) for is_whole in (False, True))
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=1e-4) and few.peak_phase == every.peak_phase
    for name, peak in every.phases.items():
        assert few.phases[name].at_peak == pytest.approx(peak.at_peak, abs=1e-4 * peak.peak_bytes)
