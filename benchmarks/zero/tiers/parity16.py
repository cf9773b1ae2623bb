"""The same curves in bf16 and fp16: against each other, and against fp32."""

from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.tiers.parity import RANKS, WORKER, furthest


def measure(rounds: int) -> Result:
    """Once, whatever the rounds. Ours is the largest gap to the curve of stage 0 on one rank in the same precision."""
    detail: dict[str, float] = {}
    for dtype in ("bf16", "fp16"):
        curves = {ranks: run_ranks(WORKER, [dtype], ranks)[0] for ranks in RANKS}
        fp32 = curves[1].pop("plain")
        first = curves[1]["zero0 none"]
        found = [curve for by_layout in curves.values() for curve in by_layout.values()]
        detail[f"{dtype}_among_layouts"] = max(furthest(curve, first) for curve in found)
        detail[f"{dtype}_from_fp32"] = max(furthest(curve, fp32) for curve in found)
    return Result(
        bench="zero",
        case="parity16",
        ours=max(detail["bf16_among_layouts"], detail["fp16_among_layouts"]),
        unit="largest relative gap of a loss",
        lower_is_better=True,
        detail=detail,
    )
