"""Rows of sequences, and what the four models say of answers, against each sequence on its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine import Engine, Generation, Sampling
from pipeline.config.stage_sections import PpoSection
from pipeline.data.batch import Documents
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.models.build import build_scorer
from step3_ppo import rollout
from step3_ppo.batches import Microbatch, collate, local_microbatches
from step3_ppo.rollout import Rollout, collect, ended_answers, ensemble_scores, generate, score_answers
from step3_ppo.update import minibatches, update_critic, update_policy
from tests.pipeline.models.tiny import frozen, source_in
from tests.ranks import run_ranks
from tests.step3_ppo.example_rollouts import advantages_of, models_in, rollout_of, saved_models

PROMPTS, RESPONSES = [3, 6, 2, 5, 4, 2, 7], [4, 1, 6, 2, 5, 3, 2]
SAMPLING = Sampling(max_new_tokens=6, end_ids=(5, 6), seed=3)
SECTION = PpoSection(minibatches=2, entropy_coef=0.02, micro_batch_tokens=24)


def generations() -> tuple[list[list[int]], list[Generation]]:
    made = rollout_of(PROMPTS, RESPONSES)
    drawn = [
        Generation(response, [-0.1 * (t + 1) for t in range(len(response))], place % 2 == 0)
        for place, response in enumerate(made.responses)
    ]
    return made.prompts, drawn


def test_rows_by_hand() -> None:
    batch = collate([[7, 8], [9], [5, 5, 5]], [[1, 2, 3], [4], [6]], [1, 0], pad_id=0)
    assert batch.indices == [1, 0]
    assert batch.input_ids.tolist() == [[9, 4, 0, 0, 0], [7, 8, 1, 2, 3]]
    assert batch.scored.tolist() == [1, 7, 8, 9]
    assert batch.input_ids.flatten()[batch.ends].tolist() == [4, 3] and batch.response_lengths == [1, 3]
    batch = collate([[7, 8], [9], [5, 5, 5]], [[1, 2, 3], [4], [6]], [1, 0], pad_id=0, packing=True)
    assert batch.input_ids.tolist() == [[9, 4, 7, 8, 1, 2, 3]] and batch.documents == Documents((2, 5))
    assert batch.scored.tolist() == [1, 4, 5, 6]
    assert batch.ends.tolist() == [1, 6] and batch.response_lengths == [1, 3]


@pytest.mark.parametrize("packing", [False, True])
def test_a_rank_without_work_has_one_token_that_does_not_count(packing: bool) -> None:
    batch = collate([], [], [], pad_id=3, packing=packing)
    assert batch.input_ids.tolist() == [[3]] and not len(batch.scored) and batch.ends.tolist() == [0]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_every_sequence_once_within_the_budget(budget: int, packing: bool) -> None:
    made = rollout_of(PROMPTS, RESPONSES)
    chosen = [6, 1, 2, 4]
    batches = local_microbatches(made.prompts, made.responses, chosen, 0, budget, packing=packing)
    assert sorted(place for batch in batches for place in batch.indices) == sorted(chosen)
    for batch in batches:
        assert len(batch.indices) == 1 or batch.input_ids.numel() <= budget
        for last, place in zip(batch.ends.tolist(), batch.indices, strict=True):
            start, end = last + 1 - PROMPTS[place] - RESPONSES[place], last + 1
            assert batch.input_ids.flatten()[start:end].tolist() == made.prompts[place] + made.responses[place]
            scored = [where for where in batch.scored.tolist() if start <= where < end]
            assert scored == list(range(start + PROMPTS[place], end))
        assert len(batch.scored) == sum(batch.response_lengths) == sum(RESPONSES[place] for place in batch.indices)


def check_collected(actual: Rollout, folder: Path, temperature: float, *, reference: str = "actor") -> None:
    """Every number from transformers' own forward over that sequence alone."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "actor")
    first = AutoModelForCausalLM.from_pretrained(folder / reference)
    scorer: Any = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    for place, (prompt, response) in enumerate(zip(actual.prompts, actual.responses, strict=True)):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logs = [torch.log_softmax(m(input_ids=ids).logits[0] / temperature, -1) for m in (policy, first)]
            hidden = scorer.model(input_ids=ids).last_hidden_state[0]
            values = (hidden @ scorer.score.weight[0]).tolist()
        for t, token in enumerate(response):
            before = len(prompt) + t - 1  # the position that has seen all tokens before this one
            assert actual.logprobs[place, t].item() == pytest.approx(logs[0][before, token].item(), abs=3e-5)
            assert actual.reference[place, t].item() == pytest.approx(logs[1][before, token].item(), abs=3e-5)
            assert actual.values[place, t].item() == pytest.approx(values[before], abs=3e-5)
            assert actual.generator[place, t].item() == pytest.approx(-0.1 * (t + 1))
        assert actual.scores[place].item() == pytest.approx(values[-1] - 0.5, abs=3e-5)
        for table in (actual.logprobs, actual.reference, actual.values, actual.generator):
            assert table[place, len(response) :].abs().sum() == 0
        assert actual.response_mask[place].sum().item() == len(response)
        assert actual.finished[place].item() == (place % 2 == 0)


