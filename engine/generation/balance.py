"""Which rank answers which prompts: by the work that they will probably make, not by their number.

How long an answer gets is not known; all are expected to get equally long. What differs is the prompt, whose tokens run
many at a time and so cost less each than those of the answer, which are drawn one after the other.
"""

from collections.abc import Sequence

PROMPT_TOKEN = 0.2  # of the time of an answer's token; measured on a CPU, 16 answers at a time


def shares(prompt_lengths: Sequence[int], ranks: int, expected: float) -> list[list[int]]:
    """The places of the prompts that each rank answers, in rising order; `expected` tokens an answer.

    The most work first, each to the rank that has least (Graham, 1969: at most a third over the best split).
    """
    work = [PROMPT_TOKEN * length + expected for length in prompt_lengths]
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        found[rank].append(place)
        loads[rank] += work[place]
    return [sorted(places) for places in found]
