"""The training step that is traced: the real code, over fake tensors.

Two optimizer steps, of which the second counts: by then the optimizer has its state, and the update of the step before is
still held to be sent. Each is a forward with log-probabilities in chunks, a backward with activation checkpointing, and
the step of the method's own optimizer; the sketched methods price their step on two responses first.

Contract: no number is computed. Whatever the code asks of a value is answered as in a step that goes well (`stand_in`).
"""

import dataclasses
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from logra.chunked_head import chunk_tokens, chunked_scores, needs_chunks, scores, trains_shared_weight
from logra.errors import ConfigError, LograError
from logra.memory import Ledger, Report
from logra.memory.timeline import Moments
from logra.optim import SketchOptimizer, ownership
from logra.optim.setup import WEIGHT_DTYPES
from logra.planner.layers import continued, depths, with_layers
from logra.planner.models import meta_model
from logra.planner.options import PlanOptions
from logra.planner.sharding import owners_by_layer, shard
from logra.planner.stand_in import StandIn
from logra.sketch.experts import Expert
from logra.trust import forward as trust_forward
from logra.trust.probe import Probe

_PROBE_RESPONSES = 2
LORA_RANK = 16


def trace(config: Any, method: str, options: PlanOptions) -> Report:
    """Live bytes of a step, by category and phase, on one of `options.num_gpus` processes.

    Args:
        config: transformers configuration of the model.
        method: logra, paper, adamw or lora.
        options: sizes; with `every_layer` all layers are traced, else a few, from which the others follow (`layers`).

    Raises:
        ConfigError: the model's forward cannot be traced, its layers do not follow from each other, or the step would be
            refused where it runs.
    """
    with _explained(config, method):
        found = None if options.every_layer else depths(config)
    if found is None:
        return _traced(config, method, options)[0]
    with mock.patch.object(
        ownership, "owners", owners_by_layer
    ):  # layers are alike: so is what this process has of them
        smaller, larger = (
            _traced(with_layers(config, depth), method, options)[1] for depth in (found.smaller, found.larger)
        )
    report = continued(smaller, larger, found)
    if report is None:
        raise ConfigError(
            f"model: steps of {found.smaller} and {found.larger} layers of this model are not alike (method={method}); "
            f"trace every layer (every_layer=True, --every-layer), which takes longer"
        )
    return report


def _traced(config: Any, method: str, options: PlanOptions) -> tuple[Report, Moments]:
    # Cycles are collected between steps only, so that the events of a step do not depend on when Python collects them.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _explained(config, method), _process_group(options.num_gpus), _quiet():
            return _Step(config, method, options).run()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _explained(config: Any, method: str) -> Iterator[None]:
    """Turns what a model raises into an error that names it."""
    try:
        yield
    except LograError:
        raise
    except Exception as error:
        kind = getattr(config, "model_type", type(config).__name__)
        text = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: the step of a {kind} model with method={method} cannot be traced ({type(error).__name__}: "
            f"{text[:300]})"
        ) from error


