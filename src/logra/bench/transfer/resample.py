"""An update of other shapes and a lower rank, from the factors of a real one.

Row i of a new factor (column, on the in side) is a row of the real factor of the same kind of layer, drawn with
replacement, with the exponent that it had. Its integers come in a random order and with random signs: otherwise zstd
would find the copies, which no training makes. What decides the size of a packet is kept: how the integers are
distributed, how they share a scale, and how the exponents are.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logra.update import LowRankUpdate, PolicyUpdate


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The target weights of a decoder model of the Llama family.

    Attributes:
        name: what it is called.
        num_weights: of the whole model, tied ones once.
        num_layers, hidden, intermediate: as in the model's configuration.
        kv_width: number of key-value heads times their width.
    """

    name: str
    num_weights: int
    num_layers: int
    hidden: int
    intermediate: int
    kv_width: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the targets of one layer, by the last parts of their names."""
        hidden, intermediate, kv_width = self.hidden, self.intermediate, self.kv_width
        return {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (kv_width, hidden),
            "self_attn.v_proj.weight": (kv_width, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }


QWEN_7B = Architecture(
    name="Qwen2.5-7B", num_weights=7_615_616_512, num_layers=28, hidden=3584, intermediate=18944, kv_width=512
)
SMOLLM2 = Architecture(
    name="SmolLM2-135M", num_weights=134_515_008, num_layers=30, hidden=576, intermediate=1536, kv_width=192
)


def resampled(update: PolicyUpdate, architecture: Architecture, rank: int, seed: int = 0) -> PolicyUpdate:
    """An update with the shapes of a model, drawn from a real one.

    Args:
        update: of a model of the same family, without sign factors.
        architecture: of the other model. Its layers take the real layers in proportion.
        rank: at most the rank of the update.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = sorted({_layer(name) for name in update.weights})
    weights = {}
    for layer in range(architecture.num_layers):
        source = layers[layer * len(layers) // architecture.num_layers]
        for kind, shape in architecture.shapes().items():
            real = update.weights[f"model.layers.{source}.{kind}"]
            weights[f"model.layers.{layer}.{kind}"] = _resampled_weight(real, shape, rank, generator)
    return replace(update, weights=weights, tensors={})


def _resampled_weight(
    real: LowRankUpdate, shape: tuple[int, int], rank: int, generator: torch.Generator
) -> LowRankUpdate:
    assert real.factor_out is not None and real.factor_in is not None
    factor_out, exponent_out = _drawn(real.factor_out, real.exponent_out, shape[0], rank, generator)
    factor_in, exponent_in = _drawn(real.factor_in.T, real.exponent_in, shape[1], rank, generator)
    return LowRankUpdate(shape, rank, real.factor_bits, factor_out, factor_in.T.contiguous(), exponent_out, exponent_in)


def _drawn(
    factor: Tensor, exponent: Tensor, num_rows: int, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    rows = torch.randint(len(factor), (num_rows,), generator=generator)
    order = torch.rand(num_rows, factor.shape[1], generator=generator).argsort(1)[:, :rank]
    signs = 2 * torch.randint(2, (num_rows, rank), generator=generator, dtype=torch.int8) - 1
    return factor[rows].gather(1, order) * signs, exponent[rows]


def _layer(name: str) -> int:
    return int(name.split(".layers.")[1].split(".")[0])
