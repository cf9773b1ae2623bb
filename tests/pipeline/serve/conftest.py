"""What the tests of the server and of its pages share."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from pipeline.chat.folder import ChatModel
from pipeline.chat.participant import load
from pipeline.serve.models import ServedModel, serve
from tests.pipeline.serve.chromium import chromium
from tests.test_chat import save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    """Tiny models of different weights."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("ppo", "sft")):
        save_model(root / name, seed)
    return {name: serve(load(ChatModel(name, root / name)), 4, None) for name in ("ppo", "sft")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
