"""The trainer of a guarded run: puts the guards of `logra.rl.guards` where they belong in a step.

rollout   bad rewards drop their group; groups without signal are sampled anew; repetition, effective sample size
loss      the KL to the reference, by `guards.kl`
merge     sentinels before it may skip it, sentinels after it see what it did
end       validation, reset of the reference, rollback, stop

Without `guards` it is `CheckedGRPOTrainer`. Events reach whoever `trainer.guards.subscribe`d.
"""

from collections.abc import Callable
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn
from transformers import TrainerCallback

from logra import distributed
from logra.errors import ConfigError
from logra.hashing import derive_key
from logra.rl.grpo import CheckedGRPOTrainer
from logra.rl.guards.config import GuardsConfig
from logra.rl.guards.events import Event
from logra.rl.guards.groups import SignalCount, num_loss_tokens, replace_rows
from logra.rl.guards.kl import mean_kl, token_kl
from logra.rl.guards.measures import effective_share, repetition, weight_sums
from logra.rl.guards.reference import copy_weights
from logra.rl.guards.watch import Guards
from logra.rl.rewards import take_out_bad


class GuardedGRPOTrainer(CheckedGRPOTrainer):
    """`CheckedGRPOTrainer` under guards.

    Args:
        *args: the arguments of `trl.GRPOTrainer`.
        guards: which guards are on; None: none.
        **kwargs: the arguments of `trl.GRPOTrainer`.

    Raises:
        ConfigError: a guard that cannot work with the other settings.
    """

    def __init__(self, *args: Any, guards: GuardsConfig | None = None, **kwargs: Any):
        self.guards: Guards | None = None if guards is None else Guards(guards)
        self.validate: Callable[[], float | None] | None = None
        """Returns a held-out score; called every `guards.validate_every` steps."""
        self.keeps_bad_rewards = guards is not None and guards.on_bad_reward == "drop"
        self._bad_rows = torch.empty(0, dtype=torch.bool)
        self._in_loss = False
        self._log_probs: Tensor | None = None
        self._num_recorded: dict[str, int] = {}
        super().__init__(*args, **kwargs)
        if self.guards is not None:
            self._require_usable(self.guards.config)
            self.add_callback(GuardState(self))

    def _require_usable(self, config: GuardsConfig) -> None:
        if config.may_roll_back and not self._can_roll_back:
            raise ConfigError("guards.sentinels: action rollback needs logra.rl.GRPOTrainer and its log of updates")
        if config.reference.is_on and self.ref_model is None:
            raise ConfigError(
                "guards.reference: there is no reference model to reset; it needs beta above 0 and no LoRA"
            )
        if config.resample and (isinstance(self.train_dataset, IterableDataset) or self.train_dataset is None):
            raise ConfigError("guards.resample=True: needs a dataset that rows can be drawn from, not a stream")
        own_rows = self.args.per_device_train_batch_size * (self.args.steps_per_generation or 1)
        group: Any = self.num_generations
        if config.resample and own_rows % group:
            raise ConfigError(
                f"guards.resample=True: {own_rows} completions per process and generation: must be a multiple of "
                f"num_generations={self.num_generations}, so that no group is spread over processes"
            )

    @property
    def _can_roll_back(self) -> bool:
        """Whether the weights of earlier versions can be restored."""
        return False

    # --- rollout ---

    def _admitted(self, rewards: Tensor) -> Tensor:
        if not self.keeps_bad_rewards:
            return super()._admitted(rewards)
        rewards, self._bad_rows = take_out_bad(
            rewards, [isinstance(function, nn.Module) for function in self.reward_funcs]
        )
        return rewards

    def _rows_without_signal(self, num_generations: int) -> Tensor:
        signal_free = super()._rows_without_signal(num_generations)
        if not self.keeps_bad_rewards:
            return signal_free
        return signal_free | self._dropped_rows(num_generations)

    def _dropped_rows(self, num_generations: int) -> Tensor:
        """Completions whose group has a bad reward, bool [completions]."""
        if not len(self._bad_rows):
            return torch.zeros_like(self._signal_free)
        return self._bad_rows.view(-1, num_generations).any(dim=1).repeat_interleave(num_generations)

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        if self.guards is not None and self.model.training:
            self._record({"guards/repetition": distributed.mean(repetition(result[1]))})
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self.guards is None or not self.model.training:
            return batch
        self._record_rollout(batch, len(inputs))
        if self.guards.config.resample:
            batch = self._resampled(batch, len(inputs))
        return batch

    def _record_rollout(self, batch: dict[str, Any], num_own: int) -> None:
        """Metrics of one generation batch that sentinels look at; bad rewards become an event."""
        assert self.guards is not None
        truncated = batch["completion_mask"].sum(dim=1) == 0
        lost = self._own_rows(self._signal_free, num_own) | truncated
        self._record({"guards/filtered": distributed.mean(lost.float().mean().item())})
        if self.keeps_bad_rewards:
            num_bad = int(self._bad_rows.sum())
            self._record({"guards/bad_rewards": float(num_bad)})
            if num_bad:
                self.guards.emit(
                    Event(
                        step=self.state.global_step + 1,
                        kind="bad_reward",
                        value=float(num_bad),
                        threshold=None,
                        action="drop",
                        detail="completions with a reward that is NaN or infinite: their groups are filtered",
                    )
                )
        if "sampling_per_token_logps" in batch and "old_per_token_logps" in batch:
            mask = batch["completion_mask"] * batch.get("tool_mask", 1)
            sums = weight_sums(batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask)
            reduced: Any = self.accelerator.reduce(sums, reduction="sum")
            share = effective_share(reduced)
            if share is not None:
                self._record({"guards/effective_samples": share})

    def _resampled(self, batch: dict[str, Any], num_own: int) -> dict[str, Any]:
        """The batch with its groups without signal replaced by groups of other prompts.

        Raises:
            DataError: no group of any batch has a signal.
        """
        assert self.guards is not None
        limit = self.guards.config.max_resampled_batches
        size: Any = self.num_generations
        pad: Any = self._tokenizer.pad_token_id
        found = SignalCount()
        found.add(self._reward_totals(), self._signal_free, self._dropped_rows(size), size)
        missing = _groups(self._own_rows(self._signal_free, num_own), size)
        num_batches = 0
        while distributed.any_process([bool(missing)])[0] and num_batches < limit:
            num_batches += 1
            other = super()._generate_and_score_completions(self._draw_rows(num_own // size, size, num_batches))
            self._record_rollout(other, num_own)
            found.add(self._reward_totals(), self._signal_free, self._dropped_rows(size), size)
            useful = _groups(~self._own_rows(self._signal_free, num_own), size)
            num_taken = min(len(missing), len(useful))
            rows, by = (_rows_of(groups[:num_taken], size) for groups in (missing, useful))
            batch = replace_rows(batch, other, rows, by, pad)
            missing = missing[num_taken:]
        self._record({"guards/resampled_batches": float(num_batches)})
        if num_batches == 0:
            return batch
        has_signal = len(missing) < num_own // size
        if not distributed.any_process([has_signal])[0]:
            raise found.error(limit)
        own_tokens: Any = self.accelerator.gather(num_loss_tokens(batch))
        return batch | {"num_items_in_batch": own_tokens.sum()}

    def _draw_rows(self, num_prompts: int, num_copies: int, attempt: int) -> list[dict[str, Any]]:
        """Dataset rows for one more generation batch, each `num_copies` times."""
        dataset: Any = self.train_dataset
        key = derive_key("resample", self.args.seed, self.state.global_step, attempt, self.accelerator.process_index)
        generator = torch.Generator().manual_seed(key % 2**63)
        indices = torch.randint(len(dataset), (num_prompts,), generator=generator).tolist()
        return [dict(dataset[index]) for index in indices for _ in range(num_copies)]

    # --- loss ---

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._in_loss:
            self._log_probs = result[0]
        return result

    @property
    def _has_own_kl(self) -> bool:
        return self.guards is not None and self.beta != 0

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        if not self._has_own_kl:
            return super()._compute_loss(model, inputs)
        assert self.guards is not None
        # TRL's own term has no clamp: it is left out, and the log-probabilities that its loss computes are used again.
        beta, self.beta, self._in_loss = self.beta, 0.0, True
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta, self._in_loss = beta, False
        log_probs, self._log_probs = self._log_probs, None
        assert log_probs is not None
        config = self.guards.config.kl
        old = inputs.get("old_per_token_logps", log_probs.detach())
        term = token_kl(
            log_probs,
            inputs["ref_per_token_logps"],
            estimator=config.estimator,
            clamp=config.clamp,
            log_p_old=old if config.estimator == "k3" and config.importance else None,
        )
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        num_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        mode = "train" if self.model.training else "eval"
        if mode == "train":  # the batch may be split over several optimizer steps
            num_tokens = num_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        totals = torch.stack([mean_kl(term.detach(), mask, 1.0), mask.sum().float()])
        reduced: Any = self.accelerator.reduce(totals, reduction="sum")
        total, count = reduced.tolist()
        self._metrics[mode]["kl"].append(total / max(count, 1.0))
        return loss + beta * mean_kl(term, mask, num_tokens)

    # --- events of a step ---

    def _on_step_begin(self) -> None:
        super()._on_step_begin()
        self._num_recorded = {name: len(values) for name, values in self._metrics["train"].items()}

    def _on_pre_optimizer_step(self) -> None:
        super()._on_pre_optimizer_step()
        if self.guards is not None and self.guards.before_merge(self.state.global_step + 1, self._step_metrics()):
            self._skip_step()

    def _on_step_end(self) -> None:
        super()._on_step_end()
        if self.guards is None:
            return
        step, guards = self.state.global_step, self.guards
        guards.after_merge(step, self._step_metrics())
        guards.end_step(self._version)
        verdict = guards.verdict()
        if verdict == "rollback":
            self._roll_back()
        self.wants_to_stop = verdict == "stop"
        self._validate(step)
        kl = self._step_metrics().get("kl")
        if self.ref_model is not None and (reason := guards.reference.reason(step, kl)) is not None:
            self._reset_reference(*reason)

    def _step_metrics(self) -> dict[str, float]:
        """What has been recorded in this step, averaged over its micro-batches."""
        metrics = {}
        for name, values in self._metrics["train"].items():
            recent = values[self._num_recorded.get(name, 0) :]
            if recent:
                metrics[name] = sum(recent) / len(recent)
        if "entropy" in metrics:
            metrics["policy/entropy"] = metrics["entropy"]
        return metrics

    def _add_step_totals(self, logs: dict[str, float]) -> None:
        super()._add_step_totals(logs)
        if self.guards is not None:
            logs |= self.guards.metrics()

    # --- what guards do ---

    @property
    def _version(self) -> int:
        """Policy version of the weights."""
        return self.state.global_step

    def _skip_step(self) -> None:
        """Let the optimizer's next step change nothing."""
        self.model.zero_grad(set_to_none=True)

    def _roll_back(self) -> None:
        raise ConfigError("this trainer cannot roll back")

    def shrink_budget(self) -> None:
        """Apply the guards' `budget_scale`."""
        raise ConfigError("this trainer cannot roll back")

    def _forget_moments(self) -> None:
        """Drop the optimizer's moments."""
        optimizer: Any = self.optimizer
        getattr(optimizer, "optimizer", optimizer).state.clear()

    def _validate(self, step: int) -> None:
        """A held-out score every so many steps, as the metric heldout/score."""
        assert self.guards is not None
        every = self.guards.config.validate_every
        if every == 0 or step % every or self.validate is None:
            return
        score = self.validate()
        if score is not None:
            self._record({"heldout/score": score})
            self.guards.reference.add_validation(score)

    def _reset_reference(self, reason: str, value: float, threshold: float | None) -> None:
        """Give the reference the weights of the policy."""
        assert self.guards is not None
        copy_weights(self.accelerator.unwrap_model(self.model), self.accelerator.unwrap_model(self.ref_model))
        self.guards.reference.was_reset(self.state.global_step)
        self.guards.reference_version = self._version
        forget = self.guards.config.reference.reset_optimizer
        if forget:
            self._forget_moments()
        self.guards.emit(
            Event(
                step=self.state.global_step,
                kind=f"reference_{reason}",
                value=value,
                threshold=threshold,
                action="reset",
                detail=f"the reference has the weights of version {self._version}"
                + (", the optimizer's moments are dropped" if forget else ""),
            )
        )


class GuardState(TrainerCallback):
    """What a checkpoint keeps of the guards: their numbers, and the reference's weights once they were replaced.

    Args:
        trainer: with guards.
    """

    checkpoint_name = "guards"

    def __init__(self, trainer: GuardedGRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Numbers, lists, and the tensors of a replaced reference."""
        guards = self._trainer.guards
        assert guards is not None
        reference = {}
        if guards.reference.last_reset_step > 0:
            reference = dict(self._reference.state_dict())
        return {"guards": guards.state_dict(), "reference": reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; optimizer and scheduler have been loaded."""
        guards = self._trainer.guards
        assert guards is not None
        guards.load_state_dict(state["guards"])
        if state["reference"]:
            self._reference.load_state_dict(state["reference"])
        if guards.budget_scale != 1.0:
            self._trainer.shrink_budget()

    @property
    def _reference(self) -> nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.ref_model)


def _groups(rows: Tensor, size: int) -> list[int]:
    """Groups of `size` rows in which all are set."""
    return rows.view(-1, size).all(dim=1).nonzero().flatten().tolist()


def _rows_of(groups: list[int], size: int) -> list[int]:
    """The rows of groups."""
    return [group * size + row for group in groups for row in range(size)]
