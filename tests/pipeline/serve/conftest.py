"""The models of the tests of the server, imported at the first use: a bare machine collects this file."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pipeline.serve.models import ServedModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, ServedModel]":
    """Tiny models of different weights."""
    from pipeline.chat.folder import ChatModel
    from pipeline.chat.participant import load
    from pipeline.serve.models import serve
    from tests.test_chat import save_model

    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("ppo", "sft")):
        save_model(root / name, seed)
    return {name: serve(load(ChatModel(name, root / name)), 4, None) for name in ("ppo", "sft")}
