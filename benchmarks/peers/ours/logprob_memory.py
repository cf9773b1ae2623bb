"""Log-probabilities of a large vocabulary, forward and backward: by our function, or from whole logits in fp32."""

import resource
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.children import report, told
from engine import token_logprobs


def main() -> None:
    """One pass; what it took above its inputs."""
    work = told()
    torch.set_num_threads(work["threads"])
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16).mul_(std).requires_grad_()

    # Logits of a few units, as a model's are: where they are hundreds, exponentials underflow, which costs time.
    hidden = drawn(work["tokens"], work["hidden"])
    weight = drawn(work["vocabulary"], work["hidden"], std=2 * work["hidden"] ** -0.5)
    targets = torch.randint(work["vocabulary"], (work["tokens"],), generator=generator)
    resting, began = _peak_bytes(), time.perf_counter()
    logprobs = (
        token_logprobs(hidden, weight, targets)[0] if work["layout"] == "ours" else plain(hidden, weight, targets)
    )
    logprobs.backward(torch.linspace(-1, 1, work["tokens"]))
    report([time.perf_counter() - began], [1.0], above_inputs=_peak_bytes() - resting)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """(N,) from logits that are all there at once."""
    logits: Any = (hidden @ weight.T).float()
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
