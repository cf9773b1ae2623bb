"""A module run on several ranks of this machine, each printing one JSON object."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, run_command
from benchmarks.record import ROOT


def run_ranks(
    python: Path | str, module: str, arguments: Sequence[str], *, ranks: int, limit: float
) -> list[dict[str, Any]]:
    """Start `module` through torchrun, one thread a rank, and read what the ranks print. Raises BenchFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
    words = ["env", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", str(python), *launch, f"--master-port={port}"]
    done = run_command([*words, "-m", module, *arguments], folder=ROOT, limit=limit)
    return printed(done.output, ranks)


def printed(output: str, ranks: int) -> list[dict[str, Any]]:
    """The objects that the ranks printed. Raises BenchFailed where one is missing."""
    found, decoder = [], json.JSONDecoder()
    for line in output.splitlines():
        rest = line
        while rest.startswith("{"):  # ranks that print at once may share a line
            value, end = decoder.raw_decode(rest)
            found.append(value)
            rest = rest[end:].lstrip()
    if len(found) != ranks:
        raise BenchFailed(f"{len(found)} of {ranks} ranks left figures:\n{output[-2000:]}")
    return found
