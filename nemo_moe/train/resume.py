"""Going on with a run: which checkpoint, and whether it is one of this run.

Going on needs the same model, data, seed, global batch size and optimizer: with others the steps so far would not be
those of this run, and the difference is refused by name. All else may change, ranks and meshes included, and is listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.checks import listed
from nemo_moe.compose import to_plain
from nemo_moe.config import RunConfig
from nemo_moe.models.hf_config import HARMLESS_KEYS
from nemo_moe.train.run_state import RunState

STATE_FILE = "state.json"
FORMAT = 1
# What must be as it was; all other keys may change between a checkpoint and the run that goes on from it.
_FIXED = ("data.", "seed", "train.global_batch_size", "optimizer.name", "model.family")
# What says nothing about the run, or is compared as the config that the model comes to.
_SILENT = ("checkpoint.", "logging.", "output_dir", "model.")
_LOADER_KEYS = ("epoch", "step", "seed", "global_batch_size", "length_group_batches", "num_samples")


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from.

    Attributes:
        folder: of the checkpoint.
        state: what its state.json holds.
        changed: one line per key that differs and may.
    """

    folder: Path
    state: dict[str, Any]
    changed: list[str]

    @property
    def progress(self) -> RunState:
        return RunState.from_dict(self.state["progress"])


def find_resume(config: RunConfig, folders: StepFolders) -> Resume | None:
    """The checkpoint that `checkpoint.resume` names, read and compared with this run's config; None to start anew.

    Raises:
        ValueError: there is none, it cannot be read, or it belongs to another run; or checkpoints are there that a new
            run in this folder would replace.
    """
    asked, latest = config.checkpoint.resume, folders.latest()
    if asked is None or (asked == "auto" and latest is None):
        if latest is not None:
            raise ValueError(
                f"{folders.root} holds checkpoints of an earlier run, the latest of step {_step_of(latest)}; set checkpoint.resume=latest"
                " to go on with it (or auto, to go on where there is one), choose another output_dir, or remove that folder"
            )
        return None
    if asked in ("latest", "auto"):
        if latest is None:
            raise ValueError(
                f"checkpoint.resume is latest, but {folders.root} holds no complete checkpoint;"
                " write auto to start anew where there is none, or the folder of a checkpoint"
            )
        folder = latest
    else:
        folder = Path(asked or "").expanduser().resolve()
        newer = [step for step, path in folders.steps().items() if folder.parent == folders.root and path > folder]
        if newer:
            raise ValueError(
                f"checkpoint.resume names step {_step_of(folder)} of this run, and {folders.root} holds later ones ({newer[-1]}), which"
                " would be lost; choose another output_dir, or remove them"
            )
    state = read_state(folder)
    return Resume(folder, state, _compare(state["config"], to_plain(config), folder))


def read_state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Raises ValueError where it is missing, damaged or of another format."""
    path = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"{path} has the format {state['format']}, and this version of nemo_moe reads {FORMAT}")
        RunState.from_dict(state["progress"])
        for key in ("loader", "config", "model_config", "log"):
            _require_type(key, state[key], dict)
        for key in _LOADER_KEYS:
            _require_type(f"loader.{key}", state["loader"][key], int)
        _require_type("ranks", state["ranks"], int)
        _require_type("data_digest", state["data_digest"], str)
        _require_type("config.model.family", state["config"]["model"]["family"], str)
        state["config"]["checkpoint"]["every_steps"]
    except OSError as error:
        raise ValueError(
            f"{folder} is not a complete checkpoint: {STATE_FILE} cannot be read ({error.strerror or error});"
            " checkpoint.resume is null, auto, latest or the folder of a checkpoint (output_dir/checkpoints/step-...)"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); resume from another checkpoint") from error
    return state


def require_same_state(resume: Resume) -> None:
    """Raise ValueError where this rank does not see the checkpoint that rank 0 chose."""
    # As text: a validation loss that is not a number does not equal itself.
    if json.dumps(read_state(resume.folder)) != json.dumps(resume.state):
        raise ValueError(f"{resume.folder} is another checkpoint here than on rank 0; checkpoints need a folder that all nodes share")


def _require_type(key: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f"{key} is {value!r}")


def check_same_run(resume: Resume, model_config: Mapping[str, Any], data_digest: str) -> None:
    """Raise ValueError where the checkpoint's model or data are not this run's, naming the keys that differ."""
    then = resume.state["model_config"]
    meaningful = [{key: value for key, value in config.items() if key not in HARMLESS_KEYS} for config in (then, model_config)]
    differing = _differences(*meaningful)
    if differing:
        keys = listed([*differing.values()], separator="; ")
        raise ValueError(f"{resume.folder} is of another model: {keys}; choose the model it was made with")
    if resume.state["data_digest"] != data_digest:
        raise ValueError(
            f"{resume.folder} was made with other samples, though the data section is the same: the tokenizer, reasoning-gym or"
            " a file has changed since; samples would be repeated and left out"
        )


def _compare(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Lines about the keys that changed and may. Raises ValueError naming those that may not."""
    differing = _differences(then, now)
    refused = {key: line for key, line in differing.items() if key.startswith(_FIXED)}
    if refused:
        keys = listed([*refused.values()], separator="; ")
        raise ValueError(
            f"{folder} belongs to another run: {keys}; give these keys the values they had, or start anew in another output_dir"
        )
    return [line for key, line in differing.items() if not key.startswith(_SILENT)]


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Key -> "key: then -> now" for the keys whose values differ."""
    old, new = dict(_flat(then)), dict(_flat(now))
    return {
        key: f"{key}: {old.get(key, '(not there)')} in the checkpoint, {new.get(key, '(not there)')} now"
        for key in dict.fromkeys([*old, *new])
        if key not in old or key not in new or old[key] != new[key]
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return pairs


def _step_of(folder: Path) -> str:
    return folder.name.removeprefix("step-").lstrip("0") or "0"
