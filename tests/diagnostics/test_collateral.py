"""`CollateralProbe`: the KL on unrelated text per unit of KL on the task."""

import pytest
import torch

import logra
from logra.diagnostics import CollateralProbe, unrelated_texts
from logra.errors import ConfigError, DataError
from logra.trust.measure import predicted_kl

TEXTS = ["abcdefg", "the cat", "x"]


def tokenize(text):
    return [ord(character) % 23 for character in text]


class Recorder:
    """An observer that prices the update by itself, on probes built with the trust region's own function."""

    def attached(self, targets):
        pass

    def detached(self):
        pass

    def begin_window(self, step):
        pass

    def observe(self, view):
        deltas = view.update()
        region = logra.TrustRegion(min_responses=100)
        rows = [tokenize(text) for text in TEXTS[:2]]
        ids = torch.tensor(rows)
        predicted = torch.ones_like(ids)
        predicted[:, 0] = 0
        unrelated = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": predicted}
        task = {name: value for name, value in self.batch.items() if name != "advantages"}
        self.kls = [
            predicted_kl(view.model, region.make_probe(**tensors, temperature=0.8), deltas)
            for tensors in (unrelated, task)
        ]
        return {}


def test_collateral_is_the_quotient_of_predicted_kls(tiny_lm, rl):
    probe = CollateralProbe(TEXTS, tokenize, every=2)
    recorder = Recorder()
    opt = rl.optimizer(tiny_lm)
    probe.attach(opt)
    opt.add_observer(recorder)
    recorder.batch = batch = rl.batch()
    for step in range(3):
        rl.loss(tiny_lm, batch).backward()
        probe.set_batch(**batch, temperature=0.8)
        opt.step()
        numbers = {name: value for name, value in opt.diagnostics().items() if name.startswith("direction/")}
        if step == 1:
            assert numbers == {}
            continue
        unrelated, task = recorder.kls
        assert numbers["direction/unrelated_kl"] == pytest.approx(unrelated, rel=1e-6)
        assert numbers["direction/task_kl"] == pytest.approx(task, rel=1e-6)
        assert numbers["direction/collateral"] == pytest.approx(unrelated / task, rel=1e-6)


def test_nothing_is_measured_without_a_batch_or_without_a_step(tiny_lm, rl):
    probe = CollateralProbe(TEXTS, tokenize, every=1)
    opt = rl.optimizer(tiny_lm)
    probe.attach(opt)
    rl.loss(tiny_lm, rl.batch()).backward()
    opt.step()
    assert "direction/collateral" not in opt.diagnostics()
    opt.param_groups[0]["lr"] = 0.0  # a warm-up's first step moves nothing
    rl.loss(tiny_lm, rl.batch()).backward()
    probe.set_batch(**rl.batch())
    opt.step()
    assert "direction/collateral" not in opt.diagnostics()


def test_long_texts_are_cut_and_tokenizers_may_return_mappings():
    probe = CollateralProbe(["a" * 1000], lambda text: {"input_ids": tokenize(text)}, every=1)
    assert probe.unrelated(1.0, torch.device("cpu")).num_tokens == 255


def test_the_texts_of_the_package():
    """English and Python, each short: a measurement is to cost little beside a step."""
    texts = unrelated_texts()
    assert len(texts) == 10
    assert sum("def " in text or "import " in text for text in texts) == 4
    assert all(40 < len(text) < 400 and "---" not in text for text in texts)


def test_texts_of_a_file(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("one\n\ntwo lines\n---\n  \n---\ndef f():\n    return 1\n")
    assert unrelated_texts(file) == ["one\n\ntwo lines", "def f():\n    return 1"]


@pytest.mark.parametrize("content", ["", "\n  \n", "---\n---\n"])
def test_a_file_without_text_is_refused(tmp_path, content):
    file = tmp_path / "texts.txt"
    file.write_text(content)
    with pytest.raises(DataError, match=r"texts.txt' holds no text"):
        unrelated_texts(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        unrelated_texts(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        unrelated_texts("~nobody-here/texts.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        unrelated_texts(tmp_path / "binary")


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="CollateralProbe: every=0"):
        CollateralProbe(TEXTS, tokenize, every=0)
    with pytest.raises(DataError, match="none of the 1 texts has two tokens"):
        CollateralProbe(["x"], tokenize)
