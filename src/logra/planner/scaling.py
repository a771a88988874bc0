"""How the cost of a step grows with the number of GPUs and of replicas: arithmetic on the shapes of a model.

Per GPU, with FSDP2 over N GPUs (a tensor of `rows` gives a GPU at most ceil(rows / N) of them), rank r, bytes:

    AdamW    weights 4 P/N, gradients 4 P/N, moments 8 P/N
    LoRA     weights 4 P/N, adapters 4 A/N, their gradients 4 A/N, their moments 8 A/N      A = sum of r (out + in)
    logra    weights 4 P/N, momentum 4 (r (out + in) + in) of the targets that the GPU owns, and whole on every GPU, summed
             over targets [out, in]: sketches 4 r (out + 2 in), the last update (r + 2) (out + in), input scales 8 in

These are the bytes that the method or the number of GPUs decides, when the backward of the last micro-batch ends. Gathered
layers, activations and logits come on top; they belong to the micro-batch (`logra plan` traces them). P counts all
parameters: AdamW trains all, `logra` its targets, LoRA adapters of the same targets.

`logra` is the default: two_sided, spectral, momentum, input scaling, fp32 weights, no other weights trained.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from logra.distributed import BUCKET_BYTES
from logra.errors import ConfigError
from logra.optim import Config
from logra.optim.ownership import shared_out
from logra.planner.models import meta_model

Method = Literal["adamw", "lora", "logra"]
METHODS: tuple[Method, ...] = ("adamw", "lora", "logra")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The parameters of a model.

    Attributes:
        targets: [out, in] of every weight that is sketched, or that LoRA adapts.
        others: shapes of all other parameters, tied ones once.
        num_layers: decoder layers.
    """

    targets: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, ...], ...]
    num_layers: int

    @property
    def num_parameters(self) -> int:
        """P, of targets and others."""
        return sum(map(math.prod, (*self.targets, *self.others)))

    def factor_entries(self, *, out: int = 1, in_: int = 1) -> int:
        """Sum over targets of out · `out` + in · `in_`: what a rank of one comes to."""
        return sum(rows * out + columns * in_ for rows, columns in self.targets)


