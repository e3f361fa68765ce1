"""Weights & Biases, as something that may fail: every failure is one warning, and the run goes on without it.

`auto` is online only where an API key is set and offline otherwise, because without a key wandb's own default raises,
and under torchrun that ends the job. WANDB_MODE decides before `auto` does, as wandb's users expect.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from nemo_moe.config import WandbConfig, WandbMode

Mode = Literal["online", "offline", "disabled"]

_MODES: dict[str, Mode] = {"online": "online", "offline": "offline", "disabled": "disabled"}
_INIT_TIMEOUT = 30.0  # seconds; without a network wandb would wait for minutes
_FINISH_TIMEOUT = 60.0


class WandbRun:
    """One W&B run of rank 0.

    Args:
        config: mode, project and name.
        folder: wandb writes below folder/wandb.
        run_config: the resolved config of the run, as plain values.
        warn: called with the reason, once, when wandb cannot be used (any longer).
        note: called with where the run is.
        run_id: of the run to go on with; None begins one.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        run_config: dict[str, Any],
        warn: Callable[[str], None],
        note: Callable[[str], None],
        *,
        run_id: str | None = None,
    ) -> None:
        self._warn = warn
        self._run: Any = None
        self.run_id = run_id
        mode = resolve_mode(config.mode)
        if mode == "disabled":
            return
        try:
            self._run = _start(config, mode, folder, run_config, run_id)
            self.run_id = self._run.id
        except Exception as error:  # whatever wandb raises: a tracker must not end a run
            self._give_up("could not start", error)
            return
        if mode == "offline":
            note(f"W&B: offline run in {Path(self._run.dir).parent} (upload it later: wandb sync <that folder>)")
        else:
            note(f"W&B: {self._run.url}")

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log values at the global step; values of the same step may come in several calls."""
        if self._run is not None:
            try:
                self._run.log(values, step=step)
            except Exception as error:
                self._give_up("stopped working", error)

    def finish(self, failed: bool = False) -> None:
        """End the run; later calls do nothing."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=int(failed))
            except Exception as error:
                self._give_up("could not finish", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        self._warn(f"W&B {what} and is off for the rest of this run: {reason}")


def resolve_mode(mode: WandbMode) -> Mode:
    """online, offline or disabled."""
    if mode is not WandbMode.auto:
        return _MODES[mode.value]
    from_environment = os.environ.get("WANDB_MODE", "")
    if from_environment in _MODES:
        return _MODES[from_environment]
    return "online" if has_api_key() else "offline"


def has_api_key() -> bool:
    """Whether a W&B key is set, in WANDB_API_KEY or in the netrc file; nothing is sent anywhere."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    candidates = [os.environ.get("NETRC"), str(Path.home() / ".netrc"), str(Path.home() / "_netrc")]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            try:
                # Not .authenticators(): it falls back to a `default` entry, which is not a W&B key.
                return host in netrc.netrc(candidate).hosts
            except (netrc.NetrcParseError, OSError):
                return False
    return False


def _start(config: WandbConfig, mode: Mode, folder: Path, run_config: dict[str, Any], run_id: str | None) -> Any:
    # Its logs go there too; by default they would land in the user's home folder.
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
    import wandb  # seconds; only rank 0 of a run that logs to it pays

    # console off: it must not wrap the stdout that the progress bar draws on.
    options: dict[str, Any] = {"init_timeout": _INIT_TIMEOUT, "silent": True, "console": "off"}
    if "finish_timeout" in wandb.Settings.model_fields:  # not in older versions
        options["finish_timeout"] = _FINISH_TIMEOUT
    settings = wandb.Settings(**options)
    known: dict[str, Any] = {} if run_id is None else {"id": run_id, "resume": "allow"}
    return wandb.init(project=config.project, name=config.name, mode=mode, dir=str(folder), config=run_config, settings=settings, **known)
