"""What the optional libraries need of this machine, each requirement with its fix, checked in order.

`is_*_loadable` answers, `load_*` returns the library or raises ImportError that names the first requirement which is not
met. Cheap requirements come first (CUDA, compute capability, the package, the torch it was built for), and only then is
the package imported: an extension built for another torch may load and read shapes wrongly without an error. What a
library compiles at run time with (CUDA_HOME, nvcc, NCCL) comes last.

DeepEP comes in generations that are told apart by what the library has, not by its version: `EPBuffer` (2.5),
`ElasticBuffer` (2.x), `Buffer` (V1). The newest one whose requirements this machine meets is taken.

Nothing here builds a buffer or a process group. Left out on purpose: whether other nodes have the same; the ranks compare
notes when a dispatcher is built.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HUB_KERNEL, HUB_VERSION = "kernels-community/deep-ep", 1
_LAYOUT_CHANGE = (2, 13)  # torch's tensor layout moved here; extensions do not cross it


@dataclass(frozen=True)
class Generation:
    """One generation of DeepEP.

    Attributes:
        name: for messages and adapters.
        buffer: the class that shows it.
        requirements: what it needs beyond CUDA and its package; each raises ImportError.
    """

    name: str
    buffer: str
    requirements: tuple[Callable[[str], None], ...]


def is_deepep_loadable(raise_error: bool = False) -> bool:
    """Whether `backend.dispatcher: deepep` can run on this machine. With `raise_error`, raise what `load_deepep_kernel` raises."""
    return _answer(load_deepep_kernel, raise_error)


def is_hybridep_loadable(raise_error: bool = False) -> bool:
    """Whether `backend.dispatcher: hybridep` can run on this machine."""
    return _answer(load_hybridep, raise_error)


def is_gmm_loadable(raise_error: bool = False) -> bool:
    """Whether `backend.experts: gmm` can run on this machine."""
    return _answer(load_gmm, raise_error)


def is_te_loadable(raise_error: bool = False) -> bool:
    """Whether `backend.experts: te` can run on this machine."""
    return _answer(load_te, raise_error)


def load_deepep_kernel() -> ModuleType:
    """The DeepEP library: an installed `deep_ep` or `deep_ep_v25`, else the hub's kernel through the package `kernels`.

    Raises ImportError naming the first requirement that is not met, and the fix.
    """
    require_cuda("DeepEP")
    require_capability("DeepEP", (9, 0))
    library = import_deepep()
    deepep_generation(library)
    return library


def import_deepep() -> ModuleType:
    """DeepEP's module, whatever generation; raises ImportError. Asks nothing of the GPU."""
    for name in ("deep_ep", "deep_ep_v25"):
        if is_installed(name):
            return import_library("DeepEP", name)
    if is_installed("kernels"):
        return _hub_kernel()
    raise ImportError(
        "DeepEP: none of the packages deep_ep, deep_ep_v25 and kernels is installed; install one, for example with:"
        " pip install 'nemo_moe[deepep]'"
    )


def deepep_generation(library: ModuleType, wanted: str | None = None) -> Generation:
    """The newest generation in `library` whose requirements are met, or the one named `wanted`.

    Raises ImportError that gives the reason for each generation which the library has.
    """
    present = [generation for generation in GENERATIONS if hasattr(library, generation.buffer) and wanted in (None, generation.name)]
    if not present:
        names = ", ".join(f"{generation.buffer} ({generation.name})" for generation in GENERATIONS if wanted in (None, generation.name))
        raise ImportError(f"DeepEP: {library.__name__} has no {names}; install a DeepEP that has")
    problems = []
    for generation in present:
        try:
            for requirement in generation.requirements:
                requirement(f"DeepEP {generation.buffer}")
        except ImportError as error:
            problems.append(str(error))
        else:
            return generation
    raise ImportError("; ".join(problems))


def load_hybridep() -> ModuleType:
    """DeepEP's module with HybridEPBuffer. Raises ImportError naming the first requirement that is not met, and the fix."""
    require_cuda("HybridEP")
    require_capability("HybridEP", (9, 0))
    library = import_library("HybridEP", "deep_ep", "build DeepEP's branch hybrid-ep from source (the published wheels have no HybridEP)")
    if not hasattr(library, "HybridEPBuffer"):
        raise ImportError(
            "HybridEP: the installed deep_ep has no HybridEPBuffer; it is in DeepEP's branch hybrid-ep only, which is built from source"
            " (the published wheels have none)"
        )
    require_nvcc("HybridEP")
    require_nvlink("HybridEP")
    return library


