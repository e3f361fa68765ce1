"""Fine-tuning: one function from a RunConfig to a saved model and its figures.

`finetune` runs the same on one process and on many ranks; all numbers that it decides by are agreed on by all ranks, so
no rank leaves the others behind. Only rank 0 prints, logs and writes the model.

Left out on purpose: skipping steps that are not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_moe.checkpoint.hf import save_hf_folder
from nemo_moe.checkpoint.together import SaveError
from nemo_moe.compose import to_plain, to_yaml
from nemo_moe.config import RunConfig
from nemo_moe.resolve import Resolved, resolve
from nemo_moe.stopping import StopRequest
from nemo_moe.train.assemble import Run, assemble, warnings_of
from nemo_moe.train.checkpoints import Checkpoints, restore_run
from nemo_moe.train.evaluate import ExactMatch, exact_match, most_frequent_answer_accuracy
from nemo_moe.train.logging import RunLogger, Value
from nemo_moe.train.loop import TrainLoop
from nemo_moe.train.progress import TransferDisplay
from nemo_moe.train.report import Accuracy, accuracy_lines, load_command
from nemo_moe.train.resume import Resume, find_resume, require_same_state
from nemo_moe.train.run_folder import RunFolder
from nemo_moe.train.run_state import RunState
from nemo_moe.train.runtime import agreed, decided_by_rank_zero, local_device, local_world_size, process_group, world_size
from nemo_moe.train.step import TrainingStopped
from nemo_moe.train.stop_vote import StopAgreed, StopVote
from nemo_moe.train.watchdog import Watchdog

_SAVE_HOURS = 2  # how long the slowest rank's files may take


def finetune(config: RunConfig, stop: StopRequest | None = None) -> dict[str, Value]:
    """Train the model that `config` describes and save it to config.output_dir/model. Collective over all ranks.

    Uses the process group that there is, or one made from torchrun's environment variables, or one of a single process.
    A SIGTERM or SIGINT to any rank ends training on all of them after a whole step, with a checkpoint to go on from.

    Args:
        stop: signals are taken by it already; None takes them for the time of this call.

    Returns:
        The final figures, equal on all ranks but for times: steps, loss (of the last step), validation_loss, seconds
        (of training), steps_without_labels, and with validation.exact_match also exact_match_before,
        exact_match_after and most_frequent_answer (accuracies). `steps` is below the configured ones after a signal.

    Raises:
        ValueError, ImportError: the run cannot start, with the reason; alike on all ranks (`runtime.StartError`).
        TrainingStopped: the loss or gradient norm is not finite any more.
        SaveError: a checkpoint cannot be written, which ends training, or the trained model, after its figures were told.
    """
    if stop is None:
        with StopRequest() as stop:
            return finetune(config, stop)
    stop.grace_seconds = config.checkpoint.grace_seconds
    resolved = resolve(config, world_size(), local_world_size=local_world_size())
    device = local_device(resolved.device)
    seconds = 60 * config.distributed.hang_report_minutes
    with process_group(resolved.dist_backend, config.distributed.timeout_minutes, device) as store:
        watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), seconds, on_peer_failure=stop.peer_failed)
        with watchdog:
            folder = RunFolder(config)
            try:
                return _finetune(config, resolved, folder, stop, watchdog)
            except BaseException as error:
                watchdog.failed(f"{type(error).__name__}: {error}")
                raise
            finally:
                folder.release()


def _finetune(config: RunConfig, resolved: Resolved, folder: RunFolder, stop: StopRequest, watchdog: Watchdog) -> dict[str, Value]:
    torch.manual_seed(config.seed)
    record = {**to_plain(config), "resolved": dataclasses.asdict(resolved)}
    first = dist.get_rank() == 0
    earlier, token = decided_by_rank_zero(folder.check)
    agreed(lambda: folder.check_shared(token))
    resume = decided_by_rank_zero(lambda: find_resume(config, folder.checkpoints))
    if resume is not None:
        agreed(lambda: require_same_state(resume))
    continued = resume is not None and resume.folder.parent == folder.checkpoints.root
    with RunLogger(config.logging, dist.get_rank()) as log:
        for line in (to_yaml(config).rstrip(), *resolved.lines):
            log.note(line)
        watchdog.now("building data and model")
        run = assemble(config, resolved, resume)
        # Two groups over gloo: a save in the background must not meet a vote of the main thread.
        votes = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.distributed.timeout_minutes))
        saves = dist.new_group(backend="gloo", timeout=timedelta(hours=_SAVE_HOURS))
        for line in (*_start_lines(run, resume), *(_restore(run, resume, saves) if resume else ())):
            log.note(line)
        if first and earlier and not continued:
            log.warn(f"{folder.path} holds an earlier run, whose logs and model are replaced; set output_dir to keep both")
        for line in warnings_of(run):
            log.warn(line)
        agreed(lambda: folder.write_configs(config, resolved, record) if first else None)
        log.begin(folder.path, record, resume.state["log"] if resume and continued else None)
        progress = resume.progress if resume else RunState()
        restored = progress if resume and resume.folder == folder.checkpoints.folder(progress.step) else None
        checkpoints = Checkpoints(run, record, folder.checkpoints, saves, log.note, restored)
        vote = StopVote(stop, votes, checkpoints.failed)
        figures = _train_and_save(run, progress, folder, log, checkpoints, vote, watchdog)
        for group in (votes, saves):  # not after a failure: other ranks may be inside a collective of theirs
            dist.destroy_process_group(group)
        return figures


def _restore(run: Run, resume: Resume, group: dist.ProcessGroup) -> list[str]:
    """Put the run to its checkpoint; lines about it."""
    same_random = restore_run(run, resume, group)
    lines = [f"going on from {resume.folder}, after step {resume.progress.step}"]
    if resume.changed:
        lines.append(f"changed since: {'; '.join(resume.changed)}")
    if not same_random:
        lines.append(f"random states are new: the checkpoint's are of {resume.state['ranks']} ranks, and there are {dist.get_world_size()}")
    return lines


def _train_and_save(
    run: Run, progress: RunState, folder: RunFolder, log: RunLogger, checkpoints: Checkpoints, vote: StopVote, watchdog: Watchdog
) -> dict[str, Value]:
    """From where `progress` stands to the saved model, or to a checkpoint where a rank is asked to stop."""
    loop = TrainLoop(run, progress, log, checkpoints, vote, watchdog)

    def check(what: str) -> None:
        watchdog.now(what)
        vote.check()

    evaluating = functools.partial(check, "evaluating exact match")
    try:
        if progress.step == 0 and progress.exact_match_before is None:
            progress.exact_match_before = _exact_match(run, 0, log, evaluating)
        loop.train()
        after = _exact_match(run, run.steps, log, evaluating)
        metrics = _report(run, progress, after, log)
        checkpoints.wait()
        # Last: what cannot be written must not cost the figures.
        _save_model(run, folder, functools.partial(check, "saving the model"))
    except StopAgreed:
        log.end_progress()
        loop.save()
        log.note(f"stopped by {vote.signal_name()} after step {progress.step} of {run.steps}; go on with: checkpoint.resume=latest")
        return _figures(progress)
    except TrainingStopped:
        try:
            checkpoints.wait()
        except SaveError as error:
            log.warn(str(error))
        raise
    checkpoints.remove_unasked()
    log.note(f"run folder: {folder.path} (the model in model/; config.yaml, resolved.json, train.jsonl and validation.jsonl beside it)")
    log.note(f"load the model with transformers:\n  {load_command(folder.model, run.data.held_out[0].question)}")
    return metrics


def _save_model(run: Run, folder: RunFolder, check: Callable[[], None]) -> None:
    source = run.config.model.folder
    with TransferDisplay("saving the model", active=dist.get_rank() == 0) as display:
        save_hf_folder(run.model, folder.model, run.data.tokenizer, source=source, progress=display.update, check=check)


def _report(run: Run, progress: RunState, after: ExactMatch | None, log: RunLogger) -> dict[str, Value]:
    """Tell how good the model got; the final figures."""
    metrics = _figures(progress)
    if after is not None:
        answer, share = most_frequent_answer_accuracy(run.data.train_answers, run.data.held_out)
        before = progress.exact_match_before
        for line in accuracy_lines(Accuracy(before, after, answer, share), run.data.held_out, run.config.validation.show_samples):
            log.note(line)
        metrics |= {"exact_match_after": after.accuracy, "most_frequent_answer": share}
        metrics |= {} if before is None else {"exact_match_before": before.accuracy}
    return metrics


def _figures(progress: RunState) -> dict[str, Value]:
    return {
        "steps": float(progress.step),
        "loss": progress.loss,
        "validation_loss": progress.validation_loss,
        "seconds": progress.seconds,
        "steps_without_labels": float(progress.steps_without_labels),
    }


def _exact_match(run: Run, step: int, log: RunLogger, check: Callable[[], None]) -> ExactMatch | None:
    if not run.config.validation.exact_match:
        return None
    meshes = run.meshes
    found = exact_match(run.model, run.data.tokenizer, run.data.held_out, device=meshes.device, dp_group=meshes.dp_group, check=check)
    log.validation(step, {"exact_match": found.accuracy, **{f"exact_match/{task}": share for task, share in found.per_task.items()}})
    return found


def _start_lines(run: Run, resume: Resume | None) -> list[str]:
    config, coefficients = run.config, run.coefficients
    of_experts = {id(parameter) for layer in run.model.moe_layers() for parameter in layer.experts.parameters()}
    copies = ((parameter.numel(), run.meshes.sizes.ep if id(parameter) in of_experts else 1) for parameter in run.model.parameters())
    start = "a checkpoint" if resume else config.model.path or "random weights"
    tokenizer = "trained from the training items" if config.model.path is None else f"the one in {config.model.path}"
    biases = [layer.gate.expert_bias for layer in run.model.moe_layers()]
    fixed = any(bias is not None for bias in biases) and config.router.bias_update_rate == 0
    return [
        *run.data.summary,
        f"tokenizer: {tokenizer}, {len(run.data.tokenizer)} entries",
        f"model: {config.model.family} from {start}, {sum(numel * ranks for numel, ranks in copies):,} parameters",
        f"auxiliary losses: {coefficients.load_balance:g} x load balance, {coefficients.router_z:g} x router z-loss",
        *(["expert biases: from the folder, used as they are (router.bias_update_rate is 0)"] if fixed else []),
        f"training: {run.steps} optimizer steps, {len(run.loader)} an epoch",
    ]
