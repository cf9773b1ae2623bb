"""Exchange messages between the launchers of one job, and judge whether a stage hangs.

torchrun or Slurm may start several launchers. The first launcher reads the run folder and decides what to run. The
other launchers follow its messages. Each launcher publishes what its ranks do and how they ended. The first launcher
reads these states and publishes a verdict. With one launcher there is nothing to exchange.

Messages travel through a PyTorch TCPStore. If torchrun has a store, the launchers use that store. Otherwise the first
launcher opens one, and all workers join as clients. The store outlives the stages, so no stage has to open the port
again. A thread makes all calls of the store, because a call never returns if the network is cut.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from pipeline.launch.failure import END_ORDER, ENDED_EARLY, HUNG, LOG_LEVEL, RESTART, StageEnd, merge_ends
from pipeline.launch.ranks import Ranks
from pipeline.launch.watchdog import RankState, is_hung, report, stacks, stopped_limit

PERIOD = 0.2  # seconds between two exchanges with the store
REPORT_TIMEOUT = 8.0
"""Seconds in which all launchers report how their ranks ended, after the first one has failed."""
LAST_MESSAGE_TIMEOUT = 30.0
"""Seconds to wait until the other launchers have received the last message."""


class LeaderLost(RuntimeError):
    """The first launcher has ended, or it does not answer."""


class _Exchange(threading.Thread):
    """The thread that calls the store: it writes messages and this launcher's state, and reads the watched keys.

    A launcher that runs alone has an exchange without a store. Such an exchange is never started and watches nothing.
    """

    def __init__(self, store: Any) -> None:
        super().__init__(daemon=True, name="launchers")
        self._store, self._beat = store, 0
        self._messages: dict[str, Any] = {}
        self._state: tuple[str, dict[str, Any]] | None = None
        self._changes = self._sent = 0
        self._closed = threading.Event()
        self.watched: tuple[str, ...] = ()
        self.values: dict[str, Any] = {}
        self.changed: dict[str, float] = {}  # when a value changed last
        self.answered = math.inf if store is None else time.monotonic()  # the end of the last exchange
        self.failed = False

    def send(self, key: str, message: Any) -> None:
        """Write a message once."""
        self._messages[key] = message
        self._changes += 1

    def publish(self, key: str, state: dict[str, Any]) -> None:
        """Write a state in each exchange, with a rising number that shows that this launcher runs."""
        self._state = key, state
        self._changes += 1

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, for at most some seconds."""
        wanted, deadline = self._changes, time.monotonic() + seconds
        while self.is_alive() and self._sent < wanted and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        self._closed.set()
        if self.is_alive():
            self.join(1.0)

    def run(self) -> None:
        try:
            while not self._closed.is_set():
                self._exchange()
                self._closed.wait(PERIOD)
        except RuntimeError:  # the process with the store has ended
            self.failed = True

    def _exchange(self) -> None:
        changes, self._beat = self._changes, self._beat + 1
        for key in list(self._messages):
            self._store.set(key, json.dumps(self._messages.pop(key)))
        if self._state is not None:
            key, state = self._state
            self._store.set(key, json.dumps({**state, "beat": self._beat}))
        self._sent = changes
        for key in self.watched:
            if self._store.check([key]):  # get() would wait for the key
                value = json.loads(self._store.get(key))
                if value != self.values.get(key):
                    self.changed[key] = time.monotonic()
                self.values[key] = value
        self.answered = time.monotonic()


