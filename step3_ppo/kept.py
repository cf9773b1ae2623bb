"""rollouts.jsonl: some answers of each rollout with what they scored and earned, so that a person sees what is learned
from, and can work the figures of metrics.jsonl out again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.figures import on_host
from pipeline.distributed import is_rank_zero
from pipeline.files import explained_disk
from step3_ppo.advantages import kl_k1
from step3_ppo.rollout import Rollout
from step3_ppo.targets import Targets

ROLLOUTS = "rollouts.jsonl"


def keep_answers(
    folder: Path,
    step: int,
    rollout: Rollout,
    targets: Targets,
    text: Callable[[list[int]], str],
    *,
    answers: int,
    tokens: bool,
) -> None:
    """Append the first `answers` of a rollout, on the leading rank; with `tokens` what stands at each of their tokens.

    `text` turns token ids into text, control tokens included.
    """
    if not answers or not is_rank_zero():
        return
    lines = "".join(
        json.dumps({"step": step, **line}, ensure_ascii=False) + "\n"
        for line in told(rollout, targets, text, answers=answers, tokens=tokens)
    )
    with explained_disk(folder), (folder / ROLLOUTS).open("a", encoding="utf-8", newline="\n") as file:
        file.write(lines)


def told(
    rollout: Rollout, targets: Targets, text: Callable[[list[int]], str], *, answers: int, tokens: bool
) -> list[dict[str, Any]]:
    """The lines of the first answers. `kl` is the log-ratio to the reference, summed; `reward` what an answer earned in
    all: score, penalties, and the KL where that counts in the reward; `advantage` the mean over its tokens.
    """
    count = min(answers, len(rollout))
    names = {"logprobs": rollout.logprobs, "generator": rollout.generator, "reference": rollout.reference}
    names |= {"values": rollout.values, "rewards": targets.rewards, "returns": targets.returns}
    tables = {
        name: table[:count].float()
        for name, table in (names | {"advantages": targets.advantages}).items()
        if table is not None
    }
    each = {"score": rollout.scores, "finished": rollout.finished, "mask": rollout.response_mask}
    if rollout.function is not None:
        each["function_score"] = rollout.function
    at, of = on_host((tables, {name: table[:count].float() for name, table in each.items()}))  # one wait
    mask = of["mask"].bool()
    found = []
    for place in range(count):
        here = {name: table[place][mask[place]] for name, table in at.items()}
        line = {
            "prompt": text(rollout.prompts[place]),
            "answer": text(rollout.responses[place]),
            "finished": bool(of["finished"][place]),
            "tokens": len(rollout.responses[place]),
            "score": of["score"][place].item(),
            "reward": here["rewards"].sum().item(),
            "advantage": here["advantages"].mean().item(),
        }
        if "function_score" in of:
            line["function_score"] = of["function_score"][place].item()
        if "reference" in here:
            line["kl"] = kl_k1(here["logprobs"], here["reference"]).sum().item()
        if tokens:
            line["token_ids"] = rollout.responses[place]
            line |= {name: [float(f"{value:.6g}") for value in table.tolist()] for name, table in here.items()}
        found.append(line)
    return found
