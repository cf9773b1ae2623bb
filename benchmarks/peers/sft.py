"""SFT on ragged conversations of 20 to 512 tokens, against TRL's SFTTrainer, packed and unpacked."""

import time
from functools import partial

import numpy as np

from benchmarks.machine import cpu_precisions
from benchmarks.measure import in_turn, median
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure, memory_and_load, read_task, report
from benchmarks.peers.engines import engine_choice, model_source, start
from benchmarks.peers.environments import TRL, environment
from benchmarks.record import Result
from pipeline.data.batch import batch_indices
from pipeline.data.encode import TokenItem
from pipeline.data.microbatches import token_microbatches
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step1_sft.train import loss_of

CONVERSATIONS, STEPS, WARMUP = 12, 2, 1


def run(rounds: int) -> list[Result]:
    """Return useful tokens per second. The peer's figure is the better of its two layouts."""
    trl = environment("trl", TRL)
    results = []
    for precision in cpu_precisions():
        task = tasks.make(
            precision,
            sequences=tasks.conversations(CONVERSATIONS * (STEPS + WARMUP)),
            conversations=CONVERSATIONS,
            steps=STEPS,
            warmup=WARMUP,
            budget=2048,
            rows=4,
            micro_rows=4,
            max_length=tasks.LONGEST,
        )
        peer = "benchmarks.peers.baselines.trl_sft"
        runs = in_turn(
            {
                "ours": partial(measure, __name__, task),
                "packed": partial(measure, peer, {**task, "layout": "packed"}, python=trl),
                "unpacked": partial(measure, peer, {**task, "layout": "unpacked"}, python=trl),
            },
            rounds,
        )
        rates = {name: median([figures.rate for figures in side]) for name, side in runs.items()}
        results.append(
            Result(
                bench="peers",
                case=f"sft-{precision}",
                ours=rates["ours"],
                unit="useful tokens/s",
                lower_is_better=False,
                peer=max(rates["packed"], rates["unpacked"]),
                detail={
                    "peer_packed": rates["packed"],
                    "peer_unpacked": rates["unpacked"],
                    **memory_and_load(runs["ours"], runs["packed"]),
                },
            )
        )
    return results


def main() -> None:
    """Run our steps with the stage's batches, loss and update; report their seconds."""
    task = read_task()
    start(task)
    engine = build_policy(model_source(task), engine_choice(task), generates=False)
    packing = verify(engine, max_length=task["max_length"])
    items = [TokenItem(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)) for ids in task["sequences"]]
    seconds, tokens = [], []
    for step in range(task["warmup"] + task["steps"]):
        start_time = time.perf_counter()
        batch = [items[i] for i in batch_indices(len(items), task["conversations"], 0, step)]
        batches, count = token_microbatches(batch, budget=task["budget"], packing=packing, pad_id=1)
        engine.update(batches, loss_of, count)
        seconds.append(time.perf_counter() - start_time)
        tokens.append(float(sum(len(item.ids) for item in batch)))
    report(seconds[task["warmup"] :], tokens[task["warmup"] :])


if __name__ == "__main__":
    main()
