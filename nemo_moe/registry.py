"""Names of backends and models -> where their code is and what it can do, as plain data.

Importing this module imports nothing of a backend: a setting that a backend cannot honour is refused from the data
here, and the backend's file (and the optional library behind it) is loaded on first use by `Registry.load`.

Adding a dispatcher is one file that subclasses `DispatchManager` and one `DISPATCHERS.register(...)`; validation, the
conformance tests and the benchmark iterate over the registry. A package of your own puts the module that registers under
the entry-point group `nemo_moe.backends`: it is imported on every rank when a name is asked for that is not here, or when
all names are.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ENTRY_POINTS = "nemo_moe.backends"

# The values of the recipe key `precision` -> torch's name of the type that is computed in.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What dispatchers and experts have in common.

    Attributes:
        target: "module:Class" of the implementation.
        summary: one line for `--help`, the docs table and the start-up lines.
        precisions: the values of the recipe key `precision` that it can compute in.
        requires: importable module names that must be present.
        extra: the pip extra of nemo_moe that installs them.
    """

    target: str
    summary: str
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    requires: tuple[str, ...] = ()
    extra: str | None = None


@dataclass(frozen=True, kw_only=True)
class DispatcherSpec(BackendSpec):
    """What a dispatcher can do.

    Attributes:
        needs_shared_batch: the ranks of its EP group must hold the same tokens (ep_size equal to tp_size).
        uneven_tokens: ranks may hold different numbers of tokens.
        sync_free: no host synchronisation, so it may run under CUDA-graph capture and torch.compile.
        async_dispatch: honours `dispatcher_async_dispatch: true`.
        deterministic: the order of rows inside an expert, and so the sums, are the same in every run.
        num_sms_multiple_of: the rule for `dispatcher_num_sms`; None where the dispatcher has no such knob.
        hidden_size_multiple_of: the rule for the hidden size.
    """

    needs_shared_batch: bool = False
    uneven_tokens: bool = True
    sync_free: bool = False
    async_dispatch: bool = False
    deterministic: bool = False
    num_sms_multiple_of: int | None = None
    hidden_size_multiple_of: int = 1


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(BackendSpec):
    """What an experts backend can do.

    Attributes:
        device_counts: takes `tokens_per_expert` on the device, so rows may be worst-case and nothing synchronises.
        row_bytes_multiple_of: the rule for the bytes of a row of hidden_size and of moe_intermediate_size elements.
    """

    device_counts: bool = False
    row_bytes_multiple_of: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family.

    Attributes:
        target: "module:Class" of the model; `Class(config, backend)`.
        config: "module:Class" of its config, with `from_hf(dict)` and `to_hf()`.
        model_type: the `model_type` of its Hugging Face config.json.
    """

    target: str
    config: str
    model_type: str


Spec = TypeVar("Spec", BackendSpec, DispatcherSpec, ExpertsSpec, ModelSpec)


class Registry(Generic[Spec]):
    """Name -> spec, with messages that name what is legal.

    Args:
        kind: the config key the names are values of, for messages ("backend.dispatcher").
        foreign: names that users of other frameworks write -> the name to use here.
    """

    def __init__(self, kind: str, foreign: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._foreign = foreign or {}
        self._specs: dict[str, Spec] = {}

    def register(self, name: str, spec: Spec) -> None:
        """Add a backend. Raises ValueError when the name is taken."""
        if name in self._specs:
            raise ValueError(f"{self.kind}: {name!r} is already registered ({self._specs[name].target})")
        self._specs[name] = spec

    def unregister(self, name: str) -> None:
        """Remove a backend that was registered (for tests and notebooks)."""
        del self._specs[name]

    def __iter__(self) -> Iterator[str]:
        _load_entry_points()
        return iter(self._specs)

    def __contains__(self, name: object) -> bool:
        if name not in self._specs:
            _load_entry_points()
        return name in self._specs

    def get(self, name: str) -> Spec:
        """The spec of `name`.

        Raises ValueError that lists the legal names and the nearest one, or that says which installed package registers
        backends and cannot be imported.
        """
        if name in self:
            return self._specs[name]
        legal = ", ".join(sorted(self._specs))
        if name in self._foreign:
            raise ValueError(f"{self.kind}: {name!r} is another framework's name; here it is {self._foreign[name]!r} (legal: {legal})")
        near = difflib.get_close_matches(str(name), list(self._specs), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{self.kind}: unknown value {name!r}{hint} (legal: {legal})")

    def check_installed(self, name: str) -> None:
        """Raise ImportError naming the extra to install when a library behind `name` is missing."""
        spec = self.get(name)
        if not isinstance(spec, BackendSpec):
            return
        missing = [module for module in spec.requires if importlib.util.find_spec(module) is None]
        if missing:
            fix = f"install it with: pip install 'nemo_moe[{spec.extra}]'" if spec.extra else "install it"
            raise ImportError(f"{self.kind}: {name!r} needs the package {', '.join(missing)}, which is not installed; {fix}")

    def load(self, name: str) -> Any:
        """The class of `name`. Imports its file. Raises as `get` and `check_installed` do."""
        self.check_installed(name)
        return load_target(self.get(name).target)


_loaded_entry_points: set[importlib.metadata.EntryPoint] = set()


def _load_entry_points() -> None:
    """Import the modules that installed packages name under `nemo_moe.backends`, each once; they register what they have."""
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry_point in _loaded_entry_points:
            continue
        _loaded_entry_points.add(entry_point)  # before the import, which may ask the registry itself
        try:
            entry_point.load()
        except Exception as error:
            _loaded_entry_points.discard(entry_point)
            raise ValueError(
                f"the entry point {entry_point.name} = {entry_point.value} of group {ENTRY_POINTS!r}, from the package"
                f" {entry_point.dist.name if entry_point.dist else '?'}, cannot be loaded ({type(error).__name__}: {error});"
                " repair that package or uninstall it"
            ) from error


def load_target(target: str) -> Any:
    """Import "module:Name" and return the object."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


