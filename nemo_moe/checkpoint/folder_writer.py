"""Writing a Hugging Face folder so that it is there whole or not at all.

Files are written into a hidden folder, brought to the disk, and moved to their place at the end. Only rank 0 touches the
disk; after each file all ranks learn whether it went well, so that a full disk ends the job everywhere with the one cause.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nemo_moe.checkpoint.tensor_files import EXTRA_FILE, INDEX_FILE, WEIGHTS_FILE
from nemo_moe.checkpoint.together import SaveError, on_rank_zero, sync

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json"
    " vocab.json vocab.txt merges.txt chat_template.jinja chat_template.json"
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_logger = logging.getLogger(__name__)


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


def write_configs(folder: Path, config: Mapping[str, Any], tokenizer: Any, source: Path | None) -> None:
    """Write all of a Hugging Face folder that is no weights: config, generation config, tokenizer files.

    Args:
        folder: exists.
        config: for config.json; the tokenizer's special token ids complete it where it has none.
        tokenizer, source: see `hf.save_hf_folder`.
    """
    token_ids = {key: config.get(key) if config.get(key) is not None else getattr(tokenizer, key, None) for key in _TOKEN_IDS}
    _write_json(folder / "config.json", {**config, **token_ids})
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    else:
        _write_json(folder / "generation_config.json", {key: value for key, value in token_ids.items() if value is not None})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    elif source is not None:
        for name in _TOKENIZER_FILES.split():
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class FolderWriter:
    """One save. All ranks call the methods alike; what rank 0 alone gives is empty on the others.

    Each call that writes raises SaveError on all ranks where rank 0 failed; `abandon` is for whatever else ends the save.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder.absolute()
        self._rank = rank
        self._partial = self._folder
        self._together(self._begin)

    def write_file(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a weights file and bring it to the disk. Tensors are contiguous and on the CPU."""
        self._together(lambda: self._save(name, tensors))

    def finish(
        self,
        files: Mapping[str, str],
        total_size: int,
        extra: Mapping[str, Tensor],
        config: Mapping[str, Any],
        tokenizer: Any,
        source: Path | None,
    ) -> None:
        """Write all that is no file of weights, and put the folder in place.

        Args:
            files: tensor -> file, of `plan_files`.
            total_size: bytes of the weights, for the index.
            extra: for EXTRA_FILE, which is left out where there is nothing.
            config: for config.json.
            tokenizer, source: see `hf.save_hf_folder`.
        """

        def write() -> None:
            if len(set(files.values())) > 1:
                _write_json(self._partial / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))})
            if extra:
                self._save(EXTRA_FILE, extra)
                _logger.warning(
                    "transformers does not know the router's expert biases: they are in %s, and it will route without them", EXTRA_FILE
                )
            write_configs(self._partial, config, tokenizer, source)
            for path in self._partial.rglob("*"):
                if path.suffix == ".safetensors":  # the library makes files that their owner alone may read
                    shutil.copymode(self._partial / "config.json", path)
                sync(path)
            sync(self._partial)
            self._publish()

        self._together(write)

    def abandon(self) -> None:
        """Remove what was written so far. Not collective."""
        if self._rank == 0 and self._partial != self._folder:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _begin(self) -> None:
        # Inside a folder that is there already: beside it may be another file system, to which files cannot be moved.
        there = self._folder.is_dir()
        self._partial = self._folder / ".partial" if there else self._folder.parent / f".{self._folder.name}.partial"
        if self._partial.exists():  # of a save that died
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        save_file(dict(tensors), self._partial / name, metadata={"format": "pt"})
        sync(self._partial / name)

    def _publish(self) -> None:
        """Move the files to their place; where one cannot be moved, all go back to where they were.

        The older weights' entry point goes first and the new one's comes last: a process that dies in between leaves a
        folder that loads as incomplete, never one that mixes two models.
        """
        if not self._folder.exists():
            self._partial.rename(self._folder)
            sync(self._folder.parent)
            return
        replaced = self._folder / ".replaced"
        if replaced.exists():
            shutil.rmtree(replaced)
        replaced.mkdir()
        new = sorted(self._partial.iterdir(), key=_is_entry_point)
        names = {path.name for path in new}
        old = [path for path in self._folder.iterdir() if path.name in names | {INDEX_FILE, EXTRA_FILE} or _WEIGHTS.fullmatch(path.name)]
        moves = [(path, replaced / path.name) for path in sorted(old, key=_is_entry_point, reverse=True)]
        moves += [(path, self._folder / path.name) for path in new]
        done: list[tuple[Path, Path]] = []
        try:
            for start, end in moves:
                start.rename(end)
                done.append((start, end))
        except OSError:
            for start, end in reversed(done):
                end.rename(start)
            replaced.rmdir()
            raise
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._partial.rmdir()

    def _together(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0; all ranks raise SaveError if it failed."""
        try:
            on_rank_zero(action, f"saving to {self._folder}")
        except SaveError:
            self.abandon()
            raise


def _is_entry_point(path: Path) -> bool:
    return path.name in (INDEX_FILE, WEIGHTS_FILE)
