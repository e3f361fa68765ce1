"""docker/: the Dockerfile (linted, nothing left behind, build arguments that exist and are used) and the script that pins uv's torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SCRIPT = ROOT / "docker" / "common" / "repin_pytorch.py"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


@dataclass
class Stage:
    """`FROM image AS name` and the instructions below it, each as (keyword, rest) with its lines joined."""

    image: str
    name: str | None
    instructions: list[tuple[str, str]] = field(default_factory=list)


def parsed(text: str) -> tuple[list[str], list[Stage]]:
    """(global build arguments, stages)."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    arguments: list[str] = []
    stages: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            image, _, name = rest.partition(" AS ")
            stages.append(Stage(image, name or None))
        elif stages:
            stages[-1].instructions.append((keyword, rest))
        else:
            assert keyword == "ARG", line
            arguments.append(rest)
    return arguments, stages


ARGUMENTS, STAGES = parsed(TEXT)


def unused(arguments: list[str], stages: list[Stage]) -> list[str]:
    """Build arguments that are declared where nothing below reads them."""
    lost = [name for name in map(name_of, arguments) if not any(reads(stage.image, name) for stage in stages)]
    for stage in stages:
        for index, (keyword, rest) in enumerate(stage.instructions):
            if keyword == "ARG" and not any(reads(text, name_of(rest)) for _, text in stage.instructions[index + 1 :]):
                lost.append(name_of(rest))
    return lost


def name_of(argument: str) -> str:
    return argument.partition("=")[0].strip()


def reads(text: str, name: str) -> bool:
    return re.search(rf"\$(\{{{name}[^}}]*\}}|{name}\b)", text) is not None


def declared() -> set[str]:
    return {name_of(rest) for rest in [*ARGUMENTS, *(rest for stage in STAGES for keyword, rest in stage.instructions if keyword == "ARG")]}


def hadolint() -> str:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("hadolint is not installed (the extra dev has it)")
    return found


