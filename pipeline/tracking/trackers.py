"""The trackers of a running stage: wandb and TensorBoard.

Errors of a tracker must not stop a run: its first failure prints a warning and turns the tracker off for the stage.
wandb writes under RUN/wandb, and runs offline if no user is logged in. TensorBoard's files are in
RUN/tensorboard/STAGE: `tensorboard --logdir RUN/tensorboard` shows them. Both group the metrics into the same sections.
"""

import math
import os
import re
import secrets
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pipeline.config.schema import RunConfig
from pipeline.errors import UserError, kind_and_line
from pipeline.files import write_atomically
from pipeline.installation import pip_install

ONLINE_PATIENCE = 30.0  # seconds that wandb may take to connect, and to upload at the end
FOLDER = "tensorboard"
MOST_ROWS = 32  # of a table; TensorBoard shows it as text
SECTIONS = (
    ("held_out", r"eval_.*|gold_score.*|judge_.*|.*_at_[\d.]+"),
    ("speed", r".*_seconds|.*_per_second|.*_bytes|seconds|tokens"),
    ("optimizer", r"(critic_)?(lr|grad_norm)|skipped_steps|kl_coef"),
    ("critic", r"value.*|return|explained_variance"),
    ("policy", r"kl.*|approx_kl|entropy|(policy|ptx)_loss|clip_fraction|first_ratio.*|(generator|importance)_.*"),
    ("rollout", r"score.*|reward.*|function_score|response_length.*|eos_rate|.*_prompts|length_correlation"),
)
"""The sections, each with a pattern of the names of its metrics. The first that matches counts."""
OTHER = "train"


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the name SECTION/NAME."""
    return {f"{section_of(name)}/{name}": value for name, value in metrics.items()}


def section_of(name: str) -> str:
    """Return the section of a metric."""
    return next((section for section, pattern in SECTIONS if re.fullmatch(pattern, name)), OTHER)


class Tracker(ABC):
    """A tracker of one stage. No method raises: the first failure prints a warning, and further calls do nothing."""

    name: ClassVar[str]
    _is_off = False

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Send the metrics of one step, and a sentence of the training guard."""

    @abstractmethod
    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table of one step."""

    @abstractmethod
    def finish(self, failed: bool = False) -> None:
        """Close the tracker at the end of the stage."""

    def _safely(self, call: Callable[[], object]) -> None:
        if self._is_off:
            return
        try:
            call()
        except Exception as problem:
            self._is_off = True
            _warn(self.name, problem)


def _warn(name: str, problem: Exception) -> None:
    text = f"{name} stopped ({kind_and_line(problem)}); metrics.jsonl is still written. tracking=none turns {name} off"
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Wandb(Tracker):
    """A wandb run.

    closing: printed when the run is closed: its link, or the command that uploads it
    """

    name = "wandb"

    def __init__(self, run: Any, closing: str = "") -> None:
        self._run, self._closing = run, closing

    def log(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Send the metrics of one step. wandb drops a step that it received before a resume."""
        guard = {"guard": note} if note else {}
        self._safely(lambda: self._run.log({**sectioned(metrics), **guard}, step=step))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def send() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

        self._safely(send)

    def finish(self, failed: bool = False) -> None:
        """Close the run. Wait at most ONLINE_PATIENCE seconds for pending uploads."""
        self._safely(lambda: self._run.finish(exit_code=int(failed)))
        if not self._is_off and self._closing:
            print(self._closing, flush=True)
        self._is_off = True


def open_wandb(config: RunConfig, stage: str, stage_dir: Path) -> Wandb | None:
    """Start or resume the wandb run of a stage. After an error of wandb, print a warning and return None."""
    try:
        return Wandb(*_start_wandb(config, stage, stage_dir))
    except Exception as problem:
        _warn(Wandb.name, problem)
        return None


def _start_wandb(config: RunConfig, stage: str, stage_dir: Path) -> tuple[Any, str]:
    """Return a run, and the line that is printed when it is closed."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode == "online":
        try:
            run = _init(wandb, config, stage, stage_dir, mode)
            print(f"{stage}: {run.url}", flush=True)
            return run, f"{stage}: {run.url}"
        except Exception as problem:
            wandb.teardown()  # wandb's service still holds the id of the failed run
            run = _init(wandb, config, stage, stage_dir, "offline")
            upload = f"Upload it later: wandb sync {shlex.quote(str(Path(run.dir).parent))}"
            cause = f"wandb cannot be used online ({kind_and_line(problem)})"
            print(f"warning: {cause}, so {stage} is tracked offline. {upload}", file=sys.stderr, flush=True)
            return run, f"{stage}: tracked offline. {upload}"
    return _init(wandb, config, stage, stage_dir, mode), ""


def _init(wandb: Any, config: RunConfig, stage: str, stage_dir: Path, mode: str) -> Any:
    name = stage_dir.parent.name
    offline = mode != "online"
    if "weave" not in sys.modules:
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # no advertisement if a judge imports openai
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_stats=offline,
        x_disable_meta=offline,
        **({} if offline else {"init_timeout": ONLINE_PATIENCE, "finish_timeout": ONLINE_PATIENCE}),
    )
    return wandb.init(
        project=config.tracking.project,
        entity=config.tracking.entity,
        group=name,
        job_type=stage,
        name=f"{name}-{stage}",
        id=_stable_id(stage_dir),
        resume="allow" if not offline else None,
        dir=stage_dir.parent,
        mode=mode,
        config=config.model_dump(mode="json"),
        settings=settings,
    )


def _stable_id(stage_dir: Path) -> str:
    """Return the id of the stage folder's wandb run, which all starts of the stage share."""
    file = stage_dir / ".wandb-id"
    if not file.exists():
        write_atomically(file, secrets.token_hex(8))  # wandb refuses the empty id that a full disk would leave
    return file.read_text(encoding="utf-8").strip()


def logged_in() -> bool:
    """Return whether wandb has a key in the environment or in the netrc file. Sends no request."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import requests.utils  # of wandb
    import wandb

    return requests.utils.get_netrc_auth(wandb.Settings().base_url) is not None


def require_tensorboard(kind: str) -> None:
    """Raise UserError if the package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise UserError(
            f"tracking.kind={kind} needs the package tensorboard: install it with "
            f"`{pip_install('tensorboard')}`, or set tracking=wandb or tracking=none"
        )


class TensorBoard(Tracker):
    """The writer of one stage. The files of earlier starts stay; steps that a resumed stage repeats are replaced."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, stage: str) -> None:
        self._folder = run_dir / FOLDER / stage
        self._writer: Any = None  # made at the first step

    def log(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Write the metrics of one step. Numbers that are not finite are left out."""
        finite = {k: v for k, v in sectioned(metrics).items() if v is not None and math.isfinite(v)}
        self._safely(lambda: [self._opened(step).add_scalar(name, value, step) for name, value in finite.items()])
        if note:
            self._safely(lambda: self._opened(step).add_text("guard", note, step))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table of one step. The metrics of this step from an earlier start remain."""
        lines = [columns, ["---"] * len(columns), *rows[:MOST_ROWS]]
        text = "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)
        self._safely(lambda: self._opened(step + 1).add_text(name, text, step))

    def finish(self, failed: bool = False) -> None:
        if self._writer is not None:
            self._safely(self._writer.close)

    def _opened(self, step: int) -> Any:
        """Return the writer. If it is new, it replaces the steps of earlier starts from `step` on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        return self._writer


def _cell(value: Any) -> str:
    """Return a cell of a Markdown table. Texts of models become plain text."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("\n", "<br>")
