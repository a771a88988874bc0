"""`logra train` in two processes: one folder, one policy, one end."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import logra
from logra import distributed
from logra.errors import ConfigError
from logra.rl import methods, processes
from logra.rl.checkpoint_config import CheckpointConfig
from logra.rl.config import LossConfig, RolloutConfig, RunConfig, TrainConfig
from logra.rl.guards.config import GuardsConfig, Rule, Sentinels
from logra.rl.run import train
from logra.trust import TrustRegion

distributed_test = pytest.mark.distributed
pytestmark = pytest.mark.timeout(300)

TASK = """
import os, random, signal

calls = 0

def dataset():
    return [{"prompt": f"{i} +", "answer": "a"} for i in range(6)]

def reward(completions, answer, **kwargs):
    global calls
    calls += 1
    if calls == AT and os.environ.get("RANK") == "1":
        ACTION
    # Draws from Python's generator: only a checkpoint knows its state in each process.
    return [sum(map(ord, text)) / 1000 + random.random() * NOISE for text in completions]
"""


def config(work, name, *, num_steps=3, at=0, action="pass", noise=0.1, **overrides):
    """Of a run whose reward function does `action` in its call number `at` on process 1."""
    task = Path(work, f"{name}.py")
    content = TASK.replace("AT", str(at)).replace("ACTION", action).replace("NOISE", str(noise))
    if not task.exists() or task.read_text() != content:
        task.write_text(content)
    settings: dict[str, Any] = {
        "output_dir": str(Path(work, name)),
        "model": str(Path(work, "tiny-model")),
        "task": str(task),
        "num_heldout": 1,
        "rollout": RolloutConfig(num_prompts=2, num_samples=2, max_new_tokens=3),
        "loss": LossConfig(micro_batch_size=1),
        "run": RunConfig(num_steps=num_steps, device="cpu"),
        "checkpoints": CheckpointConfig(every=1, keep=3),
    } | overrides
    if settings.get("method") != "adamw":
        settings["trust"] = TrustRegion(kl_budget=0.03, min_responses=4)
    return TrainConfig(**settings)


def one_run(work, name, *, sampler=False, **settings):
    """Trains; what this process knows at the end."""
    trainers, build, draw = [], methods.build_trainer, torch.multinomial

    def build_and_keep(*args, **kwargs):
        trainers.append(build(*args, **kwargs))
        if sampler:
            draw_by_row(trainers[0])
        return trainers[0]

    methods.build_trainer = build_and_keep
    output = io.StringIO()
    try:
        outcome = train(config(work, name, **settings), Console(file=output, width=200))
    finally:
        methods.build_trainer, torch.multinomial = build, draw
    (trainer,) = trainers
    return {
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "version": trainer.sketch_optimizer.version,
        "seed": torch.initial_seed(),
        "shown": output.getvalue(),
        "interrupted": outcome.interrupted,
        "leads": outcome.leads,
        "encoded": "num_bytes" in vars(trainer.sketch_optimizer.last_update),
        "bytes": trainer.state.log_history[-2]["sync/bytes"],
    }


def draw_by_row(trainer):
    """Sampling in which a completion has the same random numbers wherever its group is sampled."""
    generate, position = trainer._generate_single_turn, []

    def draw(probabilities, num_samples):
        position.append(trainer.state.global_step)
        shift = 0.61 * len(position) + 0.17 * position[0]
        uniform = torch.tensor([[(0.37 + shift + 0.29 * (row % 2)) % 1.0] for row in range(len(probabilities))])
        return (probabilities.cumsum(dim=1) < uniform).sum(dim=1, keepdim=True).clamp(max=probabilities.shape[1] - 1)

    def generate_anew(*args, **kwargs):
        position.clear()
        return generate(*args, **kwargs)

    torch.multinomial, trainer._generate_single_turn = draw, generate_anew


def runs(rank, work, each, failing=None):
    """Runs one after the other, and what `failed_run` returns of a last one."""
    ended = [one_run(work, **settings) for settings in each]
    return ended if failing is None else (ended, failed_run(rank, work, failing))


def failed_run(rank, work, settings):
    """Type and message of the error that the run ended with. Process r begins in `folders[r]`."""
    folders = settings.get("folders")
    if folders is not None:
        os.chdir(folders[rank])
    settings = {name: value for name, value in settings.items() if name != "folders"}
    try:
        train(config(work, **settings), Console(file=io.StringIO()))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def records(folder):
    """Metrics of the steps that a repetition has too. Packets bear the random name of their run, which compresses
    differently.
    """
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("time/", "memory/", "sync/bytes", "sync/seconds")
    return [{name: value for name, value in step.items() if not name.startswith(varying)} for step in steps]


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def assert_the_log_leads_to(folder, model_folder, weights):
    """A replica of the base model that follows the log has these weights, and so has the saved model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    logra.sync.Replica(model, version=0).catch_up(logra.sync.DirectoryLog(folder / "updates"))
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert_same_weights(dict(model.state_dict()), weights)
    assert_same_weights(dict(saved.state_dict()), weights)


