"""The displays and trackers of a running stage: wandb, TensorBoard, and a progress bar or plain lines.

metrics.jsonl (`pipeline/tracking/metrics.py`) is the authoritative record. Errors in this module must not stop a run.
wandb writes under RUN/wandb, and runs offline if no user is logged in. The first failure of wandb prints a warning and
turns wandb off for the stage.
"""

import json
import netrc
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES, wanted_stages
from pipeline.evaluation.samples import SAMPLES
from pipeline.files import read_plan
from pipeline.tracking.sections import section_of, sectioned
from pipeline.tracking.tensorboard import TensorBoard

SECONDS_BETWEEN_LINES = 5.0
ONLINE_PATIENCE = 30.0


class Watcher(Protocol):
    """A receiver of a stage's metrics: wandb or a progress display."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, step: int, text: str) -> None: ...


class TableWatcher(Watcher, Protocol):
    """A watcher that also receives tables, and is closed at the end of a stage."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def finish(self, failed: bool = False) -> None: ...


class Tracker:
    """A wandb run; without `run`, all methods do nothing.

    closing: printed when the run is closed: its link, or the command that uploads it
    No method raises. The first failure prints a warning, and further calls do nothing.
    """

    def __init__(self, run: Any = None, closing: str = "") -> None:
        self._run, self._closing = run, closing

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step. wandb drops a step that it received before a resume."""
        self._safely(lambda run: run.log(sectioned(metrics), step=step))

    def note(self, step: int, text: str) -> None:
        """Send a sentence of the training guard."""
        self._safely(lambda run: run.log({"guard": text}, step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table. wandb shows it at the newest step."""

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._safely(send)

    def finish(self, failed: bool = False) -> None:
        """Close the run. Wait at most ONLINE_PATIENCE seconds for pending uploads."""
        self._safely(lambda run: run.finish(exit_code=int(failed)))
        if self._run is not None and self._closing:
            print(self._closing, flush=True)
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
    """Start or resume the wandb run of a stage, as configured. Never raises an error of wandb."""
    if config.tracking.kind not in ("wandb", "both"):
        return Tracker()
    try:
        return Tracker(*_start_wandb(config, stage, stage_dir))
    except Exception as problem:
        _warn(problem)
        return Tracker()


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
            upload = f"Upload it later: wandb sync {Path(run.dir).parent}"
            print(
                f"warning: wandb cannot be reached ({type(problem).__name__}), so {stage} is tracked offline. {upload}",
                file=sys.stderr,
                flush=True,
            )
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
    """Return the id of the stage folder's wandb run, which all starts of the stage share."""
    file = stage_dir / ".wandb-id"
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def logged_in() -> bool:
    """Return whether wandb has a key in the environment or in the netrc file. Sends no request."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    host = urlsplit(wandb.Settings().base_url).netloc
    for path in paths:
        try:
            login = netrc.netrc(Path(path).expanduser()).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:
            return True
    return False


class Progress:
    """The progress of a stage: a bar with the main metrics on a terminal, otherwise one line every few seconds.

    Without a terminal the first and the last step always print a line.
    """

    def __init__(
        self,
        stage: str,
        steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        place: str = "",
        later: float | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`place` is "stage 2 of 3"; the later stages take `later` times as long as this one (None: no plan)."""
        self._stage, self._steps = stage, steps
        self._place, self._later, self._now = place and f" ({place})", later, now
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._first_step: int | None = None
        self._first_tokens: float | None = None
        self._shown_at = -float("inf")
        self._known: dict[str, float] = {}
        self._held_out: dict[str, float] = {}  # of the newest evaluation, at step `_evaluated_at`
        self._evaluated_at = 0
        self._bar: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step.

        A line has the metrics of an evaluation once, a bar until the next evaluation. If later steps have been taken
        since the evaluation, the step of the evaluation is shown.
        """
        shown = {name: metrics[name] for name in STAGES[self._stage].progress if name in metrics}
        held_out = {name: value for name, value in shown.items() if section_of(name) == "held_out"}
        self._known.update({name: value for name, value in shown.items() if name not in held_out})
        if held_out:
            self._held_out, self._evaluated_at = held_out, step
        if self._first_step is None:
            self._first_step, self._began = step, self._clock()
        if self._stream.isatty():
            self._move_bar(step)
        elif step >= self._steps or self._clock() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = self._clock()
            done = f"{step}/{self._steps}" if step else "before its first step"
            line = f"{self._stage}{self._place} {done}  {self._figures(step)}{self._left(step, metrics)}"
            print(line, file=self._stream, flush=True)
            self._held_out = {}

    def note(self, step: int, text: str) -> None:
        """Print a sentence of the training guard above the progress bar."""
        line = f"{self._stage}: step {step}: {text}"
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def finish(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _move_bar(self, step: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            start = max(0, step - 1)
            self._bar = tqdm(
                total=self._steps, initial=start, desc=self._stage, file=self._stream, dynamic_ncols=True, unit="step"
            )
        self._bar.set_postfix_str(self._figures(step), refresh=False)
        self._bar.update(step - self._bar.n)

    def _figures(self, step: int) -> str:
        trained, held_out = (
            "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)
            for metrics in (self._known, self._held_out)
        )
        if held_out and self._evaluated_at != step:
            held_out += f" (step {self._evaluated_at})"
        return "  ".join(filter(None, (trained, held_out)))

    def _left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the tokens per second, the time that the stage still needs, and the expected end of the run."""
        done = step - (self._first_step or 0)
        first = self._first_tokens if self._first_tokens is not None else metrics.get("tokens", 0)
        self._first_tokens = first
        if done <= 0 or step >= self._steps:
            return ""
        took = self._clock() - self._began
        seconds = took / done * (self._steps - step)
        tokens = metrics.get("tokens", 0) - first
        rate = f"  {tokens / took:,.0f} tokens/s" if tokens and took > 0 else ""
        left = f"{rate}  {_duration(seconds)} left"
        if self._later is None:
            return left
        end = self._now() + timedelta(seconds=seconds + self._later * took / done * self._steps)
        return f"{left}, run ends about {end:%a %H:%M}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextmanager
