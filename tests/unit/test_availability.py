"""What is said of libraries that are missing, broken, built for another torch, or that this machine cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_moe import availability
from nemo_moe.availability import (
    GENERATIONS,
    HUB_KERNEL,
    deepep_generation,
    import_deepep,
    import_library,
    is_deepep_loadable,
    is_gmm_loadable,
    is_hybridep_loadable,
    is_te_loadable,
    load_deepep_kernel,
    load_gmm,
    load_hybridep,
    load_te,
    require_capability,
    require_nccl,
    require_nvcc,
    require_same_torch,
)

ALL = [
    (is_deepep_loadable, load_deepep_kernel),
    (is_hybridep_loadable, load_hybridep),
    (is_gmm_loadable, load_gmm),
    (is_te_loadable, load_te),
]


def raised(call: object, *args: object) -> str:
    with pytest.raises(ImportError) as caught:
        call(*args)  # type: ignore[operator]
    return str(caught.value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one Hopper, as far as these questions go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "H200")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install(site: Path, module: str, source: str, requires: str | None = None) -> None:
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    info = site / f"{module}_wheel-1.0.dist-info"
    info.mkdir()
    lines = [f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}-wheel\nVersion: 1.0"]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "top_level.txt").write_text(f"{module}\n", encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
@pytest.mark.parametrize(("is_loadable", "load"), ALL)
def test_without_cuda_nothing_is_loadable_and_the_message_says_why(is_loadable: object, load: object) -> None:
    assert is_loadable() is False  # type: ignore[operator]
    assert "needs a CUDA device" in raised(load)
    assert raised(is_loadable, True) == raised(load)


def test_an_old_gpu_is_named_with_what_is_needed(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 0))
    message = raised(require_capability, "DeepEP", (9, 0))
    assert "9.0" in message and "8.0" in message and "H200" in message
    assert "compute capability" in raised(load_deepep_kernel)


def test_a_package_that_is_not_there_is_named_with_how_to_get_it(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_installed", lambda name: False)
    assert "deep_ep" in raised(load_deepep_kernel) and "nemo_moe[deepep]" in raised(load_deepep_kernel)
    assert "hybrid-ep" in raised(load_hybridep)
    assert "nemo_moe[gmm]" in raised(load_gmm) and "nemo_moe[te]" in raised(load_te)


@pytest.mark.parametrize("error", ["ImportError('undefined symbol: _ZN3c10')", "OSError('libnvshmem_host.so.3')", "AssertionError('NCCL')"])
def test_a_package_that_does_not_load_is_told_from_one_that_is_missing(site: Path, error: str) -> None:
    install(site, "broken_ep", f"raise {error}")
    message = raised(import_library, "DeepEP", "broken_ep")
    assert "is installed, but cannot be loaded" in message and "reinstall or rebuild" in message
    assert error.partition("(")[0] in message


def test_a_package_for_another_torch_is_refused_before_its_extension_is_loaded(site: Path) -> None:
    install(site, "other_ep", "raise SystemExit('it was imported')", "torch==2.1.2")
    message = raised(import_library, "DeepEP", "other_ep")
    assert "built for torch 2.1" in message and torch.__version__ in message and "shapes would be read wrongly" in message


def test_a_package_for_this_torch_and_one_that_says_nothing_are_taken(site: Path) -> None:
    install(site, "this_ep", "", f"torch=={torch.__version__.partition('+')[0]}")
    install(site, "any_ep", "", "torch>=2.4")
    for name in ("this_ep", "any_ep"):
        require_same_torch("DeepEP", name)
        assert import_library("DeepEP", name).__name__ == name


def toolkit(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    for name in ("nvcc", "cuobjdump"):
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n", encoding="utf-8")
        program.chmod(0o755)
    return folder


def test_compiling_at_run_time_needs_a_new_enough_toolkit_where_cuda_home_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.9")))
    require_nvcc("DeepEP ElasticBuffer", (12, 3))
    message = raised(require_nvcc, "DeepEP EPBuffer", (13, 1))
    assert "13.1" in message and "12.9" in message
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "has no bin/nvcc" in raised(require_nvcc, "HybridEP")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'cuda' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    message = raised(require_nvcc, "HybridEP")
    assert "CUDA_HOME" in message and "set it to" in message and str(tmp_path / "cuda") in message


def test_an_old_nccl_is_named_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_nccl_version", lambda: (2, 28, 9))
    require_nccl("DeepEP", (2, 28, 0))
    message = raised(require_nccl, "DeepEP EPBuffer", (2, 32, 3))
    assert "2.32.3" in message and "2.28.9" in message


def module(*classes: str, version: str | None = None) -> types.ModuleType:
    found = types.ModuleType("deep_ep")
    for name in classes:
        setattr(found, name, type(name, (), {}))
    if version is not None:
        found.__version__ = version  # type: ignore[attr-defined]
    return found


def test_generations_are_told_apart_by_what_the_library_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest whose requirements are met; with a toolkit the wheel's ElasticBuffer, without one its Buffer."""
    assert [generation.name for generation in GENERATIONS] == ["ep25", "elastic", "v1"]
    monkeypatch.setattr(availability, "_pair_without_nvlink", lambda: None)
    both = module("Buffer", "ElasticBuffer", version="1.0-whatever")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.9")))
    assert deepep_generation(both).name == "elastic"
    assert deepep_generation(both, "v1").name == "v1"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert deepep_generation(both).name == "v1"
    assert "EPBuffer: compiles its kernels at run time" in raised(deepep_generation, module("EPBuffer"))
    assert "EPBuffer (ep25), ElasticBuffer (elastic), Buffer (v1)" in raised(deepep_generation, module("Nothing"))


def test_gpus_without_nvlink_are_refused_with_the_pair_and_a_way_out_b30(monkeypatch: pytest.MonkeyPatch) -> None:
    """case B30: a package that imports and a GPU are not enough."""
    monkeypatch.setattr(availability, "_pair_without_nvlink", lambda: (0, 3))
    message = raised(deepep_generation, module("Buffer"))
    assert "devices 0 and 3" in message and "all_to_all" in message


def test_the_version_without_weights_in_its_expanded_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_pair_without_nvlink", lambda: None)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.9")))
    for version, taken in (("2.0.0", False), ("2.1.0", True)):
        library = module("ElasticBuffer", version=version)
        monkeypatch.setitem(sys.modules, "deep_ep", library)
        if taken:
            assert deepep_generation(library).name == "elastic"
        else:
            assert "2.1 or newer" in raised(deepep_generation, library)


# The hub's kernel


def local_kernel(folder: Path) -> None:
    """A kernel repository as `kernels` lays it out, with a build for any torch."""
    from kernels import get_local_kernel  # noqa: F401  (a version that has local folders)

    build = folder / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("class EPBuffer:\n    pass\n", encoding="utf-8")
    metadata = {"id": "_deep_ep_test_local", "name": "deep-ep", "version": 1, "license": "MIT", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}), encoding="utf-8")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")
def test_the_hub_kernel_comes_from_a_local_folder_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local_kernel(tmp_path / "deep-ep")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"{HUB_KERNEL}={tmp_path / 'deep-ep'}")
    assert hasattr(import_deepep(), "EPBuffer")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")
def test_a_local_folder_that_holds_no_kernel_is_named_with_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"{HUB_KERNEL}={tmp_path}")
    message = raised(import_deepep)
    assert HUB_KERNEL in message and "LOCAL_KERNELS" in message and "deep_ep" in message
