"""`SketchOptimizer`: trains the full weights of the targets while their dense gradient never exists.

A step, in the order of the method:

1. reduce     the sketches over data-parallel processes, each to the owner of its target
2. recover    a gradient in factors for every target, on its owner; clip the norm; skip if it is not finite or zero
3. direction  momentum, second moments, direction, normalised so that ‖ΔW‖ / ‖W‖ over all targets is `lr`
4. distance   a trust region predicts the KL of the step and scales it to its budget
5. round      the factors to integers; measure the KL that they will realise; shrink or reject
6. commit     the moments, merge W <- fl(W - ΔW), advance the version, draw new projections

Nothing is written before 6, so a skipped step leaves weights, moments and version as they were. In a run of several
processes the owner of a target (`logra.optim.ownership`) alone has its gradient and moments.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from logra import distributed, shards
from logra.contracts import StepObserver
from logra.errors import ConfigError, NonFiniteProbeError, ProbeError
from logra.hashing import derive_key
from logra.merge_rule import MergeRule
from logra.optim import exchange, gradients, input_scaling, length, merging, ownership, setup
from logra.optim.coherence import Coherence
from logra.optim.config import Config
from logra.optim.distance import ProposedStep
from logra.optim.layer import Proposal
from logra.optim.non_targets import DenseProposal, NonTargets
from logra.optim.observers import is_due, observe
from logra.optim.saved_state import SavedState, on_all
from logra.optim.state import live_share
from logra.optim.window import Window
from logra.phases import phase
from logra.sketch.capture import Capture
from logra.sketch.targets import Target, find_targets
from logra.update import LowRankUpdate, PolicyUpdate

logger = logging.getLogger("logra")


class SketchOptimizer(SavedState):
    """Optimizer of the full weights from low-rank gradient sketches (LoGRA, arXiv 2610.06647, and beyond).

    Args:
        model: the model. Its targets' forwards are replaced, its other parameters frozen unless `non_target="adamw"`.
            Build the optimizer before compiling the model, after loading and moving it.
        config: a `logra.Config`; or give its fields as keyword arguments.

    Raises:
        ConfigError: a setting has a value that is not allowed.
        TargetError: a target cannot be sketched.

    Example:
        >>> opt = logra.SketchOptimizer(model, lr=3e-4, rank=16, trust=logra.TrustRegion(kl_budget=2e-4))
        >>> loss.backward()
        >>> opt.set_probe(input_ids=ids, attention_mask=mask, loss_mask=generated)
        >>> opt.step()
        >>> opt.zero_grad()
    """

    def __init__(self, model: nn.Module, config: Config | None = None, **settings: Any) -> None:
        self.config = config = setup.resolve_config(model, config, settings)
        self.model = model
        self.targets = find_targets(model, config.target_modules)
        setup.check_dtypes(config, self.targets)
        self._non_targets = NonTargets(model, self.targets, config)
        groups = setup.parameter_groups(config, self.targets, self._non_targets.parameters)
        self._built = False
        super().__init__(groups, {})
        self._built = True
        merging.add_low_planes(config.weight_storage, self.targets, self.state)
        self._capture = Capture(
            model,
            self.targets,
            setup.sketch_spec(config),
            setup.out_side(config, self.targets),
            self._non_targets.frozen,
        )
        self._capture.begin_window(self._projection_index)
        self._probe: Any = None
        self._mismatch = 0.0
        self._clip: float | None = None
        self._window = Window(self._capture, self.targets)
        self._skip_reason: str | None = None
        self._diagnostics: dict[str, float] = {}
        self._observers: list[StepObserver] = []
        self.last_update: PolicyUpdate | None = None
        """The update that the last step() applied; None if it was skipped."""
        self.last_skip: str | None = None
        """Why the last step() changed nothing; None if it did."""

    # ---- what the outside reads ----

    @property
    def num_skipped(self) -> int:
        """Number of steps that changed nothing."""
        return self.param_groups[0]["num_skipped"]

    def diagnostics(self) -> dict[str, float]:
        """Numbers of the last step: grad_norm, update_ratio, skipped (total), and with a trust region predicted_kl,
        realised_kl (nats per generated token), alpha and kl_budget; merged_kl if it is measured.
        """
        return dict(self._diagnostics)

    @property
    def skips_step(self) -> bool:
        """Whether the next step() was told to change nothing, see `skip_step`."""
        return self._skip_reason is not None

    def num_parameters(self) -> dict[str, int]:
        """Numbers of parameters that are sketched, trained densely and frozen."""
        sketched = sum(target.parameter.numel() for target in self.targets)
        dense = sum(parameter.numel() for parameter in self._non_targets.parameters.values())
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return {"sketched": sketched, "dense": dense, "frozen": total - sketched - dense}

    def add_observer(self, observer: StepObserver) -> None:
        """Let `observer` (see `logra.diagnostics`) look at every step before it is merged; what it measures joins
        `diagnostics()`. It may be attached on some processes only; all of them then hand out the gradients that it sees.

        Raises:
            ConfigError: the observer does not suit these targets.
        """
        observer.attached({target.fqn: target.module for target in self.targets})
        self._observers.append(observer)
        observer.begin_window(self._num_steps)

    # ---- the loop: set_probe, clip_grad_norm_, step, zero_grad ----

    def set_probe(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float = 1.0,
        mismatch: float = 0.0,
    ) -> None:
        """Give the trust region the responses on which the next step is priced.

        Args:
            input_ids: int [batch, tokens].
            attention_mask: 1 at real tokens, [batch, tokens].
            loss_mask: 1 at generated tokens, [batch, tokens].
            temperature: sampling temperature, > 0.
            mismatch: KL between rollout and trainer policy, nats per token, taken off the budget.

        Raises:
            ConfigError: the optimizer has no trust region.
            ProbeError: the tensors are unusable.
        """
        if self.config.trust is None:
            raise ConfigError("set_probe needs a trust region: SketchOptimizer(..., trust=logra.TrustRegion(...))")
        generator = torch.Generator().manual_seed(derive_key("probe", self.config.seed, self.version) % 2**63)
        self._probe = self.config.trust.make_probe(
            input_ids=input_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            temperature=temperature,
            generator=generator,
        )
        self._mismatch = mismatch

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the recovered gradient (and the dense one of an inner AdamW) of the coming step to `max_norm`.

        Returns:
            The norm before clipping, fp32 scalar; not finite if a sketch is not.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm!r}: must be above 0")
        self._window.check_unproposed()
        self._clip = float(max_norm)
        return gradients.total_norm(self._recover(), self._non_targets.gradients())

    def skip_step(self, reason: str) -> None:
        """Let the next step() change nothing but the count of skipped steps; `last_skip` will say `reason`.

        In a run of several processes all of them must ask for it.
        """
        self._skip_reason = reason

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Turn the sketches since the last step into one update of the weights.

        An error leaves weights, moments and version as they are. Once its cause is gone the step can be repeated, with the
        same gradient and clipping, unless it came up while the gradient was recovered: the sketches are used up then, and
        zero_grad() and another backward are needed.

        Raises:
            CaptureError: no gradient was captured since the last step, or one reached a target past its sketch.
            ConfigError: a setting was changed to something unusable, or the process group is not that of the moments.
            LograError: another process met an error.
            ProbeError: the trust region has no usable probe.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_usable()
        shards.reshard(self.model)
        self._diagnostics = {}
        self.last_update, self.last_skip = (None, self._skip_reason) if self._skip_reason else self._update()
        self.param_groups[0]["num_skipped"] += self.last_skip is not None
        self._diagnostics["skipped"] = float(self.num_skipped)
        self._clear_window()
        self._probe, self._mismatch, self._skip_reason = None, 0.0, None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the sketches (and the inner AdamW's gradients) accumulated since the last step; a probe stays."""
        super().zero_grad(set_to_none)
        self._clear_window()

    def detach(self) -> None:
        """Give the model's modules their own forward back and unfreeze what was frozen. The optimizer is then of no use."""
        self._capture.detach()
        for observer in self._observers:
            observer.detached()

    # ---- the step ----

    def _update(self) -> tuple[PolicyUpdate | None, str | None]:
        watched = on_all(self.check_processes, "step", is_due(self._observers))
        norms, dense = self._recover(), self._non_targets.gradients()
        norm = gradients.total_norm(norms, dense)
        norm_value = self._diagnostics["grad_norm"] = norm.item()
        if not math.isfinite(norm_value):
            logger.warning("step skipped: gradient is not finite in %s", ", ".join(gradients.non_finite(norms, dense)))
            return None, "non_finite_gradient"
        if norm_value == 0:
            return None, "zero_gradient"
        clip = self._clip or self.config.max_grad_norm
        shrink = clip / norm if clip is not None and norm_value > clip else None
        window, moving = self._window, self._window.moving
        proposals = window.propose(self.config, self.state, shrink, keep=watched)
        shrink = window.shrink  # of the first attempt, where a step is repeated
        weight_norm = length.weight_norm(self.targets)
        squares = {fqn: proposal.delta().norm_squared() for fqn, proposal in proposals.items()}
        proposed_norm = exchange.numbers_of_all(squares, list(norms), norm.device).sum().sqrt()
        coherence, share = Coherence(*self.param_groups[0]["coherence"]), 1.0
        if self.config.coherence_scaling:
            # As the momentum: clipped, and of the targets alone.
            target_norm = length.norm_over_targets(torch.stack(list(norms.values())))
            coherence = coherence.after(target_norm if shrink is None else target_norm * shrink.item())
            share = coherence.of(length.mean_norm(proposals, list(norms), self.config.momentum, norm.device))
            self._diagnostics["coherence"] = share
        lr = self.param_groups[0]["lr"]
        step = ProposedStep(
            config=self.config,
            version=self.version,
            lr=lr,
            proposals=proposals,
            frames=window.frames,
            owner_of=window.owner_of,
            scale=length.step_scale(lr, weight_norm, proposed_norm),
            share=share,
        )
        # Without a trust region nothing needs to know the inner AdamW's step before it is taken.
        dense_step = self._non_targets.propose(self._dense_lr, shrink) if self.config.trust is not None else None
        try:
            updates = self._scale_and_round(step, moving, dense_step)
        except NonFiniteProbeError as error:
            logger.warning("step skipped: %s", error)
            return None, "non_finite_probe"
        if updates is None:
            return None, "trust_rejected"
        change = length.update_norm(update.delta() for update in updates.values())
        self._diagnostics["update_ratio"] = (change / weight_norm).item()
        recovered = window.gradients() if watched else {}
        if self._observers:
            alpha = self._diagnostics.get("alpha", 1.0)
            displacements = {} if dense_step is None else dense_step.displacements
            self._diagnostics |= observe(
                self._observers,
                self.model,
                step=self._num_steps,
                moving=moving,
                gradients=recovered,
                updates=updates,
                dense={parameter: alpha * displacement for parameter, displacement in displacements.items()},
            )
        del recovered
        # Dense gradients are clipped no earlier than here: a step that ended in an error would be clipped twice.
        if shrink is not None and dense_step is None:
            for grad in dense.values():
                shards.local(grad).mul_(shrink)
        trust, priced = self.config.trust, "alpha" in self._diagnostics
        snapshot = trust.snapshot(self.model, self._probe) if trust is not None and priced else None
        update = self._commit(moving, proposals, updates, dense_step, share)
        self.param_groups[0]["coherence"] = [coherence.num_updates, coherence.mean_square]
        if trust is not None and snapshot is not None:
            self._diagnostics["merged_kl"] = trust.merged_kl(self.model, self._probe, snapshot)
        return update, None

    def _recover(self) -> dict[str, Tensor]:
        """Reduce the gradients and recover the targets' ones from their sketches, once a window; the norms of these."""
        if not self._window.is_recovered:
            with phase("recover"):
                self._window.recover()
                gradients.average_dense(self._non_targets.parameters)
        return self._window.recover()

    def _scale_and_round(
        self, step: ProposedStep, moving: list[Target], dense_step: DenseProposal | None
    ) -> dict[str, LowRankUpdate] | None:
        """Steps 4 and 5. None if the trust region rejects the step."""
        trust = self.config.trust
        dense = {} if dense_step is None else dense_step.displacements
        if trust is None or (step.scale == 0 and not dense):
            # A learning rate of 0 (the first step of a warm-up) moves no weight: there is nothing to price.
            return step.rounded(step.share, attempt=0)
        if self._probe is None and distributed.num_processes() == 1:
            raise ProbeError("the trust region needs a probe: call set_probe(...) before every step()")
        updates, measured = step.within(
            trust,
            self.model,
            self._probe,
            modules={target.fqn: target.module for target in moving},
            mismatch=self._mismatch,
            dense=dense,
        )
        self._diagnostics |= measured
        return updates

    def _commit(
        self,
        moving: list[Target],
        proposals: Mapping[str, Proposal],
        updates: dict[str, LowRankUpdate],
        dense_step: DenseProposal | None,
        share: float,
    ) -> PolicyUpdate:
        shards.reshard(self.model)  # what the probe gathered is about to change
        for target in moving:
            rule = MergeRule.of(
                self.config.weight_storage, seed=self.config.seed, version=self.version + 1, name=target.fqn
            )
            merging.merge(target, self.state.get(target.parameter, {}), updates[target.fqn], rule)
        ownership.drop_others(self.targets, self.state)
        self._share = live_share()
        for target in moving:
            if target.fqn in proposals:
                self.state[target.parameter].update(proposals[target.fqn].state)
        tensors = self._step_non_targets(dense_step, share)
        if self.config.input_scaling:
            refresh = (self.version + 1) % self.config.refresh_every == 0
            input_scaling.update_scales(self._capture, moving, self.state, refresh=refresh)
        version = self.version
        update = PolicyUpdate(
            base_version=version,
            version=version + 1,
            seed=self.config.seed,
            update_index=self._projection_index,
            weights=updates,
            tensors=tensors,
            weight_storage=self.config.weight_storage,
        )
        self.param_groups[0]["version"] = version + 1
        return update

    # ---- capture and its checks ----

    @property
    def _num_steps(self) -> int:
        """Number of calls of step() so far."""
        return self.version + self.num_skipped

    @property
    def _projection_index(self) -> int:
        return self.version // self.config.refresh_every

    def _check_usable(self) -> None:
        if self._capture.detached:
            raise ConfigError("this optimizer was detached from its model: build a new one")
        lr = self.param_groups[0]["lr"]
        if not (math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"lr={lr!r}: must be finite and at least 0 (set by a scheduler or in param_groups)")
        setup.check_dtypes(self.config, self.targets)

    def _clear_window(self) -> None:
        self._capture.begin_window(self._projection_index)
        self._window.clear()
        self._clip = None
        for observer in self._observers:
            observer.begin_window(self._num_steps)

    @property
    def _dense_lr(self) -> float:
        """Learning rate of the inner AdamW; 0 if there is none."""
        return self.param_groups[1]["lr"] if self._non_targets.adamw is not None else 0.0

    def _step_non_targets(self, proposed: DenseProposal | None, share: float) -> dict[str, Tensor]:
        if self._non_targets.adamw is None:
            return {}
        if proposed is None:
            changed = self._non_targets.step(share * self._dense_lr)
        else:
            changed = self._non_targets.commit(proposed, self._diagnostics.get("alpha", 1.0))
        self.state.update(self._non_targets.adamw.state)
        return changed
