"""A real vLLM engine serving the default model follows five updates of a real optimizer.

Expected values are those of a fresh engine, in a process of its own, that loaded the trainer's saved weights.
"""

import os
from dataclasses import replace

import pytest
import torch

from logra.errors import PacketError, SyncError
from logra.integrations.vllm import VLLMEngine
from logra.update import PolicyUpdate, round_factors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

ROUTES = {
    "backend": {"weight_transfer_config": {"backend": "logra"}},
    "extension": {"worker_extension_cls": "logra.integrations.vllm.WorkerExtension"},
}


@pytest.fixture
def build(probe):
    """Builds engines, and frees them after the test: together they would not fit into memory."""
    engines = []

    def make(folder, dtype="float32", route="backend", **options):
        engines.append(probe.build_engine(str(folder), dtype, **ROUTES[route], **options))
        return engines[-1]

    yield make
    while engines:
        probe.close(engines.pop())


@pytest.fixture(params=sorted(ROUTES))
def llm(request, build, trained):
    return build(trained.base, route=request.param)


def model_of(llm) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def test_five_updates_make_the_engine_of_the_saved_weights(llm, probe, trained):
    # Catches any bit that differs, a prefix cache that survives an update (the same prompt is asked before), and
    # parameters that are replaced instead of written.
    engine = VLLMEngine(llm)
    assert engine.attach(trained.log.manifest) == 0
    pointers = {name: parameter.data_ptr() for name, parameter in model_of(llm).named_parameters()}
    before = probe.ask(llm)
    # The run shows in every number, and left the model one whose numbers depend on all of its context.
    for kind in ("logprobs", "prompt_logprobs"):
        assert all(a != b for a, b in zip(before[kind], trained.answer[kind], strict=True))
        assert all(value < -1e-4 for value in trained.answer[kind])
    for update in trained.updates:
        assert engine.push(update) == update.version
        probe.ask(llm)
    assert engine.version() == 5
    assert probe.ask(llm) == trained.answer
    assert {name: parameter.data_ptr() for name, parameter in model_of(llm).named_parameters()} == pointers


