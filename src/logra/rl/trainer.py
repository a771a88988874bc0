"""`GRPOTrainer`: TRL's GRPO trainer, with `logra.SketchOptimizer` in the place of its optimizer.

The order of one optimizer step, as transformers runs it: micro-batches forward and backward (sketches accumulate),
probe handed over, `SketchOptimizer.step`, scheduler, log. Gradients are clipped inside the optimizer, on the recovered
gradient, and the logged `grad_norm` is that gradient's norm: transformers' own clipping sees `.grad`, which stays None.

Refuses: DeepSpeed, FSDP1, fp16 gradient scaling, LoRA, torch.compile and a foreign optimizer (ConfigError).
"""

import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TRLTrainer

from logra import distributed
from logra.diagnostics.observer import Diagnostic
from logra.errors import ConfigError
from logra.optim import Config, SketchOptimizer
from logra.phases import phase
from logra.rl import fsdp
from logra.rl.checkpoints import set_version
from logra.rl.guards import rollback
from logra.rl.guards.config import GuardsConfig
from logra.rl.metrics import ROLLOUT_VERSION, optimizer_metrics
from logra.rl.probe_window import TimedTrust
from logra.rl.probed import ProbedGRPOTrainer
from logra.rl.rollout import rollout_engine
from logra.rl.workers import WorkersConfig
from logra.sync import Publisher
from logra.sync.protocols import UpdateLog


