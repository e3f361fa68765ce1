"""The dataclasses of a run: the schema of every recipe, each rejecting a bad value when it is built.

`compose.py` fills them from YAML and overrides; nothing else reads YAML. Backend and model names are plain strings that
are checked against `registry.py`, so a registered backend of the user's own works; the fixed choices are Enums (whose
member names are what the YAML says). What depends on the machine or on the number of ranks is `resolve.py`'s to check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from nemo_moe.checks import home_expanded, member, not_negative, positive, require, sizes, within
from nemo_moe.layer_config import BackendConfig as BackendConfig, MoEConfig as MoEConfig, ScoreFunction as ScoreFunction
from nemo_moe.registry import DISPATCHERS, EXPERTS, MODELS

_MINUTES = (0.01, 60 * 24 * 365)  # half a second to a year: what timers and process groups take
HALF_OF_SEEDS = 2**31  # of a task's items; some tasks seed numpy, which takes 32 bits (data/reasoning_gym.py says what the halves are for)
HELD_OUT_TRIES = 50  # generated items per held-out item wanted, before the question space counts as too small


class Precision(str, Enum):
    """What the model computes in. Master weights, gradients and optimizer states are fp32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


class Device(str, Enum):
    """`auto` is CUDA where there is a CUDA device, else the CPU; the start-up lines say which."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ActivationCheckpointing(str, Enum):
    """What backward computes again: nothing, each whole layer, or each layer except its matmuls and attention."""

    none = "none"
    full = "full"
    selective = "selective"


class ScheduleName(str, Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class WandbMode(str, Enum):
    """`auto` is online where an API key is set, else offline; `disabled` logs nothing."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True)
class ModelConfig:
    """Which model.

    Attributes:
        family: a name in `registry.MODELS`.
        path: a Hugging Face folder to start from (its config.json and weights); null starts from random weights.
        config: Hugging Face config keys; the whole config where `path` is null, changes to the folder's one otherwise.
    """

    family: str = "qwen3_moe"
    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        MODELS.get(self.family)
        require(self.path != "", "model.path is empty: write null for random weights, or a Hugging Face folder")
        _ = self.folder  # for its check
        require(
            self.path is not None or bool(self.config),
            "model.path and model.config are both empty: give a Hugging Face folder, or the config of a model to start from random weights",
        )

    @property
    def folder(self) -> Path | None:
        """`path` to read from: with its ~ replaced by the home folder."""
        return None if self.path is None else home_expanded("model.path", self.path)


@dataclass(kw_only=True)
class DistributedConfig:
    """Sizes of the meshes. `fsdp_size: null` takes all ranks that the other sizes leave.

    ep_size divides fsdp_size * tp_size and the number of experts, and is a multiple of tp_size.
    `distributed.mesh.MeshSizes` holds the rules.

    Attributes:
        timeout_minutes: how long a collective may wait before the job is ended.
        hang_report_minutes: after so long without progress, which rank is in which collective is printed; the run goes on.
    """

    fsdp_size: int | None = None
    dp_replicate_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    timeout_minutes: float = 10.0
    hang_report_minutes: float = 2.0

    def __post_init__(self) -> None:
        sizes(
            distributed__fsdp_size=self.fsdp_size,
            distributed__dp_replicate_size=self.dp_replicate_size,
            distributed__tp_size=self.tp_size,
            distributed__ep_size=self.ep_size,
        )
        within(*_MINUTES, distributed__timeout_minutes=self.timeout_minutes, distributed__hang_report_minutes=self.hang_report_minutes)


@dataclass(kw_only=True)
class RouterConfig:
    """How routing is trained.

    Attributes:
        aux_loss_coef: of the load-balance loss; null takes the model config's `router_aux_loss_coef`.
        z_loss_coef: of the mean squared logsumexp of the router logits.
        bias_update_rate: step of the expert bias of loss-free balancing; above 0 gives the model an expert bias.
        fake_balanced: replaces the gate by round-robin routing; for benchmarks only.

    What is not at its default needs a model with experts; `resolve` refuses it for others.
    """

    aux_loss_coef: float | None = None
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    fake_balanced: bool = False

    def __post_init__(self) -> None:
        not_negative(
            router__aux_loss_coef=self.aux_loss_coef, router__z_loss_coef=self.z_loss_coef, router__bias_update_rate=self.bias_update_rate
        )
        require(
            not (self.fake_balanced and self.bias_update_rate),
            f"router.bias_update_rate is {self.bias_update_rate}, but router.fake_balanced routes by no bias; set it to 0",
        )


