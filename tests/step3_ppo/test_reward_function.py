"""PPO with a reward function: without and with a reward model, on two ranks, and on held-out prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Generation
from engine.parallel import dtensors
from pipeline.config.schema import RunConfig
from pipeline.errors import SharedError, UserError
from pipeline.evaluation.user_function import JUDGE, UserFunction, load_function
from pipeline.stages.stage_run import StageRun
from step3_ppo.evaluate import ppo_evaluator
from step3_ppo.log import rollout_metrics
from step3_ppo.models import build_models, load_models
from step3_ppo.rollout import score_answers
from step3_ppo.setup import Ppo
from tests.ranks import run_ranks
from tests.step3_ppo.example_rollouts import learn
from tests.step3_ppo.test_stage import config, ppo_from, prompts, weights

# A score of text and row, which counts its calls and raises for rows with "bad".
TEXT = """
calls = 0

def score(answer, row):
    global calls
    calls += 1
    if row.get("bad"):
        raise KeyError("solution")
    return len(answer) + 100 * row["number"]
"""


def setting(folder: Path, **ppo: Any) -> RunConfig:
    (folder / "mine.py").write_text(TEXT)
    ppo.setdefault("reward_model", False)
    made = config(folder, reward_function=f"{folder}/mine.py:score", **ppo)
    return made if ppo["reward_model"] else made.model_copy(update={"reward_path": None})


def ppo_of(folder: Path, **ppo: Any) -> tuple[Ppo, StageRun]:
    return ppo_from(setting(folder, **ppo), folder, [{"number": n} for n in range(12)])


def test_the_function_gets_no_stop_string(run_folder: Path) -> None:
    ppo, _ = ppo_of(run_folder, advantage="rloo", batch_size=3, samples=2)
    ppo.rollout = ppo.rollout.model_copy(update={"stop": ["wor"]})
    answer = Generation(ppo.tokenizer.encode_answer("some words")[:-1], [], finished=True)
    assert ppo._calls([7], [answer]) == [("some", {"number": 7})]


def numbers_of(ppo: Ppo, actual: Any) -> list[int]:
    """Return the row numbers of a rollout's prompts."""
    return [[*map(list, ppo.prompts)].index(prompt) for prompt in actual.prompts]


def test_without_a_reward_model_the_critic_starts_from_the_actor_with_a_zero_head(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder)
    models = ppo.models
    assert set(models.engines) == {"actor", "critic", "reference"} and models.critic is not None
    actor = {name.removeprefix("lm."): p for name, p in models.actor.module.named_parameters()}
    body = {name.removeprefix("model."): p for name, p in models.critic.module.named_parameters()}
    assert not dtensors.full_tensor(body.pop("score.weight").detach()).any()
    assert body and all(torch.equal(dtensors.full_tensor(p), dtensors.full_tensor(actor[n])) for n, p in body.items())
    rollout = ppo.collect(1, stage)
    assert rollout.values is not None and not rollout.values.any()
    before = weights(models.critic)
    learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(models.critic), strict=True))
    # Building the critic's head must not change the actor's configuration.
    assert models.actor.module.lm.config.architectures == ["LlamaForCausalLM"]


def test_without_a_reward_model_the_function_gives_the_score(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, advantage="rloo", batch_size=3, samples=2, reward_threads=2)
    assert ppo.models.function is not None and ppo.models.function.threads == 2
    assert set(ppo.models.engines) == {"actor", "reference"}
    rollout = ppo.collect(1, stage)
    expected = [
        len(ppo.tokenizer.decode(response)) + 100 * number
        for response, number in zip(rollout.responses, numbers_of(ppo, rollout), strict=True)
    ]
    assert rollout.scores.tolist() == expected and rollout.function is None
    assert "function_score" not in rollout_metrics(rollout, ppo.compute_advantages(rollout))


SEVERAL = """
def score(answer, row):
    return {"brief": -len(answer), "number": row["number"]}
"""


