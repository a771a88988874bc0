"""A whole run on a tiny model: files, results, equal conditions for all methods."""

import importlib.util
import io
import json
import math
import socket

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import logra
from logra.diagnostics import DiagnosticsConfig
from logra.errors import ConfigError, DataError, TargetError
from logra.rl.baselines import LoraConfig
from logra.rl.config import METHODS, LossConfig, RolloutConfig, RunConfig, TrainConfig, preset
from logra.rl.guards.config import GuardsConfig, Rule, Sentinels
from logra.rl.run import train
from logra.rl.run_folder import RunFolder

INSTALLED = [name for name in METHODS if importlib.util.find_spec("galore_torch") or name not in ("galore", "apollo")]
"""Methods whose packages are here: `make baselines` brings the rest."""

TASK = """
def dataset():
    return [{"prompt": f"{i} +", "answer": "a"} for i in range(20)]

def reward(completions, answer, **kwargs):
    return [sum(c.isalpha() for c in text) / 8 for text in completions]
"""


@pytest.fixture
def run(tmp_path, model_folder):
    (tmp_path / "task.py").write_text(TASK)

    def run(name="run", console=None, **overrides):
        output = io.StringIO()
        settings = {
            "output_dir": str(tmp_path / name),
            "model": str(model_folder),
            "task": str(tmp_path / "task.py"),
            "rollout": RolloutConfig(num_prompts=2, num_samples=4, max_new_tokens=5),
            "loss": LossConfig(micro_batch_size=4),
            "run": RunConfig(num_steps=3, device="cpu"),
        } | overrides
        outcome = train(TrainConfig(**settings), console or Console(file=output, width=200))
        return outcome, output.getvalue()

    return run


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_of_updates_rebuilds_every_step(run, tmp_path, model_folder):
    """Fails if a step is not published, or published before it is merged."""
    outcome, _ = run(run=RunConfig(num_steps=3, device="cpu", anchor_every=2))
    log = logra.sync.DirectoryLog(outcome.folder / "updates")
    metrics = records(outcome.folder / "metrics.jsonl")
    assert [entry["sync/version"] for entry in metrics] == [1, 2, 3]
    assert all(entry["sync/seconds"] > 0 for entry in metrics)
    assert [entry["sync/bytes"] for entry in metrics] == [len(log.read_packet(version)) for version in (1, 2, 3)]
    replica_model = AutoModelForCausalLM.from_pretrained(model_folder)
    replica = logra.sync.Replica(replica_model, version=0)
    replica.catch_up(log)
    trained = AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    assert replica.version == 3
    assert all(torch.equal(a, b) for a, b in zip(replica_model.parameters(), trained.parameters(), strict=True))
    assert log.latest_anchor(3) == 2


def test_events_of_guards_are_written_shown_and_counted(run):
    always = Sentinels(entropy_floor=Rule(threshold=100.0, action="warn"))
    outcome, shown = run(guards=GuardsConfig(sentinels=always))
    events = [event for event in records(outcome.folder / "events.jsonl") if event["kind"] == "entropy_floor"]
    assert [event["step"] for event in events] == [1, 2, 3]
    assert events[0].keys() == {"step", "kind", "value", "threshold", "action", "detail"}
    assert (events[0]["threshold"], events[0]["action"]) == (100.0, "warn")
    assert [entry["guards/entropy_floor_events"] for entry in records(outcome.folder / "metrics.jsonl")] == [1, 2, 3]
    assert shown.count("Guard, step 1: entropy_floor") == 1
    assert "Guard, step 2: entropy_floor" not in shown  # it is shown again after 50 steps
    assert outcome.results["guards"]["events"]["entropy_floor"] == 3
    assert (outcome.results["guards"]["rollbacks"], outcome.results["guards"]["stopped_by_guard"]) == (0, False)


