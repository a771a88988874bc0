"""Where the weights that an update names live in a vLLM model: which rows of which fused tensor, on this rank.

vLLM stacks q, k and v into `qkv_proj` and gate and up into `gate_up_proj` (the model's `packed_modules_mapping` says
which), and with tensor parallelism keeps on every rank

    QKVParallelLinear           rows of the rank's heads of q, k and v; k and v heads are repeated over ranks if too few
    MergedColumnParallelLinear  an equal share of the rows of each part
    ColumnParallelLinear        an equal share of the rows
    RowParallelLinear           an equal share of the columns; its bias whole
    ReplicatedLinear, norms     everything
    VocabParallelEmbedding, ParallelLMHead   a range of rows, followed by padding that no weight has

Layers are known by the exact names of their classes: what else a subclass does to its rows cannot be known.

Contract: the pieces are views of the engine's own parameters. What has no place here is listed with the reason, by the
name that an update would use: quantised layers, layers of unknown kinds, weights that the engine has packed elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from logra.hashing import Range
from logra.sync import Piece, Placement
from logra.sync.layout import whole_piece

_UNQUANTISED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class EngineLayout:
    """The weights of an engine.

    Attributes:
        placements: {canonical name: its pieces on this rank}.
        refused: {canonical name: why no update can change it}.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """Rows of one canonical weight, as a tensor stacks them.

    Attributes:
        name: canonical name.
        num_rows: of the whole weight.
        rows: half-open range that this rank holds.
    """

    name: str
    num_rows: int
    rows: Range


def engine_layout(model: nn.Module) -> EngineLayout:
    """The layout of a loaded vLLM model. A tied parameter appears once, under its first name.

    Args:
        model: as the worker runs it.
    """
    layout = EngineLayout()
    packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", None) or {})
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        prefix, _, own_name = module_name.rpartition(".")
        names = [f"{prefix}.{part}".lstrip(".") for part in packed.get(own_name, [own_name])]
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            reason = _refusal(module, parameter)
            if reason is None:
                layout.placements.update(_placements(module, names, attribute, parameter.detach()))
            else:
                # Quantised layers name their tensors otherwise; an update would say "weight".
                attributes = {attribute, "weight"} if hasattr(module, "quant_method") else {attribute}
                layout.refused.update({f"{name}.{item}": reason for name in names for item in attributes})
    return layout


def _refusal(module: nn.Module, parameter: nn.Parameter) -> str | None:
    """Why a parameter has no place in the layout; None if it has one."""
    kind = type(module).__name__
    method = type(getattr(module, "quant_method", None)).__name__
    if hasattr(module, "quant_method") and method not in _UNQUANTISED:
        return f"it is quantised in the engine ({kind} with {method})"
    if parameter.numel() == 0:
        return (
            "the engine has packed it for its CPU kernels, out of reach: logra's plugin was not loaded before the model "
            "(is it listed in VLLM_PLUGINS, is logra installed where the engine runs?)"
        )
    if parameter.dtype not in _DTYPES:
        return f"it is kept in {parameter.dtype}; allowed are torch.float32 and torch.bfloat16"
    is_linear = any(base.__name__ == "LinearBase" for base in type(module).__mro__)
    if kind not in _KINDS and (is_linear or getattr(module, "tp_size", 1) > 1):
        return f"its layer is a {kind}, which may keep its rows in an order of its own"
    return None


def _placements(
    module: nn.Module, names: Sequence[str], attribute: str, tensor: Tensor
) -> Iterator[tuple[str, Placement]]:
    """Canonical names and placements of the weights that one parameter holds."""
    if tensor.ndim == 0:
        yield f"{names[0]}.{attribute}", Placement((), (whole_piece(tensor),))
        return
    parts, columns, num_columns = _KINDS.get(type(module).__name__, _whole)(module, names, tensor)
    is_matrix = tensor.ndim == 2
    held = sum(part.rows[1] - part.rows[0] for part in parts)
    matrix = (tensor if is_matrix else tensor.reshape(tensor.shape[0], -1))[:held]  # without padding rows
    pieces: dict[str, list[Piece]] = {}
    for part, block in zip(parts, matrix.split([part.rows[1] - part.rows[0] for part in parts]), strict=True):
        pieces.setdefault(part.name, []).append(Piece(block, part.rows, columns))
    num_rows = {part.name: part.num_rows for part in parts}
    for name, found in pieces.items():
        shape = (num_rows[name], num_columns) if is_matrix else (num_rows[name], *tensor.shape[1:])
        yield f"{name}.{attribute}", Placement(shape, tuple(found))


def _whole(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    """Everything on this rank; stacked where a module without tensor parallelism stacks several weights."""
    width = _width(tensor)
    sizes = [tensor.shape[0]] if len(names) == 1 else list(module.output_sizes)
    parts = [_Part(name, size, (0, size)) for name, size in zip(names, sizes, strict=True)]
    return parts, (0, width), width


def _column(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    size = tensor.shape[0]
    part = _Part(names[0], size * module.tp_size, (module.tp_rank * size, (module.tp_rank + 1) * size))
    return [part], (0, _width(tensor)), _width(tensor)


def _row(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    rows = _Part(names[0], tensor.shape[0], (0, tensor.shape[0]))
    if tensor.ndim == 1:  # the bias is added once, after the reduction
        return [rows], (0, 1), 1
    width = tensor.shape[1]
    return [rows], (module.tp_rank * width, (module.tp_rank + 1) * width), width * module.tp_size


def _merged(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    shares = [(size, size // module.tp_size, module.tp_rank) for size in module.output_sizes]
    return _stacked(names, shares), (0, _width(tensor)), _width(tensor)


def _qkv(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    value_size = getattr(module, "v_head_size", module.head_size)
    shares = [
        (module.total_num_heads * module.head_size, module.num_heads * module.head_size, module.tp_rank),
        (module.total_num_kv_heads * module.head_size, module.num_kv_heads * module.head_size, kv_rank),
        (module.total_num_kv_heads * value_size, module.num_kv_heads * value_size, kv_rank),
    ]
    return _stacked(names, shares), (0, _width(tensor)), _width(tensor)


def _vocabulary(module: Any, names: Sequence[str], tensor: Tensor) -> tuple[list[_Part], Range, int]:
    indices = module.shard_indices
    rows = (indices.org_vocab_start_index, indices.org_vocab_end_index)
    return [_Part(names[0], module.org_vocab_size, rows)], (0, _width(tensor)), _width(tensor)


def _stacked(names: Sequence[str], shares: Sequence[tuple[int, int, int]]) -> list[_Part]:
    """Parts of a fused tensor, from (rows of the whole part, rows here, index of the share) of each.

    One name for several parts: the checkpoint stacks them as well, and they are ranges of one canonical weight.
    """
    if len(names) == len(shares):
        return [
            _Part(name, whole, (index * size, (index + 1) * size))
            for name, (whole, size, index) in zip(names, shares, strict=True)
        ]
    total, offset, parts = sum(whole for whole, _, _ in shares), 0, []
    for whole, size, index in shares:
        parts.append(_Part(names[0], total, (offset + index * size, offset + (index + 1) * size)))
        offset += whole
    return parts


def _width(tensor: Tensor) -> int:
    """Columns of a tensor of any shape, seen as a matrix."""
    return tensor[0].numel()


_KINDS = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _merged,
    "ColumnParallelLinear": _column,
    "RowParallelLinear": _row,
    "ReplicatedLinear": _whole,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
}
