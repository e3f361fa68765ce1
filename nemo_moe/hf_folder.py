"""The one file of a Hugging Face folder that is read both before a run (what model is it) and during it (its weights)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder. Raises ValueError when it cannot be read or holds no JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a Hugging Face model folder has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(config).__name__}")
    return config
