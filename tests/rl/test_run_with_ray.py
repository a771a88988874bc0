"""Whole runs of `logra train` whose samples come from Ray actors: the same run, whatever happens to the workers."""

import json
import os
import shutil
import signal
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import ray
import torch
from rich.console import Console

from logra.errors import ConfigError, SyncError
from logra.integrations.ray import pool as ray_pool
from logra.integrations.ray import trl_generation
from logra.integrations.ray.fleet import Answered, Fleet
from logra.integrations.ray.messages import Group, WorkerSettings
from logra.integrations.ray.worker import RolloutWorker
from logra.rl import rollout
from logra.rl.checkpoint_config import CheckpointConfig
from logra.rl.config import LossConfig, RolloutConfig, RunConfig, TrainConfig
from logra.rl.run import train
from logra.sync import DirectoryLog

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"
TASK = """
def dataset():
    return [{"prompt": f"{i} +", "answer": "a"} for i in range(20)]

def reward(completions, answer, **kwargs):
    return [sum(c.isalpha() for c in text) / 8 for text in completions]
"""
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _declared_engines(monkeypatch):
    """The entry points of this tree, whichever tree was installed last."""
    engines = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][rollout.GROUP]
    monkeypatch.setattr(rollout, "entry_points", lambda group, name: [EntryPoint(name, engines[name], group)])


@pytest.fixture(scope="module", autouse=True)
def _ray_of_this_module():
    yield
    ray.shutdown()


@pytest.fixture
def run(tmp_path, model_folder):
    (tmp_path / "task.py").write_text(TASK)

    def run(name, num_workers, **overrides):
        config = TrainConfig(
            output_dir=str(tmp_path / name),
            model=str(model_folder),
            task=str(tmp_path / "task.py"),
            num_heldout=0,
            rollout=RolloutConfig(
                num_prompts=3, num_samples=4, max_new_tokens=5, engine="ray", num_workers=num_workers
            ),
            loss=LossConfig(micro_batch_size=4),
            run=RunConfig(num_steps=NUM_STEPS, num_logged_samples=12, device="cpu"),
            checkpoints=CheckpointConfig(every=2, keep=3),
            **overrides,
        )
        return train(config, Console(quiet=True)).folder

    return run


def metrics(folder, name):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(folder, other):
    assert (folder / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    logs = [DirectoryLog(path / "updates") for path in (folder, other)]
    assert [log.latest() for log in logs] == [NUM_STEPS, NUM_STEPS]
    # The integers of every update; run ids differ.
    for first, second in zip(*(log.read_since(0) for log in logs), strict=True):
        assert first.weights_digest == second.weights_digest
        assert first.weights.keys() == second.weights.keys()
        for name, weight in first.weights.items():
            assert (weight.dense() == second.weights[name].dense()).all()
    assert (folder / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()


class WorkersHere:
    """The workers of a fleet in this process, the last first."""

    def __init__(self, settings, log, *, num_workers, **_):
        self.num_workers = num_workers
        self._workers = [RolloutWorker(settings, log) for _ in range(num_workers)]
        self._asked = []

    def submit(self, worker, groups, version):
        self._asked.append((worker, groups, version))

    def wait(self, timeout_s):
        worker, groups, version = self._asked.pop()
        with torch.random.fork_rng():  # a worker seeds torch's generator, which is the trainer's here
            return Answered(worker, self._workers[worker].sample(groups, version))

    def close(self):
        self._workers = []


@pytest.fixture
def run_here(run, monkeypatch):
    """`run`, without Ray."""

    def run_here(*args, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(trl_generation, "RayPool", WorkersHere)
            return run(*args, **settings)

    return run_here


def test_a_run_does_not_depend_on_the_number_of_workers_and_goes_on_exactly(run_here, tmp_path):
    """Fails if samples depend on the worker or on the order of answers, if one runs ahead of the step, or if a worker of
    a resumed run takes the newest version of the log.
    """
    one, two = run_here("one", 1), run_here("two", 2)
    assert metrics(two, "sync/rollout_version") == [0, 1, 2, 3]
    samples = [json.loads(line) for line in (two / "samples.jsonl").read_text().splitlines()]
    assert [sample["policy_version"] for sample in samples] == [step for step in range(NUM_STEPS) for _ in range(12)]
    assert len({sample["completion"] for sample in samples}) > 40
    assert metrics(two, "rollout/lost_workers") == metrics(two, "rollout/refused_samples") == [0] * 4
    assert_same_run(one, two)
    resumed = tmp_path / "resumed"
    shutil.copytree(two, resumed)
    run_here("resumed", 1, resume=str(resumed / "checkpoints" / "step-000000000002"))
    assert_same_run(resumed, two)


@pytest.mark.launch
def test_workers_that_are_killed_start_again_and_the_run_is_the_same(run, run_here, monkeypatch):
    """Both of two Ray actors die while they sample. Fails if a step or a group is lost with them, or if a worker that
    started again serves without catching up.
    """
    submit, pids = ray_pool.RayPool.submit, []

    def killing(pool, worker, groups, version):
        if version == 2 and not pids:
            pids.extend(ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in pool._actors]))
        pid = pids[worker] if version == 2 else None
        if pid is None:
            return submit(pool, worker, groups, version)
        pids[worker] = None
        os.kill(pid, signal.SIGSTOP)  # so that the request is on its way when the process dies
        submit(pool, worker, groups, version)
        return os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(ray_pool.RayPool, "submit", killing)
        killed = run("killed", 2)
    assert pids == [None, None]
    assert metrics(killed, "rollout/lost_workers") == [0, 0, 2, 2]
    assert metrics(killed, "rollout/refused_samples") == [0] * 4
    assert_same_run(killed, run_here("undisturbed", 1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # Ray's own handler would end a run in a step


@pytest.mark.launch
def test_a_worker_that_cannot_be_built_says_why(tmp_path):
    pool = ray_pool.RayPool(
        WorkerSettings(model="x", generation={}), DirectoryLog(tmp_path / "none"), num_workers=1, max_restarts=10
    )
    fleet = Fleet(pool, timeout_s=600)
    with pytest.raises(SyncError, match=r"none is left.*the log has not begun"):
        fleet.sample([Group((1,), 2, 3)], 0)
    fleet.close()
    with pytest.raises(ConfigError, match=r"they reserve 50 CPUs, Ray has 2"):
        ray_pool.RayPool(
            WorkerSettings(model="x", generation={}), DirectoryLog(tmp_path / "none"), num_workers=50, max_restarts=10
        )


def test_a_missing_ray_is_named_before_the_model_loads(run, monkeypatch):
    from logra.rl import methods

    monkeypatch.setattr(methods, "load_model", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(ray_pool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'logra\[ray\]'"):
        run("missing", 1)
