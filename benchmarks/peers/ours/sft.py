"""Our SFT steps: the stage's batches, loss and update."""

import time

import numpy as np

from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from pipeline.data.batch import batch_indices
from pipeline.data.encode import TokenItem
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step1_sft.train import loss_of, micro_batches


def main() -> None:
    """Train, and tell the steps' times."""
    work = told()
    begin(work)
    engine = build_policy(source(work), choice(work), generates=False)
    packing = verify(engine, max_length=work["max_length"]).packing
    items = [TokenItem(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)) for ids in work["sequences"]]
    seconds, tokens = [], []
    for step in range(work["warmup"] + work["steps"]):
        began = time.perf_counter()
        chosen = [items[i] for i in batch_indices(len(items), work["conversations"], 0, step)]
        batches, count = micro_batches(chosen, budget=work["budget"], packing=packing, pad_id=1)
        engine.update(batches, loss_of, count)
        seconds.append(time.perf_counter() - began)
        tokens.append(float(sum(len(item.ids) for item in chosen)))
    report(seconds[work["warmup"] :], tokens[work["warmup"] :])


if __name__ == "__main__":
    main()
