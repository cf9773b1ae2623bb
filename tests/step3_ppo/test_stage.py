"""The PPO stage: its starting models, its training loop on tiny models, and its evaluation."""

import json
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.parallel import dist, dtensors
from pipeline.config.schema import DataConfig, EngineSettings, ModelConfig, RolloutSection, RunConfig
from pipeline.config.stage_sections import PpoSection
from pipeline.data.encode import PromptItem, TokenItem
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message, Prompt, Row
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.evaluation.evaluator import Evaluation, Evaluator, earlier_answers, metrics_of, write_table
from pipeline.evaluation.samples import Sample, read_samples, write_samples
from pipeline.launch.manifest import Manifest
from pipeline.launch.stage_inputs import stage_inputs
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.export import export_policy, export_scorer
from pipeline.models.modules import Policy
from pipeline.models.source import resolve
from pipeline.stages.stage_run import StageRun
from step3_ppo.evaluate import evaluate_policy, finish, ppo_evaluator
from step3_ppo.guard import Guard
from step3_ppo.log import rollout_metrics
from step3_ppo.models import Models, build_models, load_models
from step3_ppo.setup import Ppo
from step3_ppo.update import PtxMix
from tests.pipeline.models.tiny import classifier, config_of, frozen, language_model, source_in
from tests.step3_ppo.example_rollouts import learn

VOCABULARY = 288
TEXT = TokenItem(np.arange(5, 12), np.ones(7, dtype=bool))


def tokenizer(*texts: str) -> ChatTokenizer:
    return train_tokenizer(["some words to learn from", "and more words", *texts], 280)


def config(folder: Path, quantize: Any = "none", dtype: Any = "fp32", **ppo: Any) -> RunConfig:
    section = {"batch_size": 6, "epochs": 1.0, "lr": 0.01, "critic_lr": 0.02, "warmup": 0.0, "schedule": "constant"}
    section["update_epochs"] = 2
    return RunConfig(
        actor=str(folder / "sft"),
        reward_path=str(folder / "reward"),
        model=ModelConfig(name="tiny", path=str(folder / "sft" / "model"), attention="sdpa", quantize=quantize),
        data=DataConfig(name="none"),
        engine=EngineSettings(dtype=dtype),
        rollout=RolloutSection(max_new_tokens=6, batch_size=48, temperature=0.9),
        ppo=PpoSection(**{**section, **ppo}),
    )


def write_run(folder: Path, family: str = "llama", *, reward: ChatTokenizer | None = None) -> None:
    """Write a run with finished stages sft and reward."""
    changes = {"vocab_size": VOCABULARY}
    language_model(config_of(family, **changes)).save_pretrained(folder / "a")
    classifier(config_of("llama", **changes)).save_pretrained(folder / "r")
    policy, scorer = source_in(folder / "a"), source_in(folder / "r")
    export_policy(build_policy(policy, frozen()), policy, tokenizer(), folder / "sft" / "model")
    extra = {"reward_mean": 0.75, "reward_std": 1.5}
    engine = build_scorer(scorer, frozen(), pad_id=0)
    export_scorer(engine, scorer, reward or tokenizer(), folder / "reward" / "model", extra=extra)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, reward=tokenizer("zzz zzz zzz zzz zzz zzz"))
    with pytest.raises(UserError, match="another tokenizer"):
        load_models(config(tmp_path), tmp_path)


def test_exchanged_models_are_refused(run_folder: Path) -> None:
    swapped = config(run_folder).model_copy(update={"actor": str(run_folder / "reward")})
    with pytest.raises(UserError, match="not a language model"):
        load_models(swapped, run_folder)
    swapped = config(run_folder).model_copy(update={"reward_path": str(run_folder / "sft")})
    with pytest.raises(UserError, match="not a reward model"):
        load_models(swapped, run_folder)


