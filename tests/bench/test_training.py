"""Whole runs as cells: what their tables say, and the warm start."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from logra.bench import harder_tasks, learning, trust_cost, variants
from logra.bench.harness import Results
from logra.bench.harness.results import Record
from logra.bench.lab import training, warm_start
from logra.bench.lab.warm_start import supervised_batch
from logra.cli.train import parse
from logra.errors import ConfigError

ALPHABET = ["<end>", *"0123456789+=", *"abcdefghijklmnopqrstuvwxyz ", "<unk>"]


def tokenizer():
    plain = Tokenizer(WordLevel({character: index for index, character in enumerate(ALPHABET)}, unk_token="<unk>"))
    plain.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>", unk_token="<unk>")


def cell(rewards, heldout, **more):
    results = {
        "mean_reward_last_3_steps": sum(rewards[-3:]) / 3,
        "heldout": {"before": 0.25, "after": heldout},
        "peak_memory_bytes": 2**30,
    }
    curves = {"reward/mean": rewards, "time/update_s": [3.0, 5.0], "time/rollout_s": [1.0, 1.0]}
    return {"train": "logra train", "results": results, "curves": curves} | more


def test_supervised_rows_end_with_their_answers_and_nothing_else_counts():
    batch = supervised_batch(tokenizer(), [{"prompt": "1+2=", "answer": "3"}, {"prompt": "47+5=", "answer": "52"}])
    assert batch["input_ids"].tolist()[0] == [2, 11, 3, 12, 4, 0, 0, 0]  # 1 + 2 = 3 <end>, padding
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    assert batch["labels"].tolist() == [[-100] * 4 + [4, 0, -100, -100], [-100] * 5 + [6, 3, 0]]


def test_means_are_over_seeds():
    runs = {"a": [cell([0.0] * 3 + [0.5] * 3, 0.5), cell([0.0] * 3 + [1.0] * 3, 0.75)]}
    learned = "0.38 (0.25-0.50) | 0.75 (0.50-1.00) | 0.62 (0.50-0.75) (0.25)"
    row = f"| a | 2 | {learned} | - | 1.00 (1.00-1.00) | 269 MB | 4.00 (4.00-4.00) |"
    assert row in training.summary(runs)
    assert training.curves(runs).endswith("| reward in steps | 1-3 | 4-6 |\n|---|---|---|\n| a | 0.00 | 0.75 |")


def test_seconds_are_those_of_all_updates_over_all_rollouts():
    curves = {"time/update_s": [1.0, 9.0], "time/rollout_s": [2.0, 3.0]}
    assert training.seconds_per_rollout_second({"curves": curves}) == 2.0


def test_the_disturbance_is_shown_where_all_seeds_measured_it():
    both = [cell([0.5] * 3, 0.5, unrelated_kl=0.25), cell([0.5] * 3, 0.5, unrelated_kl=0.75)]
    assert "| 0.500 (0.250-0.750) |" in training.summary({"a": both})
    assert "| - |" in training.summary({"a": [both[0], cell([0.5] * 3, 0.5)]})


def test_a_peak_that_is_not_known_is_left_out():
    first, second = (cell([0.5] * 3, 0.5) for _ in range(2))
    first["results"]["peak_memory_bytes"] = None
    assert "| - | 269 MB |" in training.summary({"a": [first, second]})
    assert "| 1.00 | 269 MB |" in training.summary({"a": [second]})


def test_what_is_sent_is_packets_adapters_or_all_weights():
    """SmolLM2-135M, from its configuration: bf16 takes 2 bytes; adapters of rank r have r (in + out) numbers a layer."""
    hidden, kv, mlp, layers, vocabulary = 576, 192, 1536, 30, 49152
    shapes = 2 * [(hidden, hidden)] + 2 * [(hidden, kv)] + 3 * [(hidden, mlp)]
    weights = layers * (sum(m * n for m, n in shapes) + 2 * hidden) + vocabulary * hidden + hidden
    widths = layers * sum(m + n for m, n in shapes)
    assert training.sent_bytes(cell([0.0] * 3, 0.5)) == 2 * weights
    assert training.sent_bytes(cell([0.0] * 3, 0.5, train="logra train --method lora --run.seed 0")) == 2 * 16 * widths
    assert training.sent_bytes(cell([0.0] * 3, 0.5, train="logra train --method lora --lora.rank 4")) == 2 * 4 * widths
    curves = {"reward/mean": [0.0] * 3, "sync/bytes": [1e6, 3e6, 0.0]}
    assert training.sent_bytes(cell([0.0] * 3, 0.5) | {"curves": curves}) == 2e6  # the last step sent nothing


def test_kl_ratios_are_of_steps_that_were_taken():
    """Planned KL: alpha² times the prediction, 0.25 · 0.08 = 0.02; the second step was skipped."""
    curves = {
        "reward/mean": [0.0, 0.0],
        "trust/realised_kl": [0.01, None],
        "trust/alpha": [0.5, None],
        "trust/predicted_kl": [0.08, None],
    }
    text = training.kl_ratios({"a": [cell([0.0] * 3, 0.5) | {"curves": curves}] * 2})
    assert "| a | 2 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 |" in text


def test_disturbance_is_the_kl_between_two_saved_models(tmp_path):
    """Against a softmax of both models' logits in fp64, from the same folders. Catches a swap of the two."""
    config = LlamaConfig(vocab_size=len(ALPHABET), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    models = []
    for index, name in enumerate(("before", "after")):
        torch.manual_seed(index)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(20.0)
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        models.append(model.eval())
    from logra.bench.lab.smollm2 import unrelated_text

    (batch,) = unrelated_text(tokenizer()).batches
    expected = []
    with torch.no_grad():
        old, new = (
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.double() for model in models
        )
    for row, mask in enumerate(batch.attention_mask):
        first = int(mask.argmax())  # rows are padded on the left
        for position in range(first, mask.shape[0] - 1):
            p, q = old[row, position].softmax(-1), new[row, position].softmax(-1)
            expected.append((p * (p / q).log()).sum().item())
    found = training.unrelated_kl(tmp_path / "before", tmp_path / "after")
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [(variants, {"arms": ("sgd",)}), (harder_tasks, {"arms": ("sgd",)}), (harder_tasks, {"tasks": ("poetry",)}),
     (trust_cost, {"cases": ("nope",)})],
)  # fmt: skip
def test_unknown_names_are_refused(benchmark, options):
    with pytest.raises(ConfigError, match=r"sgd|poetry|nope"):
        benchmark.Options(**options)