def test_faults_leave_the_engine_at_its_version_and_it_catches_up(llm, probe, trained):
    engine = VLLMEngine(llm)
    engine.attach(trained.log.manifest)
    updates = trained.updates
    engine.push(updates[0])
    at_one = probe.ask(llm)
    damaged = bytearray(updates[1].to_bytes())
    damaged[len(damaged) // 2] ^= 1
    wrong = {
        "a duplicate": updates[0],
        "a gap": updates[2],
        "another run": replace(updates[1], run_id="another"),
        "damage": Raw(updates[1], bytes(damaged)),
        "truncation": Raw(updates[1], updates[1].to_bytes()[:-1]),
        "another model": replace(updates[1], tensors={"model.norm.bias": torch.zeros(576)}),
    }
    for what, update in wrong.items():
        with pytest.raises(PacketError):
            engine.push(update)
        assert engine.version() == 1, what
    assert probe.ask(llm) == at_one
    assert engine.catch_up(trained.log) == 5
    assert probe.ask(llm) == trained.answer


class Raw:
    """An update whose bytes are not its own."""

    def __init__(self, update, data):
        self.version, self._data = update.version, data

    def to_bytes(self):
        return self._data


def test_lost_weights_come_back_with_an_anchor(llm, probe, trained):
    engine = VLLMEngine(llm)
    engine.attach(trained.log.manifest)
    engine.push(trained.updates[0])
    for parameter in model_of(llm).parameters():
        parameter.data.zero_()  # as memory looks like that sleep level 2 dropped
    assert engine.version() is None
    with pytest.raises(SyncError, match=r"needs an anchor|cannot apply"):
        engine.push(trained.updates[1])
    assert engine.load(trained.weights, 5) == 5
    assert engine.version() == 5
    assert probe.ask(llm) == trained.answer


def test_an_engine_that_began_from_other_weights_is_found_out(build, probe, trained):
    llm = build(trained.folder)
    engine = VLLMEngine(llm)
    with pytest.raises(SyncError, match="not those of the base model"):
        engine.attach(trained.log.manifest)
    assert engine.version() is None
    engine.load(trained.weights, 5)
    assert probe.ask(llm) == trained.answer


def test_samples_carry_the_version(build, probe, trained):
    llm = build(trained.base)
    engine = VLLMEngine(llm)
    engine.attach(trained.log.manifest)
    engine.push(trained.updates[0])
    completion = llm.generate([{"prompt_token_ids": probe.PROMPT}], use_tqdm=False)[0].outputs[0]
    run_id = trained.log.manifest.run_id
    assert [span.version for span in completion.weight_versions] == [f"{run_id}:1"]


def test_a_bf16_engine_follows_exactly_with_its_low_plane(build, tools, probe, trained, tmp_path):
    # The run is one of bf16 weights with a low plane: the engine must round what the trainer's planes hold, not what
    # merging into bf16 would give.
    from transformers import AutoModelForCausalLM

    from logra.storage import split32
    from logra.sync import BaseModel, Manifest, Replica
    from logra.sync.layout import module_layout, weights_digest

    model = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.bfloat16).float()
    layout = module_layout(model)
    base = BaseModel(digest=weights_digest(layout))
    manifest = Manifest(run_id="bf16-run", weight_storage="split32", base=base)
    replica = Replica(layout, 0)
    llm = build(trained.base, "bfloat16")
    engine = VLLMEngine(llm)
    engine.attach(manifest)
    for update in trained.updates:
        update = replace(update, run_id="bf16-run", weight_storage="split32", weights_digest=None)
        replica.apply(update)
        engine.push(replace(update, weights_digest=replica.digest()))
    for weight in replica.weights().values():
        weight.copy_(split32(weight)[0].float())
    tools.save(model.to(torch.bfloat16), trained.base, tmp_path / "model")
    assert probe.ask(llm) == tools.fresh_answer(probe, tmp_path / "model", "bfloat16")


def test_two_workers_with_a_half_of_the_weights_each(build, tmp_path, monkeypatch):
    # Digests over both workers say that every bit is right; errors must not put vLLM's executor out of step.
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("tensor parallelism on CPU needs a core for each worker")
    from transformers import LlamaConfig, LlamaForCausalLM

    from logra.sync import BaseModel, Manifest, Replica
    from logra.sync.layout import module_layout, weights_digest

    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=2, max_position_embeddings=128, **sizes))
    model.save_pretrained(tmp_path)
    manifest = Manifest(run_id="two", base=BaseModel(digest=weights_digest(module_layout(model))))
    trainer = Replica(model, 0)
    engine = VLLMEngine(build(tmp_path, tensor_parallel_size=2, skip_tokenizer_init=True))
    assert engine.attach(manifest) == 0
    updates = [random_update(model, version) for version in range(3)]
    trainer.apply(updates[0])
    assert engine.push(replace(updates[0], weights_digest=trainer.digest())) == 1
    for _ in range(2):
        with pytest.raises(PacketError, match="missing"):
            engine.push(updates[2])
        assert engine.version() == 1
    trainer.apply(updates[1])
    with pytest.raises(SyncError, match="digest"):
        engine.push(replace(updates[1], weights_digest="0" * 64))
    assert engine.version() is None
    assert engine.load(trainer.weights(), 2) == 2
    trainer.apply(updates[2])
    assert engine.push(replace(updates[2], weights_digest=trainer.digest())) == 3
    assert engine.version() == 3


def random_update(model, version):
    generator = torch.Generator().manual_seed(version)
    weights = {}
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            factors = [
                torch.randn(size, generator=generator) for size in ((len(parameter), 4), (4, parameter.shape[1]))
            ]
            weights[name] = round_factors(factors[0] * 1e-2, factors[1], factor_bits=4, key=version)
    return PolicyUpdate(version, version + 1, 0, version, weights, run_id="two")
