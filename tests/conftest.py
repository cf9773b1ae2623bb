"""Choose the tests that this machine can run, and start the longest files first.

A bare GPU machine has PyTorch, transformers and Triton, but not the packages that the stages import. Only the tests of
the engine and of the GPU's benchmarks run there. Without `-m gpu`, CUDA devices are hidden, because the tests are
written for CPUs.
"""

import gc
import os
from collections.abc import Generator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from tests.fork_server import share_fork_servers

HERE = Path(__file__).parent
STAGE_PACKAGES = ("pydantic", "hydra", "datasets")  # the stages import them, the engine does not
MISSING_PACKAGES = [name for name in STAGE_PACKAGES if find_spec(name) is None]
TESTS_WITHOUT_STAGE_PACKAGES = (
    "engine", "benchmarks/test_gpu.py", "benchmarks/test_dschat.py", "pipeline/models/test_on_gpu.py",
)  # fmt: skip
TESTS_WITH_STAGE_PACKAGES = ("engine/generation/test_vllm_backend.py",)  # of a folder without
# The longest files, 15 to 60 seconds each. They start first, so that the processes end at about the same time.
LONG_FILES = (
    "test_stages_on_simulated_gpu.py",
    "test_parity.py",
    "engine/test_simulated_gpu.py",
    "test_wheel.py",
    "test_resume.py",
    "test_out_of_memory.py",
)


def _needs_stage_packages(path: str) -> bool:
    return path in TESTS_WITH_STAGE_PACKAGES or not path.startswith(TESTS_WITHOUT_STAGE_PACKAGES)


collect_ignore = [
    path
    for path in (each.relative_to(HERE).as_posix() for each in (*HERE.rglob("test_*.py"), *HERE.glob("step*")))
    if MISSING_PACKAGES and _needs_stage_packages(path)
]


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices before any module counts them, unless GPU tests were selected. Share the fork servers."""
    share_fork_servers()
    if config.option.markexpr in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_report_header() -> str | None:
    """Name the missing packages and the number of test files that are not collected."""
    if not MISSING_PACKAGES:
        return None
    missing = ", ".join(MISSING_PACKAGES)
    count = sum(path.endswith(".py") for path in collect_ignore)
    return f"not installed: {missing}; {count} test files of the stages are not collected"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections. Later ones skip the millions of objects of imported modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_earlier_objects() -> None:
    """Let garbage collections skip what earlier files imported. The engine collects in each dry run."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let nanobind in Triton 3.9 free its objects, or it would print them as leaked. This takes a second."""
    if find_spec("triton") and Version(version("triton")) >= Version("3.9"):
        gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {str(HERE / name): number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(str(item.path), len(LONG_FILES)))
