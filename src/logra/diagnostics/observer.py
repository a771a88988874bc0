"""What the diagnostics of a step have in common: when they are due, and on which responses they measure.

Contract: a probe changes nothing of the training. It reads, draws from generators of its own, and measures at the calls of
`step()` with number 0, `every`, 2 `every`, ...; a step that is skipped is not measured, and the next one comes at its own
multiple. Between measurements it costs nothing.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra import distributed
from logra.contracts import StepView
from logra.errors import ConfigError, NonFiniteProbeError, ProbeError
from logra.hashing import derive_key
from logra.trust.probe import Probe, build_probe

logger = logging.getLogger("logra")

MAX_RESPONSE_TOKENS = 4096
"""Generated tokens of one response that are looked at, as in `TrustRegion`."""


@dataclass(frozen=True)
class TaskBatch:
    """A few responses of the step's own batch.

    Attributes:
        probe: the responses.
        advantages: fp32 [num_responses], in the order of the probe; None if they were not given.
    """

    probe: Probe
    advantages: Tensor | None


class Diagnostic:
    """Base of the probes: an observer of a `SketchOptimizer` that measures every `every` steps.

    Args:
        every: calls of `step()` from one measurement to the next, at least 1.
        num_responses: responses drawn from the batch given with `set_batch`, at least 1; all if there are fewer.
        seed: of the draw.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, *, every: int, num_responses: int, seed: int) -> None:
        for name, value, least in (("every", every, 1), ("num_responses", num_responses, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{type(self).__name__}: {name}={value!r}: an integer of at least {least} is allowed")
        self.every = every
        self.num_responses = num_responses
        self.seed = seed
        self.seconds = 0.0
        """What the last measurement took, without the dense gradients that backward formed; 0 for a step not measured."""
        self._step = 0
        self._batch: TaskBatch | None = None

    def attach(self, optimizer: Any) -> None:
        """Observe the steps of a `SketchOptimizer`, from the next backward pass on.

        Raises:
            ConfigError: the optimizer's targets do not suit.
        """
        optimizer.add_observer(self)

    @property
    def is_due(self) -> bool:
        """Whether the coming step is measured."""
        return self._step % self.every == 0

    def set_batch(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float = 1.0,
        advantages: Tensor | None = None,
    ) -> None:
        """Give the responses behind the coming step, before `step()`. Does nothing where no measurement is due.

        Args:
            input_ids: int [batch, tokens].
            attention_mask: 1 at real tokens, [batch, tokens].
            loss_mask: 1 at generated tokens, [batch, tokens].
            temperature: sampling temperature, > 0.
            advantages: [batch], of each response.

        Raises:
            ProbeError: the tensors are unusable.
        """
        if not self.is_due:
            return
        if advantages is not None and advantages.shape != input_ids.shape[:1]:
            raise ProbeError(
                f"advantages has shape {tuple(advantages.shape)}: one number per response is needed, [{len(input_ids)}]."
            )
        generator = torch.Generator().manual_seed(derive_key("diagnostic", self.seed, self._step) % 2**63)
        probe = build_probe(
            input_ids,
            attention_mask,
            loss_mask,
            temperature=temperature,
            min_responses=self.num_responses,
            min_tokens=1,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            generator=generator,
        )
        chosen = None if advantages is None else advantages.detach().float()[probe.selected.to(advantages.device)]
        self._batch = TaskBatch(probe, chosen)

    # ---- logra.contracts.StepObserver ----

    def attached(self, targets: Mapping[str, nn.Module]) -> None:
        """See `logra.contracts.StepObserver`."""

    def detached(self) -> None:
        """See `logra.contracts.StepObserver`."""

    def begin_window(self, step: int) -> None:
        """See `logra.contracts.StepObserver`. A batch stays until the step it was given for is over."""
        if step != self._step:
            self._step, self._batch = step, None

    def observe(self, view: StepView) -> dict[str, float]:
        """See `logra.contracts.StepObserver`. A value that is not finite is left out, with a warning."""
        self.seconds = 0.0
        if not self.is_due:
            return {}
        start = time.perf_counter()
        try:
            return self.measure(view)
        except NonFiniteProbeError as error:
            # Whether such a step may be taken is the trust region's business, not that of a measurement.
            logger.warning("%s: step %d is not measured: %s", type(self).__name__, view.step, error)
            return {}
        except ProbeError as error:
            raise ProbeError(
                f"{type(self).__name__} cannot measure: {error} A diagnostic has no other method: leave it out."
            ) from error
        finally:
            self.seconds = time.perf_counter() - start

    def measure(self, view: StepView) -> dict[str, float]:
        """The numbers of one step that is due."""
        raise NotImplementedError


def over_processes(measure: Callable[[], list[float]] | None, num_values: int) -> list[float]:
    """The numbers that `measure` returns, averaged over the processes that have something to measure.

    Errors are raised on all processes together: one that raised alone would leave the others waiting for it.

    Args:
        measure: returns `num_values` numbers; None on a process without a batch. At least one process has one.
        num_values: how many they are.

    Raises:
        ProbeError, NonFiniteProbeError: `measure` did on this or another process.
    """
    values: list[float] = []
    error: ProbeError | None = None
    try:
        values = [] if measure is None else measure()
    except ProbeError as probe_error:
        error = probe_error
    soft = isinstance(error, NonFiniteProbeError)
    failed, failed_softly = distributed.any_process([error is not None and not soft, soft])
    if failed:
        raise ProbeError("the probe of another process failed.") if error is None or soft else error
    if failed_softly:
        raise error or NonFiniteProbeError("the probe of another process met values that are not finite.")
    if distributed.num_processes() == 1:
        return values
    weight = float(measure is not None)
    return [distributed.mean(value, weight) for value in (values or [0.0] * num_values)]
