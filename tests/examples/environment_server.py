"""A server of OpenEnv with the game of test_environment.py: `python environment_server.py PORT`."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """One try."""

    message: str


class Hint(Observation):
    """What the player reads."""

    message: str


class Game(Environment[Guess, Hint, State]):
    """Guess a digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._secret, self._tries = random.Random(seed).randrange(10), 0
        return Hint(message=f"Game {seed}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._tries += 1
        is_right = int(action.message) == self._secret
        text = "Higher." if int(action.message) < self._secret else "Lower."
        return Hint(message=text, reward=1.0 if is_right else -0.25, done=is_right or self._tries == 3)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
