"""The project's files: the lock, the wheel, make, the import contract, the public names, the README and the examples."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import nemo_moe
from nemo_moe.compose import list_recipes
from nemo_moe.registry import DISPATCHERS
from nemo_moe.schema import key_paths

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "uv.lock").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

# In halves, so that this file does not hold what it looks for.
HOSTS = ["pyp" + "i.org", "python" + "hosted.org", "npm" + "js.org", "npm" + "js.com", "deb.deb" + "ian.org", "download.py" + "torch.org"]


def run(*argv: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)


def clean_environment(**changes: str) -> dict[str, str]:
    """Without the ranks' variables, and without what tells uv or python to look elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHONPATH", "RANK", "WORLD", "LOCAL_"))}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **changes}


def tracked_files() -> list[Path]:
    """Files that are, or would be, in the repository."""
    done = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


# The lock


def test_no_tracked_file_names_a_package_index() -> None:
    files = tracked_files()
    assert ROOT / "uv.lock" in files
    for file in files:
        text = file.read_bytes().decode("utf-8", errors="replace").lower()
        assert not [host for host in HOSTS if host in text], file


def test_the_lock_holds_placeholder_hosts_and_a_hash_for_every_file() -> None:
    assert set(re.findall(r"https?://[^/\"\s]+", LOCK)) == {"https://index.invalid", "https://files.invalid"}
    packages = tomllib.loads(LOCK)["package"]
    assert len(packages) > 50
    for package in packages:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files or "editable" in package["source"], package["name"]
        assert all(file["hash"].startswith("sha256:") for file in files), package["name"]


def uv() -> str:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("uv is not installed")
    return found


