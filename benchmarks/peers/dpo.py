"""DPO on ragged pairs of 20 to 512 tokens per side, against TRL's DPOTrainer.

Both sides have the same weights and use the same pairs in the same order. Both compute the reference's
log-probabilities before the first step; the rate does not include this time. Loss and log-probabilities of each step
must agree.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.machine import cpu_precisions
from benchmarks.measure import BenchFailed, in_turn, median
from benchmarks.peers import tasks
from benchmarks.peers.child_process import Figures, measure, memory_and_load, read_task, report
from benchmarks.peers.engines import engine_choice, model_source, start
from benchmarks.peers.environments import TRL, environment
from benchmarks.peers.weights import fill
from benchmarks.record import Result
from pipeline.config.stage_sections import DpoSection
from pipeline.data.encode import PairItem
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step2_dpo.pairs import PairBatches

PAIRS, STEPS, WARMUP = 8, 1, 1
FIGURES = ("loss", "chosen log-probability", "rejected log-probability")
LOG_PROBABILITIES = {"fp32": 1e-5, "bf16": 5e-4}  # relative bound
FIRST_LOSS = {"fp32": 1e-5, "bf16": 1e-3}  # absolute; the policy is the reference, computed in other micro-batches
LOSSES = {"fp32": 1e-4, "bf16": 2e-2}  # absolute, after the first step: a margin is the small difference of large sums


def run(rounds: int) -> list[Result]:
    """Return pairs per second. Raises BenchFailed if the sides do different work."""
    trl = environment("trl", TRL)
    results = []
    for precision in cpu_precisions():
        preferences = tasks.preferences(PAIRS * (STEPS + WARMUP))
        task = tasks.of_pairs(precision, PAIRS, STEPS, WARMUP, preferences=preferences, beta=0.1)
        runs = in_turn(
            {
                "ours": partial(measure, __name__, task),
                "trl": partial(measure, "benchmarks.peers.baselines.trl_dpo", task, python=trl),
            },
            rounds,
        )
        ours, peer = runs["ours"], runs["trl"]
        require_same(ours[0].more["figures"], peer[0].more["figures"], precision)
        results.append(
            Result(
                bench="peers",
                case=f"dpo-{precision}",
                ours=median([figures.rate for figures in ours]),
                unit="pairs/s",
                lower_is_better=False,
                peer=median([figures.rate for figures in peer]),
                detail={
                    **memory_and_load(ours, peer),
                    "reference_seconds": _reference_seconds(ours),
                    "peer_reference_seconds": _reference_seconds(peer),
                },
            )
        )
    return results


def _reference_seconds(runs: Sequence[Figures]) -> float:
    return median([run.more["reference_seconds"] for run in runs])


def require_same(ours: Sequence[Sequence[float]], peer: Sequence[Sequence[float]], precision: str) -> None:
    """Raise BenchFailed if the `FIGURES` of a step, one row per step, differ by more than rounding."""
    for step, (our_row, peer_row) in enumerate(zip(ours, peer, strict=True), 1):
        relative = LOG_PROBABILITIES[precision]
        loss_bound = (FIRST_LOSS if step == 1 else LOSSES)[precision]
        bounds = [loss_bound, *(relative * abs(value) for value in our_row[1:])]
        for name, value, other, bound in zip(FIGURES, our_row, peer_row, bounds, strict=True):
            if not abs(value - other) <= bound:
                raise BenchFailed(f"step {step} in {precision}: our {name} is {value:.7g}, the peer's {other:.7g}")


def main() -> None:
    """Run our steps with the stage's batches, loss and update; report their seconds and the figures of each step."""
    task = read_task()
    start(task)
    engine = build_policy(model_source(task), engine_choice(task), generates=False)
    fill(engine.module.get_submodule("lm"))
    packing = verify(engine, max_length=task["max_length"])
    items = [_pair(*preference) for preference in task["preferences"]]
    count, steps, unread = task["pairs_a_step"], task["warmup"] + task["steps"], {"train": torch.zeros(len(items), 2)}
    schedule = [range(step * count, (step + 1) * count) for step in range(steps)]
    pairs = PairBatches(engine, DpoSection(beta=task["beta"]), items, [], unread, schedule, packing, pad_id=1)
    start_time = time.perf_counter()
    pairs = replace(pairs, reference={"train": pairs.logprobs(items, task["budget"])})
    reference_seconds = time.perf_counter() - start_time
    seconds, figures = [], []
    for step in range(steps):
        start_time = time.perf_counter()
        update = engine.update(pairs.step(step, task["budget"]).microbatches, pairs.loss, count)
        seconds.append(time.perf_counter() - start_time)
        means = {name: total / count for name, total in update.sums.items()}
        figures.append([update.loss, means["chosen_logprob"], means["rejected_logprob"]])
    report(
        seconds[task["warmup"] :],
        [float(count)] * task["steps"],
        figures=figures,
        reference_seconds=reference_seconds,
    )


def _pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> PairItem:
    first, second = (np.array(prompt + answer, dtype=np.int32) for answer in (chosen, rejected))
    return PairItem(first, second, 0.0, "", len(prompt))


if __name__ == "__main__":
    main()
