"""Our reward model's steps: the stage's batches, loss and update."""

import time

import numpy as np

from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PairItem
from pipeline.models.build import build_scorer
from pipeline.models.checks import verify
from step2_reward.batches import micro_batches
from step2_reward.train import loss_of


def main() -> None:
    """Train, and tell the steps' times."""
    work = told()
    begin(work)
    engine = build_scorer(source(work, scores=True), choice(work), pad_id=1)
    packing = verify(engine, max_length=work["max_length"]).packing
    items = [PairItem(np.array(c, dtype=np.int32), np.array(r, dtype=np.int32), 0.0, "", 0) for c, r in work["pairs"]]
    loss, seconds = loss_of(0.0, use_margin=False), []
    for step in range(work["warmup"] + work["steps"]):
        began = time.perf_counter()
        chosen = [items[i] for i in batch_indices(len(items), work["pairs_a_step"], 0, step)]
        batches, _ = micro_batches(chosen, budget=work["budget"], packing=packing, pad_id=1)
        engine.update(batches, loss, len(chosen))
        seconds.append(time.perf_counter() - began)
    report(seconds[work["warmup"] :], [float(work["pairs_a_step"])] * work["steps"])


if __name__ == "__main__":
    main()