DISPATCHERS: Registry[DispatcherSpec] = Registry(
    "backend.dispatcher", foreign={"torch": "all_to_all", "alltoall": "all_to_all", "allreduce": "all_reduce"}
)
EXPERTS: Registry[ExpertsSpec] = Registry("backend.experts", foreign={"torch": "loop", "torch_mm": "grouped_mm", "eager": "loop"})
MODELS: Registry[ModelSpec] = Registry("model.family", foreign={"qwen3": "qwen3_moe", "Qwen3MoeForCausalLM": "qwen3_moe"})

DISPATCHERS.register(
    "all_to_all",
    DispatcherSpec(
        target="nemo_moe.moe.dispatch.all_to_all:_AllToAllManager",
        summary="torch.distributed all-to-all on gloo or NCCL; exact rows, each token sent once per rank that needs it",
        deterministic=True,
    ),
)
DISPATCHERS.register(
    "all_reduce",
    DispatcherSpec(
        target="nemo_moe.moe.dispatch.all_reduce:_AllReduceManager",
        summary="ranks that share one batch compute their own experts and add up",
        needs_shared_batch=True,
        uneven_tokens=False,
        sync_free=True,
        deterministic=True,
    ),
)

EXPERTS.register("loop", ExpertsSpec(target="nemo_moe.moe.experts.loop:LoopExperts", summary="one matmul an expert; the oracle"))
EXPERTS.register(
    "grouped_mm",
    ExpertsSpec(
        target="nemo_moe.moe.experts.grouped_mm:GroupedMMExperts",
        summary="torch.nn.functional.grouped_mm",
        device_counts=True,
        row_bytes_multiple_of=16,
    ),
)

MODELS.register(
    "qwen3_moe",
    ModelSpec(
        target="nemo_moe.models.qwen3_moe:Qwen3MoeForCausalLM",
        config="nemo_moe.models.qwen3_moe:Qwen3MoeConfig",
        model_type="qwen3_moe",
    ),
)
