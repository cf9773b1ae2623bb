"""Stage 3: the PPO loop, what is loaded before it, what is left behind."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from heapq import nlargest
from pathlib import Path

from engine import Generation, Update
from pipeline.config.schema import RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PromptItems, encode_prompts
from pipeline.data.records import Prompt, Row
from pipeline.distributed import data_share, is_rank_zero, on_rank_zero
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluation, compare_models, write_table
from pipeline.evaluation.judge import Call, load_judge
from pipeline.models.export import export_policy
from pipeline.models.stage_models import require_context
from pipeline.stages.data import evaluation_prompts, log_cut, stage_records
from pipeline.stages.settings import prepare_generation, sampling, stage_steps
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import open_stage, plan_stage
from pipeline.tracking import metrics
from step3_ppo.advantages import KlController
from step3_ppo.diagnose import check_first_ratio
from step3_ppo.evaluate import Examiner
from step3_ppo.figures import Learned, rollout_figures
from step3_ppo.kept import ROLLOUTS, keep_answers
from step3_ppo.models import Models, Sources, build, find
from step3_ppo.ptx import ptx_mix
from step3_ppo.rollout import Rollout, collect, generate
from step3_ppo.rows import longest_rows
from step3_ppo.targets import Targets, targets_of
from step3_ppo.update import Minibatch, dry_run, minibatches, undivided, update_critic, update_policy

GENERATOR_GAP = 0.01  # mean difference of probabilities above which generator and trainer are not the same model


class Ppo:
    """What stays the same over the loop: configuration, models, prompts, the folder."""

    def __init__(
        self, config: RunConfig, folder: Path, sources: Sources, prompts: Sequence[list[int]], rows: Sequence[Row] = ()
    ) -> None:
        """`rows` are the prompts' rows of the data, for a reward function."""
        self.config, self.section, self.tokenizer = config, config.ppo, sources.tokenizer
        self.prompts, self.rows, self.folder = prompts, rows, folder
        self.steps = stage_steps(self.section, len(prompts))
        inner = self.section.update_epochs * self.section.minibatches
        actor_steps = max(1, self.steps - self.section.critic_warmup) * inner
        self.models: Models = build(config, sources, actor_steps=actor_steps, critic_steps=self.steps * inner)
        prepare_generation(self.models.actor, config.rollout)
        if self.section.ema is not None:
            self.models.actor.start_averaging(self.section.ema)
        self.ptx = ptx_mix(config, self.tokenizer)
        self.kl = KlController(self.section.kl_coef, self.section.kl_target, self.section.kl_horizon)
        self._compared = False

    def dry_run(self, budget: int) -> None:
        """Run the passes of an update over a micro-batch of the longest answers, and discard the result."""
        ppo, (_, shares) = self.section, data_share()
        sequences = -(-ppo.batch_size * ppo.samples // (ppo.minibatches * shares))
        asked = nlargest(-(-sequences // ppo.samples), self.prompts, key=len)
        longest = longest_rows(
            [prompt for prompt in asked for _ in range(ppo.samples)],
            self.config.rollout.max_new_tokens,
            sequences,
            self.tokenizer.pad_id,
            budget,
            packing=self.models.pack,
        )
        dry_run(self.models.actor, self.models.critic, longest, ppo, temperature=self.config.rollout.temperature)

    def rollout(self, step: int, stage: StageRun) -> Rollout:
        """Draw the answers to the prompts of the step's batch, and score them."""
        chosen = batch_indices(len(self.prompts), self.section.batch_size, self.config.seed, step - 1)
        samples = self.section.samples
        asked = [i for i in chosen for _ in range(samples)]  # by each answer
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
                [self.prompts[i] for i in asked],
                generations,
                temperature=self.config.rollout.temperature,
                pad_id=self.tokenizer.pad_id,
                budget=stage.budget,
                calls=self._calls(asked, generations),
                to_learn=to_learn,
                compares=compares,
            )
            if rollout.apart is not None:
                off = (rollout.logprobs - rollout.apart).exp() - 1.0
                self._check_ratio(rollout, off[rollout.response_mask].abs().mean().item())
        return rollout

    def _to_learn(self, step: int) -> list[str]:
        """The models whose scoring forward the first update of a rollout learns from."""
        if not self.section.shared_forward:
            return []
        learns = self.ptx is None and step > self.section.critic_warmup  # other text would be beside the answers
        return ["actor"] * learns + ["critic"] * (self.models.critic is not None)

    def _calls(self, asked: Sequence[int], generations: Sequence[Generation]) -> list[Call]:
        """What a reward function is called with; rows are there for it alone."""
        if not self.rows:
            return []
        drawn = zip(asked, generations, strict=True)
        return [(self.tokenizer.decode(answer.token_ids), self.rows[place]) for place, answer in drawn]

    def keep(self, step: int, rollout: Rollout, targets: Targets) -> None:
        """Write some of the answers down, with what they earned."""
        ppo = self.section
        keep_answers(
            self.folder,
            step,
            rollout,
            targets,
            lambda ids: str(self.tokenizer.hf.decode(ids)),
            answers=ppo.keep_answers,
            tokens=ppo.keep_tokens,
        )

    def learn(self, step: int, rollout: Rollout, targets: Targets, budget: int) -> dict[str, float]:
        """Several passes over the rollout; the first minibatch's ratio must be 1."""
        ppo, learned = self.section, Learned()
        for epoch in range(ppo.update_epochs):
            for minibatch in self._minibatches(rollout, step, epoch, budget):
                policy = None
                if step > ppo.critic_warmup:
                    policy = self._update_policy(minibatch, rollout, targets, first=not learned.steps)
                critic = self.models.critic
                values = None if critic is None else update_critic(critic, minibatch, rollout, targets, ppo)
                learned.add(minibatch.tokens, policy, values)
        return learned.figures()

    def _minibatches(self, rollout: Rollout, step: int, epoch: int, budget: int) -> list[Minibatch]:
        if self.section.minibatches == 1:
            return [undivided(rollout)]
        shuffle = (self.config.seed * 1_000_003 + step) * 1_009 + epoch
        parts, pad_id = self.section.minibatches, self.tokenizer.pad_id
        return minibatches(rollout, parts=parts, seed=shuffle, pad_id=pad_id, budget=budget, packing=self.models.pack)

    def _update_policy(self, minibatch: Minibatch, rollout: Rollout, targets: Targets, *, first: bool) -> Update:
        actor = self.models.actor
        return update_policy(
            actor,
            minibatch,
            rollout,
            targets,
            self.section,
            temperature=self.config.rollout.temperature,
            ptx=self.ptx.batch(actor.step_count, packing=self.models.pack) if self.ptx else None,
            check=partial(self._check_ratio, rollout) if first else None,
        )

    def state(self) -> dict[str, float]:
        """The KL weight in force, the optimizer steps that were skipped for a gradient that is not finite, and what the
        last flip wrote."""
        skipped = sum(engine.scaler.skipped for engine in self.models.learning.values())
        return {"kl_coef": self.kl.coef, "skipped_steps": skipped, "flip_bytes": self.models.actor.flip.bytes}

    def _check_ratio(self, rollout: Rollout, deviation: float) -> None:
        check_first_ratio(
            self.models,
            rollout,
            deviation,
            temperature=self.config.rollout.temperature,
            pad_id=self.tokenizer.pad_id,
            tolerance=self.section.ratio_tolerance,
        )


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate, export. `folder` is RUN/ppo."""
    sources = find(config, folder.parent)
    require_context(config, "ppo", sources.actor)
    require_context(config, "ppo", sources.critic)
    prompts, held_out, skipped = load_prompts(config, sources)
    plan = plan_stage(config, "ppo", folder, len(prompts.ids), policy=sources.actor, reward=sources.reward)
    config = plan.config
    ppo = Ppo(config, folder, sources, prompts.ids, prompts.rows)
    examiner = Examiner(
        held_out,
        sources.tokenizer,
        sampling(config.rollout, sources.tokenizer, seed=EVALUATION_SEED),
        ppo.section.micro_batch_tokens,
        config.rollout.keep,
        load_judge(config),
    )

    def take(extra: dict[str, float]) -> None:
        ppo.kl = dataclasses.replace(ppo.kl, coef=extra["kl_coef"])

    with open_stage(
        plan,
        "ppo",
        folder,
        ppo.models.learning,
        frozen={name: engine for name, engine in ppo.models.engines.items() if name in ("reference", "reward")},
        best_metric="eval_score",
        longest=max(map(len, prompts.ids)) + config.rollout.max_new_tokens,
        extra=lambda: {"kl_coef": ppo.kl.coef},
        take=take,
    ) as stage:
        done = stage.restore()
        if is_rank_zero():
            metrics.cut(folder / ROLLOUTS, done)
        if not ppo.section.asks_reference:  # an earlier start may have had one
            stage.last = {name: value for name, value in stage.last.items() if name not in ("kl", "kl_k3")}
        if done == 0:
            start = evaluated(stage, 0, lambda: examiner.examine(ppo.models))
            write_table(examiner.prompts, {"sft": start}, folder)
            stage.log(0, start.metrics)
            stage.save(0)  # SFT's own model is the best so far
        stage.find_micro_batch_size(ppo.dry_run)  # when the generator has its memory
        for step in stage.steps_left():
            rollout = ppo.rollout(step, stage)
            targets = targets_of(rollout, ppo.section, kl_coef=ppo.kl.coef)
            ppo.keep(step, rollout, targets)
            with stage.clock.phase("train"):
                learned = ppo.learn(step, rollout, targets, stage.budget)
            losses = learned.get("policy_loss", 0.0) + learned.get("value_loss", 0.0)
            stage.require_finite(step, losses, rollout.responses)
            stage.clock.tokens += rollout.tokens()
            figures = rollout_figures(rollout, targets) | learned | ppo.state() | stage.clock.lap()
            if "kl" in figures:
                ppo.kl = ppo.kl.after(figures["kl"], len(rollout))
            warn_of_gap(figures["generator_gap"])
            if stage.evaluates(step):
                figures |= evaluated(stage, step, lambda: examiner.examine(ppo.models)).metrics
            stage.log(step, figures)
            stage.save(step)
        finish(ppo, sources, examiner, stage, skipped)


def evaluated(stage: StageRun, step: int, examine: Callable[[], Evaluation]) -> Evaluation:
    """Held-out answers, their time counted, the best figures kept."""
    with stage.clock.phase("evaluate"):
        found = examine()
    for name, value in found.metrics.items():
        stage.note_best(step, name, value, higher=True)
    return found


def finish(ppo: Ppo, sources: Sources, examiner: Examiner, stage: StageRun, skipped: dict[str, int]) -> None:
    """The exported model, the table of answers of base, SFT and PPO model, the summary."""
    folder, actor = stage.folder, ppo.models.actor
    stage.take_best()
    with actor.averaged(), stage.clock.phase("export"):
        export_policy(actor, sources.actor, ppo.tokenizer, folder / "model")
    with actor.averaged(), stage.clock.phase("evaluate"):
        own, judge = examiner.examine(ppo.models), partial(examiner.judge, ppo.models)
        results = compare_models(examiner.prompts, folder, own, judge)
    means_by_model = {name: result.metrics for name, result in results.items()}
    stage.finish(
        {
            "gold_score": results["ppo"].metrics.get("gold_score"),
            "eval_score": results["ppo"].metrics["eval_score"],
            "held_out": means_by_model,
            "skipped": skipped,
        }
    )


def load_prompts(config: RunConfig, sources: Sources) -> tuple[PromptItems, list[Prompt], dict[str, int]]:
    """The training prompts, those that all models answer, and what was left out, by reason."""
    records, tokenizer = stage_records(config, "ppo"), sources.tokenizer
    encode = partial(encode_prompts, tokenizer, max_tokens=config.rollout.max_prompt_tokens)
    prompts, notes = on_rank_zero(partial(encode, records.train))
    log_cut("ppo", notes, len(records.train), "rollout.max_prompt_tokens")
    return prompts, evaluation_prompts(config, tokenizer, records.held_out), {**records.skipped, **notes}


def warn_of_gap(gap: float) -> None:
    """Say so when the generator is not the model that is trained."""
    if gap > GENERATOR_GAP and is_rank_zero():
        logging.getLogger("zerochat").warning(
            "generator and trainer disagree by %.3f in probability on average; above %.2f rollouts are off-policy",
            gap,
            GENERATOR_GAP,
        )
