"""The command `zerochat doctor`: show on one screen what a command line of `train` would train on what.

The command checks the configuration, the data, the tokenizer and the sizes as `train` does, with the same messages. It
loads no weights, starts no process and writes no run folder.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pipeline.config.check import validate, warnings
from pipeline.config.compose import Job, compose_jobs, parse_command
from pipeline.config.environment import check_paths, check_ranks, hub_data
from pipeline.config.messages import format_time
from pipeline.config.recipes import Rate, compare_rates
from pipeline.config.schema import RunConfig
from pipeline.config.stages import wanted_stages
from pipeline.data.load import RESERVED
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.doctor.facts import Facts, StageFacts, gather
from pipeline.errors import UserError
from pipeline.installation import DOCTOR
from pipeline.launch.folder import with_stage_shares
from pipeline.launch.ranks import count_gpus, own_ranks
from pipeline.planning.candidates import predict
from pipeline.planning.planner import measure, plan
from pipeline.stages.start import batch_line, few_steps, steps_line

USAGE = f"""\
Show what a command line of `train` would train on what, without training.

{DOCTOR} model=opt-1.3b data.path=mine.jsonl
{DOCTOR} model.path=FOLDER data.path=pairs.jsonl method=dpo sft=lora
"""
LONGEST_EXAMPLE = 800  # characters of the rendered example
COLOUR, PLAIN = ("\x1b[32m", "\x1b[0m"), ("[", "]")  # around the tokens of the loss
ROW = "  {:<8}{:>9}{:>10}{:>10}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the screen and return the exit status; 2 for a mistake of the user."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(USAGE, end="")
        return 0
    try:
        jobs = compose_jobs(parse_command(words))
        for job in jobs:
            for line in examine(job, words, sys.stdout):
                print(line, flush=True)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader is `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def examine(job: Job, words: Sequence[str], stream: TextIO) -> Iterator[str]:
    """Yield the lines about one job. Raises the UserError that `train` would end with."""
    config = validate(job.raw)
    ranks = own_ranks(config.ranks, count_gpus()).world
    check_ranks(config, ranks)
    check_paths(config)
    yield from hub_data(config, words)
    stages = wanted_stages(config)
    with tempfile.TemporaryDirectory(prefix="zerochat-doctor-") as folder:
        config = with_stage_shares(config, Path(folder), stages)
    facts = gather(config)
    yield f"{config.model.name} on {config.data.name}: {', '.join(stages)}{_seed(job)}"
    yield job.recipe or "recipe: none"
    yield ""
    yield from _template(facts, colour=_uses_colour(stream))
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
    few = (few_steps(each.stage, getattr(config, each.stage), each.steps, each.train) for each in facts.stages)
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


def _seed(job: Job) -> str:
    return f" ({job.label})" if job.label else ""


def _uses_colour(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ


def _template(facts: Facts, *, colour: bool) -> Iterator[str]:
    """Yield the tokens, and the first example as the model reads it."""
    yield facts.tokenizer.summary
    ids, counts = facts.example
    if len(ids):
        marks = "in green" if colour else "in [..]"
        yield f"first example, {len(ids)} tokens; the loss includes the {sum(counts)} tokens {marks}:"
        yield from (f"  | {line}" for line in rendered_example(facts.tokenizer, ids, counts, colour=colour).split("\n"))


def rendered_example(tokenizer: ChatTokenizer, ids: Sequence[int], counts: Sequence[bool], *, colour: bool) -> str:
    """Return a conversation as the model reads it, with the tokens of the loss in colour, or in [..] without colour.

    ids (T,): the tokens; counts (T,): True for the tokens of the loss. A long example is shortened in the middle.
    """
    begin, end = COLOUR if colour else PLAIN
    runs = [(_decode(tokenizer, run), counted) for run, counted in _runs(ids, counts)]
    length = sum(len(text) for text, _ in runs)
    limit = LONGEST_EXAMPLE // max(1, len(runs)) if length > LONGEST_EXAMPLE else length
    shown = ((_shortened(text, limit), counted) for text, counted in runs)
    return "".join(f"{begin}{text}{end}" if counted else text for text, counted in shown)


def _runs(ids: Sequence[int], counts: Sequence[bool]) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the runs of tokens with the same flag."""
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or counts[index] != counts[start]:
            yield ids[start:index], bool(counts[start])
            start = index


def _decode(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids with the names of control tokens. Other control characters are escaped."""
    text = str(tokenizer.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def _shortened(text: str, limit: int) -> str:
    half = max(20, limit // 2)
    return text if len(text) <= 2 * half + 5 else f"{text[:half]} ... {text[-half:]}"


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
            planned = plan(config, each.stage, policy=facts.policy, reward=facts.reward, ranks=ranks, size=size)
            rates = rates or measure(config, planned.task, has_files=False)
            seconds = predict(planned.task, planned.capacity, rates).stage_seconds
        except Exception as problem:  # a model that cannot be counted trains without a prediction
            yield f"{each.stage}: no prediction ({type(problem).__name__}: {str(problem).partition(chr(10))[0]})"
            continue
        yield f"{each.stage}: {planned.summary}{'' if planned.fits else ': does not fit'}"
        yield f"{'':{len(each.stage)}}  time: about {format_time(seconds)} by a measurement of this machine"
