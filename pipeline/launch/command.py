"""Run the command line and return its exit status.

The launcher composes the configuration, opens the run folder, selects the stages that must run, and starts their
processes. At the end it writes the report and prints the summary of the run. Under torchrun or Slurm every rank runs
this file. The first launcher decides and writes files. The other launchers start workers when the first one sends a
message.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.check import validate, warnings
from pipeline.config.check_machine import check_paths, check_ranks, hub_data
from pipeline.config.compose import Job, compose_jobs, parse_command
from pipeline.config.document import help_text
from pipeline.config.recipes import compare_rates, rate_warnings
from pipeline.config.schema import RunConfig
from pipeline.config.stages import stages_to_run
from pipeline.errors import UserError, exit_status, handle_signals, raise_stopped
from pipeline.evaluation.samples import SAMPLES
from pipeline.files import ends_within, write_atomically
from pipeline.installation import TRAIN
from pipeline.launch.control import Control, LeaderLost
from pipeline.launch.failure import (
    AGAIN,
    CRASHED,
    DISK_TIMEOUT,
    ENDED_EARLY,
    HUNG,
    RESTART,
    USER_ERROR,
    StageEnd,
    StageFailed,
    advise,
    save_traceback,
    status_of,
)
from pipeline.launch.folder import open_folder, with_stage_shares
from pipeline.launch.manifest import Decision, Manifest
from pipeline.launch.processes import launch_stage
from pipeline.launch.ranks import Ranks, check_rank_count, count_gpus, external_ranks, own_ranks, prints_mistakes
from pipeline.launch.stage_inputs import judge_files, stage_consumes
from pipeline.launch.summary import (
    changed_evaluation,
    compare_runs,
    compare_seeds,
    evaluation_notice,
    report_verdict,
    summarize_run,
)


def main(argv: Sequence[str] | None = None, stage: str | None = None) -> int:
    """Run a command line and return its exit status.

    The status is 0, 1 (crash), 2 (user error), 5 (hung), 130 (stopped by Ctrl-C) or 143 (stopped by another signal).
    `stage` is the stage of `python -m step1_sft` and of the other stage modules.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = any(argument.lower().endswith("debug=true") for argument in arguments)
    return exit_status(lambda: _run_or_stop(arguments, stage), debug=debug)


def _run_or_stop(arguments: list[str], stage: str | None) -> int:
    try:
        with handle_signals(raise_stopped):
            return _run(arguments, stage)
    except UserError:
        if prints_mistakes(os.environ):
            raise
        return USER_ERROR
    except StageFailed as problem:
        return problem.status
    except KeyboardInterrupt as problem:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return status_of(problem)