def test_files_and_results(run):
    outcome, shown = run()
    folder = outcome.folder
    assert {item.name for item in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "events.jsonl",
        "updates",
        "checkpoints",
        "model",
        "memory.json",
        "results.json",
    }
    metrics = records(folder / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == [1, 2, 3]
    for name in ("reward/mean", "trust/realised_kl", "optim/grad_norm", "sync/bytes", "time/probe_s", "loss"):
        assert all(name in entry for entry in metrics)
    assert not {"reward", "entropy", "epoch"} & metrics[0].keys()
    samples = records(folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert samples[0].keys() == {"step", "policy_version", "prompt", "completion", "reward"}
    # Catches the version after the step in the place of the version that sampled.
    assert [sample["policy_version"] for sample in samples[::4]] == [0, 1, 2]
    results = json.loads((folder / "results.json").read_text())
    assert results == json.loads(json.dumps(outcome.results))
    rewards = [entry["reward/mean"] for entry in metrics]
    assert results["mean_reward_first_3_steps"] == pytest.approx(sum(rewards) / 3)
    assert results["heldout"]["num_problems"] == 4
    assert results["heldout"]["decoding"] == "greedy"
    assert results["num_steps"] == 3
    assert results["seconds_per_step"] == pytest.approx(results["train_s"] / 3)
    assert results["peak_memory_bytes"] > 2**26
    assert not outcome.interrupted
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["num_prompts"] == 2
    # Nothing but the run itself is shown: no printed dictionaries, no progress bars of the libraries.
    lines = shown.splitlines()
    assert lines[0].startswith("Loading ")
    assert lines[1].startswith("Method logra: 15,360 parameters sketched, 0 trained densely, 2,496 frozen")
    assert lines[2].endswith("16 problems to train on, 4 others held out")
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/3", "2/3", "3/3"]
    assert "unseen problems, greedy" in lines[-2]
    assert lines[-1] == f"Results and model lie in {folder}"
    assert "No step had a signal" not in shown
    assert len([line for line in lines if not line.startswith("Guard, ")]) == 9


@pytest.mark.parametrize("method", INSTALLED)
def test_every_method_saves_the_policy_it_trained(run, method, tokenizer):
    settings = {"trust": preset("logra")["trust"]} if method == "paper" else {}
    if method == "lora":
        settings["lora"] = LoraConfig(rank=4, lr=0.05)
    outcome, shown = run(method=method, num_heldout=0, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    start = AutoModelForCausalLM.from_pretrained(outcome.folder.parent / "tiny-model")
    # Catches adapters that are saved instead of merged, and a model that is saved as it was before training.
    assert loaded.state_dict().keys() == start.state_dict().keys()
    assert not torch.equal(
        loaded.model.layers[0].self_attn.q_proj.weight, start.model.layers[0].self_attn.q_proj.weight
    )
    assert AutoTokenizer.from_pretrained(outcome.folder / "model").pad_token == tokenizer.pad_token
    assert outcome.results["heldout"]["before"] is None
    assert f"Method {method}: " in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"logra": logra.Config(lr=1e-4, rank=4, weight_storage="split32")},
        {"logra": logra.Config(lr=1e-4, rank=4, weight_storage="split24")},
        {"logra": logra.Config(lr=1e-4, rank=4, non_target="adamw")},
        {"use_trust": False},
        {"run": RunConfig(num_steps=3, device="cpu", precision="bf16")},
        {"run": RunConfig(num_steps=3, device="cpu", lr_schedule="cosine")},
        {"run": RunConfig(num_steps=3, device="cpu", num_threads=1, num_logged_samples=0)},
        {"loss": LossConfig(beta=0.1, loss_type="grpo", scale_rewards="batch", micro_batch_size=8)},
        *({"loss": LossConfig(loss_type=name, micro_batch_size=4)} for name in ("bnpo", "dr_grpo", "luspo")),
        *({"loss": LossConfig(loss_type=name, micro_batch_size=4)} for name in ("cispo", "sapo", "vespo")),
    ],
    ids=lambda settings: str(next(iter(settings))),
)
def test_options_train(run, settings):
    # Catches an option that is accepted and then breaks, or stops, the steps.
    outcome, _ = run(num_heldout=0, **settings)
    steps = records(outcome.folder / "metrics.jsonl")
    assert steps[-1]["sync/version"] == 3
    assert all(math.isfinite(step["reward/mean"]) for step in steps)


def test_all_methods_start_from_the_same_rollout(run):
    firsts = []
    for method in INSTALLED:
        outcome, _ = run(method, method=method, num_heldout=0)
        samples = [sample for sample in records(outcome.folder / "samples.jsonl") if sample["step"] == 1]
        for sample in samples:
            sample.pop("policy_version", None)  # baselines have none
        firsts.append(samples)
        metrics = records(outcome.folder / "metrics.jsonl")[0]
        assert {"reward/mean", "policy/entropy", "time/rollout_s", "memory/peak_bytes", "optim/grad_norm"} <= (
            metrics.keys()
        )
    # Catches a method whose setup consumes random numbers before the first rollout.
    assert all(first == firsts[0] for first in firsts)


