"""Exchange states between the launchers of one job, and judge whether a stage hangs.

torchrun or Slurm may start several launchers. Each launcher publishes one state: the number of the newest message of
the first launcher that it knows, what its ranks do, and how they ended. The state of the first launcher also has this
message (start a stage, or end) and a verdict on the stage, which it makes from the states of the others. With one
launcher there is nothing to exchange.

States travel through a PyTorch TCPStore. If torchrun has a store, the launchers use that store. Otherwise the first
launcher opens one, and all workers join as clients. The store outlives the stages, so no stage has to open the port
again. A thread makes all calls of the store, because a call never returns if the network is cut.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from pipeline.errors import first_line
from pipeline.launch.failure import END_ORDER, ENDED_EARLY, HUNG, LOG_LEVEL, RESTART, STOPPED, StageEnd, merge_ends
from pipeline.launch.ranks import Ranks
from pipeline.launch.watchdog import RankState, is_hung, report, stacks, stopped_limit

PERIOD = 0.2  # seconds between two exchanges with the store
REPORT_TIMEOUT = 8.0
"""Seconds in which all launchers report how their ranks ended, after the first one has failed."""
CONNECT_TIMEOUT = 600.0
"""Seconds until all launchers have connected. The machines of a job may need minutes to start their containers."""
CONNECT_NOTICE = 10.0  # seconds until a launcher reports that it waits for a connection
LAST_MESSAGE_TIMEOUT = 30.0
"""Seconds to wait until the other launchers have received the last message."""


class LeaderLost(RuntimeError):
    """The first launcher has ended, it does not answer, or this launcher cannot connect."""


class _Exchange(threading.Thread):
    """The thread that calls the store: it writes the state of this launcher, and reads those of the watched launchers.

    A launcher that runs alone has an exchange without a store. Such an exchange is never started and watches nothing.
    """

    def __init__(self, store: Any, own: int, watched: Sequence[int]) -> None:
        super().__init__(daemon=True, name="launchers")
        self._store, self._own, self._beat = store, own, 0
        self._state: dict[str, Any] = {}
        self._changes = self._sent = 0
        self._closed = threading.Event()
        self.watched = watched  # the first ranks of the launchers
        self.values: dict[int, Any] = {}
        self.changed: dict[int, float] = {}  # when a value changed last
        self.answered = math.inf if store is None else time.monotonic()  # the end of the last exchange
        self.failed = False

    def publish(self, state: dict[str, Any]) -> None:
        """Write a state in each exchange, with a rising number that shows that this launcher runs."""
        self._state = state
        self._changes += 1

    def flush(self, seconds: float) -> None:
        """Wait until the newest state is written, for at most some seconds."""
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
        self._store.set(f"launcher/{self._own}", json.dumps({**self._state, "beat": self._beat}))
        self._sent = changes
        for first in self.watched:
            if self._store.check([f"launcher/{first}"]):  # get() would wait for the key
                value = json.loads(self._store.get(f"launcher/{first}"))
                if value != self.values.get(first):
                    self.changed[first] = time.monotonic()
                self.values[first] = value
        self.answered = time.monotonic()


class Control:
    """The launchers of one job, from the point of view of one of them.

    `launch` is the number of the newest message. Ranks and ends in a state belong to the message of its `launch`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._launch = 0
        self._message: dict[str, Any] = {}
        self._is_stopped = False
        self._verdict = ""
        self._cause: StageEnd | None = None  # what this launcher found out about the current start
        self.keeps_store = ranks.local != ranks.world  # whether the workers can join a store that outlives them
        others = [first for first in range(0, ranks.world, ranks.local) if first != ranks.first]
        store = self._connect() if self.keeps_store else None
        self._exchange = _Exchange(store, ranks.first, others if ranks.leads else [0])
        self._began = time.monotonic()
        if self.keeps_store:
            self._publish([], None)
            self._exchange.start()

    def _connect(self) -> Any:
        """Return the store of all launchers. A thread waits for it, because PyTorch's wait ignores stop signals."""
        os.environ.setdefault(LOG_LEVEL, "ERROR")
        from torch.distributed import PrefixStore, TCPStore

        ranks, address = self._ranks, f"{self._ranks.address}:{self._ranks.port}"
        is_server, opened = ranks.leads and not ranks.agent_store, list[TCPStore | RuntimeError]()

        def open_store() -> None:
            wait = timedelta(seconds=CONNECT_TIMEOUT)
            try:
                store = TCPStore(ranks.address, ranks.port, is_master=is_server, timeout=wait, wait_for_workers=False)
                opened.append(store)
            except RuntimeError as problem:  # PyTorch's errors of networks
                opened.append(problem)

        thread = threading.Thread(target=open_store, daemon=True)
        thread.start()
        thread.join(CONNECT_NOTICE)
        if thread.is_alive() and ranks.local_first == 0:
            limit = f"{CONNECT_TIMEOUT / 60:.0f} minutes"
            print(f"rank {ranks.first} waits up to {limit} for a connection to {address}", file=sys.stderr, flush=True)
        thread.join(CONNECT_TIMEOUT)
        store = opened[0] if opened else TimeoutError("no answer")
        if isinstance(store, Exception):
            raise LeaderLost(
                f"the launchers cannot connect at {address} ({first_line(store)}): set MASTER_ADDR to an address of "
                "the first machine that all machines reach, and MASTER_PORT to a free port"
            ) from store
        return PrefixStore(f"zerochat/launchers/{self._ranks.attempt}", store)

    @property
    def is_complete(self) -> bool:
        """Return whether all launchers still run and none was stopped, so that a stage can start again."""
        return not self._lost() and not any(state["stopped"] for state in self._states().values())

    def begin(self, message: dict[str, Any]) -> None:
        """Send a message from the first launcher to all others: the start of a stage, or the end of the job."""
        self._take(self._launch + 1, message)

    def _take(self, launch: int, message: dict[str, Any]) -> None:
        self._launch, self._message, self._verdict, self._cause = launch, message, "", None
        self._publish([], None)

    def finish(self, status: int) -> None:
        """Send the end of the job to all launchers, and wait until they have received it.

        After a stop, do not wait for launchers that have not connected yet: the stop may be the end of their machines.
        """
        self.begin({"end": status, "hang_seconds": self._hang_seconds})
        deadline = time.monotonic() + LAST_MESSAGE_TIMEOUT
        while time.monotonic() < deadline and not self._lost():
            states = self._states().values()
            received = [state["launch"] == self._launch or state["stopped"] for state in states]
            is_complete = status in ENDED_EARLY or len(received) == len(self._exchange.watched)
            if is_complete and all(received):
                break
            time.sleep(0.05)
        self.close()

    def close(self) -> None:
        self._exchange.close()

    def receive(self) -> dict[str, Any]:
        """Wait for the next message of the first launcher and return it. Raise LeaderLost if it is gone."""
        while (first := self._exchange.values.get(0, {})).get("launch", 0) <= self._launch:
            if reason := self._lost():
                raise LeaderLost(reason)
            time.sleep(0.05)
        self._take(first["launch"], first["message"])
        if "end" in self._message:
            self._exchange.flush(LAST_MESSAGE_TIMEOUT)
        return self._message

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
        return self._judge(states)

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
            verdict = self._judge([])
            ends = {first: StageEnd(**state["end"]) for first, state in self._current().items() if state["end"]}
            if len(ends) == len(self._states() if end.status in ENDED_EARLY else self._exchange.watched):
                break
            if failed_at is None and verdict:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > REPORT_TIMEOUT:
                break
            time.sleep(0.05)
        causes = [] if self._cause is None else [self._cause]
        return merge_ends([end, *ends.values(), *causes])

    def _publish(self, states: Sequence[RankState], end: StageEnd | None) -> None:
        """Set the state that the exchange writes. Only the first launcher's message and verdict are read."""
        state = {
            "launch": self._launch,
            "message": self._message if self._ranks.leads else {},
            "verdict": self._verdict,
            "host": socket.gethostname(),
            "stopped": self._is_stopped,
            "ranks": [asdict(state) for state in states],
            "end": None if end is None else asdict(end),
        }
        self._exchange.publish(state)

    def _judge(self, own: Sequence[RankState]) -> str:
        """Return the verdict on the current start. The first launcher makes and publishes it."""
        if reason := self._lost():
            self._cause = self._cause or StageEnd(HUNG, reason, order=END_ORDER["lost"])
            return "failed"
        current = self._current()
        if not self._ranks.leads:
            if self._exchange.values.get(0, {}).get("launch", 0) > self._launch:
                return "failed"  # the first launcher did not wait for this one
            return str(current[0]["verdict"]) if 0 in current else ""
        for first, state in self._states().items():
            if state["stopped"] and first not in current:
                reason = f"the launcher of rank {first} (host {state['host']}) was stopped before the start"
                self._cause = self._cause or StageEnd(STOPPED, reason, order=END_ORDER["stopped"])
        ends = [state["end"]["status"] for state in current.values() if state["end"]]
        states = [*own, *(RankState(**rank) for state in current.values() for rank in state["ranks"])]
        if self._cause is None and is_hung(states, self._hang_seconds):
            self._cause = StageEnd(HUNG, report(states), stacks(states), order=END_ORDER["lost"])
        if self._cause is not None or any(status not in (0, RESTART, *ENDED_EARLY) for status in ends):
            verdict = "failed"
        elif any(state["stopped"] for state in self._states().values()):
            verdict = "stopped"
        else:
            verdict = "restart" if RESTART in ends else ""
        if verdict != self._verdict:
            self._verdict = verdict
            self._publish(own, None)
        return verdict

    @property
    def _hang_seconds(self) -> float | None:
        """`engine.hang_seconds` of the current start."""
        return self._message.get("hang_seconds")

    def _current(self) -> dict[int, dict[str, Any]]:
        """Return the states of the watched launchers that belong to the current start, by first rank."""
        return {first: state for first, state in self._states().items() if state["launch"] == self._launch}

    def _states(self) -> dict[int, dict[str, Any]]:
        """Return the states of the watched launchers, in a copy that the thread does not change."""
        return dict(self._exchange.values)

    def _lost(self) -> str:
        """Return why this launcher lost the others; "" if it did not."""
        ranks, silence, now = self._ranks, stopped_limit(self._hang_seconds), time.monotonic()
        if self._exchange.failed:
            return f"the launcher or torchrun at {ranks.address} has ended: its store is closed"
        if now - self._exchange.answered > silence:
            quiet = now - self._exchange.answered
            return f"the store at {ranks.address} has not answered for {quiet:.0f} s: its host or network is down"
        states = self._states()
        missing = [first for first in self._exchange.watched if first not in states]
        if missing and now - self._began > CONNECT_TIMEOUT:
            reason = "it ended before, or its host cannot reach this address"
            where = f"{ranks.address} for {CONNECT_TIMEOUT:.0f} s"
            return f"the launcher of rank {missing[0]} has not connected to {where}: {reason}"
        for first, state in states.items():
            quiet, may_have_ended = now - self._exchange.changed[first], ranks.leads and state["stopped"]
            if quiet > silence and not may_have_ended:
                place = f"rank {first} (host {state['host']})"
                return f"the launcher of {place} has not answered for {quiet:.0f} s: its host or network is down"
        return ""
