"""PPO with a reward function that is a generator: conversations of several turns, against independent numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Generation, Sampling
from pipeline.config.check_machine import check_paths
from pipeline.config.schema import RunConfig
from pipeline.data.records import Message, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import SharedError, UserError
from pipeline.evaluation.episodes import _groups, play_episodes
from pipeline.evaluation.samples import SAMPLES, Sample, write_samples
from pipeline.evaluation.user_function import JUDGE, load_function
from pipeline.stages.stage_run import StageRun
from step3_ppo.batches import collate
from step3_ppo.evaluate import ppo_evaluator
from step3_ppo.setup import Ppo
from tests import composed
from tests.ranks import run_ranks
from tests.step3_ppo.example_rollouts import learn
from tests.step3_ppo.test_stage import config, ppo_from, tokenizer

# As many messages as the number of the row; the reward counts the answers, and is negative if no tokens were left.
TEXT = """
def talk(answer, row):
    answers = 1
    for turn in range(row["number"]):
        answer = yield f"more {turn}"
        if answer is None:
            return -answers
        answers += 1
    return answers
"""


def setting(folder: Path, text: str = TEXT, new_tokens: int = 36, **ppo: Any) -> RunConfig:
    (folder / "mine.py").write_text(text)
    made = config(folder, reward_model=False, reward_function=f"{folder}/mine.py:talk", advantage="rloo", **ppo)
    rollout = made.rollout.model_copy(update={"max_new_tokens": new_tokens, "stop": ["o", "e"]})
    return made.model_copy(update={"reward_path": None, "rollout": rollout})


def ppo_of(folder: Path, text: str = TEXT, **ppo: Any) -> tuple[Ppo, StageRun]:
    actual, stage = ppo_from(setting(folder, text, **ppo), folder, [{"number": n % 4} for n in range(12)])
    actual.prompts = [actual.prompts[n % 3] for n in range(12)]  # short, so that answers and messages follow
    return actual, stage


class ScriptedEngine:
    """An engine whose n-th call answers every prompt with the n-th text of a script, without a model."""

    def __init__(self, tokenizer: ChatTokenizer, script: Sequence[str], *, cut: bool = False) -> None:
        self.flip, self.tokenizer, self.script, self.cut = self, tokenizer, list(script), cut
        self.contexts: list[list[list[int]]] = []
        self.settings: list[Sampling] = []

    @contextmanager
    def generating(self, **_: Any) -> Iterator["ScriptedEngine"]:
        yield self

    def assign(self, lengths: Sequence[int]) -> list[int]:
        return [*range(len(lengths))]

    def generate(self, prompts: list[list[int]], sampling: Sampling, *_: Any, **__: Any) -> list[Generation]:
        ids = self.tokenizer.encode_answer(self.script[len(self.contexts)])[: -1 if self.cut else None]
        self.contexts.append(prompts)
        self.settings.append(sampling)
        return [Generation(ids, [-0.5] * len(ids), not self.cut) for _ in prompts]


def scripted(tmp_path: Path, text: str, script: Sequence[str], new_tokens: int = 200, *, cut: bool = False) -> Any:
    (tmp_path / "mine.py").write_text(text)
    engine: Any = ScriptedEngine(tokenizer(), script, cut=cut)
    prompt = engine.tokenizer.encode_prompt((Message("user", "some words"),))
    sampling = Sampling(max_new_tokens=new_tokens, end_ids=engine.tokenizer.end_ids)
    function = load_function(f"{tmp_path}/mine.py:talk")
    rows = [{"number": 1}]
    episodes = play_episodes(engine, function, engine.tokenizer, [prompt], rows, [sampling], keep=True)
    return engine, prompt, episodes[0][0]


def test_an_episode_has_the_tokens_that_the_template_gives_the_whole_conversation(tmp_path: Path) -> None:
    engine, prompt, episode = scripted(tmp_path, TEXT, ["words", "more"])
    turns = [("user", "some words"), ("assistant", "words"), ("user", "more 0")]
    second = engine.tokenizer.encode_prompt([Message(*turn) for turn in turns])
    assert engine.contexts == [[prompt], [second]]
    last = engine.tokenizer.encode_answer("more")
    assert [*prompt, *episode.token_ids] == [*second, *last]
    first = len(engine.tokenizer.encode_answer("words"))
    expected = [True] * first + [False] * (len(second) - len(prompt) - first) + [True] * len(last)
    assert episode.sampled == expected and episode.logprobs == [-0.5] * sum(expected)
    assert episode.finished and episode.text == "words\n\n> more 0\n\nmore" and episode.rewards == {"function": 2.0}
    assert engine.settings[0].seed != engine.settings[1].seed  # each turn has random numbers of its own
    assert engine.settings[1].max_new_tokens == 200 - (len(second) - len(prompt))


def test_results_of_tools_are_turns_of_tools(tmp_path: Path) -> None:
    text = (
        "def talk(answer, row):\n"
        "    answer = yield [{'role': 'tool', 'content': {'sum': 5}}, {'role': 'tool', 'content': '6'}]\n"
        "    return 1.0"
    )
    engine, prompt, episode = scripted(tmp_path, text, ["words", "more"])
    (context,) = engine.contexts[1]
    first, second = (f"<|user|><tool_response>{text}</tool_response><|end|>" for text in ('{"sum": 5}', "6"))
    expected = f"words<|end|>{first}{second}<|assistant|>"
    assert engine.tokenizer.hf.decode(context[len(prompt) :]) == expected
    assert episode.text == 'words\n\n> {"sum": 5}\n> 6\n\nmore' and episode.rewards == {"function": 1.0}


def test_a_stop_string_is_followed_by_the_end_token(tmp_path: Path) -> None:
    engine: Any = ScriptedEngine(tokenizer(), ["", ""])
    made = engine.tokenizer
    stopped = made.encode_answer("some wor")[:-1]
    engine.generate = lambda prompts, *_, **__: (
        engine.contexts.append(prompts) or [Generation(stopped, [-0.5] * len(stopped), True) for _ in prompts]
    )
    (tmp_path / "mine.py").write_text(TEXT)
    function = load_function(f"{tmp_path}/mine.py:talk")
    sampling = Sampling(max_new_tokens=200, stop=("wor",))
    episode = play_episodes(engine, function, made, [[7]], [{"number": 1}], [sampling], keep=True)[0][0]
    assert engine.contexts[1] == [[7, *stopped, made.end_id, *made.encode_messages([Message("user", "more 0")])]]
    assert episode.text == "some\n\n> more 0\n\nsome" and episode.sampled[len(stopped)] is False


@pytest.mark.parametrize("case", ["message", "answer", "cut"])
def test_without_tokens_for_another_answer_the_function_gets_none(case: str, tmp_path: Path) -> None:
    made = tokenizer()
    answer, message = len(made.encode_answer("words")), len(made.encode_messages([Message("user", "more 0")]))
    longest = {"message": answer + message, "answer": answer - 1, "cut": 200}[case]
    _, _, episode = scripted(tmp_path, TEXT, ["words"], longest, cut=case == "cut")
    assert not episode.finished and episode.rewards == {"function": -1.0} and episode.text.startswith("w")
    assert len(episode.token_ids) == (answer - 1 if case != "message" else answer) and all(episode.sampled)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def talk(answer, row):\n    yield 5", "yielded 5, not a text or messages of the roles user and tool,"),
        ("def talk(answer, row):\n    yield {'role': 'system', 'content': 'a'}", "yielded {'role': 'system'"),
        ("def talk(answer, row):\n    yield [{'role': 'tool', 'content': [{'image': 1, 'text': 2}]}]", "yielded "),
        ("def talk(answer, row):\n    yield []", r"yielded \[\], not a text or messages"),
        ("def talk(answer, row):\n    yield 'a'", "returned NoneType, not a number"),
        ("def talk(answer, row):\n    yield 'a'\n    raise KeyError('b')", r"raised KeyError: 'b' \(line 3\)"),
        ("def talk(answer, row):\n    while True: yield 'a' * 999", "yielded a message after it got None"),
        ("def talk(answer, row):\n    yield 'a'\n    return float('nan')", "returned nan, not a finite number"),
    ],
)
def test_wrong_generators_are_explained(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SharedError, match=rf"mine.py:talk {message}"):
        scripted(tmp_path, text, ["words"] * 9)


def test_groups_by_hand() -> None:
    # (tokens, tokens that may follow): the positions of the model are those of the third, 10 + 8 = 18
    sizes = [(9, 9), (5, 9), (10, 8), (16, 1), (2, 5)]
    groups = _groups(sizes)
    assert groups == [[0, 1, 4], [2], [3]]
    for group in groups:
        assert max(sizes[at][0] for at in group) + max(sizes[at][1] for at in group) <= 18


def test_messages_are_context_and_not_scored() -> None:
    sampled = [[True, True, False, True], [True], [True, False, True]]
    responses = [[1, 2, 30, 4], [5], [6, 31, 7]]
    batch = collate([[7, 8], [9], [9]], responses, [2, 0], pad_id=0, sampled=sampled)
    assert batch.input_ids.tolist() == [[9, 6, 31, 7, 0, 0], [7, 8, 1, 2, 30, 4]]
    assert batch.scored.tolist() == [1, 3, 8, 9, 11] and batch.response_lengths == [2, 3]
    assert batch.input_ids.flatten()[batch.ends].tolist() == [7, 4]
    packed = collate([[7, 8], [9], [9]], responses, [2, 0], pad_id=0, packing=True, sampled=sampled)
    assert packed.input_ids[0, packed.scored].tolist() == [6, 7, 1, 2, 4]


def test_log_probabilities_are_those_of_the_whole_conversation(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, batch_size=6, samples=2, minibatches=2)
    rollout = ppo.collect(1, stage)
    assert rollout.sampled is not None and rollout.response_mask.sum(1).tolist() == rollout.lengths
    model = AutoModelForCausalLM.from_pretrained(run_folder / "sft" / "model").eval()
    several = 0
    for i, (prompt, response, sampled) in enumerate(
        zip(rollout.prompts, rollout.responses, rollout.sampled, strict=True)
    ):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :-1] / 0.9).log_softmax(-1)
        of_token = logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(prompt) - 1 :]
        expected = of_token[torch.tensor(sampled)]
        for table in (rollout.logprobs, rollout.generator):
            torch.testing.assert_close(table[i, : len(expected)], expected, atol=2e-5, rtol=1e-4)
            assert not table[i, len(expected) :].any()
        several += not all(sampled)
    assert several
    learned = learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert learned["first_ratio"] == pytest.approx(1, abs=1e-5) and learned["first_ratio_max_deviation"] < 1e-4


def numbers(folder: Path, batch_size: int = 64) -> dict[str, Any]:
    ppo, stage = ppo_of(folder, batch_size=6, samples=2)
    ppo.rollout = ppo.rollout.model_copy(update={"batch_size": batch_size})
    rollout = ppo.collect(1, stage)
    learned = learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    return {
        "responses": rollout.responses,
        "sampled": rollout.sampled,
        "scores": rollout.scores.tolist(),
        "learned": learned,
    }


def failure(folder: Path) -> str:
    ppo, stage = ppo_of(folder, 'def talk(answer, row):\n    yield "a"\n    return 1 / (row["number"] - 1)')
    with pytest.raises(SharedError) as caught:
        ppo.collect(1, stage)
    return str(caught.value)


def numbers_and_failure(folder: Path) -> tuple[dict[str, Any], str]:
    return numbers(folder), failure(folder)


def test_batches_and_ranks_change_no_episode_and_a_failure_on_one_rank_ends_all(run_folder: Path) -> None:
    single = numbers(run_folder)
    assert len({*single["scores"]}) > 2 and any(not all(sampled) for sampled in single["sampled"])
    several, texts = zip(*run_ranks(numbers_and_failure, 2, run_folder), strict=True)
    for other in (numbers(run_folder, batch_size=1), *several):
        assert other["learned"] == pytest.approx(single["learned"], rel=2e-3, abs=2e-4)
        assert {**other, "learned": {}} == {**single, "learned": {}}
    for text in texts:
        assert "raised ZeroDivisionError: division by zero (line 3)" in text


def test_held_out_episodes_are_played_and_scored(run_folder: Path) -> None:
    ppo, _ = ppo_of(run_folder)
    prompts = [Prompt((Message("user", text),), "made", {"number": n}) for n, text in enumerate(["some", "words"])]
    keys = {"temperatures": [1.0, 0.0], "best_of": 3}
    made = setting(run_folder, new_tokens=40)
    rollout, evaluation = made.rollout.model_copy(update={"stop": []}), made.evaluation.model_copy(update=keys)
    made = made.model_copy(update={"rollout": rollout, "evaluation": evaluation})
    folder = run_folder / "ppo"
    folder.mkdir()

    def evaluator() -> Any:
        return ppo_evaluator(made, ppo.models, ppo.tokenizer, prompts, folder)

    first = evaluator()
    found = first.evaluate(ppo.models.actor)
    for evaluation in found.values():
        turns = [text.count("> more") for text in evaluation.answers]
        assert turns[0] == 0 and evaluation.scores[0] == 1.0
        assert evaluation.scores[1] in ((2.0,) if turns[1] else (-1.0,))
    best = first.evaluate_best(ppo.models.actor, found)[1.0]
    assert all(high >= low for high, low in zip(best.scores, found[1.0].scores, strict=True))
    # A text cannot be played again. The scores of the newest episodes are in memory, others only in samples.jsonl.
    for one in (first, evaluator()):
        assert one.grade(found[1.0].answers).scores is None
    write_samples(
        folder / SAMPLES,
        [
            Sample(prompt.messages, {"sft": answer}, {"sft": score})
            for prompt, answer, score in zip(prompts, found[1.0].answers, found[1.0].scores, strict=True)
        ],
    )
    for one in (first, evaluator()):
        assert one.grade(found[1.0].answers) == found[1.0]
    assert evaluator().grade(["unknown", found[1.0].answers[1]]).scores is None


@pytest.mark.parametrize(("penalty", "best"), [(0.0, "some words mor"), (100.0, "words")])
def test_a_cut_episode_is_the_best_only_if_its_penalty_permits_it(penalty: float, best: str, run_folder: Path) -> None:
    """The reward is the length of the answer. The first answer is complete, the second one is longer and cut."""
    text = "def talk(answer, row):\n    if row['number']:\n        yield ''\n    return len(answer)\n"
    made = setting(run_folder, text, missing_end_penalty=penalty)
    evaluation = made.evaluation.model_copy(update={"temperatures": [1.0], "best_of": 2})
    ppo, _ = ppo_of(run_folder, text)
    prompts = [Prompt((Message("user", "some"),), "made", {"number": 0})]
    made = made.model_copy(update={"evaluation": evaluation})
    evaluator = ppo_evaluator(made, ppo.models, ppo.tokenizer, prompts, run_folder)
    engine: Any = ScriptedEngine(ppo.tokenizer, ["words", "some words more"])
    found = evaluator.evaluate(engine)
    engine.cut = True
    assert evaluator.evaluate_best(engine, found)[1.0].answers == [best]


def test_settings_that_do_not_support_messages_are_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT)
    where = f"ppo.reward_function={tmp_path}/mine.py:talk"
    check_paths(composed.config_of("model=gpt2", where, "ppo.reward_model=false"))
    with pytest.raises(UserError, match=r"yields messages to the policy, needs ppo.reward_model=false, not true"):
        check_paths(composed.config_of("model=gpt2", where))
    with pytest.raises(UserError, match=r"needs rollout.stream=false, not true"):
        check_paths(composed.config_of("model=gpt2", where, "ppo.reward_model=false", "rollout.stream=true"))
    with pytest.raises(UserError, match="returned generator, not a number"):
        load_function(f"{tmp_path}/mine.py:talk", key=JUDGE).score("a", {})
