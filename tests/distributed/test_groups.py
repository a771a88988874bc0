"""Embedding and head as FSDP2 groups of their own: how accelerate makes them, and what uses the head in several calls."""

import os

import pytest
import torch
import torch.distributed as dist
from sharded_lm import own_part, with_trust

import logra
from logra.chunked_head import chunked_scores
from logra.errors import LograError
from logra.planner.sharding import shard

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASES = {
    "untied": {"tied": False},
    "tied": {"tied": True},
    "dense": {"tied": False, "non_target": "adamw"},
    "trust": {"tied": False, "trust": True},
}


def language_model(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, tie_word_embeddings=tied)
    )  # fmt: skip


def batch():
    return torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(1))


def on_mesh(model):
    if dist.is_initialized():
        shard(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def gradients_and_steps(ids, *, tied, **settings):
    """Sketches and dense gradients of a loss whose head runs chunk by chunk, then two steps."""
    model = on_mesh(language_model(tied))
    opt = logra.SketchOptimizer(model, lr=0.01, rank=4, **with_trust(settings))
    found = {}
    for _ in range(2):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        # 7 does not divide the 9 scored tokens of a sequence: chunks of two lengths.
        scores, _ = chunked_scores(model, model.base_model, inputs, ids[:, 3:], chunk=7, temperature=1.0)
        (-scores.mean()).backward()
        if not found:
            sketches = {f: [t.clone() for t in sketch.tensors()] for f, sketch in opt._capture.sketches().items()}
            for tensors in sketches.values():
                logra.distributed.average_(tensors)
            dense = opt._non_targets.parameters
            found = {"sketches": sketches, "dense": {n: logra.shards.whole(p.grad) for n, p in dense.items()}}
        if opt.config.trust is not None:
            generated = torch.ones_like(ids)
            generated[:, 0] = 0
            opt.set_probe(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=generated)
        opt.step()
        opt.zero_grad()
    found["weights"] = {name: logra.shards.whole(value) for name, value in model.state_dict().items()}
    return found | {"diagnostics": opt.diagnostics()}


def all_cases(rank):
    found = {name: gradients_and_steps(own_part(batch(), rank), **case) for name, case in CASES.items()}
    with pytest.raises(LograError, match="its gradient cannot be taken chunk by chunk"):
        gradients_and_steps(own_part(batch(), rank), tied=True, non_target="adamw")
    return found


def assert_near(found, expected, name):
    assert torch.allclose(found, expected, rtol=0, atol=3e-6 * expected.abs().max().item()), name


def test_gradients_through_a_head_of_its_own_group(workers, tmp_path):
    """Fails if the head is freed between the chunks of a loss or of a probe, or if a chunk's gradient of it is lost."""
    first, second = workers.run(all_cases, 2, tmp_path)
    for name, case in CASES.items():
        expected = gradients_and_steps(batch(), **case)
        for fqn, sketches in expected["sketches"].items():
            for found, one in zip(first[name]["sketches"][fqn], sketches, strict=True):
                assert_near(found, one, (name, fqn))
        assert expected["dense"].keys() == first[name]["dense"].keys()
        for fqn, grad in expected["dense"].items():
            assert_near(first[name]["dense"][fqn], grad, (name, fqn))
        assert first[name]["diagnostics"] == second[name]["diagnostics"]
        assert first[name]["diagnostics"] == pytest.approx(expected["diagnostics"], rel=2e-2)
        for fqn, weight in first[name]["weights"].items():
            assert torch.equal(weight, second[name]["weights"][fqn]), fqn


def groups(model):
    """Names of the parameters that are gathered together, whether a forward frees them, and a backward gathers them."""
    states = {id(s): s for s in (m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state"))}
    return sorted(
        (sorted(p._param_fqn for p in group.fsdp_params), group._reshard_after_forward, group.unshard_in_backward)
        for state in states.values() for group in state._fsdp_param_groups
    )  # fmt: skip


def of_planner_and_accelerate(rank):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from cpu_fsdp import allow_fsdp_on_cpus

    from logra.rl import fsdp

    allow_fsdp_on_cpus()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    found = []
    for tied in (False, True):
        planned, real = on_mesh(language_model(tied)), language_model(tied)
        fsdp.shard(accelerator, real)
        for model in (planned, real):
            model(batch())  # names are given then
        found.append((groups(planned), groups(real)))
    return found


def test_the_plan_has_the_groups_of_accelerate(workers, tmp_path):
    for untied, tied in workers.run(of_planner_and_accelerate, 2, tmp_path):
        for planned, real in (untied, tied):
            assert planned == real
        assert (["model.embed_tokens.weight"], True, False) in untied[0]
        assert (["lm_head.weight", "model.norm.weight"], False, True) in untied[0]
        assert (["model.embed_tokens.weight", "model.norm.weight"], False, True) in tied[0]
