"""`logra train --resume`: which checkpoint a run continues from, what is refused, and that nothing of it is lost.

That a run which is killed and resumed ends with the bits of one that was not is shown in test_kill.py.
"""

import importlib.util
import io
import json
import os
import shutil
import signal

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import logra
from logra.checkpoint import CheckpointStore, tree
from logra.errors import CheckpointError, ConfigError, LograError
from logra.rl import run_folder
from logra.rl.baselines import ApolloConfig, GaLoreConfig
from logra.rl.checkpoint_config import CheckpointConfig
from logra.rl.config import LossConfig, RolloutConfig, RunConfig, TrainConfig
from logra.rl.projected_state import load_plain_state, plain_state
from logra.rl.resume import find_origin
from logra.rl.run import train
from logra.rl.run_folder import RunFolder
from logra.rl.tasks import Task

OPTIONAL = pytest.mark.skipif(importlib.util.find_spec("galore_torch") is None, reason="needs `make baselines`")

TASK = """
import os, signal

calls = 0

def dataset():
    return [{"prompt": f"{i} +", "answer": "a"} for i in range(4)]

def reward(completions, answer, **kwargs):
    global calls
    calls += 1
    if calls == AT:
        ACTION
    return [sum(map(ord, text)) / 1000 for text in completions]  # hardly ever the same twice
"""


@pytest.fixture
def run(tmp_path, model_folder):
    task = tmp_path / "task.py"

    def run(name="run", *, at=0, action="pass", num_steps=3, **overrides):
        """A run whose reward function does `action` in its call number `at`."""
        task.write_text(TASK.replace("AT", str(at)).replace("ACTION", action))
        output = io.StringIO()
        settings = {
            "output_dir": str(tmp_path / name),
            "model": str(model_folder),
            "task": str(task),
            "num_heldout": 0,
            "rollout": RolloutConfig(num_prompts=2, num_samples=2, max_new_tokens=3),
            "loss": LossConfig(micro_batch_size=4),
            "run": RunConfig(num_steps=num_steps, device="cpu"),
            "checkpoints": CheckpointConfig(every=1, keep=3),
            "use_trust": False,  # it has no state of its own; test_kill.py runs with it
        } | overrides
        return train(TrainConfig(**settings), Console(file=output, width=400)), output.getvalue()

    return run


WHOLE = {}


@pytest.fixture
def whole(run):
    """Metrics and weights of a run of three steps that nothing happened to."""
    if not WHOLE:
        outcome, _ = run("whole")
        WHOLE.update(records=records(outcome.folder), weights=weights(outcome.folder))
    return WHOLE


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(("time/", "memory/", "sync/"))}
        for line in lines
    ]


def weights(folder):
    tensors = load_file(folder / "model" / "model.safetensors")
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def test_a_longer_run_continues_a_finished_one(run, tmp_path):
    """Fails if any state that the next steps depend on is not in the checkpoint; several epochs of data are among it."""
    whole, _ = run("whole", num_steps=5)
    run("parts", num_steps=2)
    outcome, shown = run("parts", num_steps=5, resume="auto")
    assert f"Resuming from {tmp_path / 'parts' / 'checkpoints' / 'step-000000000002'}: 2 of 5 steps are done" in shown
    assert records(outcome.folder) == records(whole.folder)
    assert weights(outcome.folder) == weights(whole.folder)
    assert (outcome.folder / "samples.jsonl").read_bytes() == (whole.folder / "samples.jsonl").read_bytes()
    results = [
        {**each.results, "train_s": 0, "seconds_per_step": 0, "peak_memory_bytes": 0} for each in (outcome, whole)
    ]
    assert results[0] == results[1]
    assert CheckpointStore(outcome.folder / "checkpoints").steps() == [3, 4, 5]
    assert yaml.safe_load((outcome.folder / "config.yaml").read_text())["run"]["num_steps"] == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"logra": logra.Config(lr=1e-3, rank=4, coherence_scaling=True)},
        {"logra": logra.Config(lr=1e-3, rank=4, weight_storage="split32")},
        {"logra": logra.Config(lr=1e-3, rank=4, weight_storage="split24")},
        {"logra": logra.Config(lr=1e-3, rank=4, non_target="adamw")},
        {"logra": logra.Config(lr=1e-3, rank=4, sketch="one_sided", direction="row_adam", refresh_every=2, momentum=0.9,
                               input_scaling=True)},
        {"method": "adamw", "use_trust": True, "trust": logra.TrustRegion(kl_budget=1e-3, min_tokens=8)},
        # New subspaces in the third step: their rank, period and random seed are part of the state.
        pytest.param({"method": "galore", "galore": GaLoreConfig(rank=4, lr=1e-2, update_proj_gap=2)}, marks=OPTIONAL),
        pytest.param({"method": "apollo", "apollo": ApolloConfig(rank=4, lr=1e-2, update_proj_gap=2)}, marks=OPTIONAL),
    ],
    ids=["coherence", "split32", "split24", "non_target", "one_sided", "priced", "galore", "apollo"],
)  # fmt: skip
def test_every_state_of_the_optimizer_comes_back(run, settings):
    whole, _ = run("whole", **settings)
    run("parts", num_steps=2, **settings)
    outcome, _ = run("parts", resume="auto", **settings)
    assert records(outcome.folder) == records(whole.folder)
    assert weights(outcome.folder) == weights(whole.folder)