@pytest.mark.launch
def test_stopped_by_one_process_and_resumed_by_two_ends_with_the_same_bits(workers, model_folder, tmp_path):
    """SIGTERM reaches process 1 alone. Fails (or hangs) if process 0 goes on without it, or if a process resumes with the
    generators of another. Then a second Ctrl-C reaches process 1 alone, and process 0 has to say so.
    """
    stop = {"at": 2, "action": "os.kill(os.getpid(), signal.SIGTERM)"}
    each = [{"name": "whole"}, {"name": "stopped", **stop}, {"name": "stopped", **stop, "resume": "auto"}]
    interrupted = {"name": "interrupted", "at": 2, "action": "raise KeyboardInterrupt('a second Ctrl-C')"}
    (first, error), (second, no_error) = workers.run(
        runs, 2, tmp_path, work=str(tmp_path), each=each, failing=interrupted
    )
    assert no_error is None
    assert error == ("OtherProcessError", "the run was ended by process 1: KeyboardInterrupt: a second Ctrl-C")
    for mine, others in zip(first, second, strict=True):
        assert_same_weights(mine["weights"], others["weights"])
        assert (mine["leads"], others["leads"], others["shown"]) == (True, False, "")
        assert mine["version"] == others["version"]
        # Only the process that writes the log makes packets.
        assert (others["encoded"], others["bytes"]) == (False, mine["bytes"])
        assert mine["seed"] != others["seed"]
    whole, stopped, resumed = first
    assert [run["interrupted"] for run in first] == [run["interrupted"] for run in second] == [False, True, False]
    assert stopped["version"] == 2
    assert "2 of 3 steps are done" in resumed["shown"]
    assert_same_weights(whole["weights"], resumed["weights"])
    assert records(tmp_path / "whole") == records(tmp_path / "stopped")
    assert len(records(tmp_path / "whole")) == 3
    assert (tmp_path / "whole/samples.jsonl").read_bytes() == (tmp_path / "stopped/samples.jsonl").read_bytes()
    assert_the_log_leads_to(tmp_path / "stopped", model_folder, whole["weights"])


@distributed_test
def test_one_and_two_processes_take_the_same_steps_and_follow_each_other(workers, model_folder, tmp_path):
    """With completions that do not depend on who samples them, two processes take the steps of one, up to sums of fp32 in
    another order and close calls of the rounding. Then two go on where one was, against a log that holds its steps.
    """
    alone = one_run(tmp_path, "alone", num_steps=2, noise=0, sampler=True)
    steps = records(tmp_path / "alone")
    (first, again), (second, again_second) = workers.run(runs, 2, tmp_path, work=str(tmp_path), each=[
        {"name": "both", "num_steps": 2, "noise": 0, "sampler": True},
        {"name": "alone", "num_steps": 2, "noise": 0, "resume": str(tmp_path / "alone/checkpoints/step-000000000001")},
    ])  # fmt: skip
    assert_same_weights(first["weights"], second["weights"])
    for one, two in zip(steps, records(tmp_path / "both"), strict=True):
        for name in (
            "reward/mean",
            "reward/std",
            "policy/entropy",
            "grad_norm",
            "trust/predicted_kl",
            "trust/realised_kl",
        ):
            assert two[name] == pytest.approx(one[name], rel=0.02), name
        assert two["completions/mean_length"] == one["completions/mean_length"]
    start = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, weight in alone["weights"].items():
        assert (first["weights"][name] - weight).norm() <= 0.05 * (weight - start[name]).norm(), name
    # Other samples make another second step than the log has: the weights follow it whole, and both know the version.
    assert "the checkpoint is of 1 processes, and 2 go on" in again["shown"]
    assert "did not come out as the log has it" in again["shown"]
    assert again["version"] == again_second["version"] == 3
    assert_same_weights(again["weights"], again_second["weights"])
    assert_the_log_leads_to(tmp_path / "alone", model_folder, again["weights"])