@pytest.mark.parametrize("family", ["llama", "granite", "gpt2"])
def test_actor_and_reference_start_as_the_same_policy(family: str, tmp_path: Path) -> None:
    write_run(tmp_path, family)
    made = config(tmp_path, reference_engine={"zero_stage": 3})
    models = build_models(made, load_models(made, tmp_path), actor_steps=2, critic_steps=2)
    assert isinstance(models.actor.module, Policy) and models.reference is not None
    assert models.actor.module.use_logits == models.reference.module.use_logits == (family == "granite")
    assert models.reference.config.zero_stage == 3 and models.actor.config.zero_stage == 0
    (reward,) = models.rewards
    assert models.critic is not None
    assert (reward.module.shift, reward.module.scale) == (0.75, 1.0)
    assert (models.critic.module.shift, models.critic.module.scale) == (0.0, 1.0)
    assert models.score_unit == models.reward_std == 1.5
    assert replace(models, reward_weights={"model": 2.0}).score_unit == 3.0
    assert replace(models, reward_weights={"model": -2.0}).score_unit == 3.0  # a penalty stays a penalty
    assert replace(models, reward_weights={"model": 0.0}).score_unit == 1.0
    assert replace(models, rewards=()).score_unit == 1.0
    assert models.critic.optimizer_config is not None and models.critic.optimizer_config.lr == 0.02
    assert reward.optimizer is None and models.reference.optimizer is None


def ppo_from(made: RunConfig, folder: Path, rows: Sequence[Row] = ()) -> tuple[Ppo, StageRun]:
    """Return PPO over twelve prompts, and its stage."""
    sources = load_models(made, folder)
    ids = [sources.tokenizer.encode_prompt((Message("user", "some words " * n),)) for n in range(1, 13)]
    prompts = [PromptItem(array("i", each), row) for each, row in zip_longest(ids, rows)]
    ppo = Ppo(made, sources, prompts)
    return ppo, StageRun(folder / "ppo", made.ppo, ppo.steps, ppo.models.engines)


def ppo_of(folder: Path, **keys: Any) -> tuple[Ppo, StageRun]:
    return ppo_from(config(folder, **keys), folder)


def weights(engine: Any) -> list[torch.Tensor]:
    return [dtensors.full_tensor(p.detach()).clone() for p in engine.module.parameters()]


def test_the_loop_starts_on_policy_and_trains_both_models(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, update_epochs=2, minibatches=2, critic_warmup=1, micro_batch_tokens=100)
    assert ppo.steps == 2
    actor, critic = weights(ppo.models.actor), weights(ppo.models.critic)
    for step in (1, 2):
        rollout = ppo.collect(step, stage)
        assert len(rollout) == 6 and ppo.kl.coef == 0.05
        if step == 1:
            assert torch.equal(rollout.logprobs, rollout.reference)  # the KL is 0 before the first update
        learned = learn(ppo, step, rollout, ppo.compute_advantages(rollout), stage.budget)
        moved = [not torch.equal(a, b) for a, b in zip(actor, weights(ppo.models.actor), strict=True)]
        if step == 1:  # only the critic is trained
            assert not any(moved) and "first_ratio" not in learned and learned["lr"] == 0.0
            assert not all(torch.equal(a, b) for a, b in zip(critic, weights(ppo.models.critic), strict=True))
        else:
            assert any(moved) and learned["first_ratio"] == pytest.approx(1, abs=1e-5)
            assert learned["first_ratio_max_deviation"] < 1e-4 and learned["lr"] == 0.01
        assert learned["critic_lr"] == 0.02
    assert ppo.models.actor.step_count == 4 and ppo.models.critic.step_count == 8
    assert stage.clock.seconds["generate"] > 0 and stage.clock.seconds["score"] > 0


def test_a_model_in_4_bits_begins_on_policy_and_only_adapters_and_the_value_head_learn(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, quantize="nf4", lora={"rank": 2}, minibatches=2)
    assert ppo.models.reference is ppo.models.actor and ppo.models.critic is not None
    for engine in (ppo.models.actor, ppo.models.critic):
        learning = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
        assert all(".lora_" in name or name == "model.score.weight" for name in learning)
    rollout = ppo.collect(1, stage)
    assert torch.equal(rollout.logprobs, rollout.reference)
    torch.testing.assert_close(rollout.generator, rollout.logprobs, atol=1e-4, rtol=1e-4)
    learned = learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert learned["first_ratio_max_deviation"] < 1e-4
    critic = {n: p for n, p in ppo.models.critic.module.named_parameters() if ".lora_B" in n}
    assert critic and all(p.abs().max() > 0 for p in critic.values())


def test_adapters_on_weights_in_bf16_begin_on_policy(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, dtype="bf16", lora={"rank": 2})
    parameters = list(ppo.models.actor.module.parameters())
    assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    rollout = ppo.collect(1, stage)
    assert torch.equal(rollout.logprobs, rollout.reference)
    learned = learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert (learned["first_ratio"], learned["first_ratio_max_deviation"]) == (1.0, 0.0)


