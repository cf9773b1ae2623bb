"""Stages on a pretended device, one after another in one process: `python -m tests.pretended_gpu.stages RUN STAGE...`.

Ranks and their number of devices come from the environment; a fault of any stage ends it.
"""

from tests.pretended_gpu import cuda  # before torch  # isort: skip

import sys
from importlib import import_module
from pathlib import Path

from engine.parallel import dist
from pipeline.launch.worker import read_config
from tests.tiny import STAGES


def main(run_dir: Path, stages: list[str]) -> None:
    dist.start("stages")
    for stage in stages:
        import_module(f"{STAGES[stage]}.train").run(read_config(run_dir / stage), run_dir / stage)
        found = cuda.faults()
        assert not found, "\n".join(found)
    dist.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