def load_gmm() -> ModuleType:
    """The package grouped_gemm, tgale96's or NVIDIA's. Raises ImportError naming what is missing, and the fix."""
    require_cuda("gmm")
    require_capability("gmm", (8, 0))
    return import_library("gmm", "grouped_gemm", "pip install 'nemo_moe[gmm]'")


def load_te() -> ModuleType:
    """transformer_engine.pytorch. Raises ImportError naming what is missing, and the fix."""
    require_cuda("te")
    require_capability("te", (8, 0))
    fix = "pip install 'nemo_moe[te]'"
    import_library("te", "transformer_engine", fix)
    return import_library("te", "transformer_engine.pytorch", fix)


# Requirements


def require_cuda(what: str) -> None:
    """Raise ImportError where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise ImportError(f"{what}: needs a CUDA device, and this torch ({torch.__version__}) is built without CUDA; install a CUDA build")
    raise ImportError(f"{what}: needs a CUDA device, and torch sees none; check the driver and CUDA_VISIBLE_DEVICES")


def require_capability(what: str, least: tuple[int, int]) -> None:
    """Raise ImportError where a visible CUDA device is older than compute capability `least`."""
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        if found < least:
            raise ImportError(
                f"{what}: needs compute capability {least[0]}.{least[1]} or newer, and device {index}"
                f" ({torch.cuda.get_device_name(index)}) has {found[0]}.{found[1]}; use other GPUs or another backend"
            )


def is_installed(module: str) -> bool:
    """Whether `module` is loaded or can be found; imports nothing but its parents."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def import_library(what: str, module: str, fix: str = "install it") -> ModuleType:
    """Import `module`; raises ImportError that says whether it is missing, built for another torch, or fails to load."""
    if not is_installed(module):
        raise ImportError(f"{what}: the package {module} is not installed; {fix}")
    if module not in sys.modules:
        require_same_torch(what, module)
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AssertionError) as error:  # libraries also check NCCL by assertion while they load
        raise ImportError(
            f"{what}: {module} is installed, but cannot be loaded ({type(error).__name__}: {error}); an undefined symbol means that it was"
            f" built for another torch than {torch.__version__}: reinstall or rebuild it for this one"
        ) from error


def require_same_torch(what: str, module: str) -> None:
    """Raise ImportError where the package says that it was built for a torch whose extensions this one cannot load."""
    running = _version(torch.__version__)[:2]
    for name in importlib.metadata.packages_distributions().get(module.partition(".")[0], []):
        for text in importlib.metadata.requires(name) or []:
            pin = re.match(r"torch\s*\(?==\s*([0-9.]+)", text)
            built = _version(pin.group(1))[:2] if pin and "extra ==" not in text else running
            if built != running:
                crossing = (
                    "; shapes would be read wrongly without an error" if (built < _LAYOUT_CHANGE) != (running < _LAYOUT_CHANGE) else ""
                )
                raise ImportError(
                    f"{what}: {name} {importlib.metadata.version(name)} is built for torch {built[0]}.{built[1]}, and torch is"
                    f" {torch.__version__}{crossing}; install that torch, or build the package for this one"
                )


def require_nvcc(what: str, least: tuple[int, int] | None = None) -> None:
    """Raise ImportError where the library could not compile its kernels at run time: no CUDA toolkit, or one below `least`."""
    home = cuda_home()
    if home is None or not (home / "bin" / "nvcc").exists():
        place = "none is found (CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda)" if home is None else f"{home} has no bin/nvcc"
        raise ImportError(f"{what}: compiles its kernels at run time with a CUDA toolkit, and {place}; install one and set CUDA_HOME to it")
    if "CUDA_HOME" not in os.environ:
        raise ImportError(f"{what}: reads CUDA_HOME to compile its kernels at run time, and it is not set; set it to {home}")
    found = _nvcc_version(home)
    if least is not None and found < least:
        raise ImportError(
            f"{what}: needs nvcc {least[0]}.{least[1]} or newer, and {home} has {'.'.join(map(str, found)) or 'an unknown version'};"
            " set CUDA_HOME to a newer toolkit"
        )


