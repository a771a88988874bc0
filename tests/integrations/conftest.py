"""A tiny policy, a trainer for it in plain torch, and an engine that keeps its weights as vLLM's layers do.

The layers carry vLLM's class names and attributes; their tensors are cut and stacked here head by head, so that the rules
of the layout are written down twice.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import logra
from logra.hashing import derive_key, hash_words
from logra.sync import BaseModel, DirectoryLog, Manifest, Piece, Placement, Publisher
from logra.sync.layout import weights_digest, whole_piece
from logra.sync.publisher import optimizer_layout
from logra.update import LowRankUpdate, PolicyUpdate, round_factors

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCAB, PADDED_VOCAB = 12, 4, 2, 3, 8, 10, 16
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, WIDTH),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
    "model.layers.0.self_attn.q_proj.bias": (HEADS * HEAD_SIZE,),
    "model.layers.0.self_attn.k_proj.bias": (KV_HEADS * HEAD_SIZE,),
    "model.layers.0.self_attn.v_proj.bias": (KV_HEADS * HEAD_SIZE,),
    "model.layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
    "model.layers.0.mlp.gate_proj.weight": (INNER, WIDTH),
    "model.layers.0.mlp.up_proj.weight": (INNER, WIDTH),
    "model.layers.0.mlp.down_proj.weight": (WIDTH, INNER),
    "model.norm.weight": (WIDTH,),
}
TARGETS = [name for name in SHAPES if name.endswith("_proj.weight")]
RUN_ID = "a-run"


class UnquantizedLinearMethod:
    pass


class UnquantizedEmbeddingMethod:
    pass


class LinearBase(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None, **attributes) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.clone(), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()
        for name, value in attributes.items():
            setattr(self, name, value)


class QKVParallelLinear(LinearBase):
    pass


class MergedColumnParallelLinear(LinearBase):
    pass


class ColumnParallelLinear(LinearBase):
    pass


class RowParallelLinear(LinearBase):
    pass


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight: Tensor, rows: tuple[int, int], padded_rows: int, **attributes) -> None:
        super().__init__()
        held = torch.zeros(padded_rows, weight.shape[1], dtype=weight.dtype)
        held[: rows[1] - rows[0]] = weight[rows[0] : rows[1]]
        self.weight = nn.Parameter(held, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.org_vocab_size = weight.shape[0]
        self.shard_indices = SimpleNamespace(org_vocab_start_index=rows[0], org_vocab_end_index=rows[1])
        for name, value in attributes.items():
            setattr(self, name, value)


class RMSNorm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def heads(matrix: Tensor, chosen: range) -> Tensor:
    """Rows of the chosen heads."""
    return torch.cat([matrix[head * HEAD_SIZE : (head + 1) * HEAD_SIZE] for head in chosen])


def share(size: int, rank: int, num_ranks: int) -> slice:
    return slice(size // num_ranks * rank, size // num_ranks * (rank + 1))


def build_engine(
    weights: dict[str, Tensor], rank: int = 0, num_ranks: int = 1, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """What vLLM keeps on one of `num_ranks` workers."""
    weights = {name: value.to(dtype) for name, value in weights.items()}
    ranks = {"tp_rank": rank, "tp_size": num_ranks}
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    query = range(rank * HEADS // num_ranks, (rank + 1) * HEADS // num_ranks)
    # With more ranks than key heads, neighbouring ranks hold the same head.
    num_keys, replicas = max(KV_HEADS // num_ranks, 1), max(num_ranks // KV_HEADS, 1)
    key = range(rank // replicas * num_keys, rank // replicas * num_keys + num_keys)

    def stacked(kind: str) -> Tensor:
        parts = (("q_proj", query), ("k_proj", key), ("v_proj", key))
        return torch.cat([heads(weights[f"{attention}{name}.{kind}"], chosen) for name, chosen in parts])

    qkv = QKVParallelLinear(
        stacked("weight"),
        stacked("bias"),
        total_num_heads=HEADS,
        total_num_kv_heads=KV_HEADS,
        num_heads=len(query),
        num_kv_heads=num_keys,
        num_kv_head_replicas=replicas,
        head_size=HEAD_SIZE,
        v_head_size=HEAD_SIZE,
        output_sizes=[HEADS * HEAD_SIZE, num_keys * num_ranks * HEAD_SIZE, num_keys * num_ranks * HEAD_SIZE],
        **ranks,
    )
    o_proj = RowParallelLinear(
        weights[attention + "o_proj.weight"][:, share(HEADS * HEAD_SIZE, rank, num_ranks)], **ranks
    )
    gate_up = torch.cat(
        [weights[f"{mlp}{name}.weight"][share(INNER, rank, num_ranks)] for name in ("gate_proj", "up_proj")]
    )
    down = weights[mlp + "down_proj.weight"][:, share(INNER, rank, num_ranks)]
    padded = PADDED_VOCAB // num_ranks
    rows = (min(rank * padded, VOCAB), min((rank + 1) * padded, VOCAB))
    embedding = VocabParallelEmbedding(weights["model.embed_tokens.weight"], rows, padded, **ranks)
    layer = tree(
        self_attn=tree(qkv_proj=qkv, o_proj=o_proj),
        mlp=tree(
            gate_up_proj=MergedColumnParallelLinear(gate_up, output_sizes=[INNER, INNER], **ranks),
            down_proj=RowParallelLinear(down, **ranks),
        ),
    )
    model = tree(
        model=tree(embed_tokens=embedding, layers=nn.ModuleList([layer]), norm=RMSNorm(weights["model.norm.weight"]))
    )
    model.packed_modules_mapping = {  # type: ignore[assignment]
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.add_module("lm_head", nn.Module())
    model.lm_head.weight = embedding.weight  # tied
    return model


class Trainer:
    """Weights of every version, and the updates between them."""

    def __init__(self, storage: str = "fp32", num_updates: int = 4) -> None:
        generator = torch.Generator().manual_seed(3)
        base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        if storage != "fp32":
            base = {name: value.bfloat16().float() for name, value in base.items()}
        self.storage = storage
        self.weights = [base]
        self.updates: list[PolicyUpdate] = []
        for step in range(num_updates):
            self._step(step, generator)
        self.manifest = Manifest(
            run_id=RUN_ID,
            weight_storage=storage,
            base=BaseModel(digest=digest_of(base), digest_bf16=digest_of(rounded(base))),
        )

    def _step(self, step: int, generator: torch.Generator) -> None:
        after = dict(self.weights[-1])
        changes: dict[str, LowRankUpdate] = {}
        for name in TARGETS:
            out, width = SHAPES[name]
            changes[name] = round_factors(
                torch.randn(out, 2, generator=generator) * 0.01,
                torch.randn(2, width, generator=generator),
                factor_bits=4,
                key=derive_key("test", step, name),
            )
            after[name] = merged(after[name] - changes[name].dense(), self.storage, step + 1, name)
        tensors = {"model.norm.weight": after["model.norm.weight"] * 1.25}
        after |= tensors
        digest = digest_of(after) if step % 2 else None
        self.updates.append(PolicyUpdate(step, step + 1, 0, step, changes, tensors, RUN_ID, digest, self.storage))
        self.weights.append(after)


def merged(value: Tensor, storage: str, version: int, name: str) -> Tensor:
    """The merge rule: runs with bf16 planes move ties between bf16 numbers towards the even one, or round to 24 bits."""
    if storage == "fp32":
        return value
    bits = value.view(torch.int32)
    if storage == "split24":
        words = hash_words(derive_key("split24", 0, version, name), torch.arange(value.numel()).view(value.shape))
        bits = (bits + (words % 256).int()) & ~0xFF
        away = torch.where((words >> 8) % 2 == 1, 256, -256).int()
        return torch.where(bits & 0xFFFF == 0x8000, bits + away, bits).view(torch.float32)
    moved = torch.where((bits >> 16) % 2 == 1, bits + 1, bits - 1)
    return torch.where(bits & 0xFFFF == 0x8000, moved, bits).view(torch.float32)


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16().float() for name, value in weights.items()}


def digest_of(weights: dict[str, Tensor]) -> str:
    digest = weights_digest({name: Placement(tuple(v.shape), (whole_piece(v),)) for name, v in weights.items()})
    assert digest is not None
    return digest


def assemble(layouts: list[dict[str, Placement]]) -> dict[str, Tensor]:
    """Canonical weights from the pieces of all workers, fp32."""
    result = {}
    for name, placement in layouts[0].items():
        matrix = torch.full(placement.matrix_shape, torch.nan)
        pieces: list[Piece] = [piece for layout in layouts for piece in layout[name].pieces]
        for piece in pieces:
            matrix[slice(*piece.rows), slice(*piece.columns)] = piece.value(0, piece.tensor.shape[0])
        result[name] = matrix.view(placement.shape)
    return result


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.shape == expected[name].shape, name
        assert torch.equal(value.contiguous().view(torch.int32), expected[name].contiguous().view(torch.int32)), name


@dataclass(frozen=True)
class Trained:
    """A short run.

    Attributes:
        base: folder of the model before.
        folder: folder of the model after all updates.
        log: of the updates.
        weights: {canonical name: weight} after all updates.
        answer: of a fresh engine with the weights after all updates.
    """

    base: Path
    folder: Path
    log: DirectoryLog
    weights: dict[str, torch.Tensor]
    answer: dict[str, list]

    @property
    def updates(self) -> list[logra.PolicyUpdate]:
        return list(self.log.read_since(0))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, model_folder, probe) -> Trained:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    opt = logra.SketchOptimizer(model, lr=3e-4, rank=8)
    publisher = Publisher(DirectoryLog(folder / "updates"), opt, digest_every=5)
    ids = torch.tensor([probe.PROMPT[:16], probe.PROMPT[16:32]])
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        publisher.publish(opt.last_update)
    save(model, model_folder, folder / "model")
    weights = {name: piece.pieces[0].tensor.view(piece.shape) for name, piece in optimizer_layout(opt).items()}
    return Trained(model_folder, folder / "model", publisher.log, weights, fresh_answer(probe, folder / "model"))


def save(model: Any, base: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def fresh_answer(probe: ModuleType, folder: Path, dtype: str = "float32", settings: str = "{}") -> dict[str, list]:
    """What a fresh engine in a process of its own answers; `settings` are JSON."""
    command = [sys.executable, str(probe.__file__), str(folder), dtype, settings]
    output = subprocess.run(command, capture_output=True, text=True, env=os.environ | probe.ENVIRONMENT)
    assert output.returncode == 0, output.stderr[-4000:]
    return json.loads(output.stdout.partition("ANSWER ")[2].splitlines()[0])


@pytest.fixture(scope="session")
def trainers() -> dict[str, Trainer]:
    """One run for each merge rule; nobody changes them."""
    return {storage: Trainer(storage) for storage in ("fp32", "split32", "split24")}


@pytest.fixture
def trainer(trainers) -> Trainer:
    return trainers["fp32"]


@pytest.fixture
def tools() -> SimpleNamespace:
    """What the tests share: fixtures instead of imports, since tests are no package."""
    return SimpleNamespace(
        build_engine=build_engine,
        assemble=assemble,
        assert_same_bits=assert_same_bits,
        save=save,
        fresh_answer=fresh_answer,
        shapes=SHAPES,
        tree=tree,
        layers=SimpleNamespace(
            QKVParallelLinear=QKVParallelLinear,
            LinearBase=LinearBase,
            ColumnParallelLinear=ColumnParallelLinear,
            RowParallelLinear=RowParallelLinear,
        ),
    )


@pytest.fixture(scope="session")
def probe() -> ModuleType:
    """The module engine_probe.py, beside this file."""
    spec = importlib.util.spec_from_file_location("engine_probe", Path(__file__).parent / "engine_probe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model."""
    from logra.rl.default_model import default_model_path

    return default_model_path()


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def share_of_letters(completions, **_):
    """A reward with spread in any group."""
    return [sum(character in LETTERS for character in text) / 32 for text in completions]


def arguments(folder, **overrides):
    from trl.trainer.grpo_config import GRPOConfig

    from logra.rl.grpo import CHECKPOINTING

    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "dataloader_pin_memory": False,
        CHECKPOINTING: False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "use_vllm": True,
        "vllm_max_model_length": 128,
    }
    return GRPOConfig(**(settings | overrides))


@pytest.fixture
def train_with_trl(model_folder, tmp_path, probe):
    """Trains three steps on the default model and returns the trainer."""
    from datasets import Dataset

    from logra.rl import GRPOTrainer

    os.environ.update(probe.ENVIRONMENT)
    engines = []

    def run(**overrides):
        trainer = GRPOTrainer(
            model=str(model_folder),
            reward_funcs=share_of_letters,
            args=arguments(tmp_path / "trl", model_init_kwargs={"dtype": "float32"}, **overrides),
            train_dataset=Dataset.from_list([{"prompt": f"The {word}"} for word in ("cat", "dog", "sun", "sea")]),
            logra=logra.Config(lr=1e-3, rank=8),
        )
        if hasattr(trainer.vllm_generation, "llm"):
            engines.append(trainer.vllm_generation.llm)
        trainer.train()
        return trainer

    yield run
    while engines:
        probe.close(engines.pop())
