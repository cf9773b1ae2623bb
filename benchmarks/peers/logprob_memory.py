"""Peak memory of log-probabilities, forward and backward: 4,096 tokens, vocabulary 151,936, against logits in fp32."""

import resource
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import in_turn, median
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure, read_task, report
from benchmarks.record import Result
from engine import token_logprobs

TOKENS, VOCABULARY, HIDDEN = 4096, 151_936, 1024


def run(rounds: int) -> list[Result]:
    """Return GiB above the inputs, which include both gradients."""
    task = tasks.make("bf16", tokens=TOKENS, vocabulary=VOCABULARY, hidden=HIDDEN)
    runs = in_turn({side: partial(measure, __name__, {**task, "layout": side}) for side in ("ours", "plain")}, rounds)
    gib = {side: median([run.more["above_inputs"] / 2**30 for run in side_runs]) for side, side_runs in runs.items()}
    seconds = {side: median([run.seconds[0] for run in side_runs]) for side, side_runs in runs.items()}
    return [
        Result(
            bench="peers",
            case="logprob_memory",
            ours=gib["ours"],
            unit="GiB above inputs",
            lower_is_better=True,
            peer=gib["plain"],
            detail={"dtype": "bf16", "seconds": seconds["ours"], "peer_seconds": seconds["plain"]},
        )
    ]


def main() -> None:
    """Run one forward and backward with the task's implementation; report its bytes above the inputs."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16).mul_(std).requires_grad_()

    # Logits of a few units, as a model's. Logits of hundreds let exponentials underflow, which is slow.
    hidden = normal(task["tokens"], task["hidden"])
    weight = normal(task["vocabulary"], task["hidden"], std=2 * task["hidden"] ** -0.5)
    targets = torch.randint(task["vocabulary"], (task["tokens"],), generator=generator)
    inputs, start = _peak_bytes(), time.perf_counter()
    logprobs = (
        token_logprobs(hidden, weight, targets)[0]
        if task["layout"] == "ours"
        else full_logit_logprobs(hidden, weight, targets)
    )
    logprobs.backward(torch.linspace(-1, 1, task["tokens"]))
    report([time.perf_counter() - start], [1.0], above_inputs=_peak_bytes() - inputs)


def full_logit_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities (N,) from all logits (N, V) at once."""
    logits: Any = (hidden @ weight.T).float()
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
