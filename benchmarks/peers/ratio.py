"""Spread of a rollout's first ratios around 1 in bf16, against plain PPO on a bf16 model.

The ratio of the first minibatch is 1 up to rounding, because the policy has not changed. The rounding depends on the
source of the old log-probabilities (the generator, or the trainer's own forward) and on the precision of the logits.
`ours` and `peer` are the ratios that each side's update uses. Our old log-probabilities come from the trainer's
forward, those of plain PPO from the generator's scores. The detail has the other combination of each side.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import in_turn, median
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure, read_task, report
from benchmarks.peers.engines import engine_choice, model_source, start
from benchmarks.record import Result
from engine import Sampling
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step3_ppo.batches import collate, policy_logprobs

ANSWERS, NEW_TOKENS, MINIBATCHES = 16, 128, 4


def run(rounds: int) -> list[Result]:
    """Return the root mean square of ratio - 1 over response tokens."""
    lengths = tasks.log_normal_lengths(ANSWERS, shortest=20, longest=128, median=50.0, seed=11)
    prompts = tasks.sequences(lengths, seed=13)
    task = tasks.make("bf16", prompts=prompts, new_tokens=NEW_TOKENS, minibatches=MINIBATCHES, max_length=256)
    task["shape"] |= {"init_std": 0.08}  # four times the default: logits of several units, as a trained model's
    sides = {"ours": __name__, "plain": "benchmarks.peers.baselines.plain_ratio"}
    runs = in_turn({side: partial(measure, module, task) for side, module in sides.items()}, rounds)
    spreads = {
        (side, origin): median([rms_of_ratio(figures.more[origin]) for figures in side_runs])
        for side, side_runs in runs.items()
        for origin in ("forward", "generator")
    }
    return [
        Result(
            bench="peers",
            case="ratio",
            ours=spreads["ours", "forward"],
            unit="rms of ratio - 1",
            lower_is_better=True,
            peer=spreads["plain", "generator"],
            detail={
                "dtype": "bf16",
                "against_generator": spreads["ours", "generator"],
                "peer_against_forward": spreads["plain", "forward"],
            },
        )
    ]


def rms_of_ratio(log_ratios: Sequence[float]) -> float:
    """Return the root mean square of ratio - 1."""
    return math.sqrt(sum(math.expm1(x) ** 2 for x in log_ratios) / len(log_ratios))


def main() -> None:
    """Generate answers, score all of them, and score them again in minibatches; report the log-ratios.

    Old log-probabilities come from one forward over all answers, new ones from minibatches, as in the PPO stage. The
    stage uses the generator's own log-probabilities only for importance weights.
    """
    task = read_task()
    start(task)
    prompts, new_tokens, count = task["prompts"], task["new_tokens"], task["minibatches"]
    engine = build_policy(model_source(task), engine_choice(task), generates=True)
    assert verify(engine, max_length=task["max_length"])
    sampling = Sampling(max_new_tokens=new_tokens, end_ids=(), seed=1)
    with engine.generating() as generator:
        answers = generator.generate(prompts, sampling, sample_seeds=range(len(prompts)), batch_size=len(prompts))
    responses = [answer.token_ids for answer in answers]

    def score(indices: list[int]) -> dict[int, Tensor]:
        batch = collate(prompts, responses, indices, 1, packing=True).to(engine.device)
        logprobs = policy_logprobs(engine.module, batch, 1.0)[0].detach()
        return dict(zip(indices, logprobs.split(batch.response_lengths), strict=True))

    indices = list(range(len(prompts)))
    with engine.scoring():
        old = score(indices)
    engine.module.train()
    new = {index: row for first in range(count) for index, row in score(indices[first::count]).items()}
    trained, scored = (torch.cat([table[index] for index in indices]) for table in (new, old))
    generated = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    report(
        [1.0],
        [float(len(generated))],
        forward=(trained - scored).tolist(),
        generator=(trained - generated).tolist(),
    )


if __name__ == "__main__":
    main()
