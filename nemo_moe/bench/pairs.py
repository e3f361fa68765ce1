"""Which dispatcher x experts pairs a benchmark times: those that were named, or all that can run here.

A pair that was named and cannot run is an error, found before any rank works. One that nobody named is left out, and the
report says why. With one expert-parallel rank no token leaves it and a local permutation runs whatever the dispatcher, so
each experts backend is timed once, under that name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nemo_moe.config import BackendConfig
from nemo_moe.registry import DISPATCHERS, EXPERTS, PRECISIONS, Registry

LOCAL = "local permutation"
ORACLE = BackendConfig(dispatcher="all_to_all", experts="loop")


@dataclass(frozen=True)
class Pairs:
    """What is timed.

    Attributes:
        backends: by the name in the tables; never empty.
        left_out: one line for each pair that nobody named and that cannot run, and for each key of the recipe's backend
            section that a dispatcher does not have.
    """

    backends: dict[str, BackendConfig]
    left_out: list[str]


def choose_pairs(
    dispatchers: list[str] | None,
    experts: list[str] | None,
    ep_size: int,
    check: Callable[[BackendConfig], None],
    base: BackendConfig | None = None,
) -> Pairs:
    """The pairs of the named dispatchers and experts; None stands for all that are registered.

    Args:
        ep_size: expert-parallel ranks.
        check: raises ValueError or ImportError for a pair that cannot run.
        base: the recipe's section, whose other keys each pair gets where its dispatcher has them.

    Raises:
        ValueError, ImportError: a name is unknown, a pair of two named backends cannot run, or none of a named one can.
    """
    for registry, names in ((DISPATCHERS, dispatchers), (EXPERTS, experts)):
        for name in names or ():
            registry.get(name)
    movers = dispatchers or ([ORACLE.dispatcher] if ep_size == 1 else list(DISPATCHERS))
    backends: dict[str, BackendConfig] = {}
    problems: dict[str, list[str]] = {}
    notes: list[str] = []
    for dispatcher, expert in itertools.product(movers[:1] if ep_size == 1 else movers, experts or EXPERTS):
        backend, lost = _with_keys_of(base or BackendConfig(), dispatcher, expert)
        name = pair_name(backend, ep_size)
        try:
            check(backend)
        except (ValueError, ImportError) as error:
            if dispatchers is not None and experts is not None:
                raise
            problems.setdefault(str(error), []).append(name)
        else:
            backends[name] = backend
            notes += [line for line in lost if line not in notes]
    left_out = [f"not timed: {', '.join(names)}: {message}" for message, names in problems.items()]
    there = {name for backend in backends.values() for name in (backend.dispatcher, backend.experts)}
    asked = {*((dispatchers or []) if ep_size > 1 else []), *(experts or [])}
    if not backends or asked - there:
        lines = [f"{', '.join(names)}: {message}" for message, names in problems.items()]
        raise ValueError(
            lines[0] if len(lines) == 1 else "no pair that was asked for can run:" + "".join(f"\n  - {line}" for line in lines)
        )
    return Pairs(backends, left_out + notes)


def pair_name(backend: BackendConfig, ep_size: int) -> str:
    """How a pair is written in tables: by what really moves the tokens."""
    return f"{LOCAL if ep_size == 1 else backend.dispatcher} + {backend.experts}"


def check_sizes(backend: BackendConfig, hidden_size: int, moe_intermediate_size: int, precision: str, *, local: bool) -> None:
    """What the registry says of a pair's limits: libraries, precisions, sizes. `local` leaves the dispatcher out.

    Raises ValueError or ImportError.
    """
    experts = EXPERTS.get(backend.experts)
    _check_backend(EXPERTS, backend.experts, precision)
    EXPERTS.load(backend.experts).check_available(backend.experts_fp8)
    for size in (hidden_size, moe_intermediate_size):
        if size * getattr(torch, PRECISIONS[precision]).itemsize % experts.row_bytes_multiple_of:
            raise ValueError(
                f"backend.experts {backend.experts!r} needs rows that are multiples of {experts.row_bytes_multiple_of} bytes, which {size}"
                f" elements in {precision} are not; choose another shape or precision"
            )
    if not local:
        _check_backend(DISPATCHERS, backend.dispatcher, precision)
        DISPATCHERS.load(backend.dispatcher).check_available()
        multiple = DISPATCHERS.get(backend.dispatcher).hidden_size_multiple_of
        if hidden_size % multiple:
            raise ValueError(
                f"backend.dispatcher {backend.dispatcher!r} needs a hidden_size that is a multiple of {multiple}, found {hidden_size};"
                " choose another shape"
            )


def _check_backend(registry: Registry[Any], name: str, precision: str) -> None:
    registry.check_installed(name)
    precisions = registry.get(name).precisions
    if precision not in precisions:
        raise ValueError(f"{registry.kind}: {name!r} computes in {', '.join(precisions)} only, not in {precision}")


def _with_keys_of(base: BackendConfig, dispatcher: str, experts: str) -> tuple[BackendConfig, list[str]]:
    """`base` with other names, and without the keys that the dispatcher does not have; a line for each of those."""
    spec = DISPATCHERS.get(dispatcher)
    notes: list[str] = []
    changes: dict[str, Any] = {}
    sms, multiple = base.dispatcher_num_sms, spec.num_sms_multiple_of
    if sms is not None and (multiple is None or sms % multiple):
        changes["dispatcher_num_sms"] = None
        rule = "has no such knob" if multiple is None else f"takes multiples of {multiple}"
        notes.append(f"dispatcher_num_sms of the recipe ({sms}) is not used for {dispatcher}, which {rule}")
    if base.dispatcher_async_dispatch and not spec.async_dispatch:
        changes["dispatcher_async_dispatch"] = False
        notes.append(f"dispatcher_async_dispatch of the recipe is not used for {dispatcher}, which has no asynchronous mode")
    if base.experts_fp8 is not None and base.experts_fp8 not in EXPERTS.get(experts).fp8:
        changes["experts_fp8"] = None
        notes.append(f"experts_fp8 of the recipe ({base.experts_fp8}) is not used for {experts}, which has no such recipe")
    return dataclasses.replace(base, dispatcher=dispatcher, experts=experts, **changes), notes
