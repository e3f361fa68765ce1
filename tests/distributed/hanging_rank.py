"""One rank of test_watchdog.py: hangs as its first argument says. The test's process keeps the store."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_moe.stopping import StopRequest
from nemo_moe.train.watchdog import Watchdog

SECONDS = 1.0


def read_a_batch(seconds: float = 600.0) -> None:
    time.sleep(seconds)


def exchange() -> None:
    received, sent = torch.empty(dist.get_world_size()), torch.ones(dist.get_world_size())
    dist.all_to_all_single(received, sent)


def all_wait_but_rank_1(rank: int, watchdog: Watchdog) -> None:
    watchdog.now("step 7")
    if rank == 1:
        read_a_batch()
    exchange()


def rank_0_is_stopped(rank: int, watchdog: Watchdog) -> None:
    watchdog.now("step 7")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange()


def two_collectives(rank: int, watchdog: Watchdog) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    watchdog.now("step 7")
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=groups[0])
    else:
        dist.all_reduce(torch.ones(1), group=groups[1], async_op=True).wait()


def backward_and_objects(rank: int, watchdog: Watchdog) -> None:
    watchdog.now("step 7")
    if rank == 0:
        x = torch.ones(1, requires_grad=True)
        WaitsInBackward.apply(x).sum().backward()
    else:
        dist.all_gather_object([None] * 2, "text", group=dist.new_group([0, 1], use_local_synchronization=True))


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad.clone())
        return grad


def twice(rank: int, watchdog: Watchdog) -> None:
    for step in (1, 2):
        watchdog.now(f"step {step}")
        if rank == step - 1:
            read_a_batch(5.0)
        exchange()


def slow_but_steady(rank: int, watchdog: Watchdog) -> None:
    for step in range(40):
        watchdog.now(f"step {step}")
        time.sleep(0.1)
        exchange()


def rank_1_fails(rank: int, watchdog: Watchdog) -> None:
    watchdog.now("saving step 7")
    if rank == 1:
        watchdog.failed("no space left")
        read_a_batch()
    exchange()


def main() -> None:
    scenario, rank, world_size, port = sys.argv[1], *map(int, sys.argv[2:5])
    with StopRequest(600.0) as stop:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
        exchange()
        with Watchdog(store, rank, world_size, SECONDS, on_peer_failure=stop.peer_failed) as watchdog:
            print("ready", flush=True)
            globals()[scenario](rank, watchdog)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
