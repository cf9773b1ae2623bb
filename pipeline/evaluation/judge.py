"""Call user functions, distributed over ranks, and judge held-out answers.

A judge returns the gold score, in [0, 1]. The gold score is never used for training. The judge is a user function
(`evaluation.judge`), or the built-in gold scorer for the demo's prompts. A pair judge (`evaluation.pair_judge`)
compares two answers to the same prompt.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine import distributed
from pipeline import progress
from pipeline.config.schema import RunConfig
from pipeline.data.microbatches import gather_by_index
from pipeline.data.records import Prompt, Row
from pipeline.errors import SharedError, UserError

if TYPE_CHECKING:
    from pipeline.evaluation.user_function import UserFunction

GOLD_SOURCE = "demo"  # the data source whose prompts the gold scorer supports
Result = TypeVar("Result")
Call = tuple[str, Row]
"""The arguments of a user function: the text of an answer, and the data row of its prompt."""
Verdicts = tuple[float | None, float | None]
"""A pair judge's verdicts on one answer against another, for both orders: 1 better, 0 worse, None without a verdict."""


def load_judge(config: RunConfig, key: Literal["judge", "pair_judge"] = "judge") -> "UserFunction | None":
    """Load the function that a key of `evaluation` names; return None if the key is null."""
    where = getattr(config.evaluation, key)
    if where is None:
        return None
    from pipeline.evaluation.user_function import load_function

    return load_function(where, config.evaluation.judge_threads, key=f"evaluation.{key}")


def can_judge(prompts: Sequence[Prompt], judge: "UserFunction | None") -> bool:
    """Return whether answers to these prompts get a gold score: from the judge, or from the built-in gold scorer."""
    if judge is not None:
        return bool(prompts) and all(prompt.row is not None for prompt in prompts)
    if not prompts or any(prompt.source != GOLD_SOURCE for prompt in prompts):
        return False
    from pipeline.demo.truth import read_question

    # A user's file can be called demo.jsonl, too.
    return all(read_question(prompt.messages[-1].content) is not None for prompt in prompts)


def compare_pairs(
    prompts: Sequence[Prompt], answers: Sequence[str], others: Sequence[str], judge: "UserFunction"
) -> list[Verdicts] | None:
    """Return the verdicts on each of `answers` against that of `others`, on every rank; None if a data row is missing.

    The judge sees each pair in both orders, because judges prefer one position (Zheng et al., 2023, arXiv:2306.05685).
    Equal answers are a tie without a call. Raise SharedError on every rank if a call fails.
    """
    rows = [prompt.row for prompt in prompts if prompt.row is not None]
    if not rows or len(rows) < len(prompts):
        return None
    pairs = list(zip(answers, others, rows, strict=True))
    different = [at for at, (answer, other, _) in enumerate(pairs) if answer != other]
    calls = [pairs[at] for at in different] + [(pairs[at][1], pairs[at][0], pairs[at][2]) for at in different]
    results = _on_all_ranks(judge, judge.prefer, calls)
    verdicts: list[Verdicts] = [(0.5, 0.5)] * len(pairs)
    for number, at in enumerate(different):
        second = results[len(different) + number]
        verdicts[at] = (results[number], None if second is None else 1.0 - second)
    return verdicts


def judged(prompts: Sequence[Prompt], answers: Sequence[str], judge: "UserFunction | None") -> list[float] | None:
    """Return the gold score of each answer, on every rank; None if no judge supports these prompts.

    A user function needs the data row of every prompt. Raise SharedError on every rank if a call fails.
    """
    if not can_judge(prompts, judge):
        return None
    pairs = list(zip(prompts, answers, strict=True))
    if judge is None:
        from pipeline.demo.gold import gold_score

        return [gold_score(prompt.messages, answer) for prompt, answer in pairs]
    calls = [(answer, prompt.row) for prompt, answer in pairs if prompt.row is not None]
    return _on_all_ranks(judge, judge.score, calls)


def function_rewards(function: "UserFunction", calls: Sequence[Call]) -> dict[str, list[float]]:
    """Return the function's rewards of each call by name, on every rank. The calls are distributed over ranks.

    Raise SharedError on every rank if a call fails on any rank, or as `rewards_by_name` does.
    """
    return rewards_by_name(function, _on_all_ranks(function, function.rewards, calls))


def rewards_by_name(function: "UserFunction", rewards: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the rewards of all answers by name. Raise SharedError if the names differ from answer to answer."""
    names = list(rewards[0]) if rewards else []
    for each in rewards:
        if each.keys() != rewards[0].keys():
            raise SharedError(
                f"{function.key}={function.where} returned the rewards {', '.join(each)} for one answer and "
                f"{', '.join(names)} for another: return the same names for every answer"
            )
    return {name: [each[name] for each in rewards] for name in names}


def _on_all_ranks(
    function: "UserFunction", method: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
) -> list[Result]:
    """Return the result of each call on every rank, see `UserFunction.map`. Each rank makes some of the calls."""
    world = distributed.world()
    indices = range(world.rank, len(calls), world.size)
    local: dict[int, Result] = {}
    failure: UserError | None = None
    with progress.own().user_calls():
        try:
            local = dict(zip(indices, function.map(method, [calls[index] for index in indices]), strict=True))
        except UserError as problem:
            failure = problem
        raise_on_all_ranks(failure)
    return gather_by_index(local)


def raise_on_all_ranks(failure: UserError | None) -> None:
    """Raise SharedError on every rank if `failure` is an error on any rank. Every rank calls."""
    gathered = distributed.gather_objects(None if failure is None else str(failure))
    errors = [text for text in gathered if text is not None]
    if errors:
        raise SharedError(errors[0]) from failure