def test_auto_begins_where_there_is_no_run(run):
    _, shown = run(resume="auto", num_steps=1)
    assert "Resuming" not in shown
    # A run that has all its steps is finished again: its model may not have been written.
    outcome, shown = run(resume="auto", num_steps=1)
    assert "1 of 1 steps are done" in shown and not [line for line in shown.splitlines() if line.startswith("step")]
    AutoModelForCausalLM.from_pretrained(outcome.folder / "model")


def test_the_score_before_training_is_that_of_the_start(run):
    whole, _ = run("whole", num_heldout=1, num_steps=2)
    run("parts", num_heldout=1, num_steps=1)
    outcome, _ = run("parts", num_heldout=1, num_steps=2, resume="auto")
    assert outcome.results["heldout"] == whole.results["heldout"]


def test_a_damaged_checkpoint_is_named_and_passed_over(run, tmp_path):
    outcome, _ = run()
    expected = weights(outcome.folder)
    tensors = outcome.folder / "checkpoints" / "step-000000000003" / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    again, shown = run(resume="auto")
    assert "Warning: checkpoint step-000000000003 is ignored: tensors.safetensors is not what was written" in shown
    assert "2 of 3 steps are done" in shown
    assert weights(again.folder) == expected


def test_a_checkpoint_by_its_path(run, tmp_path):
    outcome, _ = run()
    expected, path = weights(outcome.folder), outcome.folder / "checkpoints" / "step-000000000001"
    again, shown = run(resume=str(path))
    assert "1 of 3 steps are done" in shown and "Later checkpoints were renamed" in shown
    assert weights(again.folder) == expected
    with pytest.raises(ConfigError, match=r"resume=.*is no checkpoint of.*--resume auto"):
        run(resume=str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rollout": RolloutConfig(num_prompts=1, num_samples=4, max_new_tokens=3)},
            r"rollout.num_prompts=1 \(in the run 2",
        ),
        ({"method": "adamw"}, r"method='adamw' \(in the run 'logra'\)"),
        ({"run": RunConfig(num_steps=3, seed=1, device="cpu")}, r"run.seed=1 \(in the run 0\)"),
        ({"overwrite": True}, "either continued or replaced"),
    ],
)
def test_another_run_is_refused_and_left_alone(run, change, message):
    outcome, _ = run(num_steps=1)
    before = {path: path.read_bytes() for path in outcome.folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=message):
        run(**({"num_steps": 3, "resume": "auto"} | change))
    assert {path: path.read_bytes() for path in outcome.folder.rglob("*") if path.is_file()} == before


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("refusal", ["rows", "model", "base", "log"])
def test_a_refused_step_leaves_the_later_checkpoints(run, monkeypatch, tmp_path, model_folder, refusal):
    """Fails if they are set aside, or anything else is written, before the last check."""
    outcome, _ = run()
    before = files(outcome.folder)
    if refusal == "rows":
        monkeypatch.setitem(globals(), "TASK", TASK.replace("range(4)", "range(7)"))
    if refusal == "model":
        shutil.move(model_folder, tmp_path / "elsewhere")
    if refusal == "base":
        path = model_folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"] += 1  # not trained by this method
        save_file(tensors, path, {"format": "pt"})
    if refusal == "log":
        for number in (1, 2, 3):
            (outcome.folder / "updates" / f"{number:012d}.update").unlink()
        before = files(outcome.folder)
    with pytest.raises(LograError):
        run(resume=str(outcome.folder / "checkpoints" / "step-000000000001"))
    assert files(outcome.folder) == before


