"""Episodes in an OpenEnv environment: with a client that answers from memory, and with a real server (if installed).

The game: guess a digit with at most three tries. A wrong try costs 0.25, the right one gives 1.
"""

import importlib.util
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.evaluation.user_function import Dialogue, UserFunction, load_function

EXAMPLE = "examples/rewards/environment.py"
GAME = Path(__file__).with_name("environment_server.py")
SEED = 1
SECRET = random.Random(SEED).randrange(10)


class Client:
    """A client of the game, as `GenericEnvClient`."""

    def __init__(self, url: str, message_timeout_s: float) -> None:
        self.secret, self.tries = -1, 0

    def sync(self) -> "Client":
        return self

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def reset(self, seed: int) -> SimpleNamespace:
        self.secret = random.Random(seed).randrange(10)
        return SimpleNamespace(observation={"message": f"Game {seed}."})

    def step(self, action: dict[str, str]) -> SimpleNamespace:
        self.tries += 1
        is_right = int(action["message"]) == self.secret
        text = "Higher." if int(action["message"]) < self.secret else "Lower."
        reward = 1.0 if is_right else -0.25
        return SimpleNamespace(observation={"message": text}, reward=reward, done=is_right or self.tries == 3)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> UserFunction:
    core = ModuleType("openenv.core")
    vars(core)["GenericEnvClient"] = Client
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    for name, value in {"": "http://127.0.0.1:1", "_ACTION": "message", "_TEXT": "message"}.items():
        monkeypatch.setenv(f"ZEROCHAT_ENVIRONMENT{name}", value)
    return load_function(f"{EXAMPLE}:play")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the address of a server of the game."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv-core is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = probe.getsockname()
    process = subprocess.Popen([sys.executable, str(GAME), str(place[1])])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(place) == 0:
                break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{place[1]}"
    process.kill()
    process.wait()


@pytest.fixture
def on_server(server: str, monkeypatch: pytest.MonkeyPatch) -> UserFunction:
    monkeypatch.setenv("ZEROCHAT_ENVIRONMENT", server)
    return load_function(f"{EXAMPLE}:play")


@pytest.fixture(params=["in_memory", "on_server"])
def play(request: pytest.FixtureRequest) -> UserFunction:
    function: UserFunction = request.getfixturevalue(request.param)
    return function


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([SECRET], 1.0),
        ([(SECRET + 1) % 10, SECRET], 0.75),
        ([(SECRET + 1) % 10, (SECRET + 2) % 10, SECRET], 0.5),
        ([(SECRET + 1) % 10, (SECRET + 2) % 10, (SECRET + 3) % 10], -0.75),
        ([(SECRET + 1) % 10, None], -0.25),
    ],
    ids=["first", "second", "third", "never", "no tokens left"],
)
def test_an_episode_adds_up_the_rewards_of_its_steps(
    play: UserFunction, answers: list[int | None], reward: float
) -> None:
    dialogue = Dialogue(play, {"prompt": "Guess.", "reset": {"seed": SEED}})
    *earlier, last = [None if answer is None else str(answer) for answer in answers]
    for answer in earlier:
        messages = dialogue.reply(answer)
        assert messages is not None
        assert messages[0].content == ("Higher." if int(str(answer)) < SECRET else "Lower.")
    assert dialogue.reply(last) is None
    assert dialogue.rewards == {"function": pytest.approx(reward)}


def test_each_row_has_the_first_observation_of_its_seed(
    in_memory: UserFunction, capsys: pytest.CaptureFixture[str]
) -> None:
    in_memory.call.__globals__["write_rows"](2)
    assert capsys.readouterr().out.splitlines() == [
        f'{{"prompt": "Game {seed}.", "reset": {{"seed": {seed}}}}}' for seed in (0, 1)
    ]
