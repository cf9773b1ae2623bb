"""Loss curves in fp32, every stage and tier on 1, 2 and 4 ranks, against one unsharded process of plain PyTorch."""

from benchmarks.ranks import run_ranks
from benchmarks.record import Result

RANKS = (1, 2, 4)
WORKER = "benchmarks.zero.tiers.curves"


def measure(rounds: int) -> Result:
    """Once, whatever the rounds: curves do not scatter."""
    curves = {ranks: run_ranks(WORKER, ["fp32"], ranks)[0] for ranks in RANKS}
    wanted = curves[1].pop("plain")
    gaps = {
        f"{name} x{ranks}": furthest(curve, wanted) for ranks, found in curves.items() for name, curve in found.items()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return Result(
        bench="zero",
        case="parity",
        ours=gaps[worst],
        unit="largest relative gap of a loss",
        lower_is_better=True,
        detail={"at_most": 1e-5, "worst": worst, "layouts": len(gaps), "steps": len(wanted), "losses": wanted},
    )


def furthest(curve: list[float], wanted: list[float]) -> float:
    """The largest relative gap between two curves."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(curve, wanted, strict=True))
