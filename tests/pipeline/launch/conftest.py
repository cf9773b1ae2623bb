"""What the tests of the launcher share."""

from collections.abc import Iterator

import pytest

from tests.forked_launch import Launcher


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return a process that runs the commands of one file in turn."""
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()
