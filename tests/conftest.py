"""A bare GPU machine has PyTorch, transformers and Triton, and none of what the stages need: there the engine's tests
run, and the others are left out and named. Without `-m gpu` no test sees a GPU: they are written for CPUs.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = ("pydantic", "hydra", "datasets")  # what a stage imports and the engine does not
LACKING = [name for name in NEEDED if find_spec(name) is None]
WITHOUT = ("engine", "benchmarks", "pipeline/models/test_on_gpu.py")
# The longest files, a quarter to a whole minute each. They start first, so that the processes end at the same time.
LONG = (
    "test_on_pretended_gpu.py",
    "test_parity.py",
    "engine/kernels_triton/test_compile.py",
    "engine/test_pretended_gpu.py",
    "test_wheel.py",
    "engine/test_many_machines.py",
    "test_resume.py",
    "test_out_of_memory.py",
)

collect_ignore = [
    str(path.relative_to(HERE))
    for path in HERE.rglob("test_*.py")
    if LACKING and not path.relative_to(HERE).as_posix().startswith(WITHOUT)
]


def pytest_configure(config: pytest.Config) -> None:
    """Before anything asks CUDA how many devices there are."""
    if config.option.markexpr in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_report_header() -> str | None:
    """Say what is left out."""
    if not LACKING:
        return None
    return f"without {', '.join(LACKING)}: {len(collect_ignore)} files of tests of the pipeline and stages left out"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(HERE / name): place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(str(item.path), len(LONG)))
