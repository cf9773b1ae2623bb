"""The TensorBoard files of a stage, RUN/tensorboard/STAGE: `tensorboard --logdir RUN/tensorboard` shows them.

Errors of TensorBoard must not stop a run. The first failure prints a warning, and further calls do nothing.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.installation import pip_install
from pipeline.tracking.sections import sectioned

FOLDER = "tensorboard"
MOST_ROWS = 32  # of a table; TensorBoard shows it as text


def require_tensorboard(kind: str) -> None:
    """Raise UserError if the package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise UserError(
            f"tracking.kind={kind} needs the package tensorboard: install it with "
            f"`{pip_install('tensorboard')}`, or set tracking=wandb or tracking=none"
        )


class TensorBoard:
    """The writer of one stage. The files of earlier starts stay; steps that a resumed stage repeats are replaced."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        self._folder, self._step, self._failed = run_dir / FOLDER / stage, 0, False
        self._writer: Any = None  # made at the first step, which replaces the same steps of an earlier start

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step. Numbers that are not finite are left out."""

        def write(writer: Any) -> None:
            for name, value in sectioned(metrics).items():
                if value is not None and math.isfinite(value):
                    writer.add_scalar(name, value, step)

        self._safely(step, write)

    def note(self, step: int, text: str) -> None:
        """Write a sentence of the training guard."""
        self._safely(step, lambda writer: writer.add_text("guard", text, step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table at the newest step."""
        lines = [columns, ["---"] * len(columns), *rows[:MOST_ROWS]]
        text = "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)
        self._safely(self._step, lambda writer: writer.add_text(name, text, self._step))

    def finish(self, failed: bool = False) -> None:
        """Close the files."""
        if self._writer is not None:
            self._safely(self._step, lambda writer: writer.close())

    def _safely(self, step: int, call: Callable[[Any], None]) -> None:
        if self._failed:
            return
        try:
            self._step = step
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=step)
            call(self._writer)
        except Exception as problem:
            self._failed = True
            print(
                f"warning: TensorBoard stopped ({type(problem).__name__}: {problem}); metrics.jsonl is still written",
                file=sys.stderr,
                flush=True,
            )


def _cell(value: Any) -> str:
    """Return a cell of a Markdown table. Texts of models become plain text."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("\n", "<br>")
