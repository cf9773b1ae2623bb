"""Who follows a stage while it runs: wandb, and a progress bar or plain lines.

metrics.jsonl (`run/metrics.py`) is the record; nothing here may stop or slow a run. wandb runs offline when nobody is
logged in, writes under RUN/wandb, and one that fails is said once and left alone.
"""

import json
import netrc
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.evaluation.samples import SAMPLES

SECONDS_BETWEEN_LINES = 5.0
ONLINE_PATIENCE = 30.0


class Watcher(Protocol):
    """Whoever follows a stage: wandb, a progress bar."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Tracker:
    """One wandb run, or nothing (`run` None). Every call is safe: the first failure is said, then wandb is left out."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's figures. A step that wandb has already (after a resume) is dropped by wandb."""
        self._safely(lambda run: run.log(dict(metrics), step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table; it appears at the newest step."""

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._safely(send)

    def finish(self, failed: bool = False) -> None:
        """Close the run; waits a bounded time for what is still on its way."""
        self._safely(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _safely(self, call: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as problem:
            self._run = None
            _warn(problem)


def _warn(problem: Exception) -> None:
    text = str(problem).strip().splitlines()
    print(
        f"warning: wandb stopped ({type(problem).__name__}: {text[0] if text else ''}); metrics.jsonl is still "
        "written. tracking=none turns wandb off",
        file=sys.stderr,
        flush=True,
    )


def open_tracker(config: RunConfig, stage: str, stage_dir: Path) -> Tracker:
    """Start (or continue) the wandb run of a stage, as configured. Never raises."""
    if config.tracking.kind == "none":
        return Tracker()
    try:
        return Tracker(_start_wandb(config, stage, stage_dir))
    except Exception as problem:
        _warn(problem)
        return Tracker()


def _start_wandb(config: RunConfig, stage: str, stage_dir: Path) -> Any:
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode == "online":
        try:
            return _init(wandb, config, stage, stage_dir, mode)
        except Exception:
            print("warning: wandb can't be reached; this stage is tracked offline (wandb sync)", file=sys.stderr)
            mode = "offline"
    return _init(wandb, config, stage, stage_dir, mode)


def _init(wandb: Any, config: RunConfig, stage: str, stage_dir: Path, mode: str) -> Any:
    name = stage_dir.parent.name
    offline = mode != "online"
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        init_timeout=ONLINE_PATIENCE,
        finish_timeout=ONLINE_PATIENCE,
        x_disable_stats=offline,
        x_disable_meta=offline,
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
    """One wandb run a stage folder, over all its starts."""
    file = stage_dir / ".wandb-id"
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def logged_in() -> bool:
    """Whether wandb has a key: in the environment, or in the netrc file. Asks no network."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    host = urlsplit(wandb.Settings().base_url).netloc
    for place in places:
        try:
            found = netrc.netrc(Path(place).expanduser()).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if found and found[2]:
            return True
    return False


class Progress:
    """A bar with the few figures that matter on a terminal; elsewhere a line now and then, first and last always."""

    def __init__(
        self,
        stage: str,
        steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._steps = stage, steps
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._first_step: int | None = None
        self._shown_at = -float("inf")
        self._known: dict[str, float] = {}
        self._bar: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step's figures. Evaluation figures stay until the next evaluation."""
        self._known.update({name: metrics[name] for name in STAGES[self._stage].progress if name in metrics})
        if self._first_step is None:
            self._first_step, self._began = step, self._clock()
        if self._stream.isatty():
            self._move_bar(step)
        elif step >= self._steps or self._clock() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = self._clock()
            done = f"{step}/{self._steps}" if step else "before its first step"
            line = f"{self._stage} {done}  {self._figures()}{self._left(step)}"
            print(line, file=self._stream, flush=True)

    def finish(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()

    def _move_bar(self, step: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            start = max(0, step - 1)
            self._bar = tqdm(
                total=self._steps, initial=start, desc=self._stage, file=self._stream, dynamic_ncols=True, unit="step"
            )
        self._bar.set_postfix_str(self._figures(), refresh=False)
        self._bar.update(step - self._bar.n)

    def _figures(self) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in self._known.items() if value is not None)

    def _left(self, step: int) -> str:
        done = step - (self._first_step or 0)
        if done <= 0 or step >= self._steps:
            return ""
        seconds = (self._clock() - self._began) / done * (self._steps - step)
        return f"  {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextmanager
def open_watchers(config: RunConfig, stage: str, folder: Path, steps: int) -> Iterator[list[Watcher]]:
    """The followers of a stage: wandb and the progress display on rank 0, none on other ranks.

    When the stage ends well, the table of held-out answers (samples.jsonl) goes to wandb as well.
    """
    from pipeline.distributed import is_rank_zero

    if not is_rank_zero():
        yield []
        return
    tracker, progress = open_tracker(config, stage, folder), Progress(stage, steps)
    ended = False
    try:
        yield [tracker, progress]
        columns, rows = sample_table(folder / SAMPLES)
        if rows:
            tracker.table("samples", columns, rows)
        ended = True
    finally:
        progress.finish()
        tracker.finish(failed=not ended)


def sample_table(file: Path) -> tuple[list[str], list[list[Any]]]:
    """samples.jsonl as columns and rows: the prompt, each model's answer, each model's scores."""
    if not file.exists():
        return [], []
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("answers", {})))
    kinds = [kind for kind in ("scores", "function", "gold") if any(sample.get(kind) for sample in samples)]
    columns = ["prompt", *names, *(f"{kind} {name}" for kind in kinds for name in names)]
    rows = []
    for sample in samples:
        prompt = "\n".join(f"{turn['role']}: {turn['content']}" for turn in sample["prompt"])
        answers = [sample["answers"].get(name, "") for name in names]
        figures = [(sample.get(kind) or {}).get(name) for kind in kinds for name in names]
        rows.append([prompt, *answers, *figures])
    return columns, rows