def _run(arguments: list[str], stage: str | None) -> int:
    command = parse_command(arguments)
    if command.help:
        print(help_text())
        return 0
    jobs = compose_jobs(command)
    configs = [_validated(job, stage) for job in jobs]
    if command.cfg:
        print(yaml.safe_dump(configs[0].model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
        return 0
    ranks = _ranks(configs)
    try:
        control = Control(ranks)
    except LeaderLost as problem:
        print(f"error: rank {ranks.first}: {problem}", file=sys.stderr)
        return USER_ERROR
    if not ranks.leads:
        return _follow(ranks, control)
    try:
        for config in configs:
            check_paths(config)
        for line in dict.fromkeys(line for config in configs for line in hub_data(config)):
            print(line, flush=True)
        for line in dict.fromkeys(job.recipe for job in jobs if job.recipe):
            print(line, flush=True)
        for line in dict.fromkeys(_rate_warnings(jobs, configs)):
            print(f"warning: {line}", file=sys.stderr)
        status = _lead(jobs, configs, ranks, control)
    except BaseException as problem:
        control.finish(status_of(problem))
        raise
    control.finish(status)
    return status


def _validated(job: Job, stage: str | None) -> RunConfig:
    if stage is not None and job.raw.get("stage", "all") not in ("all", stage):
        raise UserError(f"stage={job.raw['stage']} belongs to another stage: use {TRAIN} stage={job.raw['stage']}")
    return validate({**job.raw, "stage": stage} if stage is not None else job.raw)


def _rate_warnings(jobs: list[Job], configs: list[RunConfig]) -> Iterator[str]:
    for job, config in zip(jobs, configs, strict=True):
        yield from rate_warnings(compare_rates(config, job.reference), job.reference)


def _ranks(configs: list[RunConfig]) -> Ranks:
    external = external_ranks(os.environ)
    for config in configs:
        if external is not None:
            check_rank_count(external, config.ranks)
    rank_counts = {config.ranks for config in configs}
    if len(rank_counts) > 1:
        raise UserError(
            "ranks= must be the same for all runs of a multirun: start one command for each number of ranks"
        )
    ranks = external or own_ranks(rank_counts.pop(), count_gpus())
    for config in configs:
        check_ranks(config, ranks.world if config.plan.device is None else config.plan.ranks)
    return ranks


def _lead(jobs: list[Job], configs: list[RunConfig], ranks: Ranks, control: Control) -> int:
    """Run every job. A job that fails does not stop the other jobs of a multirun."""
    statuses, runs = [], dict[str, tuple[str, Path | None]]()
    for job, config in zip(jobs, configs, strict=True):
        if job.label:
            print(f"-- {job.label}", flush=True)
        last = stages_to_run(config)[-1]
        try:
            runs[job.label] = last, _run_job(config, job.label, ranks, control)
            statuses.append(0)
        except (UserError, OSError, StageFailed) as problem:
            status = status_of(problem)
            is_bug = isinstance(problem, OSError) and status != USER_ERROR
            if len(jobs) == 1 or is_bug or status in ENDED_EARLY or not control.is_complete:
                raise
            if not isinstance(problem, StageFailed):
                print(f"error: {advise(problem)}", file=sys.stderr)
            statuses.append(status)
            runs[job.label] = last, None
    if len(jobs) > 1 and configs[-1].stage != "plan":
        print(compare_runs(runs), flush=True)
        over_seeds = compare_seeds({job.label: config for job, config in zip(jobs, configs, strict=True)}, runs)
        if over_seeds:
            print(over_seeds, flush=True)
    failed = [job.label for job, status in zip(jobs, statuses, strict=True) if status]
    if failed:
        print(f"error: {len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return max(statuses)


def _run_job(config: RunConfig, label: str, ranks: Ranks, control: Control) -> Path | None:
    """Run one job and return its run folder; None for stage=plan, which keeps no folder."""
    if config.stage == "plan":
        _plan(config, ranks, control)
        return None
    stages = stages_to_run(config)
    folder = open_folder(config, stages, label)
    try:
        folder.remove_leftovers()
        for text in warnings(config):
            print(f"warning: {text}", file=sys.stderr)
        earlier = f" ({folder.reason}; name=NAME starts another run)" if folder.reason else ""
        print(f"run folder: {folder.path}{earlier}", flush=True)
        manifest = Manifest.read(folder.path)
        manifest.claim(config, stages)
        config = with_stage_shares(config, folder.path, stages)
        for stage in stages:
            _run_stage(config, manifest, stage, ranks, control)
        verdict = report_verdict(folder.path)
        print(summarize_run(folder.path, verdict), flush=True)
        return folder.path
    except (UserError, OSError, StageFailed) as problem:
        if getattr(problem, "status", USER_ERROR) == USER_ERROR:
            folder.drop_unused()
        raise
    finally:
        folder.close()


def _plan(config: RunConfig, ranks: Ranks, control: Control) -> None:
    """Print the predicted memory and time of the stages, without a run folder."""
    shared = None if ranks.local == ranks.world else Path.cwd()  # other machines do not see the temporary folder
    with tempfile.TemporaryDirectory(prefix=".zerochat-plan-", dir=shared) as run_dir:
        folder = Path(run_dir) / "plan"
        folder.mkdir()
        config = with_stage_shares(config, Path(run_dir), stages_to_run(config))
        _write_config(folder, config)
        end = _start("plan", Path(run_dir), config, ranks, control, number=0)
        if end.status:
            raise StageFailed(end.status)


def _run_stage(config: RunConfig, manifest: Manifest, stage: str, ranks: Ranks, control: Control) -> None:
    """Run, resume or skip one stage."""
    run_dir, consumed = manifest.run_dir, stage_consumes(config, manifest, stage)
    decision = manifest.decide(stage, consumed)
    manifest.check_tokenizer(stage, consumed)
    if decision.action == "run":
        decision = _set_aside(manifest, stage, consumed, decision)
    stage_dir, judges = run_dir / stage, judge_files(config)
    changed = manifest.changed_judges(stage, judges)
    if decision.action == "skip":
        notice = evaluation_notice(config, stage_dir, changed)
        print(f"{stage}: finished before with the same settings, skipped{notice}", flush=True)
        return
    processes = f"{ranks.world} process{'es' if ranks.world > 1 else ''}"
    judged = f"the file of {' and '.join(changed)} changed; earlier grades are those of the old file" if changed else ""
    evaluation = changed_evaluation(config, stage_dir) if decision.action == "resume" else []
    if evaluation and (samples := stage_dir / SAMPLES).exists():
        samples.write_text("")  # the stage answers the held-out prompts again
    because = "; ".join(filter(None, (decision.because, judged, *evaluation)))
    if decision.action == "resume":
        print(f"{stage}: resumes, {processes}{f' ({because})' if because else ''}", flush=True)
    else:
        print(f"{stage}: starts, {processes}", flush=True)
    manifest.begin(stage, consumed, judges)
    stage_dir.mkdir(exist_ok=True)
    resolved = config.model_copy(update={"name": run_dir.name, "run_dir": str(run_dir.resolve())})
    if stage == "reward":  # only the launcher reads the manifest
        init = "sft" if "sft" in consumed["models"] else "base"
        resolved = resolved.model_copy(update={"reward": config.reward.model_copy(update={"init": init})})
    _write_config(stage_dir, resolved)
    end = _run_until_finished(stage, run_dir, config, ranks, control)
    if end.status:
        ends_within(DISK_TIMEOUT, partial(manifest.stop, stage))  # a stage with status "running" resumes as well
        raise StageFailed(end.status)
    manifest.finish(stage)
    if end.stop_status:
        print(f"{stage}: finished, then stopped; run the same command again to resume", file=sys.stderr)
        raise StageFailed(end.stop_status)


def _set_aside(manifest: Manifest, stage: str, consumed: dict[str, Any], decision: Decision) -> Decision:
    """Rename the old folder of a stage that must run, or restore one of the same inputs. Return the decision then."""
    because, aside = decision.because or "its record is gone", manifest.set_aside(stage)
    restored = manifest.restore(stage, consumed)
    if restored is not None:
        print(f"{stage}: {restored} has these inputs and is {manifest.run_dir / stage} again", flush=True)
        decision = manifest.decide(stage, consumed)
    if aside is not None:
        action = "runs again" if restored is None else "changes"
        print(f"{stage}: {action} ({because}); its old folder is now {aside}", flush=True)
    return decision


def _write_config(stage_dir: Path, config: RunConfig) -> None:
    """Write the configuration that the ranks of a stage read."""
    write_atomically(stage_dir / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def _run_until_finished(stage: str, run_dir: Path, config: RunConfig, ranks: Ranks, control: Control) -> StageEnd:
    """Start a stage until it ends for good: again at its own request, and `restarts` times after a failure."""
    failures = starts = 0
    while True:
        end = _start(stage, run_dir, config, ranks, control, number=starts)
        starts += 1
        is_failure = end.status in (CRASHED, HUNG) and not end.stop_status
        if is_failure and failures < config.restarts and control.is_complete:
            failures += 1
            print(f"{stage}: restart {failures} of {config.restarts}", file=sys.stderr, flush=True)
        elif end.status != RESTART:
            return end


def _start(stage: str, run_dir: Path, config: RunConfig, ranks: Ranks, control: Control, *, number: int) -> StageEnd:
    """Start a stage on all launchers, wait until it ends, and print why it failed. `number` counts from 0."""
    hang_seconds = config.engine.hang_seconds
    message = {"stage": stage, "run_dir": str(run_dir.resolve()), "number": number, "hang_seconds": hang_seconds}
    control.begin(message)
    end = control.settle(_launch(message, ranks, control))
    if end.status in ENDED_EARLY:
        detail = f" ({end.message})" if end.message else ""
        advice = "" if stage == "plan" else "; run the same command again to resume"
        print(f"{stage}: stopped{detail}{advice}", file=sys.stderr)
    elif end.status == RESTART:
        print(f"{stage}: {end.message}", file=sys.stderr)
    elif end.status:
        print(end.traceback if config.debug else "", end="", file=sys.stderr)
        print(f"error: {stage}: {end.message}{save_traceback(end, run_dir / stage)}", file=sys.stderr, flush=True)
    return end


def _launch(message: Mapping[str, Any], ranks: Ranks, control: Control) -> StageEnd:
    """Run this launcher's ranks of a stage."""
    number = message["number"]
    ranks = replace(ranks, attempt=f"{ranks.attempt}.{number}" if number else ranks.attempt)
    run_dir = Path(message["run_dir"])
    return launch_stage(message["stage"], run_dir, ranks, shared_store=control.keeps_store, others=control.others)


def _follow(ranks: Ranks, control: Control) -> int:
    """Start this launcher's ranks of each stage that the first launcher names. Return the exit status."""
    while True:
        try:
            message = control.receive()
        except LeaderLost as problem:
            print(f"error: rank {ranks.first}: {problem}; {AGAIN} on all machines to resume", file=sys.stderr)
            return HUNG
        except KeyboardInterrupt:
            control.report_stop()
            raise
        if "end" in message:
            control.close()
            return int(message["end"])
        end = control.settle(_launch(message, ranks, control))
        if end.status in ENDED_EARLY:
            with suppress(LeaderLost):
                control.receive()  # srun may kill all tasks when one ends, and the first rank may still close wandb
            return end.status
