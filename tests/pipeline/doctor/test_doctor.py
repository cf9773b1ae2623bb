"""`zerochat doctor`: the screen for a small file, the messages for bad input, and the lines that runs also print."""

import json
import weakref
from pathlib import Path

import pytest
import torch

from pipeline.config.check import validate
from pipeline.config.compose import compose_jobs, parse_command
from pipeline.config.recipes import Recipe, compare_rates, rate_warnings
from pipeline.data.load import DataReader, StageRecords
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.data.rendering import example_lines
from pipeline.doctor.command import main as doctor
from pipeline.launch.command import main as train
from pipeline.planning.data_size import data_sizes
from pipeline.stages.start import batch_line, steps_line
from tests.pipeline.models.tiny import classifier, config_of
from tests.tiny import tiny_config

PAIRS = [
    {"prompt": f"What is {number} plus 1?", "chosen": f"It is {number + 1}.", "rejected": "No."} for number in range(40)
]
SETTINGS = ["model=tiny", "method=dpo", "sft.batch_size=8", "sft.epochs=3", "sft.max_length=64", "sft.lr=1"]


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of preference pairs with one damaged line, in the working directory."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS) + '{"prompt": "What", "chosen": 1}\n')
    monkeypatch.chdir(tmp_path)
    return file


def test_the_screen_shows_the_rows_of_each_stage(
    pairs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_stage = list[weakref.ref[StageRecords]](), DataReader.stage

    def load(reader: DataReader, stage: str) -> StageRecords:
        assert not any(reference() for reference in loaded), "the records of one stage are in memory at a time"
        records = load_stage(reader, stage)
        loaded.append(weakref.ref(records))
        return records

    monkeypatch.setattr(DataReader, "stage", load)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():  # as in a shell of a job of several ranks
        monkeypatch.setenv(name, value)
    assert doctor([*SETTINGS, f"data.path={pairs}", "data.bad_row_limit=0.5", "sft.micro_batch_tokens=256"]) == 0
    screen = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in screen.splitlines() if line.startswith("  ")}
    trained = [int(rows[stage][1]) for stage in ("sft", "dpo")]
    held_out, skipped = int(rows["sft"][2]), int(rows["sft"][3])
    assert held_out > 0 and skipped == 1 and sum(trained) + held_out == len(PAIRS)
    assert f"{round(3 * trained[0] / 8)} optimizer steps" in screen
    assert "sft: batch of 8 conversations = 1 rank x micro-batch of 4 x accumulation over 2" in screen
    steps = round(trained[1] / 32)  # of the recipe's batch
    assert f"warning: dpo: {steps} step{'s' if steps > 1 else ''} will hardly change the model: for 20 steps" in screen
    assert "warning: sft: " in screen
    assert "tokens: answers end with <|end|> (1); begin token: none; padding: <|pad|> (0)" in screen
    example = next(line for line in screen.splitlines() if line.startswith("  | "))
    assert example.startswith("  | <|user|>What is ") and "<|assistant|>[It is " in example
    assert example.endswith(".<|end|>]") and "\x1b" not in screen
    assert "sft.lr=1: OUTSIDE 0.00033 to 0.003 (recipe=tiny: 0.001)" in screen
    assert screen.count("memory: about") == screen.count("time: about") == 2
    assert [path.name for path in pairs.parent.iterdir()] == [pairs.name]  # no run folder is created
    assert len(loaded) == 3  # SFT's records also train the tokenizer
    assert not torch.distributed.is_initialized()  # NCCL would warn about the group when the command ends


