"""Hundreds of bad or odd inputs. Each command must end with one clear message, or work if the input is legal.

    python -m tests.campaign inputs [--seed S] [--only PART] [--jobs N]

A case has one fault if its exit status is another one, if it prints a traceback, control characters, no message or two,
if it does not end, or if a model or a checkpoint that was computed before is lost. The seed orders the cases. The
exit status is 1 if a case has a fault.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.campaign import bad_configs, bad_data, bad_functions, bad_models, bad_runs, bad_templates
from tests.campaign.cases import Case, inside_new, run_case
from tests.forked_launch import launch
from tests.ranks import Worker

SLOW = 60  # seconds of a case that the report names; most take one without other work
MODULES = (bad_configs, bad_data, bad_models, bad_templates, bad_functions, bad_runs)


def all_cases() -> list[Case]:
    """Return the cases of the tables."""
    return [case for module in MODULES for case in module.cases()]


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[Case, list[str], float]]:
    """Run the cases, and yield each with its faults and its seconds."""
    needs = {name for case in cases for name in case.needs}
    with fixtures(needs) as folder, bad_functions.service() as address:
        for case in cases:
            environment = {name: value.replace("{service}", address) for name, value in case.environment.items()}
            began = time.monotonic()
            faults = run_case(replace(case, environment=environment), folder)
            yield case, faults, time.monotonic() - began


@contextmanager
def fixtures(names: set[str]) -> Iterator[Path]:
    """Make the folders that cases copy: a language model, a reward model, a tokenizer, and a finished run."""
    from pipeline.data.new_tokenizer import train_tokenizer
    from tests.pipeline.models.tiny import classifier, config_of, language_model

    with tempfile.TemporaryDirectory(prefix="zerochat-fixtures-") as name:
        folder = Path(name)
        tokenizer = train_tokenizer([f"What is {n}? It is {n}." for n in range(99)], 300)
        size = {"vocab_size": 300, "max_position_embeddings": 256, "eos_token_id": 1, "bos_token_id": None}
        language_model(config_of("llama", **size)).save_pretrained(folder / "model")
        classifier(config_of("llama", **size)).save_pretrained(folder / "reward")
        for each in ("model", "reward", "tok"):
            tokenizer.save(folder / each)
        if "run" in names:
            with inside_new(folder / "work"):
                shutil.copytree(folder / "model", "model")
                bad_runs.DATA()
                worker = Worker(launch, Path.cwd(), [*bad_runs.ALL], {}, environment={})
                output, _ = worker.communicate()
                assert worker.returncode == 0, output
                Path("runs").rename(folder / "run")
        yield folder


def run_share(options: argparse.Namespace, number: int) -> list[tuple[str, bool]]:
    """Run one job's share of the cases, and print a line for each fault. Return (part, whether it has a fault)."""
    cases = [case for case in all_cases() if options.only in f"{case.part}: {case.name}"]
    random.Random(options.seed).shuffle(cases)
    results = []
    for case, faults, seconds in run_cases(cases[number :: options.jobs]):
        results.append((case.part, bool(faults)))
        if faults or seconds > SLOW:
            print(f"{case.part}: {case.name} ({seconds:.0f} s): {'; '.join(faults) or 'slow'}", flush=True)
    return results


def main(arguments: list[str]) -> int:
    """Run the cases, print a line for each fault and a table of counts, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign inputs")
    parser.add_argument("--seed", type=int, default=1, help="order of the cases")
    parser.add_argument("--only", default="", help="a part, or a part of the name of a case")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    options = parser.parse_args(arguments)
    total, failed = Counter[str](), Counter[str]()
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as jobs:
        for share in jobs.map(partial(run_share, options), range(options.jobs)):
            total.update(part for part, _ in share)
            failed.update(part for part, is_failed in share if is_failed)
    print(f"\n{'inputs':<12}{'cases':>7}{'faults':>8}")
    for part in sorted(total):
        print(f"{part:<12}{total[part]:>7}{failed[part]:>8}")
    print(f"{'all':<12}{total.total():>7}{failed.total():>8}   seed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(failed.total() > 0)
