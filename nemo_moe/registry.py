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
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

ENTRY_POINTS = "nemo_moe.backends"
_NAME = re.compile(r"\w[\w.-]*")

# The values of the recipe key `precision` -> torch's name of the type that is computed in.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What dispatchers and experts have in common.

    Attributes:
        target: "module:Class" of the implementation.
        summary: one line for `--help`, the docs table and the start-up lines.
        precisions: the values of the recipe key `precision` that it can compute in.
        devices: the devices that it can run on.
        requires: importable module names that must be present; "a|b" is one of the two.
        extra: the pip extra of nemo_moe that installs them.
        install: how to get them, where no extra does.
    """

    target: str
    summary: str
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    devices: tuple[str, ...] = ("cpu", "cuda")
    requires: tuple[str, ...] = ()
    extra: str | None = None
    install: str = "install it"


@dataclass(frozen=True, kw_only=True)
class DispatcherSpec(BackendSpec):
    """What a dispatcher can do.

    Attributes:
        needs_shared_batch: the ranks of its EP group must hold the same tokens (ep_size equal to tp_size).
        uneven_tokens: ranks may hold different numbers of tokens.
        sync_free: never synchronises with the host.
        capturable: has a mode without host synchronisation for CUDA-graph capture and torch.compile (`sync_free` ones do).
        async_dispatch: honours `dispatcher_async_dispatch: true`.
        deterministic: the order of rows inside an expert, and so the sums, are the same in every run.
        merges_duplicates: an id that a token names twice becomes one row with the sum of the weights, else a row each.
        num_sms_multiple_of: the rule for `dispatcher_num_sms`; None where the dispatcher has no such knob.
        hidden_size_multiple_of: the rule for the hidden size.
    """

    needs_shared_batch: bool = False
    uneven_tokens: bool = True
    sync_free: bool = False
    capturable: bool = False
    async_dispatch: bool = False
    deterministic: bool = False
    merges_duplicates: bool = False
    num_sms_multiple_of: int | None = None
    hidden_size_multiple_of: int = 1


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(BackendSpec):
    """What an experts backend can do.

    Attributes:
        device_counts: takes `tokens_per_expert` on the device, so rows may be worst-case and nothing synchronises.
        row_bytes_multiple_of: the rule for the bytes of a row of hidden_size and of moe_intermediate_size elements.
        fp8: values of `experts_fp8` -> what hidden_size and moe_intermediate_size must be multiples of; empty where it has none.
    """

    device_counts: bool = False
    row_bytes_multiple_of: int = 1
    fp8: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family.

    Attributes:
        target: "module:Class" of the model; `Class(config, backend)`.
        config: "module:Class" of its config, with `from_hf(dict)` and `to_hf()`.
        model_type: the `model_type` of its Hugging Face config.json; a folder with another one is refused.
    """

    target: str
    config: str
    model_type: str


Spec = TypeVar("Spec", BackendSpec, DispatcherSpec, ExpertsSpec, ModelSpec)