def test_several_rewards_are_weighted_and_logged(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, reward_model=True, reward_weights={"brief": 0.5, "model": 2.0})
    (run_folder / "mine.py").write_text(SEVERAL)
    several = load_function(f"{run_folder}/mine.py:score")
    plain = replace(ppo.models, function=None, reward_weights={})
    ppo.models = replace(ppo.models, function=several)
    rollout = ppo.collect(1, stage)
    ppo.models = plain
    by_model = ppo.collect(1, stage).scores.tolist()
    brief = [-len(ppo.tokenizer.decode(response)) for response in rollout.responses]
    numbers = numbers_of(ppo, rollout)
    expected = [0.5 * b + n + 2 * m for b, n, m in zip(brief, numbers, by_model, strict=True)]
    assert rollout.scores.tolist() == pytest.approx(expected, rel=1e-5)
    figures = rollout_metrics(rollout, ppo.compute_advantages(rollout))
    assert figures["reward_brief"] == pytest.approx(sum(brief) / len(brief))
    assert figures["reward_number"] == pytest.approx(sum(numbers) / len(numbers))
    assert figures["reward_model"] == pytest.approx(sum(by_model) / len(by_model), rel=1e-5)
    ppo.models = replace(plain, function=several, reward_weights={"brevity": 1.0})
    with pytest.raises(SharedError, match=r"reward_weights\.brevity weighs .* the rewards are brief, number, model"):
        ppo.collect(2, stage)
    (run_folder / "mine.py").write_text(SEVERAL.replace("brief", "model"))
    ppo.models = replace(plain, function=load_function(f"{run_folder}/mine.py:score"))
    with pytest.raises(SharedError, match="a reward with the name model, which is the name of the reward model"):
        ppo.collect(2, stage)


@pytest.mark.parametrize("reward_model", [False, True])
def test_held_out_answers_are_scored_by_the_same_sum(reward_model: bool, run_folder: Path) -> None:
    made = setting(run_folder, reward_model=reward_model)
    sources = load_models(made, run_folder)
    models = build_models(made, sources, actor_steps=1, critic_steps=1)
    asked = [replace(prompt, row={"number": n}) for n, prompt in enumerate(prompts())]
    judge = UserFunction("mine.py:judge", run_folder, lambda answer, row: row["number"] / 4, key=JUDGE)
    evaluator = ppo_evaluator(made, models, sources.tokenizer, asked, run_folder / "ppo")
    evaluator = replace(evaluator, judge=judge)
    judged = evaluator.grade(["words", "to learn", ""])
    assert judged.gold == [0.0, 0.25, 0.5] and judged.metrics["gold_score"] == 0.25
    by_function = [5.0, 108.0, 200.0]
    if not reward_model:
        assert judged.scores == by_function and judged.function is None
        assert judged.metrics == {"eval_score": pytest.approx(313 / 3), "gold_score": 0.25}
        return
    without = replace(models, function=None)
    plain = ppo_evaluator(made, without, sources.tokenizer, prompts(), run_folder / "ppo").grade(judged.answers)
    assert judged.function == by_function and plain.function is None
    assert judged.scores == pytest.approx([a + b for a, b in zip(plain.scores, by_function, strict=True)])
    assert judged.metrics["eval_function_score"] == pytest.approx(313 / 3)


def test_a_held_out_answer_that_was_cut_is_scored_within_its_length(run_folder: Path) -> None:
    """One more token would exceed the positions of a model whose context is the longest prompt and answer."""
    made = config(run_folder)
    made = made.model_copy(update={"rollout": made.rollout.model_copy(update={"max_new_tokens": 3})})
    sources = load_models(made, run_folder)
    models, words = build_models(made, sources, actor_steps=1, critic_steps=1), sources.tokenizer
    evaluator = ppo_evaluator(made, models, words, prompts(), run_folder / "ppo")
    texts = ["some words to learn from", "words", ""]
    answers = [[*words.encode_answer(text)[:3][:-1], words.end_id] for text in texts]
    asked = [words.encode_prompt(prompt.messages) for prompt in prompts()]
    expected = score_answers(models, asked, answers, pad_id=words.pad_id, budget=64)
    assert evaluator.grade(texts).scores == pytest.approx(expected.total)


def one_rollout(folder: Path) -> dict[str, Any]:
    """Run a rollout and its update. Return the results, this rank's calls, and the error of a failing call."""
    torch.set_num_threads(1)
    ppo, stage = ppo_of(folder)
    rollout = ppo.collect(1, stage)
    assert ppo.models.function is not None
    called = ppo.models.function.call.__globals__["calls"]
    learned = learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    # This row is on rank 1.
    ppo.rows = [{"number": 0, "bad": number == numbers_of(ppo, rollout)[1]} for number in range(12)]
    with pytest.raises(SharedError) as caught:
        ppo.collect(1, stage)
    return {"rollout": rollout, "calls": called, "learned": learned, "said": str(caught.value)}


def test_two_ranks_divide_the_calls_and_score_like_one_rank(run_folder: Path) -> None:
    single = one_rollout(run_folder)
    several = run_ranks(one_rollout, 2, run_folder)
    assert single["calls"] == 6 and [rank["calls"] for rank in several] == [3, 3]
    assert "raised KeyError: 'solution'" in single["said"] and issubclass(SharedError, UserError)
    for rank in several:
        assert rank["rollout"].responses == single["rollout"].responses
        assert rank["rollout"].scores.tolist() == single["rollout"].scores.tolist()
        assert rank["learned"] == pytest.approx(single["learned"], rel=2e-3, abs=2e-4)
        assert rank["said"] == single["said"] and "bad: True" in rank["said"]
