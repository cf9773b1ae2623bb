"""Exchange messages between the launchers of one job, if torchrun or Slurm started several launchers.

The first launcher reads the run folder and decides what to run. The other launchers follow its messages. Messages
travel through a PyTorch TCPStore. If torchrun has a store, the launchers use that store. Otherwise the first launcher
opens one, and all workers join as clients. The store outlives the stages, so no stage has to open the port again.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipeline.launch.failure import ENDED_EARLY, RESTART
from pipeline.launch.ranks import Ranks

PATIENCE = 2 * 86400.0
"""Seconds to wait for the slowest rank of a stage."""
LAST_MESSAGE_TIMEOUT = 30.0
"""Seconds to wait until the other launchers have received the last message."""


class LeaderLost(RuntimeError):
    """The first launcher has ended, or its store does not answer."""


class Control:
    """The message channel between launchers. With one launcher there is no store, and every call returns at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._message_count = 0
        self._is_only_launcher = ranks.local == ranks.world
        self._store: Any = None if self._is_only_launcher else self._connect()

    def _connect(self) -> Any:
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
    def keeps_store(self) -> bool:
        """Return whether the workers can join a store that outlives them."""
        return not self._is_only_launcher

    def send(self, message: dict[str, Any]) -> None:
        """Send the next message from the first launcher to all others."""
        if self._store is not None:
            self._store.set(f"message/{self._message_count}", json.dumps(message))
        self._message_count += 1

    def receive(self) -> dict[str, Any]:
        """Wait for the next message of the first launcher and return it. Raise LeaderLost if the store is gone."""
        try:
            while not self._store.check([f"message/{self._message_count}"]):  # store.wait() would block signals
                time.sleep(0.2)
            message: dict[str, Any] = json.loads(self._store.get(f"message/{self._message_count}"))
        except RuntimeError as problem:
            raise LeaderLost("the first rank's launcher has ended") from problem
        self._message_count += 1
        self._store.add(f"received/{self._message_count}", 1)
        return message

    def wait_until_received(self) -> None:
        """Wait until all launchers have received the last message, because this process may own the store."""
        self._wait_for_count(f"received/{self._message_count}", self._ranks.world - 1, LAST_MESSAGE_TIMEOUT)

    def report_end(self, stage: str, status: int) -> bool:
        """Report how this launcher's ranks of a stage ended. Return True for the first launcher that reports a failure.

        RESTART does not count as a failure of the job, because the stage restarts.
        """
        if status in ENDED_EARLY:
            self.report_stop()
        elif self._store is None:
            return status != 0
        elif status == RESTART:
            return bool(self._store.add(f"restart/{self._message_count}", 1) == 1)
        elif status == 0:
            self._store.add(f"ended/{stage}", 1)
        else:
            return bool(self._store.add("failed", 1) == 1)
        return False

    def report_stop(self) -> None:
        """Report that this launcher received a stop signal, so that other launchers do not wait for its ranks."""
        if self._store is not None:
            self._store.add("stopped", 1)

    def all_ended(self, stage: str) -> bool:
        """Wait until the ranks of all launchers have ended a stage. Return False if one failed or was stopped."""
        return self._wait_for_count(f"ended/{stage}", self._ranks.world, PATIENCE, until=self.others)

    def others(self) -> str:
        """Return the state of the other launchers.

        "failed": a launcher reported a failure, or the store is gone.
        "stopped": a launcher received a stop signal.
        "restart": a rank of the current stage requested a restart.
        "": none of these.
        """
        if self._store is None:
            return ""
        try:
            states = {"failed": "failed", "stopped": "stopped", f"restart/{self._message_count}": "restart"}
            return next((state for key, state in states.items() if self._store.add(key, 0) > 0), "")
        except RuntimeError:
            return "failed"

    def _wait_for_count(self, key: str, count: int, seconds: float, until: Callable[[], str] = str) -> bool:
        """Wait until a counter of the store reaches `count`. Return False on a timeout or if `until()` is not ""."""
        deadline = time.monotonic() + seconds
        while self._store is not None and time.monotonic() < deadline:
            try:
                if self._store.add(key, 0) >= count:
                    return True
            except RuntimeError:
                return False
            if until():
                return False
            time.sleep(0.2)
        return self._store is None
