"""TRL's GRPO trainer with the gaps closed that every method of `logra` would fall into, whatever its optimizer.

Owns: checked rewards, advantages that are exactly 0 where a group carries no signal, log-probabilities of the
completion alone (on CPU), and the metrics of a step. Everything else is TRL's, and so are the arguments.

TRL's tensors, with B completions of one micro-batch: prompt_ids and prompt_mask [B, P] (padded on the left),
completion_ids and completion_mask [B, C] (padded on the right), advantages fp32 [B]. Padding is known by the masks
alone, since many tokenizers pad with a token that also occurs in the text.
"""

import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TRLTrainer

from logra import distributed
from logra.errors import DataError
from logra.rl.logprobs import completion_log_probs
from logra.rl.metrics import StepClock, peak_memory_bytes, reward_metrics
from logra.rl.payload import CompactBatch, return_free_memory
from logra.rl.resumable import ResumableTrainer
from logra.rl.rewards import checked, require_finite, signal_free_rows
from logra.rl.shared_prompts import can_share_prompts, continues_prefill, order_by_prompt, shared_prefill

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(
    name for name in _CHECKPOINTING if name in {field.name for field in dataclasses.fields(GRPOConfig)}
)
"""The argument that trades recomputation for memory. vLLM holds transformers at versions with its older name."""


