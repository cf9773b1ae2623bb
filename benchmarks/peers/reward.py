"""A reward model on ragged pairs of 20 to 512 tokens per side, against TRL's RewardTrainer."""

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
from pipeline.config.stage_sections import RewardSection
from pipeline.data.encode import PairItem
from pipeline.models.build import build_scorer
from pipeline.models.checks import verify
from step2_reward.batches import RewardBatches

PAIRS, STEPS, WARMUP = 8, 3, 1


def run(rounds: int) -> list[Result]:
    """Return pairs per second."""
    trl = environment("trl", TRL)
    results = []
    for precision in cpu_precisions():
        task = tasks.of_pairs(precision, PAIRS, STEPS, WARMUP, pairs=tasks.pairs(PAIRS * (STEPS + WARMUP)))
        runs = in_turn(
            {
                "ours": partial(measure, __name__, task),
                "trl": partial(measure, "benchmarks.peers.baselines.trl_reward", task, python=trl),
            },
            rounds,
        )
        results.append(
            Result(
                bench="peers",
                case=f"reward-{precision}",
                ours=median([figures.rate for figures in runs["ours"]]),
                unit="pairs/s",
                lower_is_better=False,
                peer=median([figures.rate for figures in runs["trl"]]),
                detail=memory_and_load(runs["ours"], runs["trl"]),
            )
        )
    return results


def main() -> None:
    """Run our steps with the stage's batches, loss and update; report their seconds."""
    task = read_task()
    start(task)
    engine = build_scorer(model_source(task, scores=True), engine_choice(task), pad_id=1)
    packing = verify(engine, max_length=task["max_length"])
    items = [PairItem(np.array(c, dtype=np.int32), np.array(r, dtype=np.int32), 0.0, "", 0) for c, r in task["pairs"]]
    section = RewardSection(batch_size=task["pairs_a_step"], centering=0.0, use_margin=False)
    batches, seconds = RewardBatches(engine, section, items, [], 0, packing, 1), []
    for step in range(task["warmup"] + task["steps"]):
        start_time = time.perf_counter()
        batch = batches.step(step, task["budget"])
        engine.update(batch.microbatches, batches.loss, batch.count)
        seconds.append(time.perf_counter() - start_time)
    report(seconds[task["warmup"] :], [float(task["pairs_a_step"])] * task["steps"])


if __name__ == "__main__":
    main()
