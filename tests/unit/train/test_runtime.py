"""The process that a rank runs in: ranks that resolved `device: auto` in different ways part with one message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from nemo_moe.train.runtime import _about_backends

ROOT = Path(__file__).resolve().parents[3]
JOIN = """
import sys
import torch
from nemo_moe.train.runtime import StartError, process_group
backend = sys.argv[1]
try:
    with process_group(backend, 1.0, torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")):
        print("joined", torch.distributed.get_world_size())
except StartError as error:
    print(error)
"""


def join(*backends: str) -> list[str]:
    """What each of some rank processes says, each with the backend that it resolved to. The store is ours, as torchrun's is."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(len(backends)), "PYTHONPATH": str(ROOT)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, backend],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, backend in enumerate(backends)
    ]
    try:
        return [rank.communicate(timeout=50)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_ranks_of_one_backend_join() -> None:
    assert join("gloo", "gloo") == ["joined 2", "joined 2"]


def test_a_rank_that_sees_no_gpu_stops_all_with_one_message_instead_of_a_timeout() -> None:
    said = join("nccl", "gloo")
    assert said[0] == said[1]
    assert said[0].startswith("device: the ranks did not come to the same one: CUDA on 1 ranks (the first is rank 0; on ")
    assert "the CPU on 1 ranks (the first is rank 1; on " in said[0] and "set device to cpu for all" in said[0]


def test_the_message_names_the_machines() -> None:
    found = [["nccl", "a"]] * 8 + [["gloo", "b"]] * 8
    assert "the CPU on 8 ranks (the first is rank 8; on b)" in _about_backends(found)
    assert _about_backends(found[:8]) == ""
    many = [["gloo", "z"], *(["nccl", f"node{index}"] for index in range(6))]
    assert "CUDA on 6 ranks (the first is rank 1; on node0, node1, node2, node3 and more)" in _about_backends(many)
