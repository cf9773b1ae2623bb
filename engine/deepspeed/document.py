"""docs/reference/deepspeed.md, from the tables: made by `make docs`."""

from pathlib import Path
from typing import Any

from engine.deepspeed.keys import BATCH, OTHERS, PRECISION, TRAINING, ZERO, Key
from engine.deepspeed.optimizers import OPTIMIZERS, REFUSED_OPTIMIZERS
from engine.deepspeed.schedulers import SCHEDULERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deepspeed.md"

INTRODUCTION = """\
# DeepSpeed configurations

Made from `engine/deepspeed/` by `python -m engine.deepspeed.document`; do not edit.

An existing file is taken as it is: `engine.deepspeed=ds_config.json` on the command line, or
`engine.initialize(model, "ds_config.json")` in a loop of your own.

- What the file says counts. What it leaves out, or says "auto" for, comes from zerochat's own keys (`engine.*`,
  `<stage>.lr` and so on); in a loop of your own it is DeepSpeed's default, and of `optimizer=` where that is given.
- Saying two different things in the file and in `engine.*` is refused.
- `accepted` means that any value is taken and nothing is done, for the reason given. `refused` means that only the
  value that switches it off is taken. Unknown keys are refused with the closest known one.
- In the stages a learning rate in the file takes the place of the stages' own, the critic's too
  (`ppo.critic_engine.deepspeed=` takes another file); biases and norms are not decayed. A schedule in the file counts
  optimizer steps.

Defaults are those of DeepSpeed's code. Where its manual differs the code counts: clipping is on (1.0) even when unset.
"""

SECTIONS = (
    ("Batch and gradients", BATCH),
    ("Precision", PRECISION),
    ("ZeRO and offload", ZERO),
    ("Checkpointing and the hybrid engine", OTHERS),
    ("The rest", TRAINING),
)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, keys in SECTIONS:
        parts.append(f"## {title}\n\n| key | default | here | |\n| --- | --- | --- | --- |")
        parts.append("\n".join(_row(key) for key in sorted(keys, key=lambda k: k.verdict != "honoured")) + "\n")
    parts.append("## Optimizers (`optimizer.type`, in any case of letters)\n\n| type | parameters |\n| --- | --- |")
    for name, known in OPTIMIZERS.items():
        parts.append(f"| {name} | {_parameters(known.parameters)} |")
    parts.append("| any other class of torch.optim | its own arguments |\n")
    parts.append("Refused:\n")
    parts.extend(f"- {name}: {why}" for name, why in REFUSED_OPTIMIZERS.items())
    parts.append("\n## Schedulers (`scheduler.type`)\n\n| type | parameters |\n| --- | --- |")
    parts.extend(f"| {name} | {_parameters(known.parameters)} |" for name, known in SCHEDULERS.items())
    return "\n".join(parts) + "\n"


def _row(key: Key) -> str:
    note = key.note if not key.only else f"{key.note}; one of {', '.join(_shown(v) for v in key.only if v is not None)}"
    return f"| `{key.name}` | {_shown(key.default)} | {key.verdict} | {note} |"


def _parameters(parameters: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`" + ("" if v is None else f" {_shown(v)}") for name, v in parameters.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