@pytest.mark.parametrize("line", [b"\xff", b"5\n"])
def test_damaged_metrics_are_refused_before_anything_is_changed(run, line):
    outcome, _ = run(num_steps=1)
    metrics = outcome.folder / "metrics.jsonl"
    metrics.write_bytes(line + metrics.read_bytes()[len(line) :])
    before = files(outcome.folder)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl', line 1: not the metrics of a step.*move it away"):
        run(resume="auto", num_steps=2)
    assert files(outcome.folder) == before
    metrics.rename(outcome.folder / "damaged.jsonl")  # what the message advises
    _, shown = run(resume="auto", num_steps=2)
    assert "Warning: metrics.jsonl is shorter than it was" in shown


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\x81",
        b"1: 2\n",
        b"run:\n  3: 4\n",
        b"versions: 5\n",
        b"",
        b"- a\n- b\n",
        b"text",
        b"a: [",
        b"a: \x00",
    ],
)
def test_damaged_settings_are_refused_by_name(tmp_path, content):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_bytes(content)
    config = TrainConfig(output_dir=str(folder.path), resume="auto")
    with pytest.raises(ConfigError, match=r"resume: '.*config\.yaml' (cannot be read|does not hold the settings)"):
        find_origin(config, folder, CheckpointStore(folder.checkpoints), Task("t", [], [], len, "accuracy"))


def test_settings_may_name_the_home_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    settings = {"output_dir": str(folder.path), "resume": "auto", "model": "~/model"}
    folder.write_config(TrainConfig(**settings))
    text = folder.config.read_text()
    folder.config.write_text(text.replace(os.path.expanduser("~/model"), "~/model"))
    assert folder.config.read_text() != text
    task = Task("t", [], [], len, "accuracy")
    origin = find_origin(TrainConfig(**settings), folder, CheckpointStore(folder.checkpoints), task)
    assert origin.state is None


def test_other_rows_are_refused(run, tmp_path, monkeypatch):
    run(num_steps=1)
    monkeypatch.setitem(globals(), "TASK", TASK.replace("range(4)", "range(7)"))
    with pytest.raises(ConfigError, match="its rows are not those"):
        run(resume="auto")


def test_another_base_model_is_refused(run, model_folder):
    run(num_steps=1)
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1  # not trained by this method
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="the base model has changed"):
        run(resume="auto")


def test_a_log_that_lost_updates_is_refused(run):
    outcome, _ = run()
    (outcome.folder / "updates" / "000000000003.update").unlink()
    with pytest.raises(CheckpointError, match=r"at policy version 3, but the log .* ends at 2"):
        run(resume="auto", num_steps=4)


def test_no_checkpoint_yet(run, whole):
    """Killed before the first checkpoint: the run starts again, and its log takes the same updates again."""
    outcome, _ = run("run", num_steps=2, checkpoints=CheckpointConfig(every=0))
    assert not (outcome.folder / "checkpoints").exists()
    again, shown = run(resume="auto")
    assert "No complete checkpoint" in shown and "Warning: update" not in shown
    assert records(again.folder) == whole["records"]


def test_updates_that_come_out_otherwise_do_not_rewrite_the_log(run, monkeypatch, model_folder):
    """Another machine computes other bits. Replicas that applied the log must be able to follow the resumed run."""
    from logra.rl import recorder

    outcome, _ = run(num_steps=3)
    log = outcome.folder / "updates"
    before = {path.name: path.read_bytes() for path in log.glob("*.update")}
    follower = logra.sync.Replica(AutoModelForCausalLM.from_pretrained(model_folder), version=0)
    follower.catch_up(logra.sync.DirectoryLog(log))
    original = recorder.derive_key
    monkeypatch.setattr(recorder, "derive_key", lambda name, *rest: original(name, "other", *rest))
    again, shown = run(resume=str(outcome.folder / "checkpoints" / "step-000000000001"), num_steps=4)
    assert "Warning: update 2 did not come out as the log has it" in shown
    assert all((log / name).read_bytes() == data for name, data in before.items())
    follower.catch_up(logra.sync.DirectoryLog(log))
    assert follower.version == 6  # 3 updates, the weights of step 2 whole, steps 3 and 4
    trained = AutoModelForCausalLM.from_pretrained(again.folder / "model")
    assert all(torch.equal(a, b) for a, b in zip(follower_parameters(follower), trained.parameters(), strict=True))


def follower_parameters(replica):
    return [placement.pieces[0].tensor.view(placement.shape) for placement in replica.layout.values()]


def test_the_log_alone_recovers_the_weights_between_two_checkpoints(run, model_folder):
    outcome, _ = run(num_steps=5, checkpoints=CheckpointConfig(every=0))
    assert not (outcome.folder / "checkpoints").exists()
    shutil.move(outcome.folder / "model", outcome.folder / "trained")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    logra.sync.Replica(model, version=0).catch_up(logra.sync.DirectoryLog(outcome.folder / "updates"))
    trained = AutoModelForCausalLM.from_pretrained(outcome.folder / "trained")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


