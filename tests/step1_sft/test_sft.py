"""SFT's loss over the trained tokens for every packing, padding and micro-batch size, against transformers."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.parallel import dtensors
from pipeline.config.schema import RolloutSection
from pipeline.data.encode import TokenItem
from pipeline.data.microbatches import token_microbatches
from pipeline.data.records import Message, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.evaluation.evaluator import Evaluator, answers_of
from pipeline.evaluation.samples import read_samples
from pipeline.evaluation.user_function import JUDGE, UserFunction
from pipeline.models.build import build_policy
from pipeline.models.checks import adopt, verify
from pipeline.stages.start import sampling
from step1_sft import train
from step1_sft.loss import sft_loss
from step1_sft.train import loss_of, record_answers
from tests.pipeline.models.tiny import config_of, language_model, source_in, trained
from tests.tiny import tiny_config

LENGTHS = [9, 3, 14, 5, 2, 7, 11]


def items() -> list[TokenItem]:
    """Return conversations of random tokens. About half of the tokens are trained, in some also the first token."""
    source, made = random.Random(3), []
    for length in LENGTHS:
        counts = [source.random() < 0.5 for _ in range(length)]
        counts[-1] = True
        made.append(TokenItem(np.array([source.randint(2, 95) for _ in counts], dtype=np.int32), np.array(counts)))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    language_model(config_of("llama")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def nats(folder: Path) -> list[float]:
    """Return the negative log-probability of each trained token, computed by transformers for one row at a time."""
    model, actual = AutoModelForCausalLM.from_pretrained(folder).double(), []
    for item in items():
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=torch.tensor(item.ids[None]).long()).logits[0], -1)
        actual += [-logs[t - 1, item.ids[t]].item() for t in range(1, len(item.ids)) if item.counts[t]]
    return actual


def update(folder: Path, *, packing: bool, budget: int) -> tuple[Engine, float, float, int]:
    engine = build_policy(source_in(folder), trained())
    if packing:
        assert verify(engine, max_length=16)
    batches, count = token_microbatches(items(), budget=budget, packing=packing, pad_id=0)
    done = engine.update(batches, loss_of, count)
    return engine, done.loss, done.grad_norm, len(batches)


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("sft", {"max_length": 513}, "tiny has 512 positions for a sequence, too few for sft.max_length=513"),
        ("model", {"tokenizer": "/nowhere"}, "/nowhere: there is no such folder"),
    ],
)
def test_mistakes_about_the_model_show_before_the_data_is_read(
    section: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = tiny_config(data={"sources": [{"path": str(tmp_path / "unread.jsonl")}]}, **{section: keys})
    with pytest.raises(UserError, match=message):
        train.run(config, tmp_path / "sft")


@pytest.mark.parametrize(("packing", "budget"), [(False, 1000), (False, 20), (True, 1000), (True, 32)])
def test_an_update_is_the_mean_over_counted_tokens(folder: Path, nats: list[float], packing: bool, budget: int) -> None:
    _, loss, norm, micro = update(folder, packing=packing, budget=budget)
    assert loss == pytest.approx(math.fsum(nats) / len(nats), rel=1e-5)
    assert norm == pytest.approx(update(folder, packing=False, budget=1)[2], rel=1e-4)
    assert (micro > 1) == (budget < 1000)


@pytest.mark.parametrize("keys", [["activation_checkpointing"], ["compile_blocks", "activation_checkpointing"]])
def test_gradients_equal_those_of_the_plain_path(
    tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows through a compiled or recomputed block equal padded rows through a plain block."""
    language_model(config_of("llama", num_hidden_layers=1)).save_pretrained(tmp_path)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    # Count the graphs without running a compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    results: list[dict[str, torch.Tensor]] = []
    choice = trained()
    plain = build_policy(source_in(tmp_path), choice)
    assert verify(plain, max_length=16)
    other = replace(choice, settings=choice.settings.model_copy(update=dict.fromkeys(keys, True)))
    for engine, packing in (plain, False), (build_policy(source_in(tmp_path), other), True):
        adopt(engine, plain)  # `verify` would compile a block for each length of its trials
        batches, count = token_microbatches(items(), budget=1000 if packing else 1, packing=packing, pad_id=0)
        kept: dict[str, torch.Tensor] = {}

        def keep(sums: Any, kept: dict[str, torch.Tensor] = kept, engine: Engine = engine) -> None:
            kept |= {name: dtensors.full_tensor(p.grad).clone() for name, p in engine.module.named_parameters()}

        kept["loss"] = torch.tensor(engine.update(batches, loss_of, count, before_step=keep).loss)
        results.append(kept)
    assert bool(counters["unique_graphs"]) == ("compile_blocks" in keys)
    if "compile_blocks" in keys:  # other lengths and numbers of documents cause one more compilation, none later
        graphs = []
        for some in (items()[:2], items()[1:], [*items(), *items()[:1]]):
            batches, count = token_microbatches(some, budget=1000, packing=True, pad_id=0)
            engine.update(batches, loss_of, count)
            graphs.append(counters["unique_graphs"])
        assert len(set(graphs[1:])) == 1, graphs
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, atol=1e-5, rtol=1e-4, msg=name)


