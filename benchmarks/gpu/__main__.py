"""`python -m benchmarks.gpu`: all that wants a GPU, one JSON object a figure; what fails is said, and the rest goes on,
in a new process where the device is lost to the old one.

--quick leaves out what does not fit into five minutes. --device cpu --tiny tries the code. Needs PyTorch, transformers
and, for the kernels, Triton; nothing else of what the stages need.
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
    """Run a command line; 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the code")
    parser.add_argument("--quick", action="store_true", help="a pass of about five minutes")
    parser.add_argument("--failed", action="store_true", help=argparse.SUPPRESS)  # something did in a process before
    arguments = parser.parse_args(argv)
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the code")
    world = dist.start("benchmarks", device=arguments.device)
    setting = Setting(world.device, arguments.tiny, arguments.quick)
    print(json.dumps({"machine": describe()}), flush=True)
    failed, left = int(arguments.failed), [name for name in PARTS if name in arguments.parts or not arguments.parts]
    while left:
        failed += _part(left.pop(0), setting)
        if left and setting.lost():
            flags = [f"--{name}" for name in ("tiny", "quick") if getattr(arguments, name)]
            command = [sys.executable, "-m", "benchmarks.gpu", *left, "--device", arguments.device, *flags, "--failed"]
            os.execv(sys.executable, command)
    dist.stop()
    return 1 if failed else 0


def _part(name: str, setting: Setting) -> int:
    """Print a part's rows; how many say that something failed."""
    failed, began = 0, perf_counter()
    try:
        for row in PARTS[name](setting):
            failed += "failed" in row
            print(json.dumps({"part": name, **row}), flush=True)
    except Exception as problem:
        failed += 1
        print(json.dumps({"part": name, **failure(problem)}), flush=True)
    if not setting.lost():
        setting.clear()
    print(json.dumps({"part": name, "seconds": round(perf_counter() - began, 1)}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
