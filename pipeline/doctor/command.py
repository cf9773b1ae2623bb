"""The command `zerochat doctor`: show the data, batches and steps of a command line of `train` on one screen.

The command checks the configuration, the data, the tokenizer and the sizes as `train` does, with the same messages. It
loads no weights, starts no process and writes no run folder.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine import distributed
from pipeline.config.check import validate, warnings
from pipeline.config.check_machine import check_paths, check_ranks, hub_data
from pipeline.config.compose import Job, compose_jobs, parse_command
from pipeline.config.messages import format_time
from pipeline.config.recipes import Rate, compare_rates
from pipeline.config.schema import RunConfig
from pipeline.config.stages import stages_to_run
from pipeline.data.load import RESERVED
from pipeline.data.rendering import example_lines, token_line
from pipeline.doctor.facts import Facts, StageFacts, gather
from pipeline.errors import exit_status, kind_and_line
from pipeline.installation import DOCTOR
from pipeline.launch.folder import named_folder, with_stage_shares
from pipeline.launch.ranks import count_gpus, own_ranks, prepare_single_process
from pipeline.planning.candidates import predict
from pipeline.planning.planner import measure, plan
from pipeline.planning.stage_task import PlanInputs
from pipeline.stages.start import batch_line, few_steps, steps_line

USAGE = f"""\
Show the data, batches, steps and learning rates of a `train` command, without training.

{DOCTOR} model=opt-1.3b data.path=mine.jsonl
{DOCTOR} model.path=FOLDER data.path=pairs.jsonl method=dpo sft=lora
"""
ROW = "  {:<8}{:>9}{:>10}{:>10}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the screen and return the exit status; 2 for a mistake of the user."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(USAGE, end="")
        return 0
    return exit_status(lambda: _print_screen(words))


def _print_screen(words: Sequence[str]) -> int:
    prepare_single_process()
    try:
        for job in compose_jobs(parse_command(words)):
            for line in examine(job):
                print(line, flush=True)
    finally:
        distributed.stop()  # the measurement started a process group; NCCL warns at exit about one that is left
    return 0


def examine(job: Job) -> Iterator[str]:
    """Yield the lines about one job. Raises the UserError that `train` would end with."""
    config = validate(job.raw)
    ranks = own_ranks(config.ranks, count_gpus()).world
    check_ranks(config, ranks)
    check_paths(config)
    yield from hub_data(config)
    stages = stages_to_run(config)
    with tempfile.TemporaryDirectory(prefix="zerochat-doctor-") as folder:
        config = with_stage_shares(config, named_folder(config) or Path(folder), stages)
    facts = gather(config)
    label = f" ({job.label})" if job.label else ""
    yield f"{config.model.name} on {config.data.name}: {', '.join(stages)}{label}"
    yield job.recipe or "recipe: none"
    yield ""
    yield token_line(facts.tokenizer)
    yield from example_lines(facts.tokenizer, *facts.stages[0].example)
    yield ""
    yield from _rows(facts.stages)
    yield ""
    for each in facts.stages:
        yield f"{each.stage}: {batch_line(config, each.stage, ranks)}"
        yield f"{'':{len(each.stage)}}  {steps_line(config, each.stage, each.steps)}"
    yield ""
    yield from rate_lines(compare_rates(config, job.reference), job.reference.name if job.reference else "")
    yield ""
    yield from _predictions(config, facts, ranks)
    few = (few_steps(each.stage, getattr(config, each.stage), each.steps, each.size.rows) for each in facts.stages)
    yield from (f"warning: {text}" for text in (*filter(None, few), *warnings(config)))


def rate_lines(rates: Sequence[Rate], recipe: str) -> Iterator[str]:
    """Yield one line per learning rate: the value, and the range of the recipe."""
    for rate in rates:
        if rate.usual is None:
            yield f"  {rate.key}={rate.value:g}: no range for these settings"
            continue
        low, high = rate.range
        verdict = "within" if rate.is_usual else "OUTSIDE"
        yield f"  {rate.key}={rate.value:g}: {verdict} {low:.2g} to {high:.2g} (recipe={recipe}: {rate.usual:g})"


def _rows(stages: Sequence[StageFacts]) -> Iterator[str]:
    """Yield a table: rows of each stage, and why rows are skipped or cut."""
    yield ROW.format("stage", "rows", "held out", "skipped", "reasons").rstrip()
    for each in stages:
        reasons = [f"{count:,} {reason}" for reason, count in sorted(each.skipped.items())]
        sample = "" if each.sample == each.train else f" of the first {each.sample:,}"
        reasons += [f"{count:,}{sample}: {reason}" for reason, count in sorted(each.cut.items())]
        skipped = sum(count for reason, count in each.skipped.items() if reason != RESERVED)
        yield ROW.format(
            each.stage, f"{each.train:,}", f"{each.held_out:,}", f"{skipped:,}", "; ".join(reasons)
        ).rstrip()


def _predictions(config: RunConfig, facts: Facts, ranks: int) -> Iterator[str]:
    """Yield the predicted memory and time of each stage. The first stage measures the speed of the machine."""
    rates = None
    answer = next((each.size.answer for each in facts.stages if each.size.answer), None)
    for each in facts.stages:
        size = replace(each.size, answer=each.size.answer or answer)
        try:
            planned = plan(config, each.stage, PlanInputs(facts.policy, facts.reward, size), ranks=ranks)
            rates = rates or measure(planned.task)
            seconds = predict(planned.task, planned.capacity, rates).stage_seconds
        except Exception as problem:  # a model that cannot be counted trains without a prediction
            yield f"{each.stage}: no prediction ({kind_and_line(problem)})"
            continue
        yield f"{each.stage}: {planned.summary}{'' if planned.fits else ': does not fit'}"
        yield f"{'':{len(each.stage)}}  time: about {format_time(seconds)} by a measurement of this machine"