def test_prompts_come_in_the_same_order_for_all_methods(run):
    orders = []
    for method in ("logra", "adamw"):
        outcome, _ = run(method, method=method, num_heldout=0)
        orders.append([sample["prompt"] for sample in records(outcome.folder / "samples.jsonl")])
    assert orders[0] == orders[1]


def test_runs_are_reproducible(run):
    first, again, other = (
        run(name, num_heldout=0, run=RunConfig(num_steps=2, seed=seed, device="cpu"))[0]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )

    def samples(outcome):
        return (outcome.folder / "samples.jsonl").read_text()

    assert samples(first) == samples(again) != samples(other)
    models = [AutoModelForCausalLM.from_pretrained(o.folder / "model").state_dict() for o in (first, again)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_broken_reward_ends_the_run_with_what_was_written(run, tmp_path):
    (tmp_path / "task.py").write_text(TASK.replace("sum(", "float('inf') * sum("))
    with pytest.raises(DataError, match=r"'reward'.*must be finite"):
        run(num_heldout=0)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["interrupted"], results["num_steps"]) == (True, 0)


def test_bad_rewards_of_heldout_completions_do_not_end_a_run_that_drops_them(run, tmp_path):
    """Fails if guards.on_bad_reward=drop does not hold for the scores before, between and after the steps."""
    (tmp_path / "task.py").write_text(
        TASK.replace("for text in completions]", "for text in completions[1:]] + [float('nan')]")
    )
    guards = GuardsConfig(on_bad_reward="drop", validate_every=2)
    outcome, shown = run(guards=guards, run=RunConfig(num_steps=2, device="cpu"))
    assert "rewards of held-out completions that are NaN or infinite: 1, left out of the score" in shown
    heldout = outcome.results["heldout"]
    assert heldout["before"] is not None and heldout["after"] is not None
    assert heldout["num_left_out"] == 3
    assert "heldout/score" in records(outcome.folder / "metrics.jsonl")[1]


def test_rewards_that_never_differ_are_told_with_what_to_do(run, tmp_path):
    (tmp_path / "task.py").write_text(TASK.replace("sum(c.isalpha() for c in text) / 8", "0.5"))
    outcome, shown = run(num_heldout=0)
    assert outcome.results["num_steps"] == 3
    assert "No step had a signal" in shown and "--rollout.num-samples" in shown
    assert "no step has had a signal yet" not in shown  # it ended as soon


def test_a_long_run_without_a_signal_is_told_early(run, tmp_path):
    (tmp_path / "same.py").write_text(TASK.replace("sum(c.isalpha() for c in text) / 8", "1.0"))
    settings = RunConfig(num_steps=4, device="cpu")
    _, shown = run(task=str(tmp_path / "same.py"), run=settings, num_heldout=0)
    assert shown.count("no step has had a signal yet") == 1
    assert shown.index("step 3/4") < shown.index("no step has had a signal yet") < shown.index("step 4/4")


def test_a_reward_that_fails_later_leaves_the_way_to_the_last_step(run, tmp_path):
    output = io.StringIO()
    (tmp_path / "task.py").write_text(
        AFTERWARDS.format(action="raise KeyError('x')").replace("== 5", "== 3") + TASK_AFTERWARDS
    )
    with pytest.raises(DataError, match="reward function 'reward' raised KeyError: 'x'"):
        run(num_heldout=0, console=Console(file=output, width=300))
    assert f"logra replay --run {tmp_path / 'run'} --step 2 --output OUT" in output.getvalue()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["interrupted"], results["num_steps"]) == (True, 2)


@pytest.mark.parametrize("damage", ["missing", "shape", "corrupt"])
def test_a_damaged_checkpoint_is_refused(run, model_folder, damage):
    """Fails if weights that the file does not give are trained from the random values they start with."""
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        tensors = {key: value for key, value in tensors.items() if key != name}
    if damage == "shape":
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, path, metadata={"format": "pt"})
    if damage == "corrupt":
        path.write_bytes(path.read_bytes()[:-100])
    message = {
        "missing": f"lacks {name}",
        "shape": f"shapes of {name} .3, 3. instead of",
        "corrupt": "cannot be loaded",
    }
    with pytest.raises(ConfigError, match=message[damage]):
        run(num_heldout=0)