def open_watchers(config: RunConfig, stage: str, folder: Path, steps: int) -> Iterator[list[Watcher]]:
    """Open the watchers of a stage: the trackers and the progress display on rank 0, none on other ranks.

    The trackers receive the table of held-out answers (samples.jsonl) whenever it has changed.
    """
    from pipeline.distributed import is_rank_zero

    if not is_rank_zero():
        yield []
        return
    trackers: list[TableWatcher] = [open_tracker(config, stage, folder)]
    if config.tracking.kind in ("tensorboard", "both"):
        trackers.append(TensorBoard(folder.parent, stage))
    progress = Progress(stage, steps, **_outlook(config, stage, folder))
    tables = SampleTables(folder / SAMPLES, trackers)
    ended = False
    try:
        yield [*trackers, tables, progress]
        tables.send()
        ended = True
    finally:
        progress.finish()
        for tracker in trackers:
            tracker.finish(failed=not ended)


class SampleTables:
    """Sends the table of held-out answers to trackers after each step at which the file has changed."""

    def __init__(self, file: Path, trackers: Sequence[TableWatcher]) -> None:
        self._file, self._trackers = file, trackers
        self._sent: tuple[int, int] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the table if it has changed."""
        self.send()

    def note(self, step: int, text: str) -> None:
        """Do nothing: notes have no table."""

    def send(self) -> None:
        """Send the table if it has changed since the last call."""
        try:
            status = self._file.stat()
        except OSError:
            return
        version = status.st_mtime_ns, status.st_size
        if version == self._sent:
            return
        self._sent = version
        columns, rows = sample_table(self._file)
        for tracker in self._trackers if rows else ():
            tracker.table("samples", columns, rows)


def _outlook(config: RunConfig, stage: str, folder: Path) -> dict[str, Any]:
    """Return where the stage is among the stages of the run, and the planned time of the later ones in its own time."""
    stages, planned = wanted_stages(config), read_plan(folder)
    if stage not in stages or len(stages) == 1:
        return {}
    own, later = planned.get("stage_seconds"), planned.get("later_seconds")
    share = later / own if own and later is not None else None
    return {"place": f"stage {stages.index(stage) + 1} of {len(stages)}", "later": share}


def sample_table(file: Path) -> tuple[list[str], list[list[Any]]]:
    """Return samples.jsonl as columns and rows: prompt, temperature, and the answer and scores of each model."""
    if not file.exists():
        return [], []
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("answers", {})))
    kinds = [kind for kind in ("scores", "function", "gold") if any(sample.get(kind) for sample in samples)]
    columns = ["prompt", "temperature", *names, *(f"{kind} {name}" for kind in kinds for name in names)]
    rows = []
    for sample in samples:
        prompt = "\n".join(f"{turn['role']}: {turn['content']}" for turn in sample["prompt"])
        answers = [sample["answers"].get(name, "") for name in names]
        figures = [(sample.get(kind) or {}).get(name) for kind in kinds for name in names]
        rows.append([prompt, sample.get("temperature"), *answers, *figures])
    return columns, rows
