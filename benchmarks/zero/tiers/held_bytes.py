"""Bytes a rank holds for model states against what engine/memory predicts, every stage and tier on 1, 2 and 4 ranks."""

from benchmarks.ranks import run_ranks
from benchmarks.record import Result

RANKS = (1, 2, 4)
FIGURES = ("resting", "after_backward", "files")


def measure(rounds: int) -> Result:
    """Once, whatever the rounds: bytes do not scatter. Ours is the largest share by which a prediction is off."""
    off: dict[str, float] = {}
    for ranks in RANKS:
        for found in run_ranks("benchmarks.zero.tiers.held", [], ranks)[:1]:
            for layout, bytes_of in found.items():
                for figure in FIGURES:
                    wanted = bytes_of[f"predicted_{figure}"]
                    if wanted:
                        off[f"{layout} x{ranks} {figure}"] = abs(bytes_of[figure] / wanted - 1)
    worst = max(off, key=lambda name: off[name])
    return Result(
        bench="zero",
        case="bytes",
        ours=100 * off[worst],
        unit="% off at most",
        lower_is_better=True,
        detail={"at_most": 5.0, "worst": worst, "figures": len(off)},
    )