@pytest.mark.launch
def test_one_goes_on_where_two_were(workers, model, model_folder, tmp_path):
    """Between them two processes with different copies of the model try to replace the run: it has to survive."""
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    other = tmp_path / "other" / model_folder.name
    model.save_pretrained(other)
    shutil.copytree(model_folder, other, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    folders = [str(tmp_path), str(other.parent)]
    errors = workers.run(
        runs, 2, tmp_path, work=str(tmp_path), each=[{"name": "run", "num_steps": 1}],
        failing={"name": "run", "overwrite": True, "model": model_folder.name, "folders": folders},
    )  # fmt: skip
    for _, (kind, message) in errors:
        assert kind == "ConfigError"
        assert "the weights of process 1 are not those of process 0" in message
    resumed = one_run(tmp_path, "run", num_steps=2, resume="auto")
    assert "the checkpoint is of 2 processes, and 1 go on" in resumed["shown"]
    assert [step["step"] for step in records(tmp_path / "run")] == [1, 2]
    assert_the_log_leads_to(tmp_path / "run", model_folder, resumed["weights"])


@distributed_test
@pytest.mark.parametrize("method", ["logra", "adamw"])
def test_an_error_of_one_process_ends_both_with_it(method, workers, model_folder, tmp_path):
    settings = {"name": "run", "at": 2, "action": "raise RuntimeError('no grader')", "method": method}
    first, second = workers.run(failed_run, 2, tmp_path, work=str(tmp_path), settings=settings)
    assert second[0] == "DataError" and "no grader" in second[1]
    assert first[0] == "OtherProcessError" and first[1].startswith("the run was ended by process 1: DataError: ")
    assert "no grader" in first[1]
    assert [step["step"] for step in records(tmp_path / "run")] == [1]
    assert json.loads((tmp_path / "run/results.json").read_text())["interrupted"]


@distributed_test
def test_a_folder_that_is_taken_ends_both(workers, model_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("")
    first, second = workers.run(failed_run, 2, tmp_path, work=str(tmp_path), settings={"name": "run"})
    assert first[0] == "ConfigError" and "holds another run" in first[1]
    assert second is not None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.launch
@pytest.mark.timeout(600)
def test_the_documented_command(model_folder, tmp_path):
    """torchrun itself, from the command to a log that replays."""
    group = "__import__('torch').distributed.group.WORLD"
    patient = f"assert {group}._get_backend(__import__('torch').device('cpu')).options._timeout.total_seconds() == 7200"
    config(tmp_path, "run", at=1, action=patient)
    arguments = [
        "--output-dir", "run", "--model", str(model_folder), "--task", "run.py", "--run.device", "cpu",
        "--run.num-steps", "2", "--rollout.num-prompts", "2", "--rollout.num-samples", "2",
        "--rollout.max-new-tokens", "3", "--num-heldout", "0", "--loss.micro-batch-size", "2",
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "logra.cli.main", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command + arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/2", "2/2"]
    assert sum(line.startswith("Report: ") for line in lines) == 1
    assert len(records(tmp_path / "run")) == 2
    from logra.cli.main import main

    assert main(["replay", "--run", str(tmp_path / "run"), "--verify"]) == 0


REFUSED = [
    ({"rollout": RolloutConfig(num_prompts=3, num_samples=2)}, "num_prompts=3 on 2 processes: must be a multiple"),
    ({"loss": LossConfig(micro_batch_size=4)}, "micro_batch_size=4 on 2 processes: must divide the 2 completions"),
    ({"rollout": RolloutConfig(num_prompts=2, num_samples=2, engine="vllm")}, "engine='vllm' on 2 processes"),
    ({"method": "adamw", "use_trust": True}, "use_trust=true with method=adamw on 2 processes"),
    (
        {"guards": GuardsConfig(sentinels=Sentinels(entropy_floor=Rule(threshold=0.1, action="rollback")))},
        "action rollback on 2 processes",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_for_one_process_are_refused_for_two(overrides, message, monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        processes._require_suitable(config(tmp_path, "run", **overrides))


def test_half_a_launcher_is_refused(monkeypatch, tmp_path):
    """Fails if the process waits for a group that nobody forms."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="no RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start several processes"):
        train(config(tmp_path, "run"))