@dataclass(kw_only=True)
class TaskConfig:
    """One reasoning-gym task: its name, the number of training items and its parameters."""

    name: str
    train_size: int
    params: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            1 <= self.train_size <= HALF_OF_SEEDS,
            f"data.tasks: train_size of {self.name!r} must be between 1 and {HALF_OF_SEEDS}, found {self.train_size}",
        )


@dataclass(kw_only=True)
class DataConfig:
    """Question/answer problems of the package reasoning-gym, as chats.

    Attributes:
        tasks: the mixture.
        held_out_per_task: items per task kept for the exact-match evaluation; never in the training set, nor is an
            item that equals one of them up to operand order, list order or letter case.
        max_length: longest sequence in tokens; a longer one is cut and counted in a warning.
        length_group_batches: batches whose samples are sorted by length together, which saves padding and may slow learning;
            1 does not sort.
    """

    tasks: list[TaskConfig] = field(default_factory=list)
    held_out_per_task: int = 67
    max_length: int = 64
    length_group_batches: int = 1

    def __post_init__(self) -> None:
        require(len(self.tasks) >= 1, "data.tasks is empty: name at least one reasoning-gym task")
        sizes(data__max_length=self.max_length, data__length_group_batches=self.length_group_batches)
        require(self.max_length >= 2, f"data.max_length must be 2 or more, found {self.max_length}")
        within(1, HALF_OF_SEEDS // HELD_OUT_TRIES, data__held_out_per_task=self.held_out_per_task)


_BETAS, _EPS = [0.9, 0.95], 1e-8


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW or SGD from torch. Weight decay acts on matrices (two or more dimensions, embeddings included) alone.

    `betas` and `eps` are AdamW's, `momentum` is SGD's; to set one beside the other optimizer is an error.
    """

    name: str = "adamw"
    lr: float = 1e-5
    betas: list[float] = field(default_factory=lambda: list(_BETAS))
    eps: float = _EPS
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        require(self.name in ("adamw", "sgd"), f"optimizer.name: unknown value {self.name!r} (legal: adamw, sgd)")
        positive(optimizer__lr=self.lr, optimizer__eps=self.eps)
        not_negative(optimizer__weight_decay=self.weight_decay, optimizer__momentum=self.momentum)
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas must be two numbers in [0, 1), found {list(self.betas)}",
        )
        unread: dict[str, Any] = {"momentum": 0.0} if self.name == "adamw" else {"betas": _BETAS, "eps": _EPS}
        for key, default in unread.items():
            found = getattr(self, key)
            require(
                found == default,
                f"optimizer.{key} is {found}, but {self.name} has no {key}; leave it at {default}, or choose the optimizer that has it",
            )


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate: linear warm-up, then the named shape down to `min_lr_ratio` times the peak at the last step.

    `constant` stays at the peak, so `min_lr_ratio` above 0 beside it is an error.
    """

    name: ScheduleName = ScheduleName.cosine
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        self.name = member(ScheduleName, "schedule.name", self.name)
        not_negative(schedule__warmup_steps=self.warmup_steps)
        require(0 <= self.min_lr_ratio <= 1, f"schedule.min_lr_ratio must be in [0, 1], found {self.min_lr_ratio}")
        require(
            self.name is not ScheduleName.constant or self.min_lr_ratio == 0,
            f"schedule.min_lr_ratio is {self.min_lr_ratio}, but a constant schedule stays at the peak; set it to 0,"
            " or choose linear or cosine",
        )


@dataclass(kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
        max_steps: optimizer steps; null means num_epochs decides. Whichever comes first ends the run.
        num_epochs: passes over the data; null means max_steps decides.
        global_batch_size: sequences of one optimizer step over all ranks; the same run on other numbers of ranks.
        micro_batch_size: sequences a rank puts through the model at once. Accumulation follows from the two.
        max_grad_norm: global gradient norm above which gradients are scaled down; null does not clip.
        activation_checkpointing: what backward computes again.
    """

    max_steps: int | None = None
    num_epochs: int | None = 1
    global_batch_size: int = 32
    micro_batch_size: int = 1
    max_grad_norm: float | None = 1.0
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none

    def __post_init__(self) -> None:
        require(self.max_steps is not None or self.num_epochs is not None, "train.max_steps and train.num_epochs are both null: set one")
        positive(
            train__max_steps=self.max_steps,
            train__num_epochs=self.num_epochs,
            train__global_batch_size=self.global_batch_size,
            train__micro_batch_size=self.micro_batch_size,
            train__max_grad_norm=self.max_grad_norm,
        )
        self.activation_checkpointing = member(ActivationCheckpointing, "train.activation_checkpointing", self.activation_checkpointing)


@dataclass(kw_only=True)
class ValidationConfig:
    """Held-out loss every `every_steps` optimizer steps (null: at the end only), and exact match before and after.

    Attributes:
        exact_match: greedy generation on the held-out items before the first and after the last step.
        show_samples: how many answers to print with it.
    """

    every_steps: int | None = None
    exact_match: bool = False
    show_samples: int = 6

    def __post_init__(self) -> None:
        positive(validation__every_steps=self.every_steps)
        not_negative(validation__show_samples=self.show_samples)


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved to go on from: model, optimizer, schedule, position in the data, random states, in output_dir/checkpoints.

    A run that is asked to stop (SIGTERM, SIGINT) saves one whatever `every_steps` says.

    Attributes:
        every_steps: optimizer steps between checkpoints; the last step gets one too. null saves none on its own.
        keep_last: how many of the newest to keep.
        keep_best: also keep the one with the lowest validation loss; each checkpoint is validated first then.
        async_save: write while training goes on, from a copy in CPU memory; a save is awaited before the next and at the end.
        resume: null starts anew, `latest` goes on from output_dir's newest checkpoint, `auto` does so where there is
            one and else starts anew; or the folder of a checkpoint.
        grace_seconds: after a signal, how long saving and leaving may take before the process is ended.
    """

    every_steps: int | None = None
    keep_last: int = 2
    keep_best: bool = False
    async_save: bool = False
    resume: str | None = None
    grace_seconds: float = 120.0

    def __post_init__(self) -> None:
        positive(checkpoint__every_steps=self.every_steps, checkpoint__keep_last=self.keep_last)
        within(0.1, 60 * _MINUTES[1], checkpoint__grace_seconds=self.grace_seconds)
        require(self.resume != "", "checkpoint.resume is empty: write null, auto, latest or the folder of a checkpoint")
        home_expanded("checkpoint.resume", self.resume or "")
        for key in ("keep_best", "async_save"):
            require(
                self.every_steps is not None or not getattr(self, key),
                f"checkpoint.{key} is true, but checkpoint.every_steps is null, so nothing is saved on its own; set it",
            )


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases, on rank 0 only; its failure never stops a run."""

    mode: WandbMode = WandbMode.auto
    project: str = "nemo_moe"
    name: str | None = None

    def __post_init__(self) -> None:
        self.mode = member(WandbMode, "logging.wandb.mode", self.mode)


@dataclass(kw_only=True)
class LoggingConfig:
    """Console, JSONL and W&B share one global step.

    Attributes:
        every_steps: console and JSONL lines; the progress bar is live in between.
        progress_bar: the live bar on a terminal; without a terminal lines are printed instead.
    """

    every_steps: int = 10
    progress_bar: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        positive(logging__every_steps=self.every_steps)


@dataclass(kw_only=True)
class RunConfig:
    """A whole run. `output_dir` receives the resolved config, the logs, checkpoints, and the model in Hugging Face's layout."""

    model: ModelConfig
    data: DataConfig
    backend: BackendConfig = field(default_factory=BackendConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    precision: Precision = Precision.bf16
    device: Device = Device.auto
    seed: int = 0
    output_dir: str = "runs/default"

    def __post_init__(self) -> None:
        self.precision = member(Precision, "precision", self.precision)
        self.device = member(Device, "device", self.device)
        within(0, 2**63 - 1, seed=self.seed)
        require(self.output_dir != "", "output_dir is empty: name the folder that the run is written to")
        home_expanded("output_dir", self.output_dir)
        # With ep_size 1 no token leaves its rank, so any dispatcher is legal.
        used = {"dispatcher": DISPATCHERS.get(self.backend.dispatcher)} if self.distributed.ep_size > 1 else {}
        for kind, spec in (*used.items(), ("experts", EXPERTS.get(self.backend.experts))):
            name, precisions = getattr(self.backend, kind), spec.precisions
            require(
                self.precision.value in precisions,
                f"precision is {self.precision.value}, but backend.{kind} {name!r} computes in {', '.join(precisions)} only",
            )