class Control:
    """The launchers of one job, from the point of view of one of them.

    `launch` is the number of the current start of a stage. `hang_seconds` is `engine.hang_seconds` of this start.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._launch = 0
        self._hang_seconds: float | None = None
        self._is_stopped = False
        self._cause: StageEnd | None = None  # what this launcher found out about the current start
        self.keeps_store = ranks.local != ranks.world  # whether the workers can join a store that outlives them
        self._exchange = _Exchange(self._connect() if self.keeps_store else None)
        if self.keeps_store:
            others = [f"launcher/{first}" for first in range(0, ranks.world, ranks.local) if first != ranks.first]
            self._exchange.watched = tuple(others) if ranks.leads else ("verdict", "message/0")
            self._publish([], None)
            self._announce("")
            self._exchange.start()

    def _connect(self) -> Any:
        os.environ.setdefault(LOG_LEVEL, "ERROR")
        from torch.distributed import PrefixStore, TCPStore

        is_server = self._ranks.leads and not self._ranks.agent_store
        store = TCPStore(
            self._ranks.address,
            self._ranks.port,
            is_master=is_server,
            timeout=timedelta(minutes=15),
            wait_for_workers=False,
        )
        return PrefixStore(f"zerochat/launchers/{self._ranks.attempt}", store)

    @property
    def is_complete(self) -> bool:
        """Return whether all launchers still run and none was stopped, so that a stage can start again."""
        return not self._lost() and not any(state["stopped"] for state in self._states())

    def begin(self, message: dict[str, Any]) -> None:
        """Send the start of a stage from the first launcher to all others."""
        self._send(message)
        self._hang_seconds, self._cause = message["hang_seconds"], None
        self._publish([], None)

    def finish(self, status: int) -> None:
        """Send the end of the job to all launchers, and wait until they have received it."""
        self._send({"end": status})
        deadline = time.monotonic() + LAST_MESSAGE_TIMEOUT
        while time.monotonic() < deadline and not self._lost():
            states = self._states()
            received = [state["launch"] == self._launch or state["stopped"] for state in states]
            if len(states) == len(self._exchange.watched) and all(received):
                break
            time.sleep(0.05)
        self.close()

    def close(self) -> None:
        self._exchange.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._exchange.send(f"message/{self._launch}", message)
        self._launch += 1
        self._announce("")

    def _announce(self, verdict: str) -> None:
        """Publish the verdict of the first launcher."""
        if self._ranks.leads:
            self._exchange.publish("verdict", {"launch": self._launch, "verdict": verdict})

    def receive(self) -> dict[str, Any]:
        """Wait for the next message of the first launcher and return it. Raise LeaderLost if it is gone."""
        key = f"message/{self._launch}"
        while key not in self._exchange.values:
            if reason := self._lost():
                raise LeaderLost(reason)
            time.sleep(0.05)
        message: dict[str, Any] = self._exchange.values.pop(key)
        self._launch += 1
        self._exchange.watched = ("verdict", f"message/{self._launch}")
        self._hang_seconds, self._cause = message.get("hang_seconds"), None
        self._publish([], None)
        if "end" in message:
            self._exchange.flush(LAST_MESSAGE_TIMEOUT)
        return message

    def report_stop(self) -> None:
        """Report that this launcher received a stop signal, so that the others do not wait for its ranks."""
        self._is_stopped = True
        self._publish([], None)
        self._exchange.flush(REPORT_TIMEOUT)

    def others(self, states: Sequence[RankState]) -> str:
        """Publish what the ranks of this launcher do, and return the verdict on the stage.

        "failed": ranks of another launcher failed, the stage hangs, or a launcher is lost.
        "stopped": a launcher received a stop signal.
        "restart": a rank requested a restart.
        "": none of these.
        """
        self._publish(states, None)
        return self._verdict(states)

    def settle(self, end: StageEnd) -> StageEnd:
        """Report how the ranks of this launcher ended, and return how the stage ended on all launchers.

        The other launchers only report: they return their own end, or why they lost the first launcher.
        """
        self._is_stopped |= end.status in ENDED_EARLY or bool(end.stop_status)
        self._publish([], end)
        if not self._ranks.leads:
            self._exchange.flush(REPORT_TIMEOUT)
            return end if self._cause is None else merge_ends([end, self._cause])
        failed_at = None if end.status == 0 else time.monotonic()
        while True:
            verdict = self._verdict([])
            ends = {key: StageEnd(**state["end"]) for key, state in self._current().items() if state["end"]}
            if len(ends) == len(self._exchange.watched):
                break
            if failed_at is None and verdict:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > REPORT_TIMEOUT:
                break
            time.sleep(0.05)
        causes = [] if self._cause is None else [self._cause]
        return merge_ends([end, *ends.values(), *causes])

    def _publish(self, states: Sequence[RankState], end: StageEnd | None) -> None:
        """Set the state that the exchange writes."""
        if self._ranks.leads:
            return
        state = {
            "launch": self._launch,
            "host": socket.gethostname(),
            "stopped": self._is_stopped,
            "ranks": [asdict(state) for state in states],
            "end": None if end is None else asdict(end),
        }
        self._exchange.publish(f"launcher/{self._ranks.first}", state)

    def _verdict(self, states: Sequence[RankState]) -> str:
        """Return the verdict on the current start; the first launcher makes it and publishes it."""
        if reason := self._lost():
            self._cause = self._cause or StageEnd(HUNG, reason, order=END_ORDER["lost"])
            return "failed"
        if not self._ranks.leads:
            verdict = self._exchange.values.get("verdict", {})
            return str(verdict["verdict"]) if verdict.get("launch") == self._launch else ""
        verdict = self._judge(states)
        self._announce(verdict)
        return verdict

    def _judge(self, own: Sequence[RankState]) -> str:
        current = self._current()
        ends = [state["end"]["status"] for state in current.values() if state["end"]]
        states = [*own, *(RankState(**rank) for state in current.values() for rank in state["ranks"])]
        if self._cause is None and is_hung(states, self._hang_seconds):
            self._cause = StageEnd(HUNG, report(states), stacks(states), order=END_ORDER["lost"])
        if self._cause is not None or any(status not in (0, RESTART, *ENDED_EARLY) for status in ends):
            return "failed"
        if any(state["stopped"] for state in self._states()):
            return "stopped"
        return "restart" if RESTART in ends else ""

    def _states(self) -> list[dict[str, Any]]:
        """Return the states of the other launchers, if this is the first one."""
        if not self._ranks.leads:
            return []
        return [self._exchange.values[key] for key in self._exchange.watched if key in self._exchange.values]

    def _current(self) -> dict[str, dict[str, Any]]:
        """Return the states of the other launchers that belong to the current start, by key."""
        values = {key: self._exchange.values.get(key) for key in self._exchange.watched}
        return {key: state for key, state in values.items() if state and state.get("launch") == self._launch}

    def _lost(self) -> str:
        """Return why this launcher lost the others; "" if it did not."""
        ranks, silence, now = self._ranks, stopped_limit(self._hang_seconds), time.monotonic()
        if self._exchange.failed:
            return f"the launcher or torchrun at {ranks.address} has ended: its store is closed"
        if now - self._exchange.answered > silence:
            quiet = now - self._exchange.answered
            return f"the store at {ranks.address} has not answered for {quiet:.0f} s: its host or network is down"
        for key in self._exchange.watched:
            state, quiet = self._exchange.values.get(key), now - self._exchange.changed.get(key, now)
            if state and quiet > silence and not state.get("stopped") and "beat" in state:
                first = 0 if key == "verdict" else int(key.rpartition("/")[2])
                place = f"rank {first}" + (f" (host {state['host']})" if "host" in state else "")
                return f"the launcher of {place} has not answered for {quiet:.0f} s: its host or network is down"
        return ""