class CheckedGRPOTrainer(ResumableTrainer):
    """`trl.GRPOTrainer` with checked rewards and the metrics of `logra`; the optimizer is TRL's.

    Takes TRL's arguments. `GRPOTrainer` adds the sketch optimizer; the baselines use this class.

    Raises:
        DataError: fewer training rows than one generation takes, or a reward function that returns something unusable.
    """

    args: GRPOConfig  # transformers types it more loosely than TRL guarantees it
    keeps_bad_rewards: bool = False
    """Let rewards that are not finite through to `_admitted`, instead of ending the run at the first."""
    wants_to_stop: bool = False
    """End the training after the step."""

    def __init__(self, *args: Any, **kwargs: Any):
        given = inspect.signature(TRLTrainer.__init__).bind(self, *args, **kwargs).arguments
        _require_rows(given.get("train_dataset"), given.get("args"))
        super().__init__(*args, **kwargs)
        self.reward_funcs: list[Any] = [
            function if isinstance(function, nn.Module) else checked(function, name, keep_bad=self.keeps_bad_rewards)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self._clock = StepClock()
        self._peak_bytes = 0
        self._rewards = torch.empty(0, len(self.reward_funcs))
        self._signal_free = torch.empty(0, dtype=torch.bool)
        self.add_callback(_StepEvents(self))

    # --- rollout ---

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        held = self._buffered_inputs
        inputs: Any = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not held:
            accumulated_as_one = (
                self.num_iterations == 1 and self.args.steps_per_generation == self.args.gradient_accumulation_steps
            )
            batches: Any = self._buffered_inputs
            if self._shares_prompts and accumulated_as_one:
                batches = order_by_prompt(batches)
            buffered: Any = [CompactBatch.of(batch) for batch in batches]
            self._buffered_inputs = buffered
            inputs = buffered[self._step % len(buffered)]
        return inputs.whole() if isinstance(inputs, CompactBatch) else inputs

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **kw: Any) -> Any:
        shares = self._shares_prompts and not images and not multimodal_fields and not self.use_vllm
        policy = self.accelerator.unwrap_model(self.model_wrapped)
        shares = shares and continues_prefill(self.generation_config, policy.generation_config)
        with shared_prefill(policy) if shares else contextlib.nullcontext():
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kw)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = self._admitted(super()._calculate_rewards(*args, **kwargs))
        return self._rewards

    def _admitted(self, rewards: Tensor) -> Tensor:
        """The rewards of a generation batch, fp32 [completions, functions], as they may be trained on."""
        require_finite(rewards, self.reward_func_names)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        with self._clock.rollout():
            batch = super()._generate_and_score_completions(inputs)
        num_generations: Any = self.num_generations if mode == "train" else self.num_generations_eval
        self._signal_free = self._rows_without_signal(num_generations)
        own_rows = self._own_rows(self._signal_free, len(inputs))
        batch["advantages"] = batch["advantages"].masked_fill(own_rows, 0.0)
        for name, value in reward_metrics(self._reward_totals(), self._signal_free, num_generations).items():
            self._metrics[mode][name].append(value)
        return batch

    def _rows_without_signal(self, num_generations: int) -> Tensor:
        """Completions of the generation batch that nothing is to be learned from, bool [completions]."""
        summed = self.multi_objective_aggregation == "sum_then_normalize"
        return signal_free_rows(self._reward_totals()[:, None] if summed else self._rewards, num_generations)

    def _own_rows(self, rows: Tensor, num_own: int) -> Tensor:
        """This process's part of a tensor that has a row for every completion of all processes."""
        first = self.accelerator.process_index * num_own
        return rows[first : first + num_own]

    def _reward_totals(self) -> Tensor:
        """Weighted reward of each completion of the generation batch, fp32 [completions], NaN where not scored."""
        weighted = self._rewards * self.reward_weights.to(self._rewards.device)
        return weighted.nansum(dim=1).masked_fill(self._rewards.isnan().all(dim=1), float("nan"))

    def spread_samples(self, num_samples: int) -> list[tuple[Any, Any, float]]:
        """Prompt, completion and reward (NaN where not scored) of a few completions, from as many groups as possible.

        Args:
            num_samples: how many; fewer if the last generation batch was smaller.
        """
        totals = self._reward_totals().tolist()
        prompts, completions = (
            list(self._logs["prompt"])[-len(totals) :],
            list(self._logs["completion"])[-len(totals) :],
        )
        stride = max(len(totals) // max(num_samples, 1), 1)
        rows = range(0, len(totals), stride)[:num_samples]
        return [(prompts[row], completions[row], totals[row]) for row in rows]

    # --- log-probabilities ---

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **fields: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        text_only = not compute_aux_loss and all(value is None for value in fields.values())
        if not (text_only and self._head_scores_every_position):
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **fields,
            )
        with self.accelerator.autocast():
            log_probs, entropy = completion_log_probs(
                model,
                input_ids,
                attention_mask,
                num_completion_tokens=logits_to_keep,
                temperature=self.temperature,
                batch_size=batch_size,
                with_entropy=compute_entropy,
                entropy_has_grad=self._entropy_bonus_enabled,
                share_prompts=self._shares_prompts,
                backbone=self._backbone,
            )
        return log_probs, entropy, None

    @property
    def _backbone(self) -> nn.Module | None:
        """What the head of the language model reads; None where model and backbone are one."""
        backbone = getattr(self._language_model, "base_model", None)
        return None if backbone is self._language_model else backbone

    @functools.cached_property
    def _head_scores_every_position(self) -> bool:
        """Whether TRL would project prompt positions through the LM head too, and the model can be told not to.

        TRL's fused head drops them only where Triton runs. On CPU, with a short answer to a long prompt and a large
        vocabulary, they are a fifth of the step. Not under FSDP: the head's chunks would be collectives, of which
        processes with longer responses have more.
        """
        takes_it = "logits_to_keep" in inspect.signature(type(self._language_model).forward).parameters
        on_cpu = self.accelerator.device.type == "cpu" and not self.is_fsdp_enabled
        return on_cpu and takes_it and not self.args.cast_lm_head_to_fp32

    @property
    def _shares_prompts(self) -> bool:
        """Whether a prompt is run once for all completions of its group, from now on.

        It takes keys and values that live until the backward, which activation checkpointing drops. The model itself
        is asked every time, since a user can switch that on without TRL's argument.
        """
        return (
            self._can_share_prompts
            and not getattr(self.args, CHECKPOINTING)
            and not any(getattr(module, "gradient_checkpointing", False) for module in self._language_model.modules())
        )

    @functools.cached_property
    def _can_share_prompts(self) -> bool:
        """Whether model and processes allow it: it takes two forwards per backward, unknown to distributed wrappers."""
        return (
            self._head_scores_every_position
            and self.accelerator.num_processes == 1
            and can_share_prompts(self._language_model)
        )

    @property
    def _language_model(self) -> Any:
        """The causal language model itself, inside the wrappers of accelerate and PEFT."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    # --- metrics ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log through TRL, under `logra`'s names as well."""
        mode = "train" if self.model.training else "eval"
        if entropies := self._metrics[mode].get("entropy"):
            self._metrics[mode]["policy/entropy"] = list(entropies)
        if mode == "train" and "loss" in logs:
            self._add_step_totals(logs)
        super().log(logs, start_time)

    def _add_step_totals(self, logs: dict[str, float]) -> None:
        """Add what is a state of the run, not an average over steps."""
        logs["memory/peak_bytes"] = self._peak_bytes
        if "grad_norm" in logs:
            logs["optim/grad_norm"] = logs["grad_norm"]

    def _record(self, metrics: dict[str, float]) -> None:
        """Let these values enter the next log, averaged over the steps it covers."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    # --- events of a step, in this order; called by _StepEvents ---

    def _on_step_begin(self) -> None:
        self._clock.start_step()

    def _on_pre_optimizer_step(self) -> None:
        pass

    def _on_optimizer_step(self) -> None:
        pass

    def _on_step_end(self) -> None:
        self._record(self._clock.metrics())
        (self._peak_bytes,) = distributed.largest([peak_memory_bytes(self.accelerator.device)])
        if self.accelerator.device.type == "cpu":
            return_free_memory()


class _StepEvents(TrainerCallback):
    """Passes the events of a training step to the trainer itself, which transformers tells only its callbacks."""

    def __init__(self, trainer: CheckedGRPOTrainer):
        self._trainer = trainer

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._on_step_begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer._on_pre_optimizer_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer._on_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._on_step_end()
        if self._trainer.wants_to_stop:
            control.should_training_stop = True


def _require_rows(dataset: Any, args: GRPOConfig | None) -> None:
    """Refuse too few rows: TRL drops the incomplete batch and ends after zero steps without an error."""
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return  # the environment owns the data, or how much of it there is shows in its stream only
    if len(dataset) == 0:
        raise DataError("train_dataset has no rows: training would end after zero steps")
    if args is None:
        args = GRPOConfig()  # as TRL does
    batch_size: Any = args.generation_batch_size
    num_prompts = batch_size // args.num_generations
    if len(dataset) < num_prompts:
        raise DataError(
            f"train_dataset has {len(dataset)} rows, but one generation takes {num_prompts} prompts (generation_batch_size="
            f"{batch_size} completions on all processes, num_generations={args.num_generations} of each prompt): "
            f"training would end after zero steps. Add rows, or lower per_device_train_batch_size, "
            f"gradient_accumulation_steps or generation_batch_size"
        )