def test_reward_models_of_an_ensemble_have_the_scale_of_the_first(run_folder: Path) -> None:
    shutil.copytree(run_folder / "reward", run_folder / "second")
    file = run_folder / "second" / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reward_mean": -0.25, "reward_std": 0.5}))
    made = config(run_folder, reward_ensemble=[str(run_folder / "second")], ensemble_score="worst")
    models = build_models(made, load_models(made, run_folder), actor_steps=2, critic_steps=2)
    _, member = models.rewards
    assert (member.module.shift, member.module.scale) == (-0.25, 3.0) and models.ensemble_score == "worst"
    inputs = stage_inputs(made, Manifest(run_folder), "ppo")
    assert inputs["reward_2"] == run_folder / "second" / "model" and inputs["reward"] == run_folder / "reward" / "model"


def distillation(folder: Path) -> RunConfig:
    """Return a configuration of PPO that distils the model in `folder`/teacher without a reward."""
    section = {"advantage": "distill", "reward_model": False, "kl_coef": 0.0, "update_epochs": 1, "epochs": 6.0}
    made = config(folder, **section, batch_size=12, samples=4, lr=0.02)
    return made.model_copy(update={"reward_path": None, "teacher": str(folder / "teacher")})


def test_a_student_approaches_its_teacher_on_its_own_answers(run_folder: Path) -> None:
    language_model(config_of("gpt2", vocab_size=VOCABULARY), seed=9).save_pretrained(run_folder / "t")
    source = source_in(run_folder / "t")
    export_policy(build_policy(source, frozen()), source, tokenizer(), run_folder / "teacher" / "model")
    made = distillation(run_folder)
    assert stage_inputs(made, Manifest(run_folder), "ppo")["teacher"] == run_folder / "teacher" / "model"
    ppo, stage = ppo_from(made, run_folder)
    assert ppo.models.critic is None and not ppo.models.has_rewards
    kl = []
    for step in range(1, ppo.steps + 1):
        rollout = ppo.collect(step, stage)
        advantages = ppo.compute_advantages(rollout)
        mask = rollout.response_mask
        assert rollout.reference is not None
        assert torch.equal(advantages.advantages, torch.where(mask, rollout.reference - rollout.logprobs, 0))
        torch.testing.assert_close(rollout.scores, advantages.advantages.sum(1))
        metrics = rollout_metrics(rollout, advantages)
        assert metrics["score"] == pytest.approx(-metrics["kl"], rel=1e-4)
        kl.append(metrics["kl"] / metrics["response_length"])
        learn(ppo, step, rollout, advantages, stage.budget)
    assert kl[-1] < 0.7 * kl[0], kl
    assert ppo_evaluator(made, ppo.models, ppo.tokenizer, [], run_folder / "ppo").score is None