def test_problems_are_found_before_the_model_loads(run, tmp_path, monkeypatch):
    from logra.rl import methods

    def never(config, task):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(methods, "load_model", never)
    run_folder = tmp_path / "taken"
    run_folder.mkdir()
    (run_folder / "file").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        run("taken")
    with pytest.raises(DataError, match="Did you mean chain_sum"):
        run(task="chainsum")
    with pytest.raises(DataError, match="one step takes 18"):
        run(rollout=RolloutConfig(num_prompts=18, num_samples=4))
    with pytest.raises(ConfigError, match=r"run.report_to='wandbb': not a tracker"):
        run(run=RunConfig(device="cpu", report_to=("wandbb",)))
    (tmp_path / "task.py").write_text(TASK.replace('"answer": "a"', '"answer": i if i else "a"'))
    with pytest.raises(DataError, match="each column of one type"):
        run()
    # What cannot be used leaves no folder behind.
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_is_fetched_for_a_local_model(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for method in ("logra", "lora"):
        run(method, method=method)


@pytest.mark.parametrize("location", ["./nowhere", "/nowhere/at/all", "a/b/c", "nowhere"])
def test_a_model_that_does_not_exist(run, location):
    with pytest.raises(ConfigError, match="nor an existing folder"):
        run(model=location)


def test_a_folder_without_a_model(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        run(model=str(tmp_path / "empty"))


def test_one_interrupt_ends_the_run_after_the_step(run, tmp_path):
    # The task sends the signal in the middle of the second step's rollout.
    (tmp_path / "task.py").write_text(
        INTERRUPT.format(count=1) + TASK.replace("    return [sum", "    tick()\n    return [sum")
    )
    outcome, shown = run(num_heldout=0)
    assert outcome.interrupted
    assert [entry["step"] for entry in records(outcome.folder / "metrics.jsonl")] == [1, 2]
    assert "stopping after this step" in shown
    assert json.loads((outcome.folder / "results.json").read_text())["interrupted"]
    AutoModelForCausalLM.from_pretrained(outcome.folder / "model")


def test_two_interrupts_end_it_at_once_with_what_was_saved(run, tmp_path):
    (tmp_path / "task.py").write_text(
        INTERRUPT.format(count=2) + TASK.replace("    return [sum", "    tick()\n    return [sum")
    )
    outcome, shown = run(num_heldout=0)
    assert outcome.interrupted
    assert [entry["step"] for entry in records(outcome.folder / "metrics.jsonl")] == [1]
    # A step was running: its weights may be half updated, so none are saved.
    assert not (outcome.folder / "model").exists()
    assert "no model was saved" in shown.splitlines()[-2]
    assert f"logra replay --run {outcome.folder} --step 1 --output OUT" in shown.splitlines()[-1]


def fill(path):
    """A folder with a finished run."""
    folder = RunFolder(path)
    folder.create()
    folder.write_config(TrainConfig(output_dir=str(path)))
    folder.write_results({"a": 1})
    for part in (folder.model, folder.checkpoints, folder.updates):
        part.mkdir()
        (part / "file").write_text("content")
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_is_replaced_only_when_the_new_one_can_begin(run, tmp_path, monkeypatch):
    """Fails if --overwrite deletes the old results before the new model or trainer is known to work."""
    outcome, _ = run(num_heldout=0)
    old = contents(outcome.folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        run(overwrite=True, num_heldout=0, model=str(tmp_path / "empty"))
    with pytest.raises(TargetError):
        run(overwrite=True, num_heldout=0, logra=logra.Config(lr=1e-4, target_modules=("no_such_module",)))
    with pytest.raises(ConfigError, match=r"model=.*belongs to the run in"):
        run(overwrite=True, num_heldout=0, model=str(outcome.folder / "model"))
    assert contents(outcome.folder) == old
    again, _ = run(overwrite=True, num_heldout=0, run=RunConfig(num_steps=2, device="cpu"))
    assert [entry["step"] for entry in records(again.folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("num_heldout", [4, 0])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned NoneType"),
        ("[float('nan')] * len(completions)", "must be finite"),
        ("'abc'", "returned str"),
        ("[]", "returned 0 rewards"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_does_not_cost_the_run_that_lies_there(run, tmp_path, returned, message, num_heldout):
    """Fails if --overwrite removes the old run before the reward of the new one was called."""
    folder = fill(tmp_path / "run").path
    old = contents(folder)
    (tmp_path / "task.py").write_text(
        TASK.replace("[sum(c.isalpha() for c in text) / 8 for text in completions]", returned)
    )
    with pytest.raises(DataError, match=f"'reward'.*{message}"):
        run(overwrite=True, num_heldout=num_heldout)
    assert contents(folder) == old


def test_a_reward_that_fails_at_once_leaves_no_folder(run, tmp_path):
    # Else the corrected command is refused: the folder holds another run.
    (tmp_path / "task.py").write_text(TASK.replace("sum(", "float('nan') * sum("))
    with pytest.raises(DataError, match="must be finite"):
        run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [method for method in INSTALLED if method != "paper"])
def test_a_profile_gives_every_byte_a_category(run, method):
    """Fails if a tensor of TRL's step has no known origin, or a phase of the step is not marked."""
    outcome, output = run(method=method, profile=True, run=RunConfig(num_steps=1, device="cpu"))
    memory = json.loads((outcome.folder / "memory.json").read_text())
    assert memory["method"] == method and memory["profiled"]
    assert memory["peak_bytes"] == sum(memory["at_peak"].values())
    assert memory["at_peak"]["other"] < 0.03 * memory["peak_bytes"]
    expected = {"rollout", "forward", "backward", "update"}
    assert set(memory["phases"]) == expected | ({"recover", "probe", "sync"} if method == "logra" else set())
    assert memory["phases"]["rollout"]["at_peak"]["rollout"] > 0
    assert "Peak of each phase" in output and "arrays alone" in output


def test_every_run_says_what_it_holds_between_steps(run):
    outcome, output = run(run=RunConfig(num_steps=1, device="cpu"))
    memory = json.loads((outcome.folder / "memory.json").read_text())
    assert memory["resident"]["weights"] == 4 * 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48)
    assert memory["resident"]["optimizer_state"] > 0 and memory["process_peak_bytes"] > 2**20
    assert "Peak of each phase" not in output


def test_the_trained_model_survives_a_failing_evaluation(run, tmp_path):
    # The reward fails on the held-out rows when it sees them for the second time, which is after the training.
    (tmp_path / "task.py").write_text(AFTERWARDS.format(action="raise RuntimeError('broken')") + TASK_AFTERWARDS)
    with pytest.raises(DataError, match="'reward' raised RuntimeError: broken"):
        run()
    folder = tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(folder / "model")
    results = json.loads((folder / "results.json").read_text())
    assert results["num_steps"] == 3 and results["heldout"]["before"] is not None
    assert results["heldout"]["after"] is None


def test_an_interrupt_during_the_evaluation_says_what_is_on_disk(run, tmp_path):
    (tmp_path / "task.py").write_text(AFTERWARDS.format(action="raise KeyboardInterrupt") + TASK_AFTERWARDS)
    with pytest.raises(KeyboardInterrupt, match="the trained model is in model"):
        run()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


def test_chat_prompts_need_a_chat_template(run, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    (model_folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model_folder)
    with pytest.raises(ConfigError, match="no chat template, but the prompts of task='chain_sum' are chats"):
        run(task="chain_sum")


AFTERWARDS = """
calls = 0

def tick():
    global calls
    calls += 1
    if calls == 5:  # one evaluation, three steps, one evaluation
        {action}
"""

TASK_AFTERWARDS = TASK.replace("    return [sum", "    tick()\n    return [sum")

INTERRUPT = """
import os, signal

calls = 0

def tick():
    global calls
    calls += 1
    if calls == 2:
        for _ in range({count}):
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_diagnostics_of_a_run(run, tmp_path):
    """The command line's group reaches the probes, and their numbers the file."""
    (tmp_path / "texts.txt").write_text("some text\n---\nmore text\n")
    settings = DiagnosticsConfig(
        direction_every=2, direction_layers=3, collateral_every=3, collateral_file=str(tmp_path / "texts.txt")
    )
    outcome, _ = run(diagnostics=settings)
    steps = records(outcome.folder / "metrics.jsonl")
    assert ["direction/gradient_cosine" in step for step in steps] == [True, False, True]
    assert ["direction/collateral" in step for step in steps] == [True, False, False]
    assert sum(name.startswith("direction/rank_99/") for name in steps[0]) == 3


def test_unrelated_texts_that_cannot_be_used_are_refused_before_the_model_loads(run, tmp_path):
    (tmp_path / "empty.txt").write_text("\n---\n")
    for name, message in (("empty.txt", "holds no text"), ("missing.txt", "cannot be read")):
        settings = DiagnosticsConfig(collateral_every=1, collateral_file=str(tmp_path / name))
        with pytest.raises(DataError, match=f"{name}' {message}"):
            run(model=str(tmp_path), diagnostics=settings)  # there is no model in that folder


def test_probed_layers_that_are_no_targets_are_refused_before_training(run, tmp_path):
    settings = DiagnosticsConfig(direction_every=1, direction_layers=("model.layers.0.mlp.gate",))
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.gate', which is not a target"):
        run(diagnostics=settings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