def test_held_out_loss(folder: Path, nats: list[float]) -> None:
    engine = build_policy(source_in(folder), trained(dropout=0.2))
    expected = pytest.approx(math.fsum(nats) / len(nats), rel=1e-5)  # nats for each token, without dropout
    assert train.SftBatches(engine, (), items(), 1, 0, False, 0).evaluate(30) == {"eval_loss": expected}
    assert verify(engine, max_length=16)
    assert train.SftBatches(engine, (), items(), 1, 0, True, 0).evaluate(30) == {"eval_loss": expected}
    assert train.SftBatches(engine, (), (), 1, 0, True, 0).evaluate(30) == {}


def test_the_loss_is_a_sum() -> None:
    assert sft_loss(torch.tensor([-1.0, -2.5])).item() == 3.5
    assert sft_loss(torch.zeros(0)).item() == 0


class Letters:
    """The part of a tokenizer that generation uses."""

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        return [3, 4, 5]

    def decode_unstripped(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    decode = ChatTokenizer.decode


def test_periodic_evaluation_frees_the_generator(folder: Path, tmp_path: Path) -> None:
    engine = build_policy(source_in(folder), trained(dtype="bf16"), generates=True)
    tokenizer = cast(Any, Letters())
    tokenizer.end_ids, tokenizer.pad_id = (), 0
    settings = sampling(RolloutSection(max_new_tokens=2), tokenizer, seed=1)
    prompts = [Prompt((Message("user", f"hi {level}"),), "made", {"level": level}) for level in (0.25, 0.75)]
    judge = UserFunction("mine.py:judge", tmp_path, lambda answer, row: row["level"], key=JUDGE)
    evaluator = Evaluator(prompts, tokenizer, settings, (1.0, 0.0), judge)
    metrics = record_answers("base", engine, evaluator, tmp_path)
    assert metrics == {"gold_score": 0.5, "gold_score_at_0": 0.5}
    samples = read_samples(tmp_path / "samples.jsonl")
    assert [sample.gold for sample in samples] == [{"base": 0.25}, {"base": 0.75}] * 2
    assert [sample.temperature for sample in samples] == [1.0, 1.0, 0.0, 0.0]
    record_answers("sft", engine, evaluator, tmp_path)
    assert all(sample.answers["sft"] == sample.answers["base"] for sample in read_samples(tmp_path / "samples.jsonl"))
    model = engine.flip._model
    assert model is not None and all(p.is_meta for p in model.module.parameters())


def test_answers_end_before_a_stop_string(folder: Path) -> None:
    engine = build_policy(source_in(folder), trained(), generates=True)
    prompts = [Prompt((Message("user", "hi"),), "made")]
    tokenizer = cast(Any, Letters())
    tokenizer.end_ids, tokenizer.pad_id = (), 0
    section = RolloutSection(max_new_tokens=9)
    full = answers_of(engine, tokenizer, prompts, [sampling(section, tokenizer, seed=1)], keep=True)[0][0]
    stop = " ".join(full.split()[1:3])
    section = RolloutSection(max_new_tokens=9, stop=[stop])
    cut = answers_of(engine, tokenizer, prompts, [sampling(section, tokenizer, seed=1)], keep=True)[0][0]
    assert cut == full[: full.index(stop)].strip()