def test_a_rollout_without_finished_answers_takes_no_optimizer_step(run_folder: Path) -> None:
    """After a first update, momentum would change the parameters even with a zero gradient."""
    ppo, stage = ppo_of(run_folder, unfinished="mask", minibatches=2, update_epochs=1)
    rollout = ppo.collect(1, stage)
    rollout.finished.fill_(True)
    assert learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)["lr"] == 0.01
    engines = (ppo.models.actor, ppo.models.critic)
    before, steps = [weights(engine) for engine in engines], [engine.step_count for engine in engines]
    rollout = ppo.collect(2, stage)
    rollout.finished.fill_(False)
    assert learn(ppo, 2, rollout, ppo.compute_advantages(rollout), stage.budget) == {}
    assert [engine.step_count for engine in engines] == steps == [2, 2]
    for engine, old in zip(engines, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, weights(engine), strict=True))
    rollout.finished[3] = True  # the second minibatch has no answer
    learn(ppo, 2, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert [engine.step_count for engine in engines] == [3, 3]


def forwards(engine: Any) -> list[bool]:
    """Return a list to which each later forward appends whether it has a gradient."""
    seen: list[bool] = []
    engine.module.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


@pytest.mark.parametrize(("budget", "ptx_coef"), [(40, 0.0), (1000, 0.1)])
def test_scoring_and_the_first_update_share_their_forwards(budget: int, ptx_coef: float, run_folder: Path) -> None:
    """Metrics and weights are equal. With sharing, only the first rollout of the actor makes separate forwards."""
    results = []
    for shared in (False, True):
        ppo, stage = ppo_of(
            run_folder, update_epochs=2, critic_warmup=1, micro_batch_tokens=budget, shared_forward=shared, epochs=2.0
        )
        ppo.models.actor.flip.parity_check_every = 0  # the parity check makes forwards, too
        if ptx_coef:
            ppo.section = ppo.section.model_copy(update={"ptx_coef": ptx_coef})
            ppo.ptx = PtxMix([TEXT], size=1, pad_id=0, seed=1)
        actor, critic, figures = forwards(ppo.models.actor), forwards(ppo.models.critic), []
        for step in (1, 2, 3):
            actor.clear(), critic.clear()
            rollout = ppo.collect(step, stage)
            figures.append(learn(ppo, step, rollout, ppo.compute_advantages(rollout), stage.budget))
            many = len(rollout.batches)
            assert many == 1 if budget == 1000 else many > 2
            mine = shared and step > 1 and not ptx_coef  # the shared forwards of the actor
            trains = 2 * (many + bool(ptx_coef)) if step > 1 else 0
            assert actor.count(False) == (0 if mine and step > 2 else many) and actor.count(True) == trains
            assert critic.count(False) == (0 if shared else many) and critic.count(True) == 2 * many
        results.append((figures, weights(ppo.models.actor), weights(ppo.models.critic)))
    (separate, *before), (together, *after) = results
    for one, other in zip(separate, together, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for expected, got in zip(before, after, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(expected, got, strict=True))


def test_the_pretraining_mix_uses_the_micro_batch_size_that_fits(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, update_epochs=1, micro_batch_tokens=1000)
    ppo.section = ppo.section.model_copy(update={"ptx_coef": 0.1})
    ppo.ptx = PtxMix([TEXT] * 2, size=2, pad_id=0, seed=1)
    stage.budget = 10  # as after a dry run without memory for more
    rollout = ppo.collect(1, stage)
    seen: list[int] = []
    ppo.models.actor.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    assert sum(seen) == sum(map(len, rollout.prompts)) + sum(map(len, rollout.responses)) + 2 * 7
    assert seen.count(7) == 2  # each text has a pass of its own


def test_dropout_in_shared_forwards_is_detected(run_folder: Path) -> None:
    """With shared forwards, old and new probabilities are equal even with dropout. The first rollout shares none."""
    ppo, stage = ppo_of(run_folder, shared_forward=True)
    hidden = ppo.models.actor.module.get_submodule("lm.model.embed_tokens")
    hidden.register_forward_hook(lambda module, _, out: torch.dropout(out, 0.3, module.training))
    rollout = ppo.collect(1, stage)
    with pytest.raises(UserError, match=r"ratio is off by .*dropout is active"):
        learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)


@pytest.mark.parametrize("budget", [1000, 80])
def test_a_dry_run_of_the_longest_answers_changes_nothing(budget: int, run_folder: Path) -> None:
    """Both models run the longest prompts with complete answers, in the numbers of a step and a micro-batch."""
    ppo, stage = ppo_of(run_folder, minibatches=2, samples=2, advantage="gae", micro_batch_tokens=budget)
    engines = (ppo.models.actor, ppo.models.critic)
    before = [weights(engine) for engine in engines]
    seen: list[int] = []
    for engine in engines:
        engine.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    ppo.dry_run(stage.budget)
    lengths = sorted((len(prompt) + 6 for prompt in ppo.prompts), reverse=True)
    if budget == 1000:
        assert seen == [2 * sum(lengths[:3])] * 2  # six sequences, which are three prompts
    else:
        assert len(set(seen)) == 1 and budget - lengths[0] < seen[0] <= budget
    for engine, own in zip(engines, before, strict=True):
        assert engine.step_count == 0 and all(p.grad is None for p in engine.module.parameters())
        assert all(torch.equal(a, b) for a, b in zip(own, weights(engine), strict=True))


@pytest.mark.parametrize("advantage", ["rloo", "grpo"])
def test_without_a_critic_answers_to_a_prompt_are_adjacent(advantage: str, run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, batch_size=4, samples=3, advantage=advantage, kl_coef=0.1)
    assert ppo.models.critic is None and set(ppo.models.engines) == {"actor", "reference", "reward"}
    before = weights(ppo.models.actor)
    rollout = ppo.collect(1, stage)
    assert len(rollout) == 12 and rollout.values is None
    for first in range(0, 12, 3):
        assert rollout.prompts[first] == rollout.prompts[first + 1] == rollout.prompts[first + 2]
        # Each answer has its own random numbers.
        assert len({tuple(response) for response in rollout.responses[first : first + 3]}) > 1
    targets = ppo.compute_advantages(rollout)
    assert targets.advantages[:, 0].view(4, 3).sum(1).abs().max() < 1e-4
    learned = learn(ppo, 1, rollout, targets, stage.budget)
    figures = rollout_metrics(rollout, targets) | learned | ppo.metrics()
    assert not {"value_loss", "critic_lr", "explained_variance"} & set(figures)
    assert learned["first_ratio"] == pytest.approx(1, abs=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(ppo.models.actor), strict=True))


