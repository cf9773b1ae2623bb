"""`python -m benchmarks.gpu`: all measurements of a GPU, one JSON object per figure.

If a part fails, its row has the error and the other parts run. They run in a new process if the error made the device
unusable for the old one. --quick skips what does not fit into five minutes. --device cpu --tiny tests the code. The
measurements need PyTorch, transformers and, for the kernels, Triton; they need no other dependency of the stages.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from benchmarks import kernels
from benchmarks.gpu import ceilings, decode, profiles, training
from benchmarks.gpu.setting import Setting, failure
from benchmarks.machine import describe
from engine.parallel import dist


def _kernels(setting: Setting) -> Iterator[dict[str, Any]]:
    for case in kernels.CASES:
        try:
            yield kernels.measure(case, setting.device, tiny=setting.tiny).to_object()
        except Exception as problem:
            yield {"case": case, **failure(problem)}


PARTS: dict[str, Callable[[Setting], Iterator[dict[str, Any]]]] = {
    "ceilings": ceilings.run,
    "decode": decode.run,
    "kernels": _kernels,
    "training": training.run,
    "profile": profiles.run,
    "largest": training.largest,
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return 1 if a measurement failed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the code")
    parser.add_argument("--quick", action="store_true", help="a run of about five minutes")
    # After a lost device, the new process gets --failed, so that its exit status is 1.
    parser.add_argument("--failed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; choose from: {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; type --device cpu --tiny to test the code")
    world = dist.start("benchmarks", device=arguments.device)
    setting = Setting(world.device, arguments.tiny, arguments.quick)
    print(json.dumps({"machine": describe()}), flush=True)
    failed = int(arguments.failed)
    remaining = [name for name in PARTS if name in arguments.parts or not arguments.parts]
    while remaining:
        failed += _part(remaining.pop(0), setting)
        if remaining and setting.is_lost():
            flags = [f"--{name}" for name in ("tiny", "quick") if getattr(arguments, name)]
            options = ["--device", arguments.device, *flags, "--failed"]
            command = [sys.executable, "-m", "benchmarks.gpu", *remaining, *options]
            os.execv(sys.executable, command)
    dist.stop()
    return 1 if failed else 0


def _part(name: str, setting: Setting) -> int:
    """Print the rows of a part; return the number of failures."""
    failed, start = 0, perf_counter()
    try:
        for row in PARTS[name](setting):
            failed += "failed" in row
            print(json.dumps({"part": name, **row}), flush=True)
    except Exception as problem:
        failed += 1
        print(json.dumps({"part": name, **failure(problem)}), flush=True)
    if not setting.is_lost():
        setting.clear()
    print(json.dumps({"part": name, "seconds": round(perf_counter() - start, 1)}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
