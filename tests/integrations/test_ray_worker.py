"""A rollout worker without Ray: which version it samples with, and what it draws."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import logra
from logra.errors import SyncError
from logra.integrations.ray.messages import Group, WorkerSettings
from logra.integrations.ray.worker import RolloutWorker
from logra.sync import DirectoryLog, Publisher

ENDS, VOCAB = [1, 2, 3, 4], 24
GENERATION = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 0, "pad_token_id": 1,
              "eos_token_id": ENDS}  # fmt: skip
GROUP = Group(prompt_ids=(15, 6, 7), num_samples=6, seed=11)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A base model, a log with three updates of it, and the weights after each."""
    folder = tmp_path_factory.mktemp("ray-worker")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3)  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    # Steps long enough for the samples of two versions to differ.
    optimizer = logra.SketchOptimizer(model, logra.Config(rank=4, lr=0.2))
    log = DirectoryLog(folder / "updates")
    publisher = Publisher(log, optimizer, digest_every=1)
    weights = [{name: value.clone() for name, value in model.state_dict().items()}]
    for step in range(3):
        ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish(optimizer.last_update)
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return folder, log, weights


@pytest.fixture
def make_worker(run):
    return lambda log=None: RolloutWorker(
        WorkerSettings(model=str(run[0] / "model"), generation=GENERATION), log or run[1]
    )


def token_ids(answer):
    return [sample.token_ids for sample in answer.samples]


def test_it_samples_with_the_version_that_is_asked_for(run, make_worker):
    """Fails if a worker runs ahead to the newest version, or stays at an older one."""
    worker = make_worker()
    for version in (1, 3):
        answer = worker.sample([GROUP], version)
        assert (answer.version, [sample.version for sample in answer.samples]) == (version, [version] * 6)
        policy = LlamaForCausalLM.from_pretrained(run[0] / "model")
        policy.load_state_dict(run[2][version])
        assert all(
            torch.equal(a, b) for a, b in zip(worker.engine.model.parameters(), policy.parameters(), strict=True)
        )
        # The oracle: transformers alone, without the shared prompt, cut after the first end of any kind.
        torch.manual_seed(GROUP.seed)
        ids = torch.tensor([GROUP.prompt_ids] * 6)
        output = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                 generation_config=GenerationConfig(**GENERATION))  # fmt: skip
        expected = []
        for row in output[:, 3:].tolist():
            ends = [place for place, token in enumerate(row) if token in ENDS]
            expected.append(row[: ends[0] + 1] if ends else row)
        assert token_ids(answer) == expected
        assert len({len(row) for row in expected}) > 1


def test_samples_depend_on_the_group_and_the_version_alone(make_worker):
    """Fails if what a worker drew before, or its own random state, enters the samples."""
    first, second = make_worker(), make_worker()
    other = Group(prompt_ids=(9,), num_samples=3, seed=2)
    second.sample([other], 0)
    torch.manual_seed(99)
    alone = token_ids(first.sample([GROUP], 2))
    assert token_ids(second.sample([other, GROUP], 2))[3:] == alone
    reseeded = Group(GROUP.prompt_ids, GROUP.num_samples, seed=12)
    assert token_ids(first.sample([reseeded], 2)) != alone
    assert token_ids(second.sample([GROUP], 3)) != alone


def test_it_draws_nothing_where_it_cannot_come_to_the_version(make_worker):
    worker = make_worker()
    answer = worker.sample([GROUP], 4)  # the log ends at 3
    assert (answer.version, list(answer.samples)) == (3, [])
    answer = worker.sample([GROUP], 2)  # and there is no way back
    assert (answer.version, list(answer.samples)) == (3, [])
    worker.join(2)
    assert worker.engine.version == 3


def test_a_wrong_log_is_refused(run, make_worker, tmp_path):
    with pytest.raises(SyncError, match="the log has not begun"):
        make_worker(DirectoryLog(tmp_path / "nothing"))
    torch.manual_seed(1)
    other = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(run[0] / "model").config)
    log = DirectoryLog(tmp_path / "other")
    Publisher(log, logra.SketchOptimizer(other, logra.Config(rank=4)))
    # Catches a worker that samples with its base model because the log has no update yet.
    with pytest.raises(SyncError, match="not those of the base model"):
        make_worker(log).sample([GROUP], 0)