# ---- signals ----


def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(run, whole):
    checkpoints = CheckpointConfig(every=50)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    outcome, shown = run(at=2, action=kill, checkpoints=checkpoints)
    assert outcome.interrupted and [step["step"] for step in records(outcome.folder)] == [1, 2]
    assert "stopping after this step. A second one stops at once." in shown
    assert "The checkpoint of step 2 is in" in shown and "the same command with --resume auto goes on" in shown
    again, _ = run(resume="auto", checkpoints=checkpoints)
    assert not again.interrupted
    assert records(again.folder) == whole["records"]
    assert weights(again.folder) == whole["weights"]
    # What other parts of the process had asked to be called is called again.
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_second_signal_stops_at_once(run, whole):
    outcome, shown = run(at=3, action="[os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]")
    assert outcome.interrupted and len(records(outcome.folder)) == 2
    assert "The checkpoint of step 2 is in" in shown and "no model was saved" in shown
    again, _ = run(resume="auto")
    assert weights(again.folder) == whole["weights"]


# ---- disks and folders ----


def test_a_checkpoint_that_the_disk_does_not_take_is_reported(run, whole, monkeypatch):
    from logra.checkpoint import store

    def full(tensors, path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", full)
        outcome, shown = run()
    assert shown.count("No space left on device. Training goes on without it") == 3
    assert weights(outcome.folder) == whole["weights"]


def test_a_disk_that_fills_up_ends_the_run_with_the_last_good_state(run, whole, monkeypatch):
    original = run_folder._append

    def full(path, record):
        if record["step"] == 3 and path.name == "metrics.jsonl":
            with path.open("a") as file:
                file.write('{"step": 3, "half')
            raise LograError(f"{str(path)!r} cannot be written: No space left on device")
        original(path, record)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_append", full)
        with pytest.raises(LograError, match=r"metrics\.jsonl' cannot be written: No space left"):
            run()
    outcome, shown = run(resume="auto")
    assert "2 of 3 steps are done" in shown
    assert records(outcome.folder) == whole["records"]
    assert weights(outcome.folder) == whole["weights"]


def test_a_disk_that_is_too_small_is_refused_before_training(run, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match=r"GiB are free, but the trained model and the checkpoints take about"):
        run()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_process_trains_in_is_refused(run, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is training here"):
        run(resume="auto")
    os.close(descriptor)
    run(resume="auto", num_steps=1)


def test_metrics_that_someone_shortened_are_noticed(run):
    outcome, _ = run()
    (outcome.folder / "metrics.jsonl").write_text("")
    _, shown = run(resume="auto", num_steps=4)
    assert "Warning: metrics.jsonl is shorter than it was" in shown


# ---- pickle ----


def test_nothing_is_pickled_or_unpickled(run, monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("pickle")

    for module, name in ((torch, "save"), (torch, "load"), (pickle, "dump"), (pickle, "load")):
        monkeypatch.setattr(module, name, refuse)
    for method in ("logra", "lora"):
        run(method, method=method, num_steps=1)
        outcome, _ = run(method, method=method, num_steps=2, resume="auto")
        names = {path.suffix for path in (outcome.folder / "checkpoints").rglob("*") if path.is_file()}
        assert names == {".json", ".safetensors", ""}


@OPTIONAL
@pytest.mark.parametrize("method", ["galore", "apollo"])
def test_projectors_come_back_on_the_device_of_their_weight(method):
    # Catches a subspace that stays on the CPU, where checkpoints are read.
    kind = {"galore": "GaLoreAdamW", "apollo": "APOLLOAdamW"}[method]
    make = getattr(importlib.import_module(f"{method}_torch"), kind)
    settings = {"rank": 2, "update_proj_gap": 9, "scale": 1.0, "proj_type": "std"}
    settings |= {"proj": "random", "scale_type": "channel"} if method == "apollo" else {}
    quiet = {"no_deprecation_warning": True}
    here = torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    here.grad = torch.ones(4, 6)
    saved = make([{"params": [here], **settings}], **quiet)
    saved.step()
    elsewhere = torch.nn.Parameter(torch.empty(4, 6, device="meta"))
    loaded = make([{"params": [elsewhere], **settings}], **quiet)
    load_plain_state(loaded, tree.decode(*tree.encode(plain_state(saved))))
    assert loaded.state[elsewhere]["projector"].ortho_matrix.device.type == "meta"
    assert loaded.state[elsewhere]["projector"].rank == 2