def model_shapes(config: Any) -> Shapes:
    """The shapes of a transformers configuration, from a model without storage.

    Raises:
        ConfigError: no module has the name of a target.
    """
    model = meta_model(config)
    is_target = {
        name: name.split(".")[-2:] in [[module, "weight"] for module in Config().target_modules]
        for name, _ in model.named_parameters()
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    targets = tuple((shape[0], shape[1]) for name, shape in shapes.items() if is_target[name])
    if not targets:
        raise ConfigError(f"model: a {config.model_type} model has none of {', '.join(Config().target_modules)}")
    others = tuple(shape for name, shape in shapes.items() if not is_target[name])
    return Shapes(targets=targets, others=others, num_layers=int(config.num_hidden_layers))


# ---- memory ----


def held_bytes(shapes: Shapes, method: Method, num_gpus: int, rank: int) -> dict[str, int]:
    """Bytes on the GPU that holds most, by the categories of `logra plan`, when the last backward ends.

    Args:
        shapes: of the model.
        method: adamw, lora or logra.
        num_gpus: N.
        rank: of the sketches or the adapters.
    """
    targets, others = (4 * sum(_shard(shape, num_gpus) for shape in part) for part in (shapes.targets, shapes.others))
    held = {"weights": targets, "non_target_parameters": others}
    if method == "adamw":
        return held | {"gradients": targets + others, "optimizer_state": 2 * (targets + others)}
    if method == "lora":
        adapters = 4 * sum(_shard(shape, num_gpus) for shape in _adapters(shapes, rank))
        held["non_target_parameters"] += adapters
        return held | {"gradients": adapters, "optimizer_state": 2 * adapters}
    return held | {
        "sketches": 4 * rank * shapes.factor_entries(in_=2),
        "optimizer_state": _moments_bytes(shapes, num_gpus, rank) + 2 * 4 * shapes.factor_entries(out=0),
        "sync": _integer_bytes(shapes, rank),
    }


def _moments_bytes(shapes: Shapes, num_gpus: int, rank: int) -> int:
    """Momentum and its input scales, of the targets of the GPU that owns most."""
    sizes = [sum(shape) for shape in shapes.targets]
    loads = [0] * num_gpus
    for shape, owner in zip(shapes.targets, shared_out(sizes, num_gpus), strict=True):
        loads[owner] += 4 * (rank * sum(shape) + shape[1])
    return max(loads)


def _shard(shape: tuple[int, ...], num_gpus: int) -> int:
    """Elements of the largest of N shards by rows."""
    return math.ceil(shape[0] / num_gpus) * math.prod(shape[1:])


def _adapters(shapes: Shapes, rank: int) -> Iterator[tuple[int, int]]:
    for rows, columns in shapes.targets:
        yield from ((rank, columns), (rows, rank))


def _integer_bytes(shapes: Shapes, rank: int) -> int:
    """An update in memory: int8 factors and int16 exponents."""
    return (rank + 2) * shapes.factor_entries()


# ---- communication between the GPUs that train ----


@dataclass(frozen=True, kw_only=True)
class Links:
    """Assumed links. None of these numbers was measured."""

    gpus_per_node: int = 8
    """GPUs of a machine; up to so many use the links inside it."""
    inside_gb_per_s: float = 300.0
    """What a GPU sends to its neighbour inside a machine, GB/s (10^9 bytes)."""
    between_gb_per_s: float = 40.0
    """What a GPU sends to another machine, GB/s: a network of 400 Gbit/s for each GPU, at 80 %."""
    hop_us: float = 10.0
    """Time that a message takes besides its bytes, microseconds."""
    rollout_gb_per_s: float = 10.0
    """What the trainer's machine sends to replicas, GB/s: a network of 100 Gbit/s at 80 %."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(Links):
            value = getattr(self, item.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{item.name}={value!r}: a finite number above 0")

    def bandwidth(self, num_gpus: int) -> float:
        """Bytes/s of the slowest link of a ring over all GPUs."""
        return 1e9 * (self.inside_gb_per_s if num_gpus <= self.gpus_per_node else self.between_gb_per_s)


@dataclass(frozen=True)
class Traffic:
    """What one update costs between the GPUs that train, beside the gathering of weights, which no method changes.

    Attributes:
        sent_bytes: by each GPU.
        seconds: if nothing else ran meanwhile.
    """

    sent_bytes: float
    seconds: float


def reduction(
    shapes: Shapes, method: Method, num_gpus: int, rank: int, num_micro_batches: int, links: Links
) -> Traffic:
    """Reducing the gradient of one update, and for `logra` handing out factors and integers.

    FSDP2 reduce-scatters dense gradients and those of adapters after every micro-batch, one group a layer, here in bf16.
    Sketches are reduced once, in fp32 buckets, each to the owner of its target; each owner then broadcasts the fp32 factors
    of its proposals, in buckets too, for a trust region to price, and the integers. One all-reduce sums the second moments of
    all input features. Bytes are those of rings, over which the owners' shares come to a reduce-scatter and all-gathers. A
    collective takes log2 N hops besides, as in trees.

    Args:
        shapes: of the model.
        method: adamw, lora or logra.
        num_gpus: N.
        rank: of the sketches or the adapters.
        num_micro_batches: per update.
        links: between the GPUs.
    """
    share, bandwidth = (num_gpus - 1) / num_gpus, links.bandwidth(num_gpus)
    if method == "logra":
        sketches, factors = 4 * rank * shapes.factor_entries(in_=2), 4 * rank * shapes.factor_entries()
        num_owners = min(num_gpus, len(shapes.targets))
        # Buckets of sketches and of factors are cut at each owner's last one; its integers are sent at once.
        num_rounds = math.ceil(sketches / BUCKET_BYTES) + math.ceil(factors / BUCKET_BYTES) + 3 * num_owners + 1
        moments = 4 * (shapes.factor_entries(out=0) + len(shapes.targets))
        sent = share * (sketches + factors + _integer_bytes(shapes, rank) + 2 * moments)
    else:
        trained = shapes.num_parameters if method == "adamw" else rank * shapes.factor_entries()
        num_rounds = num_micro_batches * (shapes.num_layers + 1)
        sent = share * num_micro_batches * 2 * trained
    num_hops = num_rounds * math.ceil(math.log2(num_gpus))
    return Traffic(sent, sent / bandwidth + num_hops * links.hop_us * 1e-6)


# ---- from the trainer to the replicas ----


def update_bytes(shapes: Shapes, method: Method, rank: int, bits_per_integer: float) -> float:
    """What one replica needs for one update: all weights in bf16, adapters in bf16, or a packet.

    Args:
        shapes: of the model.
        method: adamw, lora or logra.
        rank: of the update or the adapters.
        bits_per_integer: size of a packet over the number of its integers.
    """
    entries = rank * shapes.factor_entries()
    return {"adamw": 2 * shapes.num_parameters, "lora": 2 * entries, "logra": entries * bits_per_integer / 8}[method]


def fan_out(num_bytes: float, num_replicas: int, links: Links) -> tuple[float, float]:
    """Seconds until every replica has the bytes: sent to one after the other, and by a pipelined broadcast.

    The first is what a log's server does; the second, in which every replica passes on what it gets, is the least that any
    way of sending can take.
    """
    once = num_bytes / (links.rollout_gb_per_s * 1e9)
    hop = links.hop_us * 1e-6
    return num_replicas * (once + hop), once + num_replicas * hop