def test_evaluations_are_of_the_averaged_weights(run_folder: Path) -> None:
    """The averaged weights are exported, so they are evaluated instead of the last weights."""
    ppo, stage = ppo_of(run_folder, ema=0.5)
    rollout = ppo.collect(1, stage)
    learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)
    seen: list[list[torch.Tensor]] = []

    class Watcher:
        def evaluate(self, actor: Any) -> dict[float, Any]:
            seen.append(weights(actor))
            return {}

    evaluate_policy(ppo, Watcher(), Guard("off", has_judge=False, kl_budget=10.0), stage, 1, {})
    with ppo.models.actor.averaged():
        averaged = weights(ppo.models.actor)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], averaged, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[0], weights(ppo.models.actor), strict=True))


def test_the_exported_weights_are_evaluated_once(run_folder: Path) -> None:
    sources = load_models(config(run_folder), run_folder)
    ppo, stage = ppo_of(run_folder)
    answered = []

    class Evaluations:
        prompts = prompts()
        grade = None

        def evaluate(self, actor: Any) -> dict[float, Evaluation]:
            answered.append(actor)
            return {1.0: Evaluation([f"answer {len(answered)}"] * 3, None, None)}

    guard = Guard("off", has_judge=False, kl_budget=10.0)
    stage.folder.mkdir()
    evaluate_policy(ppo, Evaluations(), guard, stage, stage.last_step, {})
    for expected in (1, 2):
        finish(ppo, sources, Evaluations(), guard, stage, skipped={})
        assert len(answered) == expected
        assert f"answer {expected}" in (stage.folder / "samples.jsonl").read_text()
        ppo.evaluated_step = stage.last_step - 1  # of other weights


def test_a_rollout_off_the_policy_stops_the_run(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder)
    rollout = ppo.collect(1, stage)
    rollout.logprobs.add_(0.1)
    with pytest.raises(UserError, match=r"the first minibatch's ratio is off by 0\.095"):
        learn(ppo, 1, rollout, ppo.compute_advantages(rollout), stage.budget)


def prompts() -> list[Prompt]:
    return [Prompt((Message("user", text),), "made") for text in ("some words", "more", "and some more words")]


def evaluator_in(folder: Path, ppo: dict[str, Any] | None = None, **evaluation: Any) -> tuple[Evaluator, Models]:
    """Return the evaluator of PPO on the held-out prompts, and its models."""
    made = config(folder, **(ppo or {}))
    made = made.model_copy(update={"evaluation": made.evaluation.model_copy(update=evaluation)})
    sources = load_models(made, folder)
    models = build_models(made, sources, actor_steps=1, critic_steps=1)
    return ppo_evaluator(made, models, sources.tokenizer, prompts(), folder / "ppo"), models


def test_held_out_scores_subtract_the_reference_level(run_folder: Path) -> None:
    evaluator, models = evaluator_in(run_folder, temperatures=[1.0, 0.0])
    judged = evaluator.grade(["words", "to learn", ""])
    words = evaluator.tokenizer
    scorer = build_scorer(resolve(config(run_folder).model, 1, folder=run_folder / "reward"), frozen(), pad_id=0)
    for prompt, answer, score in zip(prompts(), judged.answers, judged.scores, strict=True):
        ids = words.encode_prompt(prompt.messages) + words.encode_answer(answer)
        expected = scorer(torch.tensor([ids], device=dist.world().device))[0, -1].item() - 0.75
        assert score == pytest.approx(expected, abs=3e-5)
    assert judged.gold is None and judged.metrics == {"eval_score": pytest.approx(sum(judged.scores) / 3)}
    first, second = evaluator.evaluate(models.actor), evaluator.evaluate(models.actor)
    assert first == second and len(first[1.0].answers) == 3  # the random numbers are the same each time
    assert first[0.0].answers != first[1.0].answers
    scores = {"eval_score": first[1.0].metrics["eval_score"], "eval_score_at_0": first[0.0].metrics["eval_score"]}
    assert metrics_of(first) == scores


