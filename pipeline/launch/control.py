"""What the launchers of one job tell one another where torchrun or Slurm started several.

The first launcher reads the run folder and decides; the others do as it says. They talk through PyTorch's
TCP store: torchrun's own where it keeps one, else one that the first launcher opens and that all workers
join as clients, so that stages follow one another without a race for the port.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipeline.launch.failure import ENDED_EARLY, OUT_OF_MEMORY
from pipeline.launch.ranks import Ranks

PATIENCE = 2 * 86400.0
"""Seconds to wait for the slowest rank of a stage."""
FAREWELL = 30.0
"""Seconds that the last message has to be read in."""


class Lost(RuntimeError):
    """The launcher that leads is gone."""


class Control:
    """The line between launchers. With one launcher every call is answered at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent = 0
        self._alone = ranks.local == ranks.world
        self._store: Any = None if self._alone else self._connect()

    def _connect(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore

        opens = self._ranks.leads and not self._ranks.agent_store
        store = TCPStore(
            self._ranks.address,
            self._ranks.port,
            is_master=opens,
            timeout=timedelta(minutes=15),
            wait_for_workers=False,
        )
        return PrefixStore(f"zerochat/launchers/{self._ranks.attempt}", store)

    @property
    def keeps_store(self) -> bool:
        """True where the workers find a store that outlives them."""
        return not self._alone

    def say(self, message: dict[str, Any]) -> None:
        """The leader's next message to the others."""
        if self._store is not None:
            self._store.set(f"message/{self._sent}", json.dumps(message))
        self._sent += 1

    def hear(self) -> dict[str, Any]:
        """The next message of the leader; waits for it. Raises Lost when the leader is gone."""
        try:
            while not self._store.check([f"message/{self._sent}"]):  # not wait(): that would be deaf to signals
                time.sleep(0.2)
            message: dict[str, Any] = json.loads(self._store.get(f"message/{self._sent}"))
        except RuntimeError as problem:
            raise Lost("the first rank's launcher is gone") from problem
        self._sent += 1
        self._store.add(f"heard/{self._sent}", 1)
        return message

    def wait_until_heard(self) -> None:
        """Give the others time to read the last message before this process, and maybe its store, ends."""
        self._reached(f"heard/{self._sent}", self._ranks.world - 1, FAREWELL)

    def report_end(self, stage: str, status: int) -> bool:
        """Report how this launcher's ranks of a stage ended. True for the first launcher that reports a failure.

        After OUT_OF_MEMORY the stage is started again, so it fails nobody.
        """
        if status in ENDED_EARLY:
            self.report_stop()
        elif self._store is None:
            return status != 0
        elif status == OUT_OF_MEMORY:
            return bool(self._store.add(f"memory/{self._sent}", 1) == 1)
        elif status == 0:
            self._store.add(f"ended/{stage}", 1)
        else:
            return bool(self._store.add("failed", 1) == 1)
        return False

    def report_stop(self) -> None:
        """This launcher was asked to stop: nobody need wait for it."""
        if self._store is not None:
            self._store.add("stopped", 1)

    def all_ended(self, stage: str) -> bool:
        """Wait until all launchers' ranks have ended a stage; False where one failed or was stopped."""
        return self._reached(f"ended/{stage}", self._ranks.world, PATIENCE, until=self.others)

    def others(self) -> str:
        """Return how other launchers fare: "failed" if one reported a failure or the store is gone, "stopped" if one
        was asked to stop, "memory" if a rank of the stage that runs now is out of memory, else "".
        """
        if self._store is None:
            return ""
        try:
            found = {"failed": "failed", "stopped": "stopped", f"memory/{self._sent}": "memory"}
            return next((name for key, name in found.items() if self._store.add(key, 0) > 0), "")
        except RuntimeError:
            return "failed"

    def _reached(self, key: str, count: int, seconds: float, until: Callable[[], str] = str) -> bool:
        """Wait for a count, or until there is a reason not to."""
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
