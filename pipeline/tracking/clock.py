"""The stopwatch of a stage: wall seconds by phase, and the tokens that were worked through in them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function

WORK = ("flip", "generate", "score", "train")  # the phases that are the stage's work; evaluating and saving are not


class Clock:
    """Seconds by phase since the stage's first step, over all starts. `tokens` is added to by whoever works."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self._phase: str | None = None  # the last one
        self.begin_lap()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of a block under a name. What it leaves a GPU to do is waited for where a block of
        another name follows: the host can prepare the next step meanwhile.
        """
        if torch.cuda.is_available() and self._phase not in (None, name):
            with self._counted(str(self._phase)):
                torch.cuda.synchronize()
        self._phase = name
        with self._counted(name), record_function(name):  # a span, where a profile is being recorded
            yield

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some seconds of one phase under another name."""
        self.seconds[source] = self.seconds.get(source, 0.0) - seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def begin_lap(self) -> None:
        """Laps count from here."""
        self._lap, self._lap_tokens = dict(self.seconds), self.tokens

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, as `NAME_seconds`, and tokens a second over them."""
        spent = {name: total - self._lap.get(name, 0.0) for name, total in self.seconds.items() if name in WORK}
        tokens = self.tokens - self._lap_tokens
        self.begin_lap()
        return {f"{name}_seconds": round(seconds, 4) for name, seconds in spent.items()} | {
            "tokens_per_second": _rate(tokens, sum(spent.values()))
        }

    def rate(self) -> float:
        """Tokens a second over all work."""
        return _rate(self.tokens, sum(seconds for name, seconds in self.seconds.items() if name in WORK))


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / max(seconds, 1e-9), 1)
