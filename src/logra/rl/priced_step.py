"""Any torch optimizer under a KL budget: its step is taken on trial, priced, scaled and only then kept.

For the dense baselines, so that they can be compared with sketches at an equal KL. The step's displacement
d = before - after, of every parameter with a gradient, enters the same tangent and the same check as a sketched update:

    parameter <- before - alpha d

Costs two copies of what is trained. The optimizer's moments advance also where the step is scaled or rejected.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from logra.contracts import TrustPolicy
from logra.errors import NonFiniteProbeError, ProbeError


class PricedStep:
    """Attaches a trust policy to an optimizer through its step hooks.

    Args:
        optimizer: whose `step()` is to be priced from now on.
        model: causal language model that the parameters belong to.
        trust: prices the step; a step that it rejects leaves the parameters as they were.

    Example:
        >>> priced = PricedStep(torch.optim.AdamW(model.parameters(), lr=3e-5), model, logra.TrustRegion(kl_budget=1e-3))
        >>> loss.backward()
        >>> priced.set_probe(input_ids=ids, attention_mask=mask, loss_mask=generated)
        >>> priced.optimizer.step()
        >>> priced.diagnostics["realised_kl"]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, trust: TrustPolicy) -> None:
        self.optimizer = optimizer
        self.model = model
        self.trust = trust
        self.diagnostics: dict[str, float] = {}
        """Of the last step: predicted_kl, realised_kl (nats per generated token), alpha, kl_budget, num_shrinks."""
        self.displacements: dict[nn.Parameter, Tensor] = {}
        """What the last step subtracted from each parameter; empty if it was skipped."""
        self.num_skipped = 0
        self._num_steps = 0
        self._before: dict[nn.Parameter, Tensor] = {}
        self._probe: Any = None
        self._mismatch = 0.0
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._price)

    def set_probe(self, *, mismatch: float = 0.0, **tensors: Any) -> None:
        """Give the responses on which the next step is priced, as `SketchOptimizer.set_probe`."""
        generator = torch.Generator().manual_seed(self._num_steps)
        self._probe = self.trust.make_probe(**tensors, generator=generator)
        self._mismatch = mismatch

    def state_dict(self) -> dict[str, int]:
        """What the next steps depend on besides the optimizer's own state."""
        return {"num_steps": self._num_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what `state_dict` returned."""
        self._num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def _remember(self, *_: Any) -> None:
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        self._before = {parameter: parameter.detach().clone() for parameter in parameters if parameter.grad is not None}

    @torch.no_grad()
    def _price(self, *_: Any) -> None:
        whole = {parameter: before - parameter for parameter, before in self._before.items()}
        for parameter, before in self._before.items():
            parameter.copy_(before)
        self._before.clear()
        self.diagnostics, self.displacements = {}, {}
        with suppress(NonFiniteProbeError):
            if any(moved.any() for moved in whole.values()):
                self.displacements = self._allowed(whole)
        for parameter, moved in self.displacements.items():
            parameter.sub_(moved)
        self._num_steps += bool(self.displacements)
        self.num_skipped += not self.displacements
        self._probe = None

    def _allowed(self, whole: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The share of the step that the policy accepts; nothing if it rejects it."""
        if self._probe is None:
            raise ProbeError("the trust region needs a probe: call set_probe(...) before every step()")
        decision = self.trust.predict(
            self.model, self._probe, {}, step=self._num_steps, mismatch=self._mismatch, dense=whole
        )
        alpha, attempt = decision.alpha, 0
        while True:
            scaled = {parameter: alpha * moved for parameter, moved in whole.items()}
            verdict = self.trust.verify(
                self.model, self._probe, {}, budget=decision.budget, attempt=attempt, dense=scaled
            )
            self.diagnostics = {
                "predicted_kl": decision.predicted_kl,
                "kl_budget": decision.budget,
                "alpha": alpha,
                "realised_kl": verdict.realised_kl,
                "num_shrinks": float(attempt),
            }
            if verdict.action != "shrink":
                return scaled if verdict.action == "accept" else {}
            alpha, attempt = alpha * verdict.factor, attempt + 1