def test_the_cost_of_the_trust_region_needs_a_step_after_the_first():
    with pytest.raises(ConfigError, match="num_steps=1: at least 2"):
        trust_cost.Options(num_steps=1)


@pytest.mark.parametrize("arm", [*learning.ARMS, *variants.ARMS])
def test_every_arm_is_a_run_that_logra_train_would_take(arm):
    _, flags = (learning.ARMS | variants.ARMS)[arm]
    assert parse(["--output-dir", "x", *flags, *harder_tasks.task_flags("two_digits")]).prices_steps == (
        arm.startswith(("logra", "paper")) or arm.endswith("-kl")
    )


def test_steps_of_equal_kl_have_one_budget_for_all_methods():
    arms = {name: flags for name, (_, flags) in variants.ARMS.items() if name.endswith("-kl")}
    configs = [parse(["--output-dir", "x", *flags]) for flags in arms.values()]
    assert {config.method for config in configs} == {"logra", "adamw", "lora", "galore", "apollo"}
    for step in (0, 4, 8, 20):
        assert len({config.trust.budget_at(step) for config in configs}) == 1
    assert not any(config.logra.coherence_scaling for config in configs if config.method == "logra")


def test_tasks_are_shown_one_after_the_other():
    records = [
        Record(
            cell={"task": task, "arm": "logra", "seed": 0}, result=cell([0.5] * 3, 0.5), machine={}, commit=None, dirty=None,
            date=None, command="", jobs=1, wall_s=0.0,
        )
        for task in ("two_digits", "products")
    ]  # fmt: skip
    text = harder_tasks.table(Results("harder_tasks", {}, records))
    assert text.index("**products of one digit**") < text.index("**sums and differences of two digits")
    assert text.count("| `logra`") == 4


@pytest.mark.parametrize("benchmark", [learning, variants, harder_tasks])
def test_cells_that_the_benchmark_does_not_know_are_nothing_to_show(benchmark):
    record = Record(
        cell={"task": "products", "arm": "sgd", "seed": 0}, result=cell([0.5] * 3, 0.5), machine={}, commit=None, dirty=None,
        date=None, command="", jobs=1, wall_s=0.0,
    )  # fmt: skip
    for records in ([], [record]):
        with pytest.raises(ConfigError, match="nothing to show"):
            benchmark.table(Results("x", {}, records))


def test_warm_starts_come_from_the_cache_the_second_time_and_never_half_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_CACHE", str(tmp_path))
    made = []

    def teach(folder, task, task_options, *, seed):
        folder.mkdir()
        made.append((task, task_options, seed))
        if len(made) == 1:
            raise KeyboardInterrupt
        (folder / "seed").write_text(str(seed))

    monkeypatch.setattr(warm_start, "_teach", teach)
    with pytest.raises(KeyboardInterrupt):
        warm_start.warm_start("chain_sum", {"max_digits": 2}, seed=1)
    for options, seed in (({"max_digits": 2}, 1), ({"max_digits": 2}, 1), ({"max_digits": 2}, 2), ({}, 1)):
        folder = warm_start.warm_start("chain_sum", options, seed=seed)
        assert (folder / "seed").read_text() == str(seed)
    tasks = [({"max_digits": 2}, 1), ({"max_digits": 2}, 1), ({"max_digits": 2}, 2), ({}, 1)]
    assert made == [("chain_sum", options, seed) for options, seed in tasks]
    assert len(list(tmp_path.iterdir())) == 3