class _Step:
    """One model, one optimizer, and the step over both."""

    def __init__(self, config: Any, method: str, options: PlanOptions) -> None:
        self.options, self.method, self.vocabulary = options, method, int(config.vocab_size)
        self.fake = FakeTensorMode()
        mesh = init_device_mesh("cpu", (options.num_gpus,)) if options.num_gpus > 1 else None
        with torch.device("meta"):
            self.model = self._build(config)
        self.policy: Any = self.model.get_base_model() if method == "lora" else self.model
        with self.fake, StandIn():
            _materialise(self.model)
            if mesh is not None:
                shard(self.model, mesh, torch.bfloat16 if options.precision == "bf16" else None)
            self.optimizer = self._build_optimizer()
        if options.precision == "bf16" and mesh is None:
            # As accelerate does it. FSDP2 gathers weights in the compute dtype itself.
            self.model.forward = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
        self.makes_chunks = options.chunked_logits and needs_chunks(options.num_scored_tokens, self.vocabulary)
        if self.makes_chunks and mesh is not None and trains_shared_weight(self.model):
            raise ConfigError(
                f"method={method} with num_gpus={options.num_gpus}: the head of this model is its embedding, which {method} "
                f"trains, and whose gradient cannot be taken chunk by chunk under FSDP2. Plan all logits at once "
                f"(chunked_logits=False, --whole-logits), or methods that freeze it"
            )
        shape = (options.micro_batch, options.seq_len)
        self.ids = self.fake.from_tensor(torch.zeros(shape, dtype=torch.int64))
        self.mask = self.fake.from_tensor(torch.ones(shape, dtype=torch.int64))

    def _build(self, config: Any) -> Any:
        options = self.options
        sketched = self.method in ("logra", "paper")
        dtype = WEIGHT_DTYPES[options.weight_storage] if sketched else torch.float32
        model = meta_model(config, dtype)
        if options.activation_checkpointing:
            # The state of the random number generator is not a tensor of the fake mode; there is no dropout to repeat.
            arguments = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        if self.method == "lora":
            from peft import LoraConfig, get_peft_model

            rank = options.rank or LORA_RANK
            adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapter)
            model.enable_input_require_grads()
        return model.train()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        if self.method in ("logra", "paper"):
            optimizer = SketchOptimizer(self.model, self.options.sketch_config(self.method))
            if any(isinstance(target.module, Expert) for target in optimizer.targets):
                raise ConfigError(
                    f"method={self.method}: a model whose experts are sketched cannot be planned for, since which of them "
                    f"run depends on the data"
                )
            return optimizer
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # One weight after the other, as training with little memory does; all at once takes a second copy of the state.
        return torch.optim.AdamW(trained, lr=1e-5, foreach=False)

    def run(self) -> tuple[Report, Moments]:
        """Trace both steps; the report of the second and its events."""
        held = {"rollout": (self.ids, self.mask)}
        with self.fake, StandIn(), Ledger(self.model, self.optimizer, held=held, device=torch.device("cpu")) as ledger:
            for is_counted in (False, True):
                if is_counted:
                    gc.collect()
                    ledger.restart()
                self._forward_backward()
                self._optimizer_step(is_priced=is_counted)
                moments = ledger.moments()
                ledger.settle()
            return ledger.report(), moments

    def _forward_backward(self) -> None:
        options = self.options
        num_tokens = options.seq_len - options.num_prompt_tokens
        chosen = self.ids[:, -num_tokens:]
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if self.makes_chunks:
            chunk = chunk_tokens(self.vocabulary)
            log_probs, _ = chunked_scores(
                self.model, self.policy.base_model, inputs, chosen, chunk=chunk, temperature=1.0
            )
        else:
            logits = self.model(**inputs, logits_to_keep=num_tokens + 1).logits[:, :-1]
            log_probs, _ = scores(logits, chosen, 1.0, entropy_has_grad=False)
            del logits
        # GRPO's loss with an advantage of one: the ratio to the policy that sampled.
        loss = -(log_probs - log_probs.detach()).exp().mean()
        del log_probs
        loss.backward()

    def _optimizer_step(self, *, is_priced: bool) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, SketchOptimizer):
            # The first step only makes the state.
            config = self.options.sketch_config(self.method)
            optimizer.config = config if is_priced else dataclasses.replace(config, trust=None)
            if optimizer.config.trust is not None:
                optimizer._probe = self._probe()
        optimizer.step()
        optimizer.zero_grad()

    def _probe(self) -> Probe:
        """Two responses, made of real tensors (drawing them takes values) and turned into fake ones."""
        options = self.options
        assert isinstance(self.optimizer, SketchOptimizer)
        trust: Any = self.optimizer.config.trust
        with _disable_current_modes():
            ids = torch.ones(_PROBE_RESPONSES, options.seq_len, dtype=torch.int64)
            generated = torch.ones_like(ids)
            generated[:, : options.num_prompt_tokens] = 0
            probe = trust.make_probe(
                input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=generated, temperature=1.0
            )
            batches = tuple(
                dataclasses.replace(
                    batch,
                    **{name: self.fake.from_tensor(value) for name, value in vars(batch).items()
                       if isinstance(value, Tensor)},
                )
                for batch in probe.batches
            )  # fmt: skip
        return dataclasses.replace(probe, batches=batches)


def _materialise(model: nn.Module) -> None:
    """Fake tensors in the place of the meta tensors that the model was built with; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


@contextmanager
def _process_group(num_processes: int) -> Iterator[None]:
    """A process group of which this is one process and nobody the others."""
    if num_processes == 1:
        with _unshared_prompts():
            yield
        return
    if dist.is_initialized():
        raise ConfigError(
            "num_gpus > 1 cannot be planned where a process group is running: plan in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    try:
        with _unshared_prompts():
            yield
    finally:
        dist.destroy_process_group()


def _unshared_prompts() -> Any:
    """Which responses share a prompt is a question of values: none do, which takes the most memory."""
    return mock.patch.object(trust_forward, "split_prefixes", return_value=None)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