def test_the_reward_model_scores_the_ended_answers_and_the_others_the_generated_ones(tmp_path: Path) -> None:
    saved_models(tmp_path)
    prompts, drawn = generations()
    models, ended = models_in(tmp_path), [[*each.token_ids[:-1], 7] for each in drawn]
    scores = score_answers(models, prompts, ended, pad_id=0, budget=20)
    actual = collect(models, prompts, drawn, scores=scores, temperature=1.0, pad_id=0, budget=20)
    plain = collect(models, prompts, drawn, temperature=1.0, pad_id=0, budget=20)
    others = [replace(each, token_ids=ids) for each, ids in zip(drawn, ended, strict=True)]
    expected = collect(models, prompts, others, temperature=1.0, pad_id=0, budget=20)
    torch.testing.assert_close(actual.scores, expected.scores, atol=3e-5, rtol=1e-5)
    assert (actual.scores - plain.scores).abs().max() > 0.01
    for name in ("logprobs", "reference", "values"):
        torch.testing.assert_close(getattr(actual, name), getattr(plain, name), msg=name)
    assert actual.responses == plain.responses


def test_equal_answers_get_equal_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches round differently, which GRPO would magnify. Here each scored sequence has a score of its own."""

    def number(_: Engine, batches: Sequence[Microbatch]) -> list[float]:
        return [float(place) for place in range(sum(len(batch.indices) for batch in batches))]

    saved_models(tmp_path)
    monkeypatch.setattr(rollout, "model_scores", number)
    prompts, answers = [[3, 4], [3, 4], [3], [3, 4], [3]], [[5], [5], [5], [6], [5]]
    scores = score_answers(models_in(tmp_path), prompts, answers, pad_id=0, budget=8)
    assert scores.total == scores.rewards["model"] == [0.0, 0.0, 1.0, 2.0, 1.0]


def test_an_answer_is_scored_with_the_end_of_the_training_data() -> None:
    """`</s>` is a second end token here, and END is `end_id`. No answer becomes longer."""
    words = train_tokenizer(["one two three Human: four"] * 3, 300)
    end, plain = words.end_id, words.encode_answer("one two")
    other = words.encode_answer("three")[0]
    words.end_ids = (end, other)
    ends = {
        "as trained": (Generation(plain, [], True), plain),
        "another end token": (Generation([*plain[:-1], other], [], True), plain),
        "cut off": (Generation(plain[:-1], [], False), [*plain[:-2], end]),
        "one token": (Generation(plain[:1], [], False), [end]),
    }
    for case, (generation, expected) in ends.items():
        assert ended_answers([generation], words) == [expected], case
    stopped = words.encode_answer("one two\n\nHuman:")[:-1]
    assert ended_answers([Generation(stopped, [], True)], words, ["User:", "Human:"]) == [plain]
    assert ended_answers([Generation(words.encode_answer("Human:")[:-1], [], True)], words, ["Human:"]) == [[end]]
    lines = words.encode_answer("one\ntwo\n")[:-1]  # `min_new_tokens` may allow the first line break
    assert ended_answers([Generation(lines, [], True)], words, ["\n"]) == [words.encode_answer("one\ntwo")]


def test_the_scores_of_an_ensemble_by_hand() -> None:
    members = [[1.0, -2.0, 0.5], [2.0, 4.0, 0.5], [0.0, 1.0, -1.0]]
    assert ensemble_scores(members, "mean") == pytest.approx([1.0, 1.0, 0.0])
    assert ensemble_scores(members, "worst") == [0.0, -2.0, -1.0]


@pytest.mark.parametrize("combine", ["mean", "worst"])
def test_an_ensemble_scores_on_the_scale_of_its_first_model(combine: str, tmp_path: Path) -> None:
    """The same weights with another shift and scale give other scores: v - 0.5 and 3 (v - 0.2)."""
    saved_models(tmp_path)
    prompts, drawn = generations()
    models = models_in(tmp_path)
    first = collect(models, prompts, drawn, temperature=1.0, pad_id=0, budget=20).scores
    member = build_scorer(source_in(tmp_path / "reward"), frozen(), pad_id=0, shift=0.2, scale=3.0)
    both = replace(models, rewards=[*models.rewards, member], ensemble_score=combine)
    assert both.engines.keys() == {"actor", "critic", "reference", "reward", "reward_2"}
    actual = collect(both, prompts, drawn, temperature=1.0, pad_id=0, budget=20).scores
    second = 3 * (first + 0.3)
    expected = (first + second) / 2 if combine == "mean" else torch.minimum(first, second)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("temperature", "budget"), [(1.0, 10_000), (0.7, 20)])
def test_collected_numbers_are_each_models_own(temperature: float, budget: int, packing: bool, tmp_path: Path) -> None:
    saved_models(tmp_path)
    prompts, drawn = generations()
    models = models_in(tmp_path, packing=packing)
    actual = collect(models, prompts, drawn, temperature=temperature, pad_id=0, budget=budget)
    check_collected(actual, tmp_path, temperature)


def test_a_stop_string_ends_an_answer_by_itself(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models, prompts = models_in(tmp_path), rollout_of(PROMPTS, RESPONSES).prompts[:3]
    sampling = replace(SAMPLING, end_ids=())

    def text(ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    full = generate(models, prompts, sampling, first_seed=0, batch_size=4, text=text)
    assert not any(answer.finished for answer in full)
    stop = text(full[1].token_ids[1:3])
    cut = generate(models, prompts, replace(sampling, stop=(stop,)), first_seed=0, batch_size=4, text=text)
    assert cut[1].finished and cut[1].token_ids == full[1].token_ids[:3]


def one_step(folder: Path, zero_stage: int, packing: bool = False) -> dict[str, Any]:
    """Generate, collect, an optimizer step on each of two minibatches; all that should not depend on ranks."""
    torch.set_num_threads(1)
    models = models_in(folder, zero_stage=zero_stage, packing=packing)
    prompts = rollout_of(PROMPTS, RESPONSES).prompts
    drawn = generate(models, prompts, SAMPLING, first_seed=40, batch_size=4)
    rollout = collect(models, prompts, drawn, temperature=0.9, pad_id=0, budget=24)
    targets = advantages_of(rollout, SECTION, kl_coef=0.1)
    updates, seen = [], []
    for minibatch in minibatches(rollout, count=2, seed=8, pad_id=0, budget=24, packing=packing):
        actor = update_policy(models.actor, minibatch, rollout, targets, SECTION, temperature=0.9)
        critic = update_critic(models.critic, minibatch, rollout, targets, clip=SECTION.value_clip)
        norms = {**actor.maxima, "grad_norm": actor.grad_norm, "critic_grad_norm": critic.grad_norm}
        updates.append({"loss": actor.loss, "value_loss": critic.loss, **norms, **actor.sums, **critic.sums})
        seen.append([each.indices for each in minibatch.batches])
    final = collect(models, prompts, drawn, temperature=0.9, pad_id=0, budget=1000)
    return {"drawn": drawn, "rollout": rollout, "updates": updates, "seen": seen, "final": final}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """The step without padding; and a rollout whose trainer gathers weights in 8 bits, as the generator does not."""
    actual = one_step(folder, 3, True)
    models = models_in(folder, zero_stage=2, compress="gather8")
    generate(models, rollout_of(PROMPTS, RESPONSES).prompts, SAMPLING, first_seed=40, batch_size=4)
    return actual | {"checked in 8 bits": len(models.actor.flip.checked)}


def test_two_ranks_without_padding_make_the_step_that_one_makes_with_it(tmp_path: Path) -> None:
    saved_models(tmp_path)
    single = one_step(tmp_path, 0)
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first["checked in 8 bits"] and second["checked in 8 bits"], "held to what 8 bits explain"
    for step in range(2):  # equally many micro-batches, every sequence on one rank
        assert len(first["seen"][step]) == len(second["seen"][step])
        theirs = [place for result in (first, second) for batch in result["seen"][step] for place in batch]
        ours = [place for batch in single["seen"][step] for place in batch]
        assert sorted(theirs) == sorted(ours)
    for result in (first, second):
        assert [g.token_ids for g in result["drawn"]] == [g.token_ids for g in single["drawn"]]
        for step in range(2):
            assert result["updates"][step] == pytest.approx(single["updates"][step], rel=2e-3, abs=2e-4)
        for which in ("rollout", "final"):
            for name in ("scores", "logprobs", "reference", "values", "generator", "response_mask", "finished"):
                actual, expected = getattr(result[which], name), getattr(single[which], name).cpu()
                torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-3, msg=name)
    moved = single["final"].logprobs - single["rollout"].logprobs
    assert moved.abs().max() > 1e-3
