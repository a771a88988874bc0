"""From a configuration to a model, a tokenizer and the trainer of a method.

All methods get the same TRL settings: prompts in the same order, one rollout of all completions per step, the same loss
over the same micro-batches. They differ in the trainer's optimizer, its learning rate, and in LoRA's adapters.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.integration_utils import get_available_reporting_integrations
from trl.trainer.grpo_config import GRPOConfig

from logra import distributed
from logra.diagnostics import CollateralProbe, DirectionProbe, unrelated_texts
from logra.diagnostics.observer import Diagnostic
from logra.errors import ConfigError, DataError
from logra.optim.setup import WEIGHT_DTYPES
from logra.rl.checkpoints import ResumedPublisher
from logra.rl.config import TrainConfig
from logra.rl.default_model import MODEL_ID, default_model_path
from logra.rl.grpo import CHECKPOINTING
from logra.rl.guarded import GuardedGRPOTrainer
from logra.rl.guards.length_penalty import with_length_penalty
from logra.rl.pretrained import load_causal_lm, load_tokenizer, require_fit
from logra.rl.priced import PricedGRPOTrainer
from logra.rl.rollout import engine_class
from logra.rl.tasks import Task
from logra.rl.trainer import GRPOTrainer
from logra.rl.workers import WorkersConfig
from logra.sync import DirectoryLog, Publisher


def model_location(model: str) -> str:
    """Folder or hub id to load from; the default model is converted on first use.

    Raises:
        ConfigError: `model` looks like a path, and there is no such folder.
    """
    if model.lower() == MODEL_ID:
        return str(default_model_path())
    path = Path(model)
    if path.is_dir():
        return str(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"model={model!r}: neither {MODEL_ID}, nor an existing folder, nor a hub id of the form owner/name"
        )
    return model


def load_model(config: TrainConfig, task: Task) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer.

    Raises:
        ConfigError: they cannot be loaded, weights are missing, the tokenizer has no chat template although one is
            needed, or model, tokenizer and prompts do not go together.
    """
    location, what = model_location(config.model), f"model={config.model!r}"
    tokenizer = load_tokenizer(what, location, padding_side="left")
    # What does not fit is reported, with all that is missing, below.
    model, report = load_causal_lm(
        what,
        location,
        dtype=WEIGHT_DTYPES[config.logra.weight_storage],
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _require_all_weights(config.model, report)
    if tokenizer.chat_template is None and not isinstance(task.train[0]["prompt"], str):
        raise ConfigError(
            f"model={config.model!r}: its tokenizer has no chat template, but the prompts of task={task.name!r} are "
            f"chats. Choose an instruction-tuned model, or a task whose prompts are text"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    require_fit(what, model, tokenizer, [row["prompt"] for row in (*task.train, *task.heldout)])
    return model, tokenizer


def _require_all_weights(model: str, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights at random; tied weights are not missing.

    Args:
        model: as the user gave it.
        report: transformers' loading info, with `missing_keys` and `mismatched_keys` (name, shape found, shape needed).
    """
    absent = sorted(report["missing_keys"])
    misfits = sorted(
        f"{name} {list(found)} instead of {list(needed)}" for name, found, needed in report["mismatched_keys"]
    )
    for what, names in (("lacks", absent), ("has other shapes of", misfits)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"model={model!r}: the checkpoint {what} {', '.join(names[:3])}{more}. They would be trained from random "
                f"values: use a complete checkpoint of this architecture"
            )


def training_set(task: Task) -> Dataset:
    """The rows to train on, as TRL takes them.

    Raises:
        DataError: a column holds values of several types.
    """
    try:
        return Dataset.from_list(task.train)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"task={task.name!r}: its rows do not form a table, each column of one type: {error}"
        ) from error


def texts_to_spare(config: TrainConfig) -> list[str]:
    """The texts that collateral KL is measured on; none where it is not. They need no model.

    Raises:
        DataError: the file cannot be read, or holds no text.
    """
    diagnostics = config.diagnostics
    return unrelated_texts(diagnostics.collateral_file) if diagnostics.collateral_every else []


def build_diagnostics(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Diagnostic]:
    """The probes that the configuration asks for.

    Args:
        config: the run.
        tokenizer: of the model.
        texts: from `texts_to_spare`.
    """
    settings = config.diagnostics
    common: dict[str, Any] = {"num_responses": settings.num_responses, "seed": config.run.seed}
    probes: list[Diagnostic] = []
    if settings.direction_every:
        probes.append(DirectionProbe(settings.direction_layers, settings.direction_every, **common))
    if settings.collateral_every:
        probes.append(CollateralProbe(texts, tokenizer, settings.collateral_every, **common))
    return probes


def build_trainer(
    config: TrainConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reward: Callable[..., Any],
    dataset: Dataset,
    arguments: GRPOConfig,
    diagnostics: Sequence[Diagnostic] = (),
) -> GuardedGRPOTrainer:
    """The trainer of the method, ready to train.

    Args:
        config: the run.
        model: the policy, from `load_model`.
        tokenizer: its tokenizer.
        reward: TRL reward function of the task.
        dataset: from `training_set`.
        arguments: from `trl_arguments`.
        diagnostics: from `build_diagnostics`.
    """
    common: dict[str, Any] = {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": with_length_penalty(reward, config.guards.length_penalty, config.rollout.max_new_tokens),
        "args": arguments,
        "train_dataset": dataset,
        "guards": config.guards,
    }
    if config.method in ("logra", "paper"):
        trainer: GuardedGRPOTrainer = GRPOTrainer(
            logra=config.optimizer_config, diagnostics=diagnostics, workers=_workers(config), **common
        )
        trainer.create_optimizer()
        return trainer
    baseline: Callable[..., GuardedGRPOTrainer] = GuardedGRPOTrainer
    if config.prices_steps:
        baseline = functools.partial(PricedGRPOTrainer, trust=config.trust)
    if config.method == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return baseline(peft_config=adapter, **common)
    return baseline(**common)


def _workers(config: TrainConfig) -> WorkersConfig | None:
    """The fleet that samples, where there is one."""
    rollout = config.rollout
    if rollout.engine not in ("ray", "ray_vllm"):
        return None
    given = {"num_workers": rollout.num_workers, "num_threads": rollout.worker_threads, "num_gpus": rollout.worker_gpus}
    return WorkersConfig(
        engine="vllm" if rollout.engine == "ray_vllm" else "transformers",
        model=model_location(config.model),
        **{name: value for name, value in given.items() if value is not None},
    )


_BODY = r"(?!.*lm_head).*"
"""Modules that GaLore and APOLLO project, those of them that are linear: all but the head."""


def trl_arguments(config: TrainConfig) -> GRPOConfig:
    """TRL's settings of a run. They need no model, so that what they refuse is refused before it loads.

    Raises:
        ConfigError: a setting that this machine or TRL does not take, or a tracker that is not there.
    """
    available = get_available_reporting_integrations()
    for name in config.run.report_to:
        if name not in available:
            raise ConfigError(
                f"run.report_to={name!r}: not a tracker, or its package is not installed. "
                f"Available: {', '.join(available) or 'none'}"
            )
    try:
        return _grpo_config(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"TRL refuses the settings: {error}") from error


def _grpo_config(config: TrainConfig) -> GRPOConfig:
    accumulation = config.rollout.num_completions // distributed.num_processes() // config.loss.micro_batch_size
    return GRPOConfig(
        output_dir=config.output_dir,
        max_steps=config.run.num_steps,
        per_device_train_batch_size=config.loss.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        num_generations=config.rollout.num_samples,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        loss_type=config.loss.loss_type,
        scale_rewards=config.loss.scale_rewards,
        epsilon=config.loss.epsilon,
        epsilon_high=config.loss.epsilon_high,
        beta=config.loss.beta,
        mask_truncated_completions=config.loss.mask_truncated,
        top_entropy_quantile=config.loss.top_entropy,
        entropy_coef=config.loss.entropy_coef,
        lr_scheduler_type=config.run.lr_schedule if config.run.warmup_steps == 0 else _with_warmup(config),
        warmup_steps=config.run.warmup_steps,
        bf16=config.run.precision == "bf16",
        use_cpu=config.run.device == "cpu" or not torch.accelerator.is_available(),
        dataloader_pin_memory=False,
        seed=config.run.seed,
        report_to=list(config.run.report_to),
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **{CHECKPOINTING: False},
        **_engine_arguments(config),
        **_optimizer_arguments(config),
    )


def _engine_arguments(config: TrainConfig) -> dict[str, Any]:
    """What samples, in TRL's terms."""
    rollout = config.rollout
    if rollout.engine == "transformers":
        return {}
    for package in {"ray": ("ray",), "ray_vllm": ("ray", "vllm")}.get(rollout.engine, ("vllm",)):
        engine_class(package)  # one that is missing is found before the model loads
    if rollout.engine == "ray":
        return {"use_vllm": True, "vllm_importance_sampling_correction": False}
    loss = config.loss
    correction = {
        "vllm_importance_sampling_correction": loss.importance != "off",
        "vllm_importance_sampling_mode": "sequence_mask" if loss.importance == "off" else loss.importance,
        "vllm_importance_sampling_clip_max": loss.importance_max,
        "vllm_importance_sampling_clip_min": loss.importance_min,
        "off_policy_mask_threshold": loss.off_policy_kl,
    }
    if rollout.engine in ("vllm", "ray_vllm"):
        return {"use_vllm": True, "vllm_mode": "colocate", **correction}
    return {
        "use_vllm": True,
        **correction,
        "vllm_mode": "server",
        "vllm_server_base_url": rollout.server_url or "http://127.0.0.1:8000",
    }


def _with_warmup(config: TrainConfig) -> str:
    schedule = config.run.lr_schedule
    return "constant_with_warmup" if schedule == "constant" else schedule


def _optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """TRL's optimizer, its learning rate and clipping; a sketch optimizer has its own in `logra.Config`."""
    if config.method == "adamw":
        adamw = config.adamw
        return {
            "learning_rate": adamw.lr,
            "weight_decay": adamw.weight_decay,
            "max_grad_norm": adamw.max_grad_norm,
        }
    if config.method == "lora":
        return {"learning_rate": config.lora.lr, "max_grad_norm": config.lora.max_grad_norm}
    if config.method in ("galore", "apollo"):
        projected: Any = getattr(config, config.method)
        _require_package(config.method)
        settings = {"rank": projected.rank, "scale": projected.scale, "update_proj_gap": projected.update_proj_gap}
        return {
            "optim": f"{config.method}_adamw",
            "optim_target_modules": _BODY,
            "optim_args": ",".join(f"{name}={value}" for name, value in settings.items()),
            "learning_rate": projected.lr,
            "max_grad_norm": projected.max_grad_norm,
        }
    return {"max_grad_norm": 0.0}


def _require_package(method: str) -> None:
    """Find a baseline's package before the model loads.

    Raises:
        ConfigError: it, or one that it imports, is not installed or cannot be loaded.
    """
    try:
        importlib.import_module(f"{method}_torch")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"method={method}: the package {error.name} is not installed: pip install 'logra[bench]'"
        ) from error
    except ImportError as error:
        raise ConfigError(f"method={method}: its package cannot be loaded: {error}") from error


def count_parameters(trainer: GuardedGRPOTrainer) -> dict[str, int]:
    """Numbers of parameters that are sketched, trained densely and frozen."""
    if isinstance(trainer, GRPOTrainer):
        return trainer.sketch_optimizer.num_parameters()
    model: Any = trainer.model
    total = sum(parameter.numel() for parameter in model.parameters())
    dense = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"sketched": 0, "dense": dense, "frozen": total - dense}


def publish_updates(
    config: TrainConfig,
    trainer: GuardedGRPOTrainer,
    folder: Path,
    *,
    resumed: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Let a trainer of sketches put every update into a log, on process 0; the baselines make none.

    Args:
        config: the run.
        trainer: its trainer.
        folder: of the log.
        resumed: the log may hold updates that the trainer is about to make again.
        say: shows a line.
    """
    if isinstance(trainer, GRPOTrainer) and distributed.rank() == 0:
        settings: dict[str, Any] = {"base_model": config.model, "anchor_every": config.run.anchor_every}
        log, optimizer = DirectoryLog(folder), trainer.sketch_optimizer
        if resumed:
            trainer.publish_to(ResumedPublisher(log, optimizer, say=say, **settings))
        else:
            trainer.publish_to(Publisher(log, optimizer, **settings))


def trained_policy(trainer: GuardedGRPOTrainer) -> PreTrainedModel:
    """The plain model that was trained; LoRA adapters are merged into its weights, which ends their training."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
