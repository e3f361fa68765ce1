"""`nemo-moe doctor`: the matrix has a reason in each cell that does not run, and a recipe's exit code says whether it can."""

from __future__ import annotations

import pytest
import torch

from nemo_moe.cli.main import main
from nemo_moe.registry import DISPATCHERS, EXPERTS, DispatcherSpec, ExpertsSpec


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["doctor", *argv])
    return code, capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """Dispatcher -> its cells, from the table."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("dispatcher \\"))
    table = {}
    for line in lines[start + 2 :]:
        if not line:
            break
        name, *cells = [cell for cell in line.split("  ") if cell.strip()]
        table[name.strip()] = [cell.strip() for cell in cells]
    return table


def test_every_pair_has_a_cell_and_every_empty_one_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor(capsys)
    assert code == 0
    table = rows(text)
    assert list(table) == list(DISPATCHERS)
    reasons = [line for line in text.splitlines() if line.startswith("[")]
    for cells in table.values():
        assert len(cells) == len(list(EXPERTS))
        for cell in cells:
            assert cell.startswith("no: [") or set(cell.split()) <= {"fp32", "bf16"}
            for number in cell.removeprefix("no: ").split() if cell.startswith("no") else ():
                assert any(reason.startswith(number) and len(reason) > 30 for reason in reasons)
    assert table["all_to_all"][0] == "fp32 bf16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
def test_a_dispatcher_that_needs_cuda_is_no_choice_here_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = doctor(capsys)
    assert all(cell.startswith("no:") for cell in rows(text)["deepep"] + rows(text)["hybridep"])
    assert "no CUDA device" in text


def test_backends_without_a_common_precision_are_no_pair(capsys: pytest.CaptureFixture[str]) -> None:
    target = "nemo_moe.moe.dispatch.all_to_all:_AllToAllManager"
    DISPATCHERS.register("half", DispatcherSpec(target=target, summary="", precisions=("bf16",)))
    EXPERTS.register("whole", ExpertsSpec(target="nemo_moe.moe.experts.loop:LoopExperts", summary="", precisions=("fp32",)))
    try:
        _, text = doctor(capsys)
    finally:
        DISPATCHERS.unregister("half")
        EXPERTS.unregister("whole")
    assert "half and whole compute in no common precision" in text
    assert rows(text)["half"][-1].startswith("no:") and rows(text)["half"][0] == "bf16"


def test_a_recipe_that_runs_exits_with_0_and_says_what_it_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor(capsys, "demo", "device=cpu")
    assert code == 0
    assert "demo: runs on 2 ranks" in text and "dispatcher: all_to_all (as configured)" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["backend.dispatcher=deepep", "precision=bf16", "device=cpu"], "'deepep' runs on cuda only"),
        (["backend.dispatcher=deepep"], "computes in bf16 only"),
        (["backend.dispatcher=hybridep", "precision=bf16", "backend.dispatcher_async_dispatch=true"], "has no asynchronous mode"),
        (["backend.dispatcher=deepep", "precision=bf16", "backend.dispatcher_num_sms=21"], "multiple of 2"),
        (["backend.dispatcher=nothing"], "unknown value 'nothing'"),
        (["--nproc-per-node", "3", "device=cpu"], "3"),
    ],
)
def test_a_recipe_that_cannot_run_here_exits_with_1_and_the_reason(
    capsys: pytest.CaptureFixture[str], changes: list[str], reason: str
) -> None:
    code, text = doctor(capsys, "demo", *changes)
    assert code == 1
    last = text.splitlines()[-1]
    assert "demo: cannot run" in last and reason in last


def test_with_one_expert_parallel_rank_any_dispatcher_is_legal_in_any_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Its library need not be there, and no token is moved in bf16."""
    for dispatcher in ("deepep", "hybridep"):
        code, text = doctor(capsys, "demo", "distributed.ep_size=1", f"backend.dispatcher={dispatcher}", "precision=fp32", "device=cpu")
        assert code == 0
        assert f"{dispatcher} as configured is not used" in text
