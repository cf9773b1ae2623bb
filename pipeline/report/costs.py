"""Build the report sections about time, speed, memory and configuration."""

import json

from pipeline.config.messages import format_bytes, format_time
from pipeline.config.stages import STAGES
from pipeline.report.data import MANIFEST, RunReading, StageReading
from pipeline.report.html import Markup, element, grid, section, table
from pipeline.report.stage_curves import Plot, one
from pipeline.report.svg import Series

MEMORY = ("device_bytes", "host_bytes")
PHASES = Plot(
    "PPO: seconds per rollout",
    "",
    {
        "generate_seconds": Series("generate", tone="ppo"),
        "score_seconds": Series("score", tone="second"),
        "train_seconds": Series("train", tone="strong"),
        "flip_seconds": Series("flip"),
    },
    (0, None),
)
RATE = Plot("PPO: tokens per second", "", one("tokens_per_second"), (0, None))


def speed_section(run: RunReading) -> Markup | None:
    """Build the section with the time, tokens and phases of each stage. Return None without figures."""
    rows = [_speed_row(stage) for stage in run.stages.values() if stage.finished]
    charts = grid(plot.draw(run.stage("ppo")) for plot in (PHASES, RATE))
    if not rows and not charts:
        return None
    head = ("Stage", "Steps", "Time", "Tokens", "Tokens per second")
    lead = (
        "Wall time, and tokens of all ranks: of complete sequences, and for PPO of answers. Tokens per second exclude "
        "the time of evaluation, saving and export."
    )
    stages = table(head, rows, numbers=range(1, 5)) if rows else None
    return section("speed", "Speed", lead, stages, charts, phases_table(run))


def phases_table(run: RunReading) -> Markup | None:
    """Build the table of the seconds of each phase: measured, and per step also the prediction of plan.json."""
    rows = []
    for stage in run.stages.values():
        steps, took = stage.number("steps") or 0.0, stage.summary.get("seconds_by_phase", {})
        planned = dict(stage.planned.get("seconds", {}))
        planned["train"] = planned.get("train", 0.0) + planned.pop("step", 0.0)
        for phase, seconds in sorted(took.items(), key=lambda item: -item[1]):
            if seconds <= 0:
                continue
            before, measured = planned.get(phase, 0.0), seconds / max(steps, 1.0)
            ratio = (format_time(before), f"{measured / before:.2g} x") if before > 0 else ("", "")
            shown = (format_time(seconds), f"{seconds / sum(took.values()):.0%}", format_time(measured))
            rows.append((STAGES[stage.name].title, phase.replace("_", " "), *shown, *ratio))
    if not rows:
        return None
    lead = (
        "A ratio above 1 means that a step was slower than the prediction from the start of the stage, which is a "
        "short measurement. Possible causes are other work on the machine, compilation in the first steps, and a "
        "restart with smaller micro-batches after an out-of-memory error."
    )
    head = ("Stage", "Phase", "Time", "Share", "Per step", "Predicted per step", "Measured / predicted")
    numbers = table(head, rows, numbers=range(2, 7))
    return element("div", element("h3", "Where the time goes"), element("p", lead), numbers)


def _speed_row(stage: StageReading) -> tuple[str, ...]:
    seconds = stage.number("seconds")
    return (
        STAGES[stage.name].title,
        _number(stage, "steps"),
        "" if seconds is None else format_time(seconds),
        _number(stage, "tokens"),
        _number(stage, "tokens_per_second"),
    )


def _number(stage: StageReading, key: str) -> str:
    value = stage.number(key)
    return "" if value is None else f"{value:,.0f}"


