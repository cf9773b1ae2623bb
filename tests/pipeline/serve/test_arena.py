"""The arena: rounds over HTTP, and its options."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.chat.command import main
from pipeline.serve import command
from pipeline.serve.app import create_app
from pipeline.serve.arena import Arena
from pipeline.serve.models import ServedModel
from pipeline.serve.votes import Contestant, VoteFile
from tests.pipeline.serve.running import LIMIT, pause_after, served
from tests.test_chat import empty_run, save_model

CONTESTANTS = (Contestant("ppo", "aa"), Contestant("sft", "bb"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> VoteFile:
    return VoteFile(tmp_path_factory.mktemp("arena") / "votes.jsonl")


@pytest.fixture(autouse=True)
def votes(file: VoteFile) -> VoteFile:
    """The file of votes of the server, without votes."""
    file.path.unlink(missing_ok=True)
    return file


@pytest.fixture(scope="module")
def url(models: dict[str, ServedModel], file: VoteFile) -> Iterator[str]:
    arena = partial(Arena, list(models.values()), CONTESTANTS, file)
    with served(create_app(models, key=None, arena=arena)) as address:
        yield address


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=LIMIT))


def refusal(url: str, body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, body)
    return caught.value.code, json.load(caught.value)["error"]["message"]


def play(url: str, text: str = "hello", **sampling: Any) -> tuple[str, list[dict[str, Any]]]:
    """Play one round. Return its name and its events."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **sampling}
    name = post(f"{url}/arena/rounds", body)["round"]
    stream = urllib.request.urlopen(f"{url}/arena/rounds/{name}", timeout=LIMIT).read().decode()
    return name, [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line]


def answers(events: list[dict[str, Any]]) -> list[str]:
    return ["".join(event["text"] for event in events if event.get("side") == side) for side in (0, 1)]


def test_a_round_hides_the_names_until_the_vote(url: str, votes: VoteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, seen = iter([0, 1, 0]), set()
    monkeypatch.setattr("pipeline.serve.arena.secrets.randbelow", lambda _: next(drawn))
    for number in range(3):
        name, events = play(url, temperature=0)
        assert not any(word in json.dumps(events) for word in ("ppo", "sft"))
        assert events[-1] == {"done": True, "problem": None, "result": None}
        actual = post(f"{url}/arena/votes", {"round": name, "vote": "right", "comment": f"no. {number} 🙂"})
        row = list(votes.rows())[-1]
        left, right = answers(events)
        assert (row["left"]["answer"], row["right"]["answer"]) == (left, right) == (row["rejected"], row["chosen"])
        assert actual["names"] == [row["left"]["model"], row["right"]["model"]]
        assert row["prompt"] == [{"role": "user", "content": "hello"}]
        assert row["comment"] == f"no. {number} 🙂" and row["sampling"] == {"temperature": 0, "max_tokens": 8}
        assert actual["tally"]["votes"] == number + 1
        seen.add((tuple(actual["names"]), left))
    assert len(seen) == 2, "the sides are shuffled, and the names belong to the answers"
    assert {row["right"]["version"] for row in votes.rows()} == {"aa", "bb"}


def test_wrong_votes_and_wrong_rounds_are_refused(url: str, votes: VoteFile) -> None:
    name, _ = play(url)
    vote = {"round": name, "vote": "left"}
    assert refusal(f"{url}/arena/votes", {**vote, "vote": "up"})[0] == 400
    assert refusal(f"{url}/arena/votes", {**vote, "comment": "x" * 10_001})[0] == 400
    assert refusal(f"{url}/arena/votes", {**vote, "round": "none"})[0] == 404
    assert not list(votes.rows())
    post(f"{url}/arena/votes", vote)
    assert refusal(f"{url}/arena/votes", vote) == (
        409, "this round has a vote already; send another message to start a new round",
    )  # fmt: skip
    messages = [{"role": "user", "content": "hello"}]
    assert refusal(f"{url}/arena/rounds", {"messages": messages, "model": "ppo"}) == (
        400,
        "model: there is no such field",
    )
    assert len(list(votes.rows())) == 1


def test_a_vote_needs_complete_and_different_answers(
    url: str, models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = pause_after(2, models["sft"], monkeypatch)
    name = post(f"{url}/arena/rounds", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})["round"]
    assert refusal(f"{url}/arena/votes", {"round": name, "vote": "both"})[0] == 409
    go_on.set()
    urllib.request.urlopen(f"{url}/arena/rounds/{name}", timeout=LIMIT).read()
    post(f"{url}/arena/votes", {"round": name, "vote": "both"})
    name, events = play(url, top_p=1, max_tokens=1, temperature=0)
    if len(set(answers(events))) == 1:
        assert refusal(f"{url}/arena/votes", {"round": name, "vote": "left"})[0] == 409


def test_an_arena_needs_two_models_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_run(tmp_path, sft="finished")
    assert main([str(tmp_path), "--arena"]) == 2
    assert "the arena compares two models of a run" in capsys.readouterr().err
    assert main([str(tmp_path), "--arena", "--host", "0.0.0.0"]) == 2
    assert "--host 0.0.0.0 lets other machines connect, so a key is needed" in capsys.readouterr().err


def test_the_arena_and_the_chat_page_are_not_served_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["runs/x", "--web", "--arena"])
    assert "--arena: not allowed with argument --web" in capsys.readouterr().err


def test_the_arena_has_the_two_newest_stages_and_knows_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, only the page itself needs no key."""
    for seed, stage in enumerate(("sft", "ppo")):
        save_model(tmp_path / stage / "model", seed)
    stages = {stage: {"status": "finished", "produced": {"model": stage * 2}} for stage in ("sft", "ppo")}
    (tmp_path / "manifest.json").write_text(json.dumps({"identity": {}, "asked": "", "stages": stages}))
    seen = []

    def look(listener: command.Listener, app: Any, greeting: str) -> None:
        with served(app) as url:
            assert urllib.request.urlopen(url, timeout=LIMIT).status == 200
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/arena", timeout=LIMIT)
            request = urllib.request.Request(f"{url}/arena", headers={"Authorization": "Bearer k"})
            seen.append(json.load(urllib.request.urlopen(request, timeout=LIMIT)))
        seen.append(greeting.partition(" at ")[0])

    VoteFile(tmp_path / "votes.jsonl").append(
        {"vote": "right", "left": Contestant("sft", "sftsft").cast("a"), "right": Contestant("ppo", "ppoppo").cast("b")}
    )
    monkeypatch.setattr(command.Listener, "run", look)
    assert main([str(tmp_path), "--arena", "--port", "0", "--key", "k"]) == 0
    assert (seen[0]["first"], seen[0]["second"], seen[0]["wins"]) == ("ppo", "sft", 1)
    assert seen[1] == "arena of ppo and sft"
