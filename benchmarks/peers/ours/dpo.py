"""Our DPO steps: the stage's batches, loss and update; the reference's log-probabilities are read before."""

import time
from typing import Any

import numpy as np

from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from benchmarks.peers.weights import fill
from pipeline.config.schema import DpoSection
from pipeline.data.encode import PairItem
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step2_dpo.batches import Pairs
from step2_dpo.evaluate import pair_logprobs
from step2_dpo.objective import loss_of


def main() -> None:
    """Train, and tell the steps' times and what their pairs came to."""
    work = told()
    begin(work)
    engine = build_policy(source(work), choice(work), generates=False)
    fill(engine.module.get_submodule("lm"))
    packing = verify(engine, max_length=work["max_length"]).packing
    cut: dict[str, Any] = {"budget": work["budget"], "packing": packing, "pad_id": 1}
    items = [_pair(*preference) for preference in work["preferences"]]
    began = time.perf_counter()
    pairs = Pairs(items, pair_logprobs(engine, items, **cut))
    reference_seconds = time.perf_counter() - began
    loss, each, seconds, figures = loss_of(DpoSection(beta=work["beta"])), work["pairs_a_step"], [], []
    for step in range(work["warmup"] + work["steps"]):
        began = time.perf_counter()
        batches, _ = pairs.micro_batches(range(step * each, (step + 1) * each), **cut)
        update = engine.update(batches, loss, each)
        seconds.append(time.perf_counter() - began)
        means = {name: total / each for name, total in update.sums.items()}
        figures.append([update.loss, means["chosen_logprob"], means["rejected_logprob"]])
    report(
        seconds[work["warmup"] :],
        [float(each)] * work["steps"],
        figures=figures,
        reference_seconds=reference_seconds,
    )


def _pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> PairItem:
    first, second = (np.array(prompt + answer, dtype=np.int32) for answer in (chosen, rejected))
    return PairItem(first, second, 0.0, "", len(prompt))


if __name__ == "__main__":
    main()