def memory_section(run: RunReading) -> Markup | None:
    """Build the section with the peak memory of the largest rank of each stage."""
    rows = []
    for stage in run.stages.values():
        entries = _memory_by_rank(stage)
        if entries:
            largest = max(entries, key=lambda entry: [entry[key] for key in MEMORY])
            peaks = (_bytes(largest[key], "none") for key in MEMORY)
            rows.append((STAGES[stage.name].title, f"{len(entries)}", f"{largest['rank']}", *peaks))
    if not rows:
        return None
    lead = (
        "Bytes allocated on the device, and resident host memory of the process. The table shows the rank with the "
        "highest peak; summary.json has all ranks."
    )
    table_of_peaks = table(("Stage", "Ranks", "Largest rank", "Device", "Host"), rows, numbers=range(1, 5))
    return section("memory", "Memory", lead, table_of_peaks, ledger(run), restarts(run))


def ledger(run: RunReading) -> Markup | None:
    """Build the table of peak bytes by owner and phase: predicted, and measured on rank 0."""
    rows = []
    for stage in run.stages.values():
        memory = stage.summary.get("memory") or {"predicted": {}, "measured": {}}
        for phase in dict.fromkeys([*memory["predicted"], *memory["measured"]]):
            before, after = memory["predicted"].get(phase, {}), memory["measured"].get(phase, {})
            for owner in dict.fromkeys([*before, *after]):
                cells = (_bytes(before.get(owner), ""), _bytes(after.get(owner), ""))
                if any(cells):
                    rows.append((STAGES[stage.name].title, phase, owner, *cells))
    if not rows:
        return None
    lead = (
        "Bytes per rank by owner, at the peak of each phase. Measured from the tensors in memory at some points of "
        "sampled steps; temporary memory of kernels is not measured."
    )
    head = ("Stage", "Phase", "Owner", "Predicted", "Measured")
    numbers = table(head, rows, numbers=(3, 4))
    return element("details", element("summary", "Bytes by owner"), element("p", lead), numbers)


def restarts(run: RunReading) -> Markup | None:
    """Build a line for each stage that ran out of memory and restarted with smaller micro-batches."""
    lines = []
    for stage in run.stages.values():
        record = stage.summary.get("out_of_memory")
        if record and record["restarts"]:
            lines.append(
                f"{STAGES[stage.name].title} ran out of memory {record['restarts']} times and restarted; its last "
                f"micro-batches had at most {record['micro_batch_tokens']:,} tokens. The micro-batch size does not "
                "change an update."
            )
    return element("p", " ".join(lines)) if lines else None


def _memory_by_rank(stage: StageReading) -> list[dict[str, int]]:
    return stage.summary.get("peak_memory_by_rank") or []


def _bytes(value: int | None, missing: str) -> str:
    return format_bytes(value) if value else missing


def configuration_section(run: RunReading) -> Markup | None:
    """Build the section with the resolved configuration of each stage and the manifest."""
    texts = [(f"{name}/config.yaml", stage.config) for name, stage in run.stages.items() if stage.config]
    if run.manifest:
        texts.append((MANIFEST, json.dumps(run.manifest, indent=1)))
    if not texts:
        return None
    folded = [element("details", element("summary", title), element("pre", text)) for title, text in texts]
    lead = "The resolved configuration of each stage. The manifest records inputs and outputs by content hash."
    return section("configuration", "Configuration", lead, folded)


def facts(run: RunReading) -> Markup:
    """Build the line under the headline: run name, model, data, seed, ranks, ZeRO stage and time."""
    total = sum(stage.number("seconds") or 0.0 for stage in run.stages.values())
    ranks = next((len(entries) for stage in run.stages.values() if (entries := _memory_by_rank(stage))), None)
    values = {
        "Run": run.name,
        "Model": run.setting("model", "name"),
        "Data": run.setting("data", "name"),
        "Seed": run.setting("seed"),
        "Ranks": ranks,
        "ZeRO stage": run.setting("engine", "zero_stage"),
        "Time": format_time(total) if total else None,
    }
    pairs = [
        element("div", element("dt", name), element("dd", str(value)))
        for name, value in values.items()
        if value is not None
    ]
    return element("dl", pairs, class_="facts")