def test_the_best_of_several_answers_has_the_highest_score_of_each_prompt(run_folder: Path) -> None:
    evaluator, models = evaluator_in(run_folder, temperatures=[0.0, 1.0], best_of=3)
    evaluations = evaluator.evaluate(models.actor)
    best = evaluator.evaluate_best(models.actor, evaluations)[1.0]
    seeds = [replace(evaluator.sampling, seed=evaluator.sampling.seed + number) for number in range(3)]
    single = [replace(evaluator, sampling=each).evaluate(models.actor)[1.0] for each in seeds]
    assert best.scores == pytest.approx([max(actual.scores[i] for actual in single) for i in range(3)], abs=1e-5)
    assert all(answer in [actual.answers[i] for actual in single] for i, answer in enumerate(best.answers))
    assert best.scores != pytest.approx(single[0].scores, abs=1e-5)
    assert replace(evaluator, temperatures=(0.0,)).evaluate_best(models.actor, {}) == {}
    assert replace(evaluator, candidates=1).evaluate_best(models.actor, {}) == {}


@pytest.mark.parametrize(("penalty", "cut"), [(0.0, {0, 1}), (100.0, {1})])
def test_a_cut_answer_is_the_best_only_if_its_penalty_permits_it(
    penalty: float, cut: set[int], run_folder: Path
) -> None:
    """Prompt 0 has a complete answer, which scores less than a cut one; prompt 1 has cut answers only."""
    evaluator, models = evaluator_in(run_folder, {"missing_end_penalty": penalty}, temperatures=[1.0], best_of=2)
    long = "some words " * 9
    candidates = [[["words", long, "more"]], [[long, f"{long} words", "more"]]]
    drawn = iter(candidates[1:])
    evaluator = replace(evaluator, answer=lambda *_, **__: next(drawn), score=lambda answers: (score(answers), None))

    def score(answers: Sequence[str]) -> list[float]:
        return [float(len(answer)) for answer in answers]

    first = {1.0: evaluator.grade(candidates[0][0])}
    best = evaluator.evaluate_best(models.actor, first)[1.0]
    assert {n for n, answer in enumerate(best.answers) if answer.startswith(long)} == cut
    assert best.scores == score(best.answers)


def test_earlier_answers_are_complete_or_ignored(tmp_path: Path) -> None:
    made = prompts()
    samples = [Sample(prompt.messages, {"base": f"a{i}"}, temperature=0.5) for i, prompt in enumerate(made)]
    write_samples(tmp_path / "samples.jsonl", samples)
    assert earlier_answers(made[::-1], tmp_path, "base", 0.5) == ["a2", "a1", "a0"]
    assert earlier_answers(made, tmp_path, "sft", 0.5) is None and earlier_answers(made, tmp_path, "base", 1.0) is None
    assert earlier_answers([*made, Prompt((Message("user", "new"),), "made")], tmp_path, "base", 0.5) is None
    assert earlier_answers(made, tmp_path / "nowhere", "base", 0.5) is None


def test_the_table_has_every_models_answer(tmp_path: Path) -> None:
    results = {
        "sft": {0.7: Evaluation(["a", "b", "c"], [0.1, 0.2, 0.3], [1.0, 0.0, 0.5])},
        "ppo": {
            0.7: Evaluation(["d", "e", "f"], [1.1, 1.2, 1.3], None),
            0.0: Evaluation(["g", "h", "i"], [2.1, 2.2, 2.3], None),
        },
    }
    write_table(prompts(), results, tmp_path)
    rows = read_samples(tmp_path / "samples.jsonl")
    sampled = [{"sft": s, "ppo": p} for s, p in zip("abc", "def", strict=True)]
    assert [row.answers for row in rows] == [*sampled, {"ppo": "g"}, {"ppo": "h"}, {"ppo": "i"}]
    assert [row.temperature for row in rows] == [0.7] * 3 + [0.0] * 3
    assert rows[1].scores == {"sft": 0.2, "ppo": 1.2} and rows[1].gold == {"sft": 0.0}
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["prompt"][0]["content"] == "some words"