class GRPOTrainer(ProbedGRPOTrainer):
    """Drop-in for `trl.GRPOTrainer` that trains the full weights from gradient sketches.

    Args:
        *args: the arguments of `trl.GRPOTrainer`. They mean what they mean there, except those of TRL's optimizer (see
            `logra`) and those that are refused (see Raises).
        logra: settings of the optimizer; None means `logra.Config()`. The learning rate is `Config.lr`, a relative step:
            `args.learning_rate`, `args.optim` and `args.weight_decay` belong to TRL's optimizer and are not used (a
            warning says so when they are set). `args.lr_scheduler_type` and warm-up work as usual, and
            `args.max_grad_norm` (1.0 in TRL) holds unless `Config.max_grad_norm` is set.
        diagnostics: probes of `logra.diagnostics` that look at the steps, and whose numbers join the metrics.
        guards: what watches over a long run, see docs/long-runs.md; None: nothing.
        workers: sample with a fleet of rollout workers, see docs/distributed.md; None: with what TRL's arguments say.
        **kwargs: the arguments of `trl.GRPOTrainer`. `optimizers` may hold a `SketchOptimizer`, then without `logra`; the
            trainer takes it over, and completes its config in the same way.

    Raises:
        ConfigError: a setting that cannot work with sketches (`peft_config`, `fp16`, `torch_compile`, DeepSpeed, FSDP1,
            a foreign optimizer), before the model is loaded where it can be known.
        DataError: see `CheckedGRPOTrainer`.

    Example:
        >>> from logra.rl import GRPOTrainer
        >>> trainer = GRPOTrainer(model="path", reward_funcs=reward, args=args, train_dataset=dataset)
        >>> trainer.train()
    """

    def __init__(
        self,
        *args: Any,
        logra: Config | None = None,
        diagnostics: Sequence[Diagnostic] = (),
        guards: GuardsConfig | None = None,
        workers: WorkersConfig | None = None,
        **kwargs: Any,
    ):
        given = inspect.signature(TRLTrainer.__init__).bind(self, *args, **kwargs).arguments
        arguments: GRPOConfig | None = given.get("args")
        _refuse_arguments(arguments, given, logra)
        with rollout_engine(arguments, workers):
            super().__init__(*args, guards=guards, **kwargs)
        fsdp.refuse_ignored(self.accelerator, self.args)
        if getattr(self.accelerator, "scaler", None) is not None:
            raise ConfigError("mixed_precision='fp16': the gradient scaler needs `.grad`. Use bf16, or fp32.")
        _warn_of_ignored(self.args)
        given_optimizer: Any = self.optimizer
        self._config = self._resolve(logra or (given_optimizer.config if given_optimizer is not None else Config()))
        if given_optimizer is not None:
            given_optimizer.config = self._config
        self._diagnostics = tuple(diagnostics)
        self._attached = False
        self._publisher: Publisher | None = None
        if self.use_vllm:
            self._engine.follow(self._what_to_follow)

    def _resolve(self, config: Config) -> Config:
        """`config` with TRL's gradient clipping where it sets none, and a clock around its trust region."""
        if config.max_grad_norm is None and self.args.max_grad_norm:
            config = dataclasses.replace(config, max_grad_norm=self.args.max_grad_norm)
        if config.trust is not None:
            config = dataclasses.replace(config, trust=TimedTrust(config.trust))
        return config

    # --- the optimizer ---

    @property
    def sketch_optimizer(self) -> SketchOptimizer:
        """The optimizer, without the wrapper that accelerate puts around it. It exists once training has begun."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, SketchOptimizer):
            raise ConfigError("the optimizer is built when train() starts; create_optimizer() builds it earlier")
        return optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the sketch optimizer on the model (once)."""
        if self.accelerator.is_fsdp2:
            fsdp.shard(self.accelerator, self.model)
        if self.optimizer is None:
            self.optimizer = SketchOptimizer(self.model if model is None else model, self._config)
            self._group_parameters = fsdp.GroupParameters(self.optimizer)
        if not self._attached:
            self._attached = True
            for diagnostic in self._diagnostics:
                diagnostic.attach(self.sketch_optimizer)
        replicated = self.accelerator.num_processes > 1 and not self.accelerator.is_fsdp2
        if replicated and self.sketch_optimizer.num_parameters()["dense"] == 0:
            # The optimizer averages the sketches itself. DistributedDataParallel would find no gradient to reduce, and
            # refuses such a model: in evaluation mode accelerate places it without that wrapper.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's scheduler; transformers builds it when accelerate has prepared the optimizer."""
        if self.accelerator.is_fsdp2:
            self._group_parameters.restore()
        return super().create_scheduler(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.accelerator.is_fsdp2:
            with self.sketch_optimizer.whole_state():  # process 0 writes the file
                return super()._save_optimizer_and_scheduler(output_dir)
        return fsdp.save_state(output_dir, self.sketch_optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.accelerator.is_fsdp2:  # there the weights come with the optimizer's state
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.accelerator.is_fsdp2:
            return super()._load_optimizer_and_scheduler(checkpoint)
        return fsdp.load_state(checkpoint, self.sketch_optimizer, self.lr_scheduler)

    def publish_to(self, publisher: Publisher) -> None:
        """Publish every update from now on, on the main process; its bytes and seconds enter the metrics.

        Args:
            publisher: of an update log, built with this trainer's `sketch_optimizer`.
        """
        self._publisher = publisher
        if self.guards is not None:
            self.guards.begin(self.sketch_optimizer.version)
            if self.guards.config.may_roll_back:
                rollback.anchor_start(publisher, self.sketch_optimizer)

    @property
    def publisher(self) -> Publisher | None:
        """Of the log that updates go to; None without one."""
        return self._publisher

    def _what_to_follow(self) -> tuple[SketchOptimizer, UpdateLog | None]:
        """The optimizer, and the log of its updates where there is one."""
        self.create_optimizer()
        return self.sketch_optimizer, None if self._publisher is None else self._publisher.log

    @property
    def _engine(self) -> Any:
        """What samples in the place of the model, see `logra.rl.rollout`."""
        return self.vllm_generation

    def close(self) -> None:
        """Give back what samples outside of this process; the next generation takes it again."""
        if self.use_vllm:
            self._engine.close()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor | None:
        # None keeps transformers from logging the norm of the few `.grad`s; `_add_step_totals` logs the real one.
        return None

    # --- the step ---

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._generate_single_turn(*args, **kwargs)
        if self.model.training:
            version = self._engine.sampled_version if self.use_vllm else self.sketch_optimizer.version
            metrics = self._engine.metrics() if self.use_vllm else {}
            if version is not None:
                metrics[ROLLOUT_VERSION] = float(version)
            self._record(metrics)
        return result

    def _on_step_begin(self) -> None:
        super()._on_step_begin()
        self.sketch_optimizer.zero_grad()  # as the window: half a step can be left of an earlier train()
        if self.guards is not None and self.guards.config.may_roll_back and self._publisher is None:
            raise ConfigError(
                "guards.sentinels: action rollback needs the log of updates: call publish_to(publisher) first"
            )

    def _on_pre_optimizer_step(self) -> None:
        super()._on_pre_optimizer_step()
        trust = self.sketch_optimizer.config.trust
        due = [diagnostic for diagnostic in self._diagnostics if diagnostic.is_due]
        if trust is None and not due:
            return
        if isinstance(trust, TimedTrust):
            trust.reset()
        if trust is not None:
            self._mismatch = self._window.mismatch(self._mismatch)
        tensors = self._window.tensors()
        if self.sketch_optimizer.skips_step:
            return
        # Without advantage on any process (or without a token that counts) the gradient is zero and the step is skipped
        # before anything is priced. A KL or entropy term in the loss makes a gradient of its own. A process that has no
        # signal itself takes part in the pricing of the others' gradient, on its own responses.
        has_gradient = self._window.has_advantage() or self.beta != 0 or self._entropy_bonus_enabled
        if not (distributed.any_process([has_gradient])[0] and tensors["loss_mask"].any()):
            return
        if trust is not None:
            self.sketch_optimizer.set_probe(**tensors, temperature=self.temperature, mismatch=self._mismatch or 0.0)
        for diagnostic in due:
            diagnostic.set_batch(**tensors, temperature=self.temperature, advantages=self._window.advantages())

    def _on_optimizer_step(self) -> None:
        optimizer = self.sketch_optimizer
        metrics = optimizer_metrics(optimizer.diagnostics())
        if isinstance(optimizer.config.trust, TimedTrust):
            metrics["time/probe_s"] = optimizer.config.trust.seconds
        seconds = sum(diagnostic.seconds for diagnostic in self._diagnostics)
        if seconds > 0:
            metrics["time/diagnostics_s"] = seconds
        if self._mismatch is not None:
            metrics["trust/mismatch"] = self._mismatch
        update = optimizer.last_update
        with phase("sync"):
            num_bytes = 0
            if update is not None and self.is_world_process_zero():
                if self._publisher is not None:
                    update = self._publisher.publish(update)
                    metrics |= self._publisher.metrics()
                    num_bytes = int(metrics["sync/bytes"])
                else:
                    num_bytes = update.num_bytes
            # Process 0 alone encodes the packet. A log that went on without this run (see `ResumedPublisher`) has moved the
            # version of the process that writes.
            version, num_bytes = distributed.largest([optimizer.version, num_bytes])
            metrics["sync/bytes"] = float(num_bytes)
            if version != optimizer.version:
                set_version(optimizer, version)
            if self.use_vllm:
                self._engine.add(update)
        if self.use_vllm:
            metrics.pop("sync/seconds", None)  # that of the delivery to the engine
        self._record(metrics)

    def _add_step_totals(self, logs: dict[str, float]) -> None:
        super()._add_step_totals(logs)
        optimizer = self.sketch_optimizer
        logs["optim/skipped"] = float(optimizer.num_skipped)
        logs["sync/version"] = float(optimizer.version)
        if "grad_norm" in optimizer.diagnostics():
            logs["grad_norm"] = optimizer.diagnostics()["grad_norm"]

    # --- what guards do ---

    @property
    def _can_roll_back(self) -> bool:
        return self.accelerator.num_processes == 1

    @property
    def _version(self) -> int:
        return self.sketch_optimizer.version

    def _skip_step(self) -> None:
        self.sketch_optimizer.skip_step("guard")

    def _forget_moments(self) -> None:
        self.sketch_optimizer.restart()

    def _roll_back(self) -> None:
        """Go on with the weights of the last good version, a smaller budget and another seed."""
        assert self.guards is not None and self._publisher is not None
        good = self.guards.good_version()
        update = rollback.go_back(self.sketch_optimizer, self._publisher, good)
        if self.use_vllm:
            self._engine.add(update)
        self.guards.rolled_back(self.state.global_step, to_version=good, as_version=update.version)
        self.shrink_budget()
        self._mismatch = None
        if self.ref_model is not None and self.guards.reference_version > good:
            self._reset_reference("rollback", float(self.guards.reference_version), float(good))

    def shrink_budget(self) -> None:
        """Apply the guards' `budget_scale` to the trust region, or to the learning rate where there is none."""
        assert self.guards is not None
        trust = self.sketch_optimizer.config.trust
        if isinstance(trust, TimedTrust):
            trust.budget_scale = self.guards.budget_scale
            return
        scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        initial = [group["initial_lr"] for group in self.sketch_optimizer.param_groups]
        scheduler.base_lrs = [lr * self.guards.budget_scale for lr in initial]


def _refuse_arguments(args: GRPOConfig | None, given: dict[str, Any], logra: Config | None) -> None:
    """Refuse what can be known before the model is loaded."""
    if given.get("peft_config") is not None or hasattr(given.get("model"), "peft_config"):
        raise ConfigError(
            "peft_config: logra trains the full weights and cannot be combined with an adapter. Remove peft_config, or "
            "use trl.GRPOTrainer for LoRA."
        )
    if logra is not None and not isinstance(logra, Config):
        raise ConfigError(f"logra={logra!r}: a logra.Config is needed, for example logra.Config(lr=1e-4)")
    optimizer = (given.get("optimizers") or (None, None))[0]
    if optimizer is not None and not isinstance(optimizer, SketchOptimizer):
        raise ConfigError(
            f"optimizers holds a {type(optimizer).__name__}: leave it out, or give a logra.SketchOptimizer"
        )
    if optimizer is not None and logra is not None:
        raise ConfigError("give either optimizers=(SketchOptimizer, scheduler) or logra=Config(...), not both")
    if (args is not None and args.deepspeed) or fsdp.is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError(
            "deepspeed: ZeRO flattens the weights, so that their gradients cannot be sketched. "
            "Use FSDP2 or DDP (examples/accelerate/)."
        )
    fsdp.refuse_settings(args)
    if args is not None and args.save_on_each_node and args.world_size > 1 and not fsdp.is_asked_for(args):
        raise ConfigError(
            "save_on_each_node=True: process 0 alone has the optimizer's whole state, and checkpoints of other machines "
            "could not be resumed. Set save_on_each_node=False, with an output_dir that all machines see, or use FSDP2."
        )
    if args is not None and args.fp16:
        raise ConfigError(
            "fp16=True: the gradient scaler needs `.grad`, which a sketched weight does not have. "
            "Use bf16=True, or fp32."
        )
    if args is not None and args.torch_compile:
        raise ConfigError("torch_compile=True: sketches are captured in eager mode. Set torch_compile=False.")


def _warn_of_ignored(args: GRPOConfig) -> None:
    """Warn once when arguments of TRL's optimizer were set, since `Config` has its own."""
    replaced_by = {"learning_rate": "Config.lr", "optim": "Config.direction", "weight_decay": "Config.weight_decay"}
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    ignored = [f"{name}={getattr(args, name)!r} (use {new})" for name, new in replaced_by.items()
               if getattr(args, name) != defaults[name]]  # fmt: skip
    if ignored:
        warnings.warn(
            f"logra.rl.GRPOTrainer does not use TRL's {', '.join(ignored)}: the sketch optimizer has settings of its own",
            UserWarning,
            stacklevel=3,
        )
