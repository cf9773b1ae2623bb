"""Memory limits of a stage, stored for its next start.

The limits are in `STAGE/out_of_memory.json`. A stage whose pass runs out of memory writes smaller limits and ends with
`RestartStage`. The launcher then starts the stage again, and the stage resumes from its newest checkpoint. Delete the
file to try the configured sizes again.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine import oom
from pipeline.config.schema import RunConfig
from pipeline.distributed import broadcast_from_rank_zero
from pipeline.errors import RestartStage, UserError
from pipeline.files import write_json

FILE = "out_of_memory.json"


@dataclass(frozen=True)
class MemoryLimits:
    """The limits of a stage's micro-batches.

    micro_batch_tokens: the largest size; None without a limit. shared_forward: whether PPO may hold the graphs of all
    micro-batches of a step. restarts: how often the stage ran out of memory and restarted.
    """

    micro_batch_tokens: int | None = None
    shared_forward: bool = True
    restarts: int = 0


def read_limits(folder: Path) -> MemoryLimits:
    """Return the limits in a stage's folder, or no limits if it has no file. Raises UserError for a damaged file."""
    try:
        return MemoryLimits(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return MemoryLimits()
    except (ValueError, TypeError) as problem:
        raise UserError(f"{folder / FILE} cannot be read ({problem}): delete it") from problem


def write_limits(folder: Path, limits: MemoryLimits) -> None:
    """Write the limits for the next start. Several ranks may write the same limits at the same time."""
    write_json(folder / FILE, asdict(limits))


def within_limits(config: RunConfig, stage: str, folder: Path) -> RunConfig:
    """Return the configuration with the limits from the stage's folder applied. Every rank calls this function."""
    limits: MemoryLimits = broadcast_from_rank_zero(read_limits(folder))
    changes: dict[str, Any] = {}
    if limits.micro_batch_tokens is not None:
        configured = getattr(config, stage).micro_batch_tokens
        changes["micro_batch_tokens"] = min(configured, limits.micro_batch_tokens)
    if stage == "ppo" and not limits.shared_forward:
        changes["shared_forward"] = False
    return config.model_copy(update={stage: getattr(config, stage).model_copy(update=changes)})


def restart(folder: Path, problem: oom.PassOutOfMemory, *, tokens: int, longest: int) -> RestartStage:
    """Write smaller limits after a pass ran out of memory; return the exception that makes the launcher restart.

    tokens: the size of the micro-batches. longest: tokens of the longest sequence, the smallest possible size.
    Raises UserError if the micro-batches cannot be smaller.
    """
    stage, limits = folder.name, read_limits(folder)
    if problem.holds_graphs:
        limits, change = replace(limits, shared_forward=False), "ppo.shared_forward=false"
    elif tokens <= longest:
        raise UserError(
            f"{stage}.micro_batch_tokens={tokens} is a micro-batch of one sequence, and its pass runs out of memory "
            f"({problem}). Use shorter sequences ({_lengths(stage)}), engine.activation_checkpointing=true, a higher "
            "engine.zero_stage, an offload tier (engine=zero3-offload), more ranks that share a row "
            f"(engine.sequence_parallel) or adapters ({stage}.lora.rank=16)"
        ) from problem
    else:
        limits = replace(limits, micro_batch_tokens=max(longest, tokens // 2))
        change = f"{stage}.micro_batch_tokens={limits.micro_batch_tokens} instead of {tokens}"
    write_limits(folder, replace(limits, restarts=limits.restarts + 1))
    return RestartStage(
        f"out of memory ({problem}); the stage restarts from its newest checkpoint with {change}, which does not "
        "change the result"
    )


def _lengths(stage: str) -> str:
    return "rollout.max_prompt_tokens, rollout.max_new_tokens" if stage == "ppo" else f"{stage}.max_length"
