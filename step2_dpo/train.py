"""Stage 2 without a reward model: what is loaded, the loop, what is left behind."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PairItem, encode_preferences
from pipeline.data.pairs import longer
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import EVALUATION_SEED, HeldOut, answers_of, compared, write_table
from pipeline.evaluation.judge import judged, load_judge
from pipeline.evaluation.user_function import OwnFunction
from pipeline.launch.manifest import stage_inputs
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import policy_to_tune, require_context
from pipeline.planning.choose import announce
from pipeline.stages.data import evaluation_prompts, examples, say_undecided, stage_records
from pipeline.stages.settings import arrange, optimizer_config, prepare_generation, sampling, say_steps, stage_steps
from pipeline.stages.stage_run import StageRun
from pipeline.tracking.watchers import open_watchers
from step2_dpo.evaluate import held_out_figures, held_out_shares, pair_logprobs, with_reference
from step2_dpo.objective import loss_of


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate, export. `folder` is RUN/dpo."""
    section = config.dpo
    start = stage_inputs(config, folder.parent, "dpo")["actor"]
    assert start is not None
    source, tokenizer = policy_to_tune(config, start)
    require_context(config, "dpo", source)
    records = stage_records(config, "dpo")
    say_undecided("dpo", records.train)
    encode = partial(encode_preferences, tokenizer, max_length=section.max_length, stage="dpo")
    data = examples("dpo", section, records, encode)
    encoded, held_out = data.train, data.held_out
    prompts, judge = evaluation_prompts(config, tokenizer), load_judge(config)
    del records  # texts, of which nothing is needed any more
    steps = stage_steps(section, len(encoded))
    say_steps("dpo", section, steps, len(encoded))
    drawn = [batch_indices(len(encoded), section.batch_size, config.seed, step) for step in range(steps)]
    train, places = only(encoded, drawn)
    arrange(config)
    config, predicted = announce(config, "dpo", folder, policy=source)
    section = config.dpo
    choice = EngineChoice(config.engine, optimizer_config(section, steps=steps), section.lora)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length).packing
    loss, examiner = loss_of(section), Examiner(config, engine, tokenizer, prompts, judge)
    cut: dict[str, Any] = {"budget": section.micro_batch_tokens, "packing": packing, "pad_id": tokenizer.pad_id}
    with (
        open_watchers(config, "dpo", folder, steps) as watchers,
        StageRun(
            folder,
            section,
            steps,
            {"policy": engine},
            longest=2 * max(longer(pair) for pair in train),
            watchers=watchers,
            profile=config.profile,
            decides="eval_loss",
        ) as stage,
    ):
        stage.predicted = predicted
        with stage.clock.phase("reference"):  # which the policy is as long as it has learned nothing
            sets = {"train": train, "held_out": held_out}
            known = with_reference(folder, sets, lambda items: pair_logprobs(engine, items, **cut))
        pairs, unseen = known["train"], known["held_out"]
        done = stage.restore()
        stage.find_micro_batch_size(
            lambda budget: engine.dry_run(pairs.largest_batch(**cut | {"budget": budget}), loss)
        )
        if done == 0:
            with stage.clock.phase("evaluate"):
                write_table(prompts, {"sft": examiner.examine()}, folder)
        for step in stage.steps_left():
            indices = [places[index] for index in drawn[step - 1]]
            cut["budget"] = stage.budget
            batches, _ = pairs.micro_batches(indices, **cut)
            with stage.clock.phase("train"):
                update = engine.update(batches, loss, len(indices))
            stage.clock.tokens += sum(len(train[i].chosen) + len(train[i].rejected) for i in indices)
            stage.require_finite(step, update.loss, [each.input_ids for each in batches])
            means = {name: total / len(indices) for name, total in update.sums.items()}
            figures = {"loss": update.loss, **means, "lr": update.lr, "grad_norm": update.grad_norm}
            figures |= {"skipped_steps": engine.scaler.skipped}
            if stage.evaluates(step) and held_out:
                with stage.clock.phase("evaluate"):
                    figures |= held_out_figures(unseen, pair_logprobs(engine, held_out, **cut), section)
                stage.note_best(step, "eval_loss", figures["eval_loss"], higher=False)
            stage.log(step, figures)
            stage.save(step)
        stage.take_best()
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model")
        with stage.clock.phase("evaluate"):
            results = compared(prompts, folder, examiner.examine(), examiner.judge)
            ranked: dict[str, Any] = {"eval_pairs": 0}
            if held_out:
                logprobs = pair_logprobs(engine, held_out, **cut)
                ranked = {**held_out_figures(unseen, logprobs, section), **held_out_shares(unseen, logprobs)}
        by_model = {name: result.figures for name, result in results.items()}
        gold = by_model["dpo"].get("gold_score")
        stage.finish({**ranked, "gold_score": gold, "held_out": by_model, "skipped": data.skipped, "packing": packing})


def only(pairs: Sequence[PairItem], drawn: Sequence[Sequence[int]]) -> tuple[list[PairItem], dict[int, int]]:
    """The pairs that a step draws, and where each of them is now: the reference need not read others."""
    chosen = sorted({index for indices in drawn for index in indices})
    return [pairs[index] for index in chosen], {index: place for place, index in enumerate(chosen)}


class Examiner:
    """Puts the same held-out prompts, with the same noise, to the policy as it is."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        tokenizer: ChatTokenizer,
        prompts: Sequence[Prompt],
        judged_by: OwnFunction | None,
    ) -> None:
        self._engine, self._tokenizer, self._prompts = engine, tokenizer, prompts
        self._sampling = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
        self._judged_by = judged_by

    def examine(self) -> HeldOut:
        """Its answers."""
        answers = answers_of(self._engine, self._tokenizer, self._prompts, self._sampling, keep=False)
        return self.judge(answers)

    def judge(self, answers: list[str]) -> HeldOut:
        """Answers with their gold scores, where somebody can tell."""
        return HeldOut(answers, None, judged(self._prompts, answers, self._judged_by))
