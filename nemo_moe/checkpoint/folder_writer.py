"""Writing a Hugging Face folder so that it is there whole or not at all.

Files are written into a hidden folder and moved to their place at the end. Only rank 0 touches the disk; after
each step all ranks learn whether it went well, so that a full disk ends the job everywhere with the one cause.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from nemo_moe.checkpoint.tensor_files import EXTRA_FILE, INDEX_FILE, WEIGHTS_FILE

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json"
    " vocab.json vocab.txt merges.txt chat_template.jinja chat_template.json"
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_logger = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A folder could not be written, for a reason that all ranks know; one message is enough."""


def plan_files(tensors: Sequence[tuple[str, int]], max_bytes: int) -> dict[str, str]:
    """Tensor -> file, in order, no file above max_bytes unless one tensor is.

    Args:
        tensors: (name, bytes).

    Returns:
        All in model.safetensors where they fit, else model-00001-of-0000N.safetensors and so on.
    """
    numbers: list[int] = []
    filled = 0
    for _, size in tensors:
        start_new = not numbers or filled + size > max_bytes
        filled = size if start_new else filled + size
        numbers.append((numbers[-1] if numbers else 0) + start_new)
    count = numbers[-1] if numbers else 0
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in numbers} if count > 1 else {1: WEIGHTS_FILE}
    return {key: names[number] for (key, _), number in zip(tensors, numbers, strict=True)}


class FolderWriter:
    """One save. All ranks call the methods alike, but `add` and `add_extra`, which are rank 0's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder.absolute()
        # Inside a folder that is there already: beside it may be another file system, to which files cannot be moved.
        self._partial = self._folder / ".partial" if self._folder.is_dir() else self._folder.parent / f".{self._folder.name}.partial"
        self._rank = rank
        self._tensors: dict[str, Tensor] = {}
        self._extra: dict[str, Tensor] = {}
        self._together(self._begin)

    def add(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor for the next `write_tensors`."""
        self._tensors[key] = tensor

    def add_extra(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor for EXTRA_FILE."""
        self._extra[key] = tensor

    def write_tensors(self, name: str) -> None:
        """Write what was added since the last call as file `name`."""
        self._together(lambda: save_file(self._tensors, self._partial / name, metadata={"format": "pt"}))
        self._tensors = {}

    def finish(
        self, files: Mapping[str, str], sizes: Mapping[str, int], config: Mapping[str, Any], tokenizer: Any, source: Path | None
    ) -> None:
        """Write all that is no weights, and put the folder in place.

        Args:
            files: tensor -> file, of `plan_files`.
            sizes: the index's metadata.
            config: for config.json.
            tokenizer, source: see `hf.save_hf_folder`.
        """

        def write() -> None:
            if len(set(files.values())) > 1:
                self._write_json(INDEX_FILE, {"metadata": dict(sizes), "weight_map": dict(sorted(files.items()))})
            if self._extra:
                save_file(self._extra, self._partial / EXTRA_FILE, metadata={"format": "pt"})
                _logger.warning(
                    "transformers does not know the router's expert biases: they are in %s, and it will route without them", EXTRA_FILE
                )
            self._write_configs(config, tokenizer, source)
            self._publish()

        self._together(write)

    def _begin(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)  # of a save that died
        self._partial.mkdir(parents=True)

    def _write_configs(self, config: Mapping[str, Any], tokenizer: Any, source: Path | None) -> None:
        token_ids = {key: config.get(key) if config.get(key) is not None else getattr(tokenizer, key, None) for key in _TOKEN_IDS}
        self._write_json("config.json", {**config, **token_ids})
        if source is not None and (source / "generation_config.json").is_file():
            shutil.copyfile(source / "generation_config.json", self._partial / "generation_config.json")
        else:
            self._write_json("generation_config.json", {key: value for key, value in token_ids.items() if value is not None})
        if tokenizer is not None:
            tokenizer.save_pretrained(self._partial)
        elif source is not None:
            for name in _TOKENIZER_FILES.split():
                if (source / name).is_file():
                    shutil.copyfile(source / name, self._partial / name)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self._partial / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

    def _publish(self) -> None:
        """Move the files to their place. The weights' entry point comes last: until then the folder loads as incomplete."""
        if not self._folder.exists():
            self._partial.rename(self._folder)
            return
        old = [path for path in self._folder.iterdir() if path.name in (INDEX_FILE, EXTRA_FILE) or _WEIGHTS.fullmatch(path.name)]
        for path in sorted(old, key=lambda path: path.name not in (INDEX_FILE, WEIGHTS_FILE)):
            path.unlink()
        for path in sorted(self._partial.iterdir(), key=lambda path: path.name in (INDEX_FILE, WEIGHTS_FILE)):
            target = self._folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        self._partial.rmdir()

    def _together(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0; all ranks raise SaveError if it failed."""
        error: Exception | None = None
        if self._rank == 0:
            try:
                action()
            except Exception as caught:
                error = caught
                shutil.rmtree(self._partial, ignore_errors=True)
        message = [None if error is None else f"{type(error).__name__}: {error}"]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(message, src=0)
        if message[0] is not None:
            raise SaveError(f"saving to {self._folder} failed: {message[0]}") from error
