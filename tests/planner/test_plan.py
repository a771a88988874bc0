"""A plan says what a real step takes."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import logra
from logra import chunked_head
from logra.chunked_head import chunk_tokens, chunked_scores
from logra.errors import ConfigError, LograError
from logra.memory import Ledger
from logra.planner.models import load_config
from logra.planner.options import PlanOptions
from logra.planner.step import trace

SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 200, "tie_word_embeddings": True}  # fmt: skip
SEQUENCE, RANK = 24, 4
OPTIONS = PlanOptions(seq_len=SEQUENCE, micro_batch=2, precision="fp32", rank=RANK)


def small_config(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | SMALL | changes))
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of ten tokens, so that a tiny batch takes several."""
    monkeypatch.setattr(chunked_head, "CHUNK_BYTES", 10 * 4 * SMALL["vocab_size"])


def measured(config, method):
    """The step that the planner traces, over real tensors, under the same ledger."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    policy = model
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
        model.enable_input_require_grads()
    model.train()
    if method in ("logra", "paper"):
        opt = logra.SketchOptimizer(model, OPTIONS.sketch_config(method))
    else:
        opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5, foreach=False)
    ids = torch.randint(0, 200, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0  # padding, so that attention gets a mask, as it does in the plan
    generated = torch.ones_like(ids)
    generated[:, : OPTIONS.num_prompt_tokens] = 0
    chosen = ids[:, OPTIONS.num_prompt_tokens :]
    with Ledger(model, opt, held={"rollout": (ids, mask)}) as ledger:
        for is_counted in (False, True):
            if is_counted:
                ledger.restart()
            inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            log_probs, _ = chunked_scores(
                model, policy.base_model, inputs, chosen, chunk=chunk_tokens(200), temperature=1.0
            )
            loss = -(log_probs - log_probs.detach()).exp().mean()
            del log_probs
            loss.backward()
            del loss
            if method in ("logra", "paper"):
                opt.set_probe(input_ids=ids, attention_mask=mask, loss_mask=generated)
            opt.step()
            opt.zero_grad()
            ledger.settle()
    return ledger.report()


ARCHITECTURES = [{}, {"model_type": "qwen2"}, {"model_type": "qwen3", "head_dim": 8}]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["logra", "paper", "adamw", "lora"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.usefixtures("small_chunks")
def test_the_plan_is_what_the_profile_finds(tmp_path, architecture, method):
    """Fails if the traced step is another than the real one, or a number asked of a fake tensor takes a wrong branch."""
    config = load_config(str(small_config(tmp_path, **architecture)))
    planned, real = trace(config, method, OPTIONS), measured(config, method)
    assert planned.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    for name in ("forward", "backward", "update"):
        assert planned.phases[name].peak_bytes == pytest.approx(real.phases[name].peak_bytes, rel=0.05), name
    for category in ("weights", "optimizer_state", "sketches", "gradients"):
        # Input scales that changed are no longer those of the momentum, and a traced step changes none.
        scales = 4 * 7 * SMALL["hidden_size"] if category == "optimizer_state" and method == "logra" else 0
        assert planned.resident[category] == pytest.approx(real.resident[category], abs=scales), category
    assert planned.is_complete


def test_sharded_weights_and_state_are_a_part_of_the_whole(tmp_path):
    path = str(small_config(tmp_path))
    settings = {"methods": ["adamw"], "seq_len": 32}
    alone, shared = (logra.memory.plan(path, num_gpus=n, **settings)["methods"]["adamw"]["resident"] for n in (1, 4))
    assert shared["weights"] == alone["weights"] / 4
    assert shared["optimizer_state"] == pytest.approx(alone["optimizer_state"] / 4, rel=0.01)


def test_a_tied_head_that_trains_is_refused_as_it_would_be_where_it_runs(tmp_path, small_chunks):
    """What runs: tests/distributed/test_groups.py. Fails for a plan of a step that ends in an error, and for one refused that
    would run: with all logits at once, with few of them, with a head that is frozen, or in one process.
    """
    path = str(small_config(tmp_path))
    settings = {"num_gpus": 2, "methods": ["adamw"], "seq_len": 32}  # 24 scored tokens, three chunks
    with pytest.raises(
        ConfigError, match=r"method=adamw with num_gpus=2: the head .* is its embedding.*--whole-logits"
    ):
        logra.memory.plan(path, **settings)
    for runs in ({"chunked_logits": False}, {"seq_len": 24}, {"methods": ["lora"]}, {"num_gpus": 1}):
        assert logra.memory.plan(path, **(settings | runs))["methods"]


@pytest.mark.parametrize(
    ("changes", "num_gpus", "refused", "why", "planned"),
    [
        ({}, 2, "adamw", "the head of this model is its embedding", "lora"),
        ({"model_type": "gpt_neox"}, 1, "logra", "target_modules", "adamw"),
    ],
    ids=["tied head", "no targets"],
)
def test_a_method_that_is_refused_leaves_the_others_planned(
    tmp_path, small_chunks, changes, num_gpus, refused, why, planned
):
    """Fails if a refusal ends the plan, is lost, or changes the trace that comes after it; and if a method alone is not
    refused with its own error.
    """
    settings = {
        "model": str(small_config(tmp_path, **changes)),
        "num_gpus": num_gpus,
        "seq_len": 32,
        "gpu_memory": "1GB",
    }
    found = logra.memory.plan(methods=[refused, planned], **settings)["methods"]
    assert list(found) == [refused, planned]
    assert found[planned] == logra.memory.plan(methods=planned, **settings)["methods"][planned]
    assert found[refused]["fits"] is None and why in found[refused]["refused"]
    with pytest.raises(LograError) as error:
        logra.memory.plan(methods=refused, **settings)
    assert str(error.value) == found[refused]["refused"]


def test_weight_storages_take_their_bytes(tmp_path):
    """Fails for a low plane that counts as state, or has more bytes than it needs."""
    config = load_config(str(small_config(tmp_path)))
    found = [
        trace(config, "logra", dataclasses.replace(OPTIONS, precision="bf16", weight_storage=storage)).resident
        for storage in ("fp32", "split32", "split24")
    ]
    assert [4 * resident["weights"] / found[0]["weights"] for resident in found] == [4, 4, 3]
    assert len({resident["optimizer_state"] for resident in found}) == 1


def test_what_fits_and_what_is_the_most_that_does(tmp_path):
    """Fails if the largest micro-batch does not fit, or twice of it does."""
    path = str(small_config(tmp_path))
    settings = {"methods": ["adamw"], "seq_len": 64}
    (found,) = logra.memory.plan(path, gpu_memory="2MiB", **settings)["methods"].values()
    assert found["fits"] and found["spare_bytes"] == 2 * 2**20 - found["peak_bytes"]
    largest = found["largest_micro_batch"]
    for micro_batch, fits in ((largest, True), (2 * largest, False)):
        (other,) = logra.memory.plan(path, gpu_memory="2MiB", micro_batch=micro_batch, **settings)["methods"].values()
        assert other["fits"] is fits


def test_methods_at_the_same_time_are_planned_as_one_after_the_other(tmp_path):
    path = str(small_config(tmp_path))
    settings = {"methods": ["logra", "adamw"], "seq_len": 64, "gpu_memory": "2MiB"}
    assert logra.memory.plan(path, num_processes=2, **settings) == logra.memory.plan(path, **settings)


def test_sketched_experts_cannot_be_planned_for(tmp_path):
    # The default patterns reach the down projections of the experts beside those of the shared one.
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    config = load_config(str(small_config(tmp_path, model_type="qwen2_moe", **sizes)))
    with pytest.raises(ConfigError, match="experts are sketched cannot be planned for"):
        trace(config, "logra", OPTIONS)