def test_the_lock_agrees_with_pyproject(tmp_path: Path) -> None:
    done = run(uv(), "lock", "--check", "--offline", env=clean_environment(UV_CACHE_DIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr


def test_what_setup_installs_is_hashed_and_leaves_torch_to_pip(tmp_path: Path) -> None:
    options = ["--frozen", "--offline", "--no-header", "--no-annotate", "--no-emit-project", "--extra", "dev", "--prune", "torch"]
    for option in options:
        assert option == "--offline" or option in MAKEFILE
    done = run(uv(), "export", *options, env=clean_environment(UV_CACHE_DIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    requirements = done.stdout.replace("\\\n", "").splitlines()
    names = {line.split("==")[0] for line in requirements}
    assert {"hydra-core", "reasoning-gym", "transformers", "pytest", "uv", "hatchling"} <= names
    assert not {name for name in names if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))}
    assert all("--hash=sha256:" in line for line in requirements)


def test_versions_that_are_written_twice_agree() -> None:
    locked = {package["name"]: package.get("version") for package in tomllib.loads(LOCK)["package"]}
    assert f"TORCH := torch=={locked['torch']}\n" in MAKEFILE
    assert f"UV_VERSION := {locked['uv']}\n" in MAKEFILE
    assert nemo_moe.__version__ == PYPROJECT["project"]["version"] == locked["nemo-moe"]
    assert f"\n## {nemo_moe.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# make and CI


def test_make_says_what_is_missing_where_python_is_too_old(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.4" && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("Makefile", "uv.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    for interpreter, said in ((str(old), "Python 3.10.4"), (str(tmp_path / "absent"), "not there")):
        for target in ("demo", "test"):
            done = run("make", target, f"PYTHON={interpreter}", cwd=checkout, env=clean_environment(MAKEFLAGS=""))
            assert done.returncode != 0
            assert "nemo_moe needs python 3.11 or newer" in done.stderr and said in done.stderr, done.stderr
    assert not (checkout / ".venv").exists()


def test_make_test_checks_formatting_too() -> None:
    lint = MAKEFILE.partition("\nlint: ")[2].partition("\n\n")[0]
    assert "ruff check ." in lint and "ruff format --check" in lint and "lint-imports" in lint


def test_the_way_from_the_yaml_key_to_the_wire_is_within_its_budget_for_every_dispatcher() -> None:
    done = run(sys.executable, "tools/path_length.py", env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.split()[0]: row.split() for row in done.stdout.splitlines()[1:] if row.split()[0] in DISPATCHERS}
    assert list(rows) == list(DISPATCHERS)
    assert rows["all_to_all"][3:] == ["all_to_all"] and rows["all_reduce"][3:] == ["all_reduce,", "local"]
    for row in rows.values():
        assert 500 < int(row[2]) <= 2000 and int(row[2]) < int(row[1]), row


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
    assert run("bash", "-n", str(script)).returncode == 0


# The package


def test_recipes_are_inside_the_wheel_and_found_there(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    if "No module named hatchling" in done.stderr:
        pytest.skip("hatchling is not installed")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    names = {file.relative_to(installed).as_posix() for file in installed.rglob("*") if file.is_file()}
    assert {f"nemo_moe/_recipes/{name}.yaml" for name in list_recipes()} <= names
    assert "nemo_moe/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"nemo_moe", f"nemo_moe-{nemo_moe.__version__}.dist-info"}
    assert not [name for name in names if name.startswith("nemo_moe/_recipes/") and not name.endswith(".yaml")]
    # From a folder that is no checkout, with the wheel's files alone.
    listed = run(sys.executable, "-m", "nemo_moe.cli.main", "recipes", cwd=tmp_path, env=clean_environment(PYTHONPATH=str(installed)))
    assert listed.returncode == 0, listed.stderr
    assert str(installed / "nemo_moe" / "_recipes") in listed.stdout
    assert all(name in listed.stdout for name in list_recipes())


def test_the_library_needs_torch_alone() -> None:
    script = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not to be imported")

refused = {"hydra", "omegaconf", "yaml", "transformers", "tokenizers", "wandb", "rich", "reasoning_gym", "datasets"}
sys.meta_path.insert(0, Refuse())
import nemo_moe
assert "torch" not in sys.modules, "import nemo_moe loads its parts on first use"
import torch
config = nemo_moe.MoEConfig(num_experts=4, num_experts_per_tok=2, hidden_size=16, moe_intermediate_size=16)
output, _ = nemo_moe.MoE(config, nemo_moe.BackendConfig())(torch.randn(5, 16))
assert output.shape == (5, 16)
nemo_moe.Qwen3MoeForCausalLM, nemo_moe.MeshSizes, nemo_moe.parallelize, nemo_moe.clip_grad_norm_, nemo_moe.DISPATCHERS
"""
    done = run(sys.executable, "-c", script, env=clean_environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    tree = ast.parse((ROOT / "nemo_moe" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {(alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared == set(nemo_moe._MODULE_OF.items())
    for name in nemo_moe._MODULE_OF:
        assert getattr(nemo_moe, name) is not None
        assert not (ROOT / "nemo_moe" / f"{name}.py").exists(), "a module of that name would take its place"
    with pytest.raises(AttributeError):
        getattr(nemo_moe, "nothing_of_that_name")  # noqa: B009


def test_every_module_stands_in_the_import_contract() -> None:
    (layers,) = [contract["layers"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"] if contract["type"] == "layers"]
    placed = [module.strip() for layer in layers for module in re.split("[|:]", layer)]
    for file in (ROOT / "nemo_moe").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        holds_code = file.name != "__init__.py" or file.stat().st_size > 200
        if module != "nemo_moe" and holds_code:
            assert any(module == place or module.startswith(f"{place}.") for place in placed), f"{module}: place it in pyproject.toml"


# What is written about it


def test_the_readme_names_keys_recipes_and_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    known = set(key_paths())
    table = readme.partition("## Config keys")[2].partition("## ")[0]
    in_table = {name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert len(in_table) > 20 and in_table <= known, in_table - known
    assert {name.split(".")[0] for name in in_table} == {name for name in known if "." not in name}
    for key in re.findall(r"([a-z_]+(?:\.[a-z_]+)+)=", readme):
        assert key in known or key == "section.key", key
    for name in re.findall(r"nemo-moe finetune (\w+) ", readme):
        assert name in list_recipes() or name in ("my_run", "RECIPE"), name
    for path in re.findall(r"(?:examples|recipes|tests|tools|nemo_moe|docs)/[\w/]+\.\w+", readme):
        assert (ROOT / path).is_file(), path
    for target in re.findall(r"make (\w[\w-]*)", readme):
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


def test_the_layer_example_is_equal_on_one_and_two_ranks() -> None:
    script = str(ROOT / "examples" / "moe_layer.py")
    env = clean_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, env=env)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: 51 tokens, experts 0 to 3" in done.stdout and "rank 1 of 2: 50 tokens, experts 4 to 7" in done.stdout
    alone = run(sys.executable, script, env=env)
    assert alone.returncode == 0, alone.stderr
    assert "rank 0 of 1: 101 tokens" in alone.stdout


def test_the_figures_of_the_readme_are_filled_in() -> None:
    assert sorted(set(re.findall(r"FIGURE_\w*", (ROOT / "README.md").read_text(encoding="utf-8")))) == []


def test_shell_files_are_readable_by_bash() -> None:
    for script in (ROOT / "examples").glob("*.sh"):
        assert os.access(script, os.X_OK)
        assert run("bash", "-n", str(script)).returncode == 0