def test_the_dockerfile_passes_the_linter_and_a_bad_one_does_not(tmp_path: Path) -> None:
    done = subprocess.run([hadolint(), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    bad = tmp_path / "Dockerfile"
    bad.write_text(TEXT.replace("--no-install-recommends", ""), encoding="utf-8")
    assert "DL3015" in subprocess.run([hadolint(), str(bad)], capture_output=True, text=True, check=False).stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/hadolint docker/Dockerfile" in makefile.partition("\nlint: ")[2].partition("\n\n")[0]


def test_images_and_installers_are_pinned() -> None:
    images = {stage.image for stage in STAGES} - {stage.name for stage in STAGES}
    for image in images:
        for argument in ARGUMENTS:
            image = image.replace(f"${{{name_of(argument)}}}", argument.partition("=")[2])
        assert re.search(r":\d+\.\d+", image) and "latest" not in image, image
    assert f"uv=={tomllib.loads((ROOT / 'uv.lock').read_text(encoding='utf-8'))['package'][_index('uv')]['version']} " in TEXT
    for _, rest in STAGES[1].instructions:
        for install in re.findall(r"pip (?:install|wheel) ([^&;]*)", rest):
            pinned = re.search(r"==|--constraint|--requirement|--no-index|--no-deps[^&]* \.\s*$", install)
            assert pinned, f"not pinned: pip {install}"


def _index(name: str) -> int:
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    return next(index for index, package in enumerate(packages) if package["name"] == name)


def test_nothing_is_left_behind_in_the_image() -> None:
    assert len(STAGES) == 3 and STAGES[-1].name is None
    for stage in STAGES:
        for keyword, rest in stage.instructions:
            if keyword == "RUN" and "apt-get" in rest:
                assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
            if keyword == "RUN" and "pip " in rest:
                assert rest.count("--no-cache-dir") == len(re.findall(r"pip (?:install|wheel) ", rest)), rest
    # No file of the checkout and none of the builder's is copied; the wheels are there for one command alone.
    kept = [STAGES[-1], *(stage for stage in STAGES if stage.name == STAGES[-1].image)]
    assert not [rest for stage in kept for keyword, rest in stage.instructions if keyword in ("COPY", "ADD")]
    assert "--mount=type=bind,from=builder,source=/wheels" in next(rest for keyword, rest in STAGES[-1].instructions if keyword == "RUN")


def test_what_deepep_and_triton_compile_with_at_run_time_is_in_the_image() -> None:
    runtime = " ".join(rest for _, rest in STAGES[0].instructions)
    assert STAGES[-1].image == STAGES[0].name
    for package in ("cuda-nvcc-", "cuda-cuobjdump-", "gcc", "g++", "python3-dev", "rdma-core"):
        assert package in runtime, package
    assert "CUDA_HOME=/usr/local/cuda" in runtime


def test_every_build_argument_is_used_and_the_check_finds_one_that_is_not() -> None:
    assert unused(ARGUMENTS, STAGES) == []
    assert {"DEEPEP", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CUDA_IMAGE", "CUDA_APT"} == declared()
    assert unused(*parsed(TEXT + "ARG NOBODY=1\n")) == ["NOBODY"]
    assert unused(*parsed("ARG NOBODY=1\n" + TEXT)) == ["NOBODY"]
    assert unused(*parsed(TEXT.replace('"${DEEPEP}"', '"x"'))) == ["DEEPEP"]
    assert re.search(r'^ARG DEEPEP=""$', TEXT, flags=re.MULTILINE), "empty by default: nothing is chosen for the user"


def build_arguments_named_in(text: str) -> set[str]:
    """Those of `--build-arg NAME=...`, and those of an action's `build-args: |` block."""
    named = set(re.findall(r"--build-arg[ =]([A-Za-z_]\w*)", text))
    for indent, block in re.findall(r"^( *)build-args: \|\n((?:\1 +.*\n?)+)", text, flags=re.MULTILINE):
        named |= set(re.findall(rf"^{indent} +(\w+)=", block, flags=re.MULTILINE))
    return named


def test_every_build_argument_that_is_written_about_exists() -> None:
    texts = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", DOCKERFILE, *(ROOT / ".github").rglob("*.yml")]
    named = {file: build_arguments_named_in(file.read_text(encoding="utf-8")) for file in texts}
    assert "DEEPEP" in named[ROOT / "README.md"] and "DEEPEP" in named[ROOT / ".github" / "actions" / "build-image" / "action.yml"]
    for file, names in named.items():
        assert names <= declared(), f"{file.name} names {names - declared()}, which docker/Dockerfile does not have"
    assert build_arguments_named_in("a\n  build-args: |\n    ONE=1\n    TWO=2\n  other: x=3\n --build-arg THREE=3") == {
        "ONE",
        "TWO",
        "THREE",
    }


# The script


def repin(root: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--root", str(root), *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def state(root: Path) -> tuple[str, str]:
    return tuple((root / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "docker/common/uv-pytorch.toml"))  # type: ignore[return-value]


def uv_table(root: Path) -> dict[str, list[str]]:
    table: dict[str, list[str]] = tomllib.loads(state(root)[0])["tool"]["uv"]
    return table


PINNED = ("--torch", "2.11.0+cu130", "--cudnn", "nvidia-cudnn-cu13==9.15.1.9")


def test_pinning_twice_gives_the_same_files_and_an_older_block_is_replaced(checkout: Path) -> None:
    assert repin(checkout, *PINNED).returncode == 0
    first = state(checkout)
    assert uv_table(checkout)["constraint-dependencies"] == ["torch==2.11.0"]
    assert uv_table(checkout)["override-dependencies"] == ["nvidia-cudnn-cu13==9.15.1.9; sys_platform == 'linux'"]
    again = repin(checkout, *PINNED)
    assert again.returncode == 0 and again.stdout == "" and state(checkout) == first
    assert repin(checkout, "--torch", "2.14.1", "--cudnn", "nvidia-cudnn-cu13==9.27.0.42").returncode == 0
    text = state(checkout)[0]
    assert "2.11.0" not in text and text.count("constraint-dependencies") == text.count("override-dependencies") == 1
    assert len(text.splitlines()) == len(first[0].splitlines())
    assert repin(checkout, *PINNED).returncode == 0 and state(checkout) == first


def test_nothing_else_in_pyproject_is_touched(checkout: Path) -> None:
    before = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    repin(checkout, *PINNED)
    after = tomllib.loads(state(checkout)[0])
    for table in (before, after):
        del table["tool"]["uv"]["constraint-dependencies"], table["tool"]["uv"]["override-dependencies"]
    assert after == before
    fragment = tomllib.loads(state(checkout)[1])
    assert fragment == {key: uv_table(checkout)[key] for key in ("constraint-dependencies", "override-dependencies")}


def test_check_changes_nothing_and_tells(checkout: Path) -> None:
    before = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    done = repin(checkout, *PINNED, "--check")
    assert done.returncode == 1 and done.stdout.count("would change: ") == 2
    assert (checkout / "pyproject.toml").read_text(encoding="utf-8") == before and not (checkout / "docker").exists()
    repin(checkout, *PINNED)
    assert repin(checkout, *PINNED, "--check").returncode == 0


def installed(folder: Path, version: str, *requires: str) -> Path:
    """A folder on the path where torch of that version is installed, as far as its metadata goes."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def test_the_torch_that_is_installed_is_found_with_its_cudnn(checkout: Path, tmp_path: Path) -> None:
    path = installed(tmp_path / "site", "2.12.1+cu130", "filelock", 'nvidia-cudnn-cu13==9.18.0.1; platform_system == "Linux"')
    assert repin(checkout, path=path).returncode == 0
    assert uv_table(checkout)["constraint-dependencies"] == ["torch==2.12.1"]
    assert uv_table(checkout)["override-dependencies"] == ["nvidia-cudnn-cu13==9.18.0.1; sys_platform == 'linux'"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--torch", "newest"), "--torch must be a version like 2.13.0, found 'newest'"),
        (("--torch", "2.13.0"), "names no cuDNN package"),
        (("--torch", "2.13.0", "--cudnn", "cudnn"), "--cudnn must be like nvidia-cudnn-cu13==9.20.0.48, found 'cudnn'"),
    ],
)
def test_what_can_not_be_pinned_is_said_and_nothing_is_written(checkout: Path, arguments: tuple[str, ...], said: str) -> None:
    done = repin(checkout, *arguments)
    assert done.returncode == 2 and said in done.stderr and not (checkout / "docker").exists()


def test_a_cpu_build_and_broken_marks_are_refused(checkout: Path, tmp_path: Path) -> None:
    done = repin(checkout, path=installed(tmp_path / "cpu", "2.13.0+cpu", "filelock"))
    assert done.returncode == 2 and "give --cudnn" in done.stderr
    pyproject = checkout / "pyproject.toml"
    whole = pyproject.read_text(encoding="utf-8")
    for broken, said in (
        (whole.replace("# <<<\n", ""), "found 1 and 0"),
        (whole + "\n# <<<\n", "found 1 and 2"),
        (whole.replace("[tool.uv]\n", '[tool.uv]\noverride-dependencies = ["a"]\n'), "also sets override-dependencies outside the marks"),
    ):
        pyproject.write_text(broken, encoding="utf-8")
        done = repin(checkout, *PINNED)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert pyproject.read_text(encoding="utf-8") == broken and not (checkout / "docker").exists()


def test_this_checkout_is_pinned_to_the_torch_of_its_lock() -> None:
    packages = {
        package["name"]: package.get("version") for package in tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    }
    pins = ("--torch", packages["torch"], "--cudnn", f"nvidia-cudnn-cu13=={packages['nvidia-cudnn-cu13']}")
    done = repin(ROOT, *pins, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["te", "gmm", "deepep"])
def test_the_lock_has_each_extra_with_the_one_torch(name: str) -> None:
    """A wheel for another torch would not resolve: nothing in the lock says that it takes any."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    assert [package["version"] for package in packages if package["name"] == "torch"] == ["2.13.0"]
    (ours,) = [package for package in packages if package["name"] == "nemo-moe"]
    assert ours["optional-dependencies"][name]
    by_hand = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["dependency-metadata"]
    assert "sgl-deep-ep" not in {entry["name"] for entry in by_hand}
