"""The commands `zerochat serve` and `zerochat chat --web`: models, addresses, keys, and mistakes."""

import re
from pathlib import Path

import pytest

from pipeline.chat.command import main
from pipeline.chat.folder import find_all
from pipeline.serve.command import Listener
from tests.test_chat import empty_run, save_model


def test_the_page_offers_all_finished_stages_newest_first(tmp_path: Path) -> None:
    empty_run(tmp_path, sft="finished", reward="finished", ppo="finished")
    assert [model.name for model in find_all(tmp_path)] == ["ppo", "sft"]
    (tmp_path / "sft" / "config.yaml").write_text("")
    assert [model.name for model in find_all(tmp_path)] == ["ppo", "sft", "base"]
    assert [model.name for model in find_all(tmp_path / "sft")] == ["sft"]


def test_the_first_address_is_that_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "mine", 0)
    greetings = []
    monkeypatch.setattr(Listener, "run", lambda _, app, greeting: greetings.append(greeting))
    assert main([str(tmp_path / "mine"), "--web"]) == 0
    assert re.match(r"chat page of mine at http://127\.0\.0\.1:\d+/, API at http", greetings[0])


@pytest.mark.parametrize(("option", "variable", "key"), [(None, "k\n", "k"), ("o ", "k", "o"), (None, "\n", None)])
def test_white_space_around_a_key_does_not_count(
    option: str | None, variable: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that a cluster mounts from a file ends with a line break, which no client can send."""
    monkeypatch.setenv("ZEROCHAT_KEY", variable)
    listener = Listener("127.0.0.1", 0, option)
    listener.socket.close()
    assert listener.key == key
