"""One rank of a sharded replica that follows a log: a program of its own.

    python sharded_replica.py RANK PORT FOLDER

FOLDER holds for every storage a log and the base weights. For every case the rank writes what it stores in the end, where
that lies in the whole, the checksums of it, and what the model computes with it.
"""

import importlib.util
import json
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from logra.sync import DirectoryLog, Replica

CASES = (("fsdp2", "fp32"), ("fsdp2", "split32"), ("fsdp2", "split24"), ("tp", "fp32"), ("tp", "split24"))
NUM_RANKS = 2


def policy(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The model of the tests with these weights, and a forward that uses all of them."""
    spec = importlib.util.spec_from_file_location("shared", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    model = shared.Policy().to(dtype)
    model.load_state_dict(weights)

    def layer_forward(self, x):
        attention = self.o_proj(self.q_proj(x)) + self.k_proj(x).sum() + self.v_proj(x).sum()
        return attention + self.down_proj(self.gate_proj(x) * self.up_proj(x))

    model.layer.forward = types.MethodType(layer_forward, model.layer)
    model.forward = types.MethodType(lambda self, ids: self.layer(self.norm(self.embed(ids))), model)
    return model


def shard(model: Any, kind: str, mesh: DeviceMesh) -> None:
    if kind == "fsdp2":
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return
    by_rows = {name: ColwiseParallel() for name in ("q_proj", "gate_proj", "up_proj")}
    by_columns = {name: RowwiseParallel() for name in ("o_proj", "down_proj")}
    parallelize_module(model.layer, mesh, by_rows | by_columns)


@torch.no_grad()
def follow(kind: str, storage: str, mesh: DeviceMesh, folder: Path, rank: int) -> None:
    model = policy(load_file(folder / f"{storage}.safetensors"), torch.float32 if storage == "fp32" else torch.bfloat16)
    shard(model, kind, mesh)
    replica = Replica(model, storage=storage)  # pyright: ignore[reportArgumentType]
    log = DirectoryLog(folder / storage)
    replica.catch_up(log, until=3)
    ids = torch.arange(6)
    model(ids)  # FSDP2 keeps the gathered weights of the outermost module
    replica.catch_up(log)
    tensors, places = {"output": model(ids).float()}, []
    for part in replica.digest_parts():
        (piece,) = replica.layout[part.name].pieces
        tensors[part.name] = piece.value(0, piece.tensor.shape[0]).contiguous()
        places.append([part.name, part.shape, part.rows, part.columns, part.checksum])
    assert replica.digest() is None
    save_file(tensors, folder / f"{kind}-{storage}-{rank}.safetensors", {"places": json.dumps(places)})


def main(rank: int, port: int, folder: Path) -> None:
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=120)
    dist.init_process_group("gloo", address, rank=rank, world_size=NUM_RANKS, timeout=patience)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for kind, storage in CASES:
        follow(kind, storage, mesh, folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