def test_earlier_answers_that_the_template_rewrites_count_as_examples(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each conversation of two turns becomes two examples, in the screen of doctor and in the plan."""
    turns = [{"role": role, "content": "Yes"} for role in ("assistant", "user", "assistant")]
    rows = [{"messages": [{"role": "user", "content": f"Is it {number}?"}, *turns]} for number in range(80)]
    file, template = pairs.with_name("chats.jsonl"), pairs.with_name("now.jinja")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ 'Now: ' if m.role == 'assistant' and loop.last }}{{ m.content }}"
        "<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>Now: {% endif %}"
    )
    words = ["model=tiny", "stage=sft", f"data.path={file}", f"model.chat_template={template}", "sft.batch_size=8"]
    assert doctor([*words, "sft.epochs=1"]) == 0
    screen = capsys.readouterr().out
    trained = next(int(line.split()[1]) for line in screen.splitlines() if line.startswith("  sft  "))
    assert f"{trained}: earlier answers as examples of their own" in screen
    assert f"     {round(2 * trained / 8)} optimizer steps" in screen
    job = compose_jobs(parse_command([*words, "data.stage_shares={sft: 1, ppo: 0}"]))[0]
    assert data_sizes(validate(job.raw), ["sft"])["sft"].rows == 2 * trained


@pytest.mark.parametrize(
    "words",
    [
        ["sft.learning_rate=1"],
        ["data.path=nothing.jsonl"],
        ["ranks=3"],
    ],
)
def test_a_mistake_has_the_message_of_training(
    words: list[str], pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*SETTINGS[1:], *([] if "data.path=nothing.jsonl" in words else [f"data.path={pairs}"]), *words]
    assert doctor(common) == 2
    message = capsys.readouterr().err
    assert train(common) == 2
    assert message.startswith("error: ") and capsys.readouterr().err.endswith(message)


def test_a_reward_model_that_does_not_suit_its_place_is_reported(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    classifier(config_of("llama", max_position_embeddings=512)).save_pretrained(other)
    train_tokenizer(["ba bb"], 300).save(other)
    assert doctor(["model=tiny", f"data.path={pairs}", "data.bad_row_limit=0.5", f"reward={other}"]) == 2
    assert f"the reward model in {other} has another tokenizer or chat template" in capsys.readouterr().err
    assert doctor(["stage=dpo", f"data.path={pairs}", "data.bad_row_limit=0.5", f"actor={other}"]) == 2
    assert f"{other} has a LlamaForSequenceClassification, not a language model" in capsys.readouterr().err


def test_the_models_are_checked_before_the_data_is_read(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(["model=tiny", f"data.path={pairs}", "data.bad_row_limit=0", "model.tokenizer=/nothing"]) == 2
    assert "/nothing: there is no such folder" in capsys.readouterr().err


def test_the_tokens_of_the_loss_are_marked_and_control_characters_are_shown() -> None:
    tokenizer = train_tokenizer(["hello there"] * 4, 300)
    messages = (Message("user", "hi\x1b[31m"), Message("assistant", "ok"))
    ids, counts = tokenizer.encode_conversations([messages])[0]
    title, example = example_lines(tokenizer, ids, counts)
    assert title.endswith("the loss includes the 3 tokens in [..]:")
    assert example == "  | <|user|>hi\\x1b[31m<|end|><|assistant|>[ok<|end|>]"
    messages = (Message("user", "a" * 9000), Message("assistant", "ok"))
    ids, counts = tokenizer.encode_conversations([messages])[0]
    assert len("".join(example_lines(tokenizer, ids, counts))) < 1000


def test_ranks_micro_batches_and_accumulation_make_the_batch() -> None:
    config = tiny_config(
        sft={"batch_size": 64, "max_length": 1024, "micro_batch_tokens": 8192},
        reward={"batch_size": 64, "max_length": 1024, "micro_batch_tokens": 8192},
        ppo={"batch_size": 64, "minibatches": 2, "update_epochs": 3, "samples": 2, "max_length": 200},
        engine={"tensor_parallel": 2},
    )
    assert batch_line(config, "sft", 4).startswith(
        "batch of 64 conversations = 2 groups of 2 ranks x micro-batch of 8 x accumulation over 4 (with 1024 tokens"
    )
    assert "= 4 groups of 2 ranks x micro-batch of 4 x accumulation over 4 " in batch_line(config, "reward", 8)
    assert batch_line(config, "ppo", 2).startswith("batch of 64 answers = 1 group of 2 ranks x micro-batch of 58 ")
    labels = tiny_config(dpo={"loss": "kto"})
    assert batch_line(labels, "dpo", 1).startswith(f"batch of {labels.dpo.batch_size} answers = ")
    assert steps_line(config, "ppo", 5) == "30 optimizer steps (5 rollouts x 3 epochs x 2 minibatches)"


def test_learning_rates_are_compared_with_the_recipe() -> None:
    recipe = Recipe("r", "", {"sft": {"lr": 1e-5}, "ppo": {"lr": 1e-6, "critic_lr": 1e-5}, "lora_lr": {"sft": 1e-4}})
    config = tiny_config(sft={"lr": 2.9e-5}, ppo={"lr": 3.1e-6, "critic_lr": 3e-6})
    rates = compare_rates(config, recipe)
    assert [(rate.key, rate.usual, rate.is_usual) for rate in rates] == [
        ("sft.lr", 1e-5, True),
        ("reward.lr", None, True),
        ("ppo.lr", 1e-6, False),
        ("ppo.critic_lr", 1e-5, False),
    ]
    assert rate_warnings(rates, recipe) == [
        "ppo.lr=3.1e-06 is 3.1 times the 1e-06 of recipe=r: set ppo.lr=1e-06, or watch the first steps",
        "ppo.critic_lr=3e-06 is 0.3 times the 1e-05 of recipe=r: set ppo.critic_lr=1e-05, or watch the first steps",
    ]
    adapters = tiny_config(sft={"lr": 1e-4, "lora": {"rank": 4}}, dpo={"loss": "orpo"})
    adapters = adapters.model_copy(update={"method": "dpo"})
    assert [rate.usual for rate in compare_rates(adapters, recipe)] == [1e-4, None]


def test_a_stage_of_an_earlier_run_has_the_rows_of_that_run(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (Path("runs") / "x" / "sft").mkdir(parents=True)
    data = {"name": "pairs", "path": str(pairs), "stage_shares": {"sft": 0.2, "reward": 0.4, "ppo": 0.4}}
    (Path("runs") / "x" / "sft" / "config.yaml").write_text(json.dumps({"data": data}))
    assert doctor(["model=tiny", f"data.path={pairs}", "data.bad_row_limit=0.5", "stage=reward", "name=x"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  reward "))
    assert int(row.split()[1]) < 0.7 * len(PAIRS)  # without the run, the stage would use all pairs


@pytest.mark.parametrize("key", ["data.path", "model.path", "actor"])
def test_a_path_that_begins_with_the_name_of_no_user_is_a_missing_path(
    key: str, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`~name/x` is in the home folder of a user, and `pathlib` raises RuntimeError if there is none of this name."""
    assert doctor([f"data.path={pairs}", "stage=dpo", f"{key}=~no-such-user/x"]) == 2
    assert f"error: {key}=~no-such-user/x: there is no such f" in capsys.readouterr().err
