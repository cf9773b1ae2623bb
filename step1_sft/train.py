"""Stage 1, supervised fine-tuning: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch
from pipeline.data.encode import encode_conversations
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import barrier, is_rank_zero
from pipeline.evaluation.evaluator import EVALUATION_SEED, answers_of
from pipeline.evaluation.judge import judged, load_judge
from pipeline.evaluation.samples import SAMPLES, Sample, read_samples, write_samples
from pipeline.evaluation.user_function import UserFunction
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.source import ModelSource
from pipeline.models.stage_models import (
    adopt_special_ids,
    base_source,
    check_vocabulary,
    require_adapters,
    require_context,
    require_scorer,
    run_tokenizer,
)
from pipeline.stages.data import check_data_to_come, evaluation_prompts, examples, stage_records
from pipeline.stages.settings import optimizer_config, prepare_generation, sampling
from pipeline.stages.start import open_stage, plan_stage
from pipeline.stages.supervised import SupervisedTask, train_supervised
from step1_sft.batches import SftBatches
from step1_sft.loss import sft_loss


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export. `folder` is RUN/sft."""
    source = base_source(config)
    records = stage_records(config, "sft")
    ppo_prompts = check_data_to_come(config, "sft")
    tokenizer = run_tokenizer(config, folder.parent, trained_on=records.train)
    _check_model(config, source, tokenizer)
    encode = partial(encode_conversations, tokenizer, max_length=config.sft.max_length, loss_on=config.sft.loss_on)
    data = examples("sft", config.sft, records, encode)
    prompts, judge = evaluation_prompts(config, tokenizer, ppo_prompts), load_judge(config)
    del records, ppo_prompts  # frees the texts
    plan = plan_stage(config, "sft", folder, len(data.train), policy=source)
    config, section = plan.config, plan.config.sft
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora, section.dropout)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = _choose_packing(engine, section.packing, section.max_length)
    batches = SftBatches(data.train, section.batch_size, config.seed, packing, tokenizer.pad_id)
    answers = partial(
        answer,
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        prompts=prompts,
        folder=folder,
        judge=judge,
    )
    task = SupervisedTask(
        engine,
        loss_of,
        batches.step,
        batches.largest_microbatch,
        evaluate=lambda budget: batches.evaluate(engine, data.held_out, budget),
        best_metric="eval_loss",
        before_first_step=lambda: answers("base"),
    )
    longest = max(len(item.ids) for item in data.train)
    with open_stage(plan, "sft", folder, {"policy": engine}, best_metric="eval_loss", longest=longest) as stage:
        train_supervised(stage, task)
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model")
        with stage.clock.phase("evaluate"):
            gold = answers("sft")
        stage.finish({"gold_score": gold, "skipped": data.skipped, "packing": packing})


def loss_of(module: nn.Module, batch: TokenBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Return the summed loss of a micro-batch, without metrics."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    return sft_loss(logprobs), {}


def answer(
    name: str,
    config: RunConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    folder: Path,
    judge: UserFunction | None = None,
) -> float | None:
    """Answer the held-out prompts and add the answers to samples.jsonl under `name`. Return the mean gold score."""
    settings = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
    answers = answers_of(engine, tokenizer, prompts, settings, keep=False)  # the next answers follow after training
    gold = judged(prompts, answers, judge)
    if is_rank_zero():
        earlier = {sample.prompt: sample for sample in read_samples(folder / SAMPLES)}
        samples = []
        for index, prompt in enumerate(prompts):
            before = earlier.get(prompt.messages, Sample(prompt.messages, {}))
            scores = before.gold if gold is None else {**before.gold, name: gold[index]}
            samples.append(Sample(prompt.messages, {**before.answers, name: answers[index]}, gold=scores))
        write_samples(folder / SAMPLES, samples)
    barrier()
    return None if not gold else sum(gold) / len(gold)


def _check_model(config: RunConfig, source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if the base model does not serve this stage or a later stage of the run."""
    check_vocabulary(source, tokenizer)
    adopt_special_ids(source, tokenizer)
    require_context(config, "sft", source)
    require_scorer(config, source)
    require_adapters(config, source)


def _choose_packing(engine: Engine, configured: bool, max_length: int) -> bool:
    """Return whether rows are packed: the configuration enables packing and the model supports packed rows."""
    abilities = verify(engine, max_length=max_length)
    if is_rank_zero():
        for note in abilities.notes:
            print(f"sft: {note}", flush=True)
    return configured and abilities.packing
