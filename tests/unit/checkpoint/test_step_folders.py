"""Which checkpoint is the latest, which are kept, and what an interrupted save leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_moe.checkpoint.step_folders import StepFolders


def save(folders: StepFolders, step: int, *, is_best: bool = False, keep_last: int = 2) -> None:
    (folders.begin(step) / "data").write_text(str(step))
    folders.publish(step, is_best=is_best, keep_last=keep_last)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folders = StepFolders(tmp_path / "checkpoints")
    for step in (10, 20, 30, 40):
        save(folders, step, is_best=step == 20)
    assert list(folders.steps()) == [20, 30, 40]
    assert folders.latest() == folders.folder(40) and folders.best() == folders.folder(20)
    save(folders, 50, is_best=True)
    assert list(folders.steps()) == [40, 50] and folders.best() == folders.folder(50)


def test_a_save_that_died_changes_nothing(tmp_path: Path) -> None:
    folders = StepFolders(tmp_path)
    save(folders, 10)
    (folders.begin(20) / "data").write_text("half")
    assert folders.latest() == folders.folder(10) and list(folders.steps()) == [10]
    save(folders, 30)
    assert not folders.partial(20).exists()


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    folders = StepFolders(tmp_path)
    save(folders, 10)
    (folders.begin(10) / "data").write_text("again")
    folders.publish(10, is_best=False, keep_last=1)
    assert (folders.folder(10) / "data").read_text() == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


@pytest.mark.parametrize("text", ["", "../elsewhere", "step-00000099", "step-1", "/tmp", "\xff\x00"])
def test_latest_leads_nowhere_but_to_a_checkpoint(tmp_path: Path, text: str) -> None:
    folders = StepFolders(tmp_path / "checkpoints")
    save(folders, 10)
    (tmp_path / "elsewhere").mkdir()
    (folders.root / "latest").write_bytes(text.encode("latin-1"))
    assert folders.latest() == folders.folder(10)


def test_without_a_pointer_the_newest_whole_folder_is_the_latest(tmp_path: Path) -> None:
    folders = StepFolders(tmp_path)
    assert folders.latest() is None and folders.best() is None and folders.steps() == {}
    save(folders, 10)
    save(folders, 20)
    (tmp_path / "latest").unlink()
    assert folders.latest() == folders.folder(20)


def test_removing_the_last_one_leaves_what_is_not_ours(tmp_path: Path) -> None:
    folders = StepFolders(tmp_path / "checkpoints")
    save(folders, 10, is_best=True)
    save(folders, 20)
    folders.remove(10)
    assert list(folders.steps()) == [20]
    (folders.root / "notes.txt").write_text("mine")
    folders.remove(20)
    assert [path.name for path in folders.root.iterdir()] == ["notes.txt"]
    (folders.root / "notes.txt").unlink()
    save(folders, 10)
    folders.remove(10)
    assert not folders.root.exists()


_DIE = """
import os, sys
from pathlib import Path
from nemo_moe.checkpoint.step_folders import StepFolders
folders, place, count = StepFolders(Path(sys.argv[1])), int(sys.argv[2]), 0
(folders.begin(10) / "data").write_text("new")
def die_at(event, arguments):
    global count
    if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        count += 1
        if count == place:
            os._exit(9)
sys.addaudithook(die_at)
folders.publish(10, is_best=False, keep_last=1)
"""


@pytest.mark.parametrize("place", range(1, 9))
def test_dying_anywhere_while_a_step_is_replaced_leaves_a_whole_latest(tmp_path: Path, place: int) -> None:
    """case B50: a process that ends before the n-th change of the file system; keep_last=1, and the same step again."""
    folders = StepFolders(tmp_path)
    save(folders, 10, keep_last=1)
    done = subprocess.run([sys.executable, "-c", _DIE, str(tmp_path), str(place)], check=False)
    assert done.returncode == (9 if place <= 6 else 0), done.returncode
    folders.recover()
    latest = folders.latest()
    assert latest == folders.folder(10) and (latest / "data").read_text() in ("10", "new")
    assert not list(tmp_path.glob(".step-*"))
