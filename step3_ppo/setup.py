"""PPO before its first step: the prompts, the models, and the numbers that the configuration gives to the loop."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING, cast

from engine import Generation
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import PpoSection
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PromptItem, encoder
from pipeline.data.microbatches import largest_share
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import Evaluations
from pipeline.evaluation.judge import Call
from pipeline.planning.stage_task import DECODE_BATCH, stage_steps
from pipeline.stages.data import (
    encode_for_all,
    evaluation_prompts,
    log_cut,
    open_data,
    stage_records,
)
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import prepare_generation, sampling
from step3_ppo.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    Advantages,
    KlController,
    RewardShaping,
    compute_advantages,
)
from step3_ppo.batches import largest_microbatch
from step3_ppo.log import UpdateMetrics
from step3_ppo.models import ModelSources, build_models
from step3_ppo.rollout import (
    Answered,
    Rollout,
    check_generator,
    collect,
    ended_answers,
    generate,
    score_answers,
)
from step3_ppo.update import (
    Minibatch,
    PtxMix,
    check_first_ratio,
    dry_run,
    minibatches,
    single_minibatch,
    update_critic,
    update_policy,
)

if TYPE_CHECKING:
    from pipeline.evaluation.episodes import Episode

_ROUND = 2**32  # more than the steps of a run: each round of dynamic sampling has sample seeds of its own


class Ppo:
    """The models of PPO, and its functions with the numbers of the configuration. The loop calls the methods."""

    def __init__(self, config: RunConfig, sources: ModelSources, prompts: Sequence[PromptItem]) -> None:
        """Build the models. A reward function needs the data rows of the prompts."""
        ppo, self.rollout, self.seed = config.ppo, config.rollout, config.seed
        self.section, self.tokenizer = ppo, sources.tokenizer
        self.prompts = [prompt.ids for prompt in prompts]
        self.rows = [prompt.row for prompt in prompts if prompt.row is not None]
        self.sampling = sampling(self.rollout, self.tokenizer, seed=self.seed)
        self.steps = stage_steps(ppo, len(prompts))
        updates = ppo.update_epochs * ppo.minibatches
        actor_steps = (self.steps - ppo.critic_warmup) * updates
        self.models = build_models(config, sources, actor_steps=actor_steps, critic_steps=self.steps * updates)
        prepare_generation(self.models.actor, self.rollout)
        if ppo.ema is not None:
            self.models.actor.start_averaging(ppo.ema)
        self.ptx = ptx_mix(config, self.tokenizer)
        self.kl = KlController(ppo.kl_coef, ppo.kl_target, ppo.kl_horizon)
        self.shaping = reward_shaping(ppo, unit=self.models.score_unit)
        self._estimate = advantage_estimator(ppo)
        self.replaced = 0
        self.evaluated_step: int | None = None
        self.evaluations: Evaluations = {}  # of the actor after `evaluated_step`

    @property
    def only_finished(self) -> bool:
        """Whether the updates leave out the answers without an end token."""
        return self.section.unfinished == "mask"

    def dry_run(self, budget: int) -> None:
        """Run the passes of an update over a micro-batch of the longest answers, and discard the result."""
        ppo, models = self.section, self.models
        sequences = largest_share(-(-ppo.batch_size * ppo.samples // ppo.minibatches))
        longest = nlargest(-(-sequences // ppo.samples), self.prompts, key=len)
        batch = largest_microbatch(
            [list(prompt) for prompt in longest for _ in range(ppo.samples)],
            self.rollout.max_new_tokens,
            sequences,
            self.tokenizer.pad_id,
            budget,
            packing=models.packing,
        )
        temperature, entropy_coef = self.rollout.temperature, ppo.entropy_coef
        dry_run(models.actor, models.critic, batch, temperature=temperature, entropy_coef=entropy_coef)

    def collect(self, step: int, stage: StageRun) -> Rollout:
        """Generate the answers to the prompts of a step, and score them with all models.

        `ppo.resample` replaces prompts without a preferred answer.
        """
        sample = partial(self._sample, step, stage)
        answered = sample(batch_indices(len(self.prompts), self.section.batch_size, self.seed, step - 1), 0)
        if self.section.resample:
            from step3_ppo.dynamic_sampling import replace_uniform

            bound = {"samples": self.section.samples, "rounds": self.section.resample, "count": len(self.prompts)}
            answered = replace_uniform(answered, sample, self.shaping, seed=(self.seed, step), **bound)
            self.replaced = answered.replaced
        with stage.clock.phase("score"):
            return collect(
                self.models,
                self._ids(self._repeated(answered.prompts)),
                answered.generations,
                temperature=self.rollout.temperature,
                pad_id=self.tokenizer.pad_id,
                budget=stage.budget,
                scores=answered.scores,
                shared_forwards=self._shared_forwards(step),
                sampled=[episode.sampled for episode in self._episodes(answered.generations)] or None,
            )

    def _sample(self, step: int, stage: StageRun, prompts: list[int], number: int) -> Answered:
        """Generate and score the answers to some prompts of a step. `number` counts the rounds of dynamic sampling."""
        first_seed = (number * _ROUND + step) * self.section.batch_size * self.section.samples
        with stage.clock.phase("generate"):
            generations = self._generate(prompts, first_seed)
        stage.clock.move("generate", "flip", self.models.actor.flip.seconds)
        ids, pad_id = self._repeated(prompts), self.tokenizer.pad_id
        ended = ended_answers(generations, self.tokenizer, self.rollout.stop)
        texts, calls = self._ids(ids), self._calls(ids, generations)
        played = [episode.rewards for episode in self._episodes(generations)] or None
        with stage.clock.phase("score"):
            scores = score_answers(self.models, texts, ended, calls, pad_id=pad_id, budget=stage.budget, played=played)
        return Answered(prompts, generations, scores)

    def _generate(self, prompts: list[int], first_seed: int) -> list[Generation]:
        """Return the answers to some prompts. If the reward function takes turns, an answer is an episode."""
        rollout = self.rollout
        batch_size, keep, park = rollout.batch_size or DECODE_BATCH, rollout.keep, rollout.park_optimizer
        if not self.models.takes_turns:
            return generate(
                self.models,
                self._ids(prompts),
                self.sampling,
                first_seed=first_seed,
                batch_size=batch_size,
                keep=keep,
                park_optimizer=park,
                samples=self.section.samples,
                text=self.tokenizer.decode_unstripped,
            )
        from pipeline.evaluation.episodes import play_episodes

        ids, function = self._repeated(prompts), self.models.function
        assert function is not None
        [episodes] = play_episodes(
            self.models.actor,
            function,
            self.tokenizer,
            self._ids(ids),
            [self.rows[i] for i in ids],
            [self.sampling],
            first_seed=first_seed,
            batch_size=batch_size,
            keep=keep,
            park_optimizer=park,
        )
        check_generator(self.models.actor)
        return [*episodes]

    def _episodes(self, generations: Sequence[Generation]) -> "list[Episode]":
        """Return the generations as episodes; empty if the reward function does not take turns."""
        return cast("list[Episode]", list(generations)) if self.models.takes_turns else []

    def _ids(self, prompts: Sequence[int]) -> list[list[int]]:
        """Return the token ids of prompts."""
        return [list(self.prompts[i]) for i in prompts]

    def _repeated(self, prompts: Sequence[int]) -> list[int]:
        """Return the prompt of each answer."""
        return [i for i in prompts for _ in range(self.section.samples)]

    def _calls(self, prompts: Sequence[int], generations: Sequence[Generation]) -> list[Call]:
        """Return the arguments of the reward function for each answer; empty if the prompts have no rows."""
        if not self.rows:
            return []
        pairs = zip(prompts, generations, strict=True)
        return [(self.tokenizer.decode(answer.token_ids, self.rollout.stop), self.rows[i]) for i, answer in pairs]

    def compute_advantages(self, rollout: Rollout) -> Advantages:
        """Shape the rewards of a rollout and estimate its advantages."""
        return compute_advantages(rollout, self.shaping, self._estimate, kl_coef=self.kl.coef)

    def minibatches(self, rollout: Rollout, step: int, budget: int) -> Iterator[Minibatch]:
        """Yield the minibatches of all epochs over a rollout; each epoch has its own order.

        `budget` is the largest number of tokens of a micro-batch.
        """
        packing = self.models.packing
        for epoch in range(self.section.update_epochs):
            of_epoch = [single_minibatch(rollout)]
            if self.section.minibatches > 1 or self.only_finished:
                of_epoch = minibatches(
                    rollout,
                    count=self.section.minibatches,
                    seed=(self.seed * 1_000_003 + step) * 1_009 + epoch,
                    pad_id=self.tokenizer.pad_id,
                    budget=budget,
                    packing=packing,
                    only_finished=self.only_finished,
                )
            for minibatch in of_epoch:
                number = self.models.actor.step_count
                ptx = None if self.ptx is None else self.ptx.batch(number, budget, packing=packing)
                yield replace(minibatch, ptx=ptx)

    def update(
        self, step: int, minibatch: Minibatch, rollout: Rollout, advantages: Advantages, updates: UpdateMetrics
    ) -> None:
        """Update the actor (after `ppo.critic_warmup` rollouts) and the critic on a minibatch, and add their metrics.

        Raises UserError if the ratio of the first minibatch of a rollout is not 1, before the parameters change.
        """
        actor, critic, policy, values = self.models.actor, self.models.critic, None, None
        check = partial(check_first_ratio, dtype=actor.config.dtype, tolerance=self.section.ratio_tolerance)
        if step > self.section.critic_warmup:
            policy = update_policy(
                actor,
                minibatch,
                rollout,
                advantages,
                self.section,
                temperature=self.rollout.temperature,
                kl_coef=self.kl.coef if self.section.kl_counts_in == "loss" else 0.0,
                check=None if updates.steps else check,
            )
        if critic is not None:
            values = update_critic(critic, minibatch, rollout, advantages, clip=self.section.value_clip)
        updates.add(minibatch.tokens, policy, values)

    def metrics(self) -> dict[str, float]:
        """Return the KL weight, the steps skipped for a non-finite gradient, the bytes of the flip, replacements."""
        skipped = sum(engine.scaler.skipped for engine in self.models.engines.values())
        metrics = {"kl_coef": self.kl.coef, "skipped_steps": skipped, "flip_bytes": self.models.actor.flip.bytes}
        if self.section.resample:
            metrics["replaced_prompts"] = self.replaced / self.section.batch_size
        return metrics

    def _shared_forwards(self, step: int) -> list[str]:
        """Return the roles whose scoring forward is also the forward of the first update.

        In the first rollout that trains the actor, its forwards are separate, so that `check_first_ratio` detects
        dropout: a shared forward always has the ratio 1.
        """
        if not self.section.shared_forward or self.only_finished:
            return []
        actor_learns = self.ptx is None and step > self.section.critic_warmup + 1  # PTX adds other micro-batches
        return ["actor"] * actor_learns + ["critic"] * (self.models.critic is not None)


def load_prompts(config: RunConfig, sources: ModelSources) -> tuple[list[PromptItem], list[Prompt], dict[str, int]]:
    """Return the training prompts, the evaluation prompts, and the number of skipped rows by reason."""
    reader, tokenizer = open_data(config), sources.tokenizer
    records = stage_records(config, "ppo", reader)
    prompts, notes = encode_for_all(encoder(config, "ppo", tokenizer), records.train)
    log_cut("ppo", notes, len(records.train), "rollout.max_prompt_tokens")
    return prompts, evaluation_prompts(config, tokenizer, reader), {**records.skipped, **notes}


def ptx_mix(config: RunConfig, tokenizer: ChatTokenizer) -> PtxMix | None:
    """Return the pretraining mix of the configuration; None if `ppo.ptx_coef` is 0."""
    ppo = config.ppo
    if ppo.ptx_coef == 0.0:
        return None
    items, _ = encode_for_all(encoder(config, "sft", tokenizer), stage_records(config, "sft", open_data(config)).train)
    size = max(1, ppo.batch_size // ppo.minibatches)
    return PtxMix(items, size, tokenizer.pad_id, config.seed)


def reward_shaping(ppo: PpoSection, *, unit: float = 1.0) -> RewardShaping:
    """Return the numbers that turn scores into rewards. `unit`: the standard deviation of the reward model's scores."""
    return RewardShaping(
        score_clip=ppo.score_clip,
        missing_end_penalty=ppo.missing_end_penalty * unit if ppo.unfinished == "penalize" else 0.0,
        length_penalty=ppo.length_penalty,
        length_free=ppo.length_free,
        kl_estimator=None if ppo.kl_counts_in == "loss" else ppo.kl_estimator or "k1",
    )


def advantage_estimator(ppo: PpoSection) -> AdvantageEstimator:
    """Return the estimator that `ppo.advantage` names, with its numbers."""
    estimate, keys = ESTIMATORS[ppo.advantage]
    return partial(estimate, **{key: getattr(ppo, key) for key in keys})