def require_cuobjdump(what: str) -> None:
    """Raise ImportError where the toolkit lacks the disassembler that DeepEP's run-time compilation calls."""
    home = cuda_home()
    if home is None or not (home / "bin" / "cuobjdump").exists():
        raise ImportError(f"{what}: needs cuobjdump, which {home or 'no CUDA toolkit here'} does not have; install the whole toolkit")


def require_nccl(what: str, least: tuple[int, int, int]) -> None:
    """Raise ImportError where the NCCL that torch has loaded is older than `least`."""
    found = _nccl_version()
    if found < least:
        raise ImportError(
            f"{what}: needs NCCL {'.'.join(map(str, least))} or newer, and torch has loaded {'.'.join(map(str, found)) or 'none'};"
            " install a newer nvidia-nccl"
        )


def require_nvlink(what: str) -> None:
    """Raise ImportError where two visible devices of this node are not joined by NVLink."""
    pair = _pair_without_nvlink()
    if pair is not None:
        raise ImportError(
            f"{what}: needs NVLink between the GPUs of a node, and devices {pair[0]} and {pair[1]} have none;"
            " use dispatcher all_to_all here"
        )


def require_weights_in_combine(what: str) -> None:
    """Raise ImportError for DeepEP 2.0, whose expanded layout carries no weights home (2.1 does; nothing but its version tells)."""
    library = sys.modules.get("deep_ep") or sys.modules.get("deep_ep_v25")
    version = getattr(library, "__version__", None)
    if isinstance(version, str) and _version(version)[:2] == (2, 0):
        raise ImportError(f"{what}: DeepEP {version} cannot carry routing-weight gradients in its expanded layout; install 2.1 or newer")


GENERATIONS = (
    Generation(
        "ep25",
        "EPBuffer",
        (lambda what: require_nvcc(what, (13, 1)), require_cuobjdump, lambda what: require_nccl(what, (2, 32, 3)), require_nvlink),
    ),
    Generation(
        "elastic",
        "ElasticBuffer",
        (lambda what: require_nvcc(what, (12, 3)), require_cuobjdump, require_weights_in_combine, require_nvlink),
    ),
    Generation("v1", "Buffer", (require_nvlink,)),
)


# Facts of the machine


def cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, CUDA_PATH, where nvcc on PATH lies, /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return Path(nvcc).resolve().parents[1]
    usual = Path("/usr/local/cuda")
    return usual if usual.is_dir() else None


@functools.cache
def _nvcc_version(home: Path) -> tuple[int, ...]:
    try:
        text = subprocess.run([str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else ()


@functools.cache
def _nccl_version() -> tuple[int, ...]:
    """Of the library that this process has loaded; torch.cuda.nccl.version() is that of the headers torch was built with."""
    try:
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        number = ctypes.c_int()
        loaded.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ()
    return (number.value // 10000, number.value // 100 % 100, number.value % 100)


@functools.cache
def _pair_without_nvlink() -> tuple[int, int] | None:
    """Two visible devices that no NVLink joins; None where all are joined, or torch cannot tell."""
    count = torch.cuda.device_count()
    try:
        from torch._C import _distributed_c10d as c10d

        links: Any = c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    except (ImportError, AttributeError, RuntimeError):
        return None
    for first in range(count):
        for second in range(first + 1, count):
            if not links[first][second]:
                return first, second
    return None


def _hub_kernel() -> ModuleType:
    """DeepEP from the hub. LOCAL_KERNELS=kernels-community/deep-ep=FOLDER, which `kernels` reads, works without a network."""
    from kernels import get_kernel

    try:
        library: ModuleType = get_kernel(HUB_KERNEL, version=HUB_VERSION)
    except Exception as error:
        raise ImportError(
            f"DeepEP: the hub kernel {HUB_KERNEL} cannot be loaded ({type(error).__name__}: {error}); without a network, set"
            f" LOCAL_KERNELS={HUB_KERNEL}=FOLDER, or install the package deep_ep"
        ) from error
    return library


def _answer(load: Callable[[], ModuleType], raise_error: bool) -> bool:
    try:
        load()
    except ImportError:
        if raise_error:
            raise
        return False
    return True


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
