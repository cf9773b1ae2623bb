"""What a person's own function gives, the calls spread over ranks, and who judges held-out answers.

A judge gives the gold score, in [0, 1], and trains nothing: a function of one's own (`evaluation.judge`), or for the
demo's prompts the gold scorer.
"""

from collections.abc import Sequence

from pipeline.config.schema import RunConfig
from pipeline.data.records import Prompt, Row
from pipeline.distributed import gather_by_index, gather_objects, rank, rank_count
from pipeline.errors import SharedError, UserError
from pipeline.evaluation.user_function import JUDGE, UserFunction, load_function

GOLD_SOURCE = "demo"  # whose prompts the gold scorer can read
Call = tuple[str, Row]
"""What a person's function is called with: an answer's text, and the row of the data that its prompt comes from."""


def load_judge(config: RunConfig) -> UserFunction | None:
    """The function that judges; None where none is asked for."""
    evaluation = config.evaluation
    return None if evaluation.judge is None else load_function(evaluation.judge, evaluation.judge_threads, key=JUDGE)


def judged(prompts: Sequence[Prompt], answers: Sequence[str], judge: UserFunction | None) -> list[float] | None:
    """The gold score of each answer, on every rank; None where nobody can tell.

    A function is asked about prompts that brought their rows along. Raises SharedError where a call fails.
    """
    if judge is None:
        return gold_scores(prompts, answers)
    asked = zip(prompts, answers, strict=True)
    calls = [(answer, prompt.row) for prompt, answer in asked if prompt.row is not None]
    return function_scores(judge, calls) if calls and len(calls) == len(prompts) else None


def gold_scores(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float] | None:
    """The gold scorer's, in [0, 1], of each answer; None unless all prompts are the demo's."""
    if not prompts or any(prompt.source != GOLD_SOURCE for prompt in prompts):
        return None
    from pipeline.demo.gold import gold_score

    return [gold_score(prompt.messages, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def function_scores(function: UserFunction, calls: Sequence[Call]) -> list[float]:
    """What a function gives for each call, the calls spread over ranks; all of it on every rank.

    Raises SharedError where a call fails on any rank.
    """
    places = range(rank(), len(calls), rank_count())
    mine: dict[int, float] = {}
    failure: UserError | None = None
    try:
        mine = dict(zip(places, function.scores([calls[place] for place in places]), strict=True))
    except UserError as problem:
        failure = problem
    said = [text for text in gather_objects(None if failure is None else str(failure)) if text is not None]
    if said:
        raise SharedError(said[0]) from failure
    return gather_by_index(mine)
