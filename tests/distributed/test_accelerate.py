"""What `logra.rl.fsdp` takes from accelerate: sharding before the optimizer is built, and groups that survive `prepare`."""

import os

import pytest
import torch
from sharded_lm import SETTINGS, Model, assert_close_to_one_process, assert_equal_on_all, batch, own_part, train

import logra

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

WORLD_SIZE = 4
"""More than o_proj has rows: the last process holds nothing of it, in both layers."""


def prepared_by_accelerate(rank):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from cpu_fsdp import allow_fsdp_on_cpus

    from logra.rl import fsdp

    allow_fsdp_on_cpus()
    # accelerate asks for these, also where the process group exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    fsdp.refuse_ignored(accelerator, None)
    model = Model()
    if rank > 0:  # what it holds counts for nothing: the first process has the weights
        torch.nn.init.zeros_(model.layers[0].q_proj.weight)
    fsdp.shard(accelerator, model)
    opt = logra.SketchOptimizer(model, **SETTINGS)
    parameters = fsdp.GroupParameters(opt)
    prepared, _ = accelerator.prepare(model, opt)
    exchanged = [parameter is target.parameter for parameter, target in _groups(opt)]
    parameters.restore()
    restored = [parameter is target.parameter for parameter, target in _groups(opt)]
    opt.detach()
    wrappers = sum("_checkpoint_wrapped_module" in module._modules for module in model.modules())
    result = train(model, own_part(batch(), rank))
    logra.distributed.average_(list(result["sketches"].values()))
    result["weights"] = {
        name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in result["weights"].items()
    }
    return result | {
        "same_model": prepared is model,
        "wrappers": wrappers,
        "exchanged": exchanged,
        "restored": restored,
    }


def _groups(opt):
    return zip(opt.param_groups[0]["params"], opt.targets, strict=True)


def test_a_model_that_accelerate_shards_trains_like_one_process(workers, tmp_path):
    results = workers.run(prepared_by_accelerate, WORLD_SIZE, tmp_path)
    for result in results:
        assert result["same_model"]
        assert result["wrappers"] == 2  # one a layer: the checkpointing of the plugin is applied, and once
        assert all(result["restored"])
    assert not all(results[-1]["exchanged"])  # what is restored was wrong: two empty shards have one address
    assert_equal_on_all(results)
    assert_close_to_one_process(results)
