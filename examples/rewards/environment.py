"""Episodes in an environment of OpenEnv (https://github.com/meta-pytorch/OpenEnv), a server with reset and step.

    pip install '.[environments]'
    export ZEROCHAT_ENVIRONMENT=http://127.0.0.1:8000
    python examples/rewards/environment.py 2000 > tasks.jsonl
    python train.py data.path=tasks.jsonl actor=RUN/sft stage=ppo ppo=grpo ppo.reward_model=false \
        ppo.reward_threads=32 ppo.reward_function=examples/rewards/environment.py:play

The third line writes one row per episode: its first observation is the prompt, and "reset" has the arguments
of reset. ZEROCHAT_ENVIRONMENT_ACTION is the field of the action that gets an answer, and ZEROCHAT_ENVIRONMENT_TEXT the
field of the observation that the policy reads. By default, they are those fields of the environment's schema that are
required texts, if there is exactly one.

All episodes of a rollout are open at the same time, so the server has to allow as many sessions
(`create_app(..., max_concurrent_envs=N)` with N = ppo.batch_size * ppo.samples).
"""

import json
import os
import sys
import urllib.request
from collections.abc import Generator
from functools import cache
from typing import Any

from openenv.core import GenericEnvClient

URL = os.environ.get("ZEROCHAT_ENVIRONMENT", "")
if not URL.startswith(("http://", "https://")):  # checked when the command starts
    raise ValueError("ZEROCHAT_ENVIRONMENT has to be the address of the environment's server, http://HOST:PORT")
SECONDS = 60  # for one reset or step
MOST_TURNS = 100


def play(answer: str | None, row: dict[str, Any]) -> Generator[str, str | None, float]:
    """Return the sum of the rewards of an episode. It ends when the environment is done or no tokens are left."""
    action, text = field("action"), field("observation")
    with GenericEnvClient(URL, message_timeout_s=SECONDS).sync() as environment:
        environment.reset(**row.get("reset", {}))
        total = 0.0
        for _ in range(MOST_TURNS):
            if answer is None:  # no tokens are left for another answer
                break
            result = environment.step({action: answer})
            total += float(result.reward or 0.0)
            if result.done:
                break
            answer = yield str(result.observation[text])
        return total


@cache
def field(kind: str) -> str:
    """Return the name of the text field of an "action" or "observation". Raise ValueError if there is no single one."""
    variable = f"ZEROCHAT_ENVIRONMENT_{'ACTION' if kind == 'action' else 'TEXT'}"
    if variable in os.environ:
        return os.environ[variable]
    with urllib.request.urlopen(f"{URL}/schema", timeout=SECONDS) as response:
        schema = json.load(response)[kind]
    names = [name for name in schema.get("required", ()) if schema["properties"][name].get("type") == "string"]
    if len(names) != 1:
        raise ValueError(f"set {variable} to one of {', '.join(schema['properties'])}")
    return names[0]


def write_rows(count: int) -> None:
    """Print a row for each of the seeds 0, 1, ...: the first observation of its episode, and the arguments of reset."""
    with GenericEnvClient(URL, message_timeout_s=SECONDS).sync() as environment:
        for seed in range(count):
            observation = environment.reset(seed=seed).observation
            print(json.dumps({"prompt": str(observation[field("observation")]), "reset": {"seed": seed}}))


if __name__ == "__main__":
    write_rows(int(sys.argv[1]))
