"""Fixtures for all tests: one thread per process, and no pool of ranks left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: ranks and test process share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    yield
    import sys

    module = sys.modules.get("nemo_moe.testing.run_distributed")
    if module is not None:
        module.shutdown_pools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need CUDA devices are skipped, with the reason, where there are too few."""
    needed = {"gpu": 1, "gpu2": 2}
    wanted = [(item, needed[mark.name]) for item in items for mark in item.iter_markers() if mark.name in needed]
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count()
    for item, count in wanted:
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device(s), found {found}"))