class Registry(Generic[Spec]):
    """Name -> spec, with messages that name what is legal.

    Args:
        kind: the config key the names are values of, for messages ("backend.dispatcher").
        spec_type: of the specs.
        base: "module:Class" that what a spec's `target` names must be a subclass of.
        foreign: names that users of other frameworks write -> the name to use here.
    """

    def __init__(self, kind: str, spec_type: type[Spec], base: str, foreign: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._spec_type: type[Spec] = spec_type
        self._base = base
        self._foreign = foreign or {}
        self._specs: dict[str, Spec] = {}

    def register(self, name: str, spec: Spec) -> None:
        """Add a backend. Raises ValueError when the name is taken or cannot be written in a recipe, or the spec is of another kind."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{self.kind}: a name must be text of letters, digits, '_', '-' and '.', found {name!r}")
        if not isinstance(spec, self._spec_type):
            raise ValueError(f"{self.kind}: {name!r} needs a spec of type {self._spec_type.__name__}, found {type(spec).__name__}")
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
        missing = [names.replace("|", " or ") for names in spec.requires if not any(map(_is_importable, names.split("|")))]
        if missing:
            fix = f"install it with: pip install 'nemo_moe[{spec.extra}]'" if spec.extra else spec.install
            raise ImportError(f"{self.kind}: {name!r} needs the package {', '.join(missing)}, which is not installed; {fix}")

    def load(self, name: str) -> Any:
        """The class of `name`. Imports its file.

        Raises ValueError as `get` does, and where the class is none of the kind that the registry is for; ImportError as
        `check_installed` does, and where the file or the class in it cannot be loaded.
        """
        self.check_installed(name)
        loaded = self.load_part(name, "target")
        base = load_target(self._base)
        if not isinstance(loaded, type) or not issubclass(loaded, base):
            raise ValueError(f"{self.kind}: {name!r} is registered as {self.get(name).target}, which is no subclass of {base.__name__}")
        open_methods = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        if open_methods:
            raise ValueError(f"{self.kind}: {name!r} is registered as {self.get(name).target}, which does not define {open_methods}")
        return loaded

    def load_part(self, name: str, field: str) -> Any:
        """What the "module:Name" in `field` of the spec of `name` stands for. Raises ImportError where it cannot be loaded."""
        target = getattr(self.get(name), field)
        try:
            return load_target(target)
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"{self.kind}: {name!r} is registered as {target}, which cannot be loaded ({type(error).__name__}: {error});"
                " repair the package that registers it, or choose another"
            ) from error


_loaded_entry_points: set[importlib.metadata.EntryPoint] = set()


def _load_entry_points() -> None:
    """Import the modules that installed packages name under `nemo_moe.backends`, each once; they register what they have."""
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry_point in _loaded_entry_points:
            continue
        _loaded_entry_points.add(entry_point)  # before the import, which may ask the registry itself
        try:
            entry_point.load()
        except (Exception, SystemExit) as error:  # a module that ends the program must not end a run that looks for a name
            _loaded_entry_points.discard(entry_point)
            raise ValueError(
                f"the entry point {entry_point.name} = {entry_point.value} of group {ENTRY_POINTS!r}, from the package"
                f" {entry_point.dist.name if entry_point.dist else '?'}, cannot be loaded ({type(error).__name__}: {error});"
                " repair that package or uninstall it"
            ) from error


def load_target(target: str) -> Any:
    """Import "module:Name" and return the object. Raises whatever importing it raises."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package above it
        return False


DISPATCHERS: Registry[DispatcherSpec] = Registry(
    "backend.dispatcher",
    DispatcherSpec,
    base="nemo_moe.moe.dispatch.base:DispatchManager",
    foreign={"torch": "all_to_all", "alltoall": "all_to_all", "allreduce": "all_reduce"},
)
EXPERTS: Registry[ExpertsSpec] = Registry(
    "backend.experts",
    ExpertsSpec,
    base="nemo_moe.moe.experts.base:Experts",
    foreign={"torch": "loop", "torch_mm": "grouped_mm", "eager": "loop"},
)
MODELS: Registry[ModelSpec] = Registry(
    "model.family",
    ModelSpec,
    base="torch.nn:Module",
    foreign={
        "qwen3": "qwen3_moe",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "MixtralForCausalLM": "mixtral",
        "mixtral-8x7b": "mixtral",
        "mixtral-8x22b": "mixtral",
    },
)

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
        capturable=True,
        deterministic=True,
    ),
)
DISPATCHERS.register(
    "deepep",
    DispatcherSpec(
        target="nemo_moe.moe.dispatch.deepep:_DeepepManager",
        summary="DeepEP's kernels over NVLink and RDMA (V1 Buffer, 2.x ElasticBuffer, 2.5 EPBuffer)",
        precisions=("bf16",),
        devices=("cuda",),
        requires=("deep_ep|deep_ep_v25|kernels",),
        extra="deepep",
        capturable=True,
        async_dispatch=True,
        merges_duplicates=True,
        num_sms_multiple_of=2,
        hidden_size_multiple_of=16,
    ),
)
DISPATCHERS.register(
    "hybridep",
    DispatcherSpec(
        target="nemo_moe.moe.dispatch.hybridep:_HybridEPManager",
        summary="DeepEP's HybridEPBuffer: dispatch and grouping by expert in one call, over NVLink and RDMA",
        precisions=("bf16",),
        devices=("cuda",),
        requires=("deep_ep",),
        install="build DeepEP's branch hybrid-ep from source (the published wheels have no HybridEP)",
        capturable=True,
        merges_duplicates=True,
        num_sms_multiple_of=1,
        hidden_size_multiple_of=16,
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

EXPERTS.register(
    "gmm",
    ExpertsSpec(
        target="nemo_moe.moe.experts.gmm:GmmExperts",
        summary="the package grouped_gemm (tgale96's or NVIDIA's), with row counts on the host",
        precisions=("bf16",),
        devices=("cuda",),
        requires=("grouped_gemm",),
        extra="gmm",
        row_bytes_multiple_of=16,
    ),
)
EXPERTS.register(
    "te",
    ExpertsSpec(
        target="nemo_moe.moe.experts.te:TEExperts",
        summary="TransformerEngine's GroupedLinear, with row counts on the host",
        precisions=("bf16",),
        devices=("cuda",),
        requires=("transformer_engine",),
        extra="te",
        row_bytes_multiple_of=16,
        fp8={"current": 16, "block": 128, "mxfp8": 32},
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
MODELS.register(
    "mixtral",
    ModelSpec(
        target="nemo_moe.models.mixtral:MixtralForCausalLM",
        config="nemo_moe.models.mixtral:MixtralConfig",
        model_type="mixtral",
    ),
)
