"""PPO before its first step: the prompts, the models and the numbers of the configuration."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import nlargest
from pathlib import Path

from engine import Generation
from pipeline.config.schema import PpoSection, RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PromptItems, encode_prompts
from pipeline.data.records import Prompt, Row
from pipeline.distributed import data_share, on_rank_zero
from pipeline.evaluation.judge import Call
from pipeline.stages.data import evaluation_prompts, log_cut, stage_records
from pipeline.stages.settings import prepare_generation, sampling, stage_steps
from pipeline.stages.stage_run import StageRun
from step3_ppo.advantages import KlController
from step3_ppo.diagnose import check_first_ratio
from step3_ppo.estimators import (
    ESTIMATORS,
    AdvantageEstimator,
    Advantages,
    RewardShaping,
    compute_advantages,
)
from step3_ppo.log import UpdateMetrics, write_rollout_log
from step3_ppo.models import Models, ModelSources, build_models
from step3_ppo.ptx import ptx_mix
from step3_ppo.rollout import Rollout, collect, generate
from step3_ppo.rows import longest_rows
from step3_ppo.update import Minibatch, PolicyLoss, dry_run, minibatches, undivided, update_critic, update_policy


class Ppo:
    """The models of PPO with their prompts and settings. The training loop calls its methods step by step."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        sources: ModelSources,
        prompts: Sequence[list[int]],
        rows: Sequence[Row] = (),
    ) -> None:
        """`rows` are the data rows of the prompts, which a reward function gets."""
        self.config, self.section, self.tokenizer = config, config.ppo, sources.tokenizer
        self.prompts, self.rows, self.folder = prompts, rows, folder
        self.steps = stage_steps(self.section, len(prompts))
        updates = self.section.update_epochs * self.section.minibatches
        actor_steps = max(1, self.steps - self.section.critic_warmup) * updates
        self.models: Models = build_models(config, sources, actor_steps=actor_steps, critic_steps=self.steps * updates)
        prepare_generation(self.models.actor, config.rollout)
        if self.section.ema is not None:
            self.models.actor.start_averaging(self.section.ema)
        self.ptx = ptx_mix(config, self.tokenizer)
        self.kl = KlController(self.section.kl_coef, self.section.kl_target, self.section.kl_horizon)
        self.policy_loss = policy_loss_settings(self.section, config.rollout.temperature)
        self._shaping, self._estimate = reward_shaping(self.section), advantage_estimator(self.section)
        self._compared = False

    def set_kl_coef(self, coef: float) -> None:
        """Set the weight of the KL to the reference, as a checkpoint has it."""
        self.kl = dataclasses.replace(self.kl, coef=coef)

    def dry_run(self, budget: int) -> None:
        """Run the passes of an update over a micro-batch of the longest answers, and discard the result."""
        ppo, (_, shares) = self.section, data_share()
        sequences = -(-ppo.batch_size * ppo.samples // (ppo.minibatches * shares))
        longest_prompts = nlargest(-(-sequences // ppo.samples), self.prompts, key=len)
        longest = longest_rows(
            [prompt for prompt in longest_prompts for _ in range(ppo.samples)],
            self.config.rollout.max_new_tokens,
            sequences,
            self.tokenizer.pad_id,
            budget,
            packing=self.models.pack,
        )
        temperature = self.config.rollout.temperature
        dry_run(self.models.actor, self.models.critic, longest, temperature=temperature, entropy_coef=ppo.entropy_coef)

    def collect(self, step: int, stage: StageRun) -> Rollout:
        """Generate the answers to the prompts of a step, and score them with all models."""
        chosen = batch_indices(len(self.prompts), self.section.batch_size, self.config.seed, step - 1)
        samples = self.section.samples
        prompt_of_answer = [i for i in chosen for _ in range(samples)]
        with stage.clock.phase("generate"):
            generations = generate(
                self.models,
                [self.prompts[i] for i in chosen],
                sampling(self.config.rollout, self.tokenizer, seed=self.config.seed),
                first_stream=step * self.section.batch_size * samples,
                batch_size=self.config.rollout.batch_size,
                keep=self.config.rollout.keep,
                park_optimizer=self.config.rollout.park_optimizer,
                samples=samples,
                text=self.tokenizer.decode,
            )
        stage.clock.move("generate", "flip", self.models.actor.flip.seconds)
        to_learn = self._to_learn(step)
        compares = "actor" in to_learn and not self._compared
        self._compared = self._compared or compares
        with stage.clock.phase("score"):
            rollout = collect(
                self.models,
                [self.prompts[i] for i in prompt_of_answer],
                generations,
                temperature=self.config.rollout.temperature,
                pad_id=self.tokenizer.pad_id,
                budget=stage.budget,
                calls=self._calls(prompt_of_answer, generations),
                to_learn=to_learn,
                compares=compares,
            )
            if rollout.apart is not None:
                deviation = (rollout.logprobs - rollout.apart).exp() - 1.0
                self._check_ratio(rollout, deviation[rollout.response_mask].abs().mean().item())
        return rollout

    def compute_advantages(self, rollout: Rollout) -> Advantages:
        """Shape the rewards of a rollout and estimate its advantages, as `ppo.advantage` and `ppo.kl_in` say."""
        return compute_advantages(rollout, self._shaping, self._estimate, kl_coef=self.kl.coef)

    def minibatches(self, rollout: Rollout, step: int, budget: int) -> Iterator[Minibatch]:
        """Yield the minibatches of all passes over a rollout; each pass has its own order."""
        for epoch in range(self.section.update_epochs):
            if self.section.minibatches == 1:
                yield undivided(rollout)
                continue
            seed = (self.config.seed * 1_000_003 + step) * 1_009 + epoch
            count, pad_id = self.section.minibatches, self.tokenizer.pad_id
            yield from minibatches(
                rollout, parts=count, seed=seed, pad_id=pad_id, budget=budget, packing=self.models.pack
            )

    def update(
        self, step: int, minibatch: Minibatch, rollout: Rollout, advantages: Advantages, updates: UpdateMetrics
    ) -> None:
        """Take a step of the actor (after `ppo.critic_warmup` rollouts) and of the critic, and add their metrics.

        Raises UserError if the ratio of the first minibatch of a rollout is not 1, before the parameters change.
        """
        ppo, actor, critic = self.section, self.models.actor, self.models.critic
        policy = None
        if step > ppo.critic_warmup:
            policy = update_policy(
                actor,
                minibatch,
                rollout,
                advantages,
                self.policy_loss,
                kl_coef=0.0 if self._shaping.kl_in_reward else self.kl.coef,
                ptx=self.ptx.batch(actor.step_count, packing=self.models.pack) if self.ptx else None,
                check=None if updates.steps else partial(self._check_ratio, rollout),
            )
        values = None
        if critic is not None:
            values = update_critic(critic, minibatch, rollout, advantages, clip=ppo.value_clip)
        updates.add(minibatch.tokens, policy, values)

    def state(self) -> dict[str, float]:
        """Return the KL weight, the number of steps skipped for a non-finite gradient, and the bytes of the flip."""
        skipped = sum(engine.scaler.skipped for engine in self.models.learning.values())
        return {"kl_coef": self.kl.coef, "skipped_steps": skipped, "flip_bytes": self.models.actor.flip.bytes}

    def write_rollout_log(self, step: int, rollout: Rollout, advantages: Advantages) -> None:
        """Append `ppo.keep_answers` answers of a rollout to rollouts.jsonl."""
        write_rollout_log(
            self.folder,
            step,
            rollout,
            advantages,
            lambda ids: str(self.tokenizer.hf.decode(ids)),
            answers=self.section.keep_answers,
            tokens=self.section.keep_tokens,
        )

    def _to_learn(self, step: int) -> list[str]:
        """Return the models whose scoring forward is the forward of the first update as well."""
        if not self.section.shared_forward:
            return []
        actor_learns = self.ptx is None and step > self.section.critic_warmup  # PTX adds other micro-batches
        return ["actor"] * actor_learns + ["critic"] * (self.models.critic is not None)

    def _calls(self, prompt_of_answer: Sequence[int], generations: Sequence[Generation]) -> list[Call]:
        """Return the arguments of the reward function for each answer; empty without a reward function."""
        if not self.rows:
            return []
        answers = zip(prompt_of_answer, generations, strict=True)
        return [(self.tokenizer.decode(answer.token_ids), self.rows[index]) for index, answer in answers]

    def _check_ratio(self, rollout: Rollout, deviation: float) -> None:
        check_first_ratio(
            self.models,
            rollout,
            deviation,
            temperature=self.config.rollout.temperature,
            pad_id=self.tokenizer.pad_id,
            tolerance=self.section.ratio_tolerance,
        )


def load_prompts(config: RunConfig, sources: ModelSources) -> tuple[PromptItems, list[Prompt], dict[str, int]]:
    """Return the training prompts, the held-out prompts, and the number of skipped rows by reason."""
    records, tokenizer = stage_records(config, "ppo"), sources.tokenizer
    encode = partial(encode_prompts, tokenizer, max_tokens=config.rollout.max_prompt_tokens)
    prompts, notes = on_rank_zero(partial(encode, records.train))
    log_cut("ppo", notes, len(records.train), "rollout.max_prompt_tokens")
    return prompts, evaluation_prompts(config, tokenizer, records.held_out), {**records.skipped, **notes}


def reward_shaping(ppo: PpoSection) -> RewardShaping:
    """Return the numbers that turn scores into rewards."""
    return RewardShaping(
        score_clip=ppo.score_clip,
        missing_end_penalty=ppo.missing_end_penalty,
        length_penalty=ppo.length_penalty,
        length_free=ppo.length_free,
        kl_estimator=ppo.kl_estimator or "k1",
        kl_in_reward=ppo.kl_counts_in != "loss",
    )


def advantage_estimator(ppo: PpoSection) -> AdvantageEstimator:
    """Return the estimator that `ppo.advantage` names, with its numbers."""
    estimate, keys = ESTIMATORS[ppo.advantage]
    return partial(estimate, **{key: getattr(ppo, key) for key in keys})


def policy_loss_settings(ppo: PpoSection, temperature: float) -> PolicyLoss:
    """Return the numbers of the policy's loss."""
    return PolicyLoss(
        temperature=temperature,
        clip=ppo.clip,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        importance_cap=ppo.importance_cap,
        entropy_coef=ppo.entropy_coef,
        kl_estimator=ppo.kl_estimator or "k3",
    )
