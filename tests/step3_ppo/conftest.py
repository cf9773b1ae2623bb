import shutil
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with finished stages sft and reward."""
    from tests.step3_ppo.test_stage import write_run  # imported here because most tests need no models

    folder = tmp_path_factory.mktemp("finished")
    write_run(folder)
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run, which a test may change. Random weights (adapters) do not depend on earlier tests."""
    torch.manual_seed(1)
    return shutil.copytree(finished, tmp_path / "run")
