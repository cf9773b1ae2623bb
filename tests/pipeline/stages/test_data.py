import ctypes
import gc
import json
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import distributed
from pipeline.config.schema import DataConfig, RolloutSection, RunConfig, SourceConfig
from pipeline.data import sources
from pipeline.data.encode import encode_conversations
from pipeline.data.files import Table, read_table
from pipeline.data.load import DataReader, StageRecords, load_stage
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Preference, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.evaluation.user_function import try_reward
from pipeline.stages import data as stage_data
from pipeline.stages.data import encode_for_all, log_cut, log_divided, return_memory_of_texts
from tests.ranks import Worker, run_ranks
from tests.tiny import tiny_config

ROWS = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(30)]
NONE = StageRecords([], [], {})


def check_data_to_come(config: RunConfig, stage: str = "sft", records: StageRecords = NONE) -> dict[str, Any]:
    return stage_data.check_data_to_come(config, stage, records, stage_data.open_data(config))


def evaluation_prompts(config: RunConfig, tokenizer: ChatTokenizer) -> list[Prompt]:
    return stage_data.evaluation_prompts(config, tokenizer, stage_data.open_data(config))


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="without glibc")
def test_the_memory_of_texts_returns_to_the_system() -> None:
    texts = [str(number) * 250 for number in range(10_000, 110_000)]  # 125 MB, between which other memory stays
    kept = texts[::100]
    del texts
    before = resident_bytes()
    return_memory_of_texts()
    assert before - resident_bytes() > 60_000_000 and len(kept) == 1000


def test_the_check_of_later_data_reads_each_file_once_and_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive = list[str](), list[int]()

    def count_pairs() -> None:
        alive.append(sum(isinstance(each, Preference) for each in gc.get_objects()))

    for name, count in {"shared": 300, "pairs": 6000, "prompts": 100}.items():
        rows = [{"prompt": f"{n} {name}?", "chosen": "a", "rejected": "b"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def counted(path: Path) -> Table:
        read.append(path.stem)
        count_pairs()
        return read_table(path)

    stages = {"shared": ["sft", "ppo"], "pairs": ["reward"], "prompts": ["ppo"]}
    files = [{"path": str(tmp_path / f"{name}.jsonl"), "stages": stages[name]} for name in stages]
    monkeypatch.setattr(sources, "read_table", counted)
    data = DataConfig.model_validate({"name": "a", "sources": files})
    config = tiny_config(evaluation={"judge": "judge.py:judge"}).model_copy(update={"data": data})
    reader = stage_data.open_data(config)
    records = stage_data.stage_records(config, "sft", reader)
    stage_data.check_data_to_come(config, "sft", records, reader)
    held_out = stage_data.evaluation_prompts(config, train_tokenizer(["Question 1?"], 300), reader)
    count_pairs()
    assert read == ["shared", "prompts", "pairs"]  # the evaluation prompts first
    assert alive[3] - alive[2] < 1000  # of "pairs", the held-out ones and a sample
    assert held_out and all(prompt.row and prompt.row["chosen"] == "a" for prompt in held_out)  # for the judge


def test_held_out_prompts_that_do_not_fit_are_reported_before_any_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = train_tokenizer(["Question 1?"], 300)
    own = {"data": DataConfig(name="a", path=str(file))}
    config = tiny_config(rollout={"max_prompt_tokens": 3}).model_copy(update=own)
    with pytest.raises(UserError, match=r"none of the \d held-out prompts fits .*max_prompt_tokens=3, .*raise it"):
        evaluation_prompts(config, tokenizer)
    assert evaluation_prompts(config.model_copy(update={"stage": "sft"}), tokenizer) == []
    assert "max_prompt_tokens=3: no prompt is answered" in capsys.readouterr().out


def test_truncated_rows_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    log_cut("sft", {}, 9, "sft.max_length")
    assert capsys.readouterr().out == ""
    notes = {"no answer within max_length": 1, "cut to max_length": 4, "earlier answers as examples of their own": 2}
    log_cut("sft", notes, 9, "sft.max_length")
    message = capsys.readouterr().out
    assert message == (
        "sft: too long: 4 (cut to max_length), 1 (no answer within max_length) of 9; sft.max_length sets the limit\n"
        "sft: 2 more examples: earlier answers that the template rewrites\n"
    )


def test_the_first_stage_refuses_invalid_data_of_later_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file has ties, which SFT does not read."""
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pairs.write_text("".join(json.dumps({"prompt": f"{n}?", "chosen": "a", "rejected": "a"}) + "\n" for n in range(9)))
    sources = [{"path": str(chats), "stages": ["sft", "ppo"]}, {"path": str(pairs), "stages": ["reward"]}]
    data = DataConfig.model_validate({"name": "x", "sources": sources})
    config = tiny_config().model_copy(update={"data": data})
    with pytest.raises(UserError, match="9 of 9 rows cannot be used for reward: 9 x chosen equals rejected"):
        check_data_to_come(config)
    assert capsys.readouterr().out.startswith("sft: checking the data of reward and ppo")
    for nothing_bad_to_come in ({"stage": "sft"}, {"data": tiny_config().data}):
        check_data_to_come(config.model_copy(update=nothing_bad_to_come))
    check_data_to_come(config, "ppo")  # the reward stage has already run
    assert capsys.readouterr().out == ""
    check_data_to_come(config.model_copy(update={"reward_path": "elsewhere"}))
    assert capsys.readouterr().out.startswith("sft: checking the data of ppo")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    return float(row['answer'])\n",
            r"raised KeyError: 'answer' \(line 2\) for the answer '' to the row \{'?prom",
        ),
        (
            "    return 1.0 if not answer else row['answer']\n",
            r"raised KeyError: 'answer' .* for the answer 'The answer",
        ),
        ("    yield 'Again.'\n    return row['answer']\n", None),
        ("    yield row['answer']\n", r"raised KeyError: 'answer' \(line 2\)"),
        ("    import os\n    os._exit(7)\n", r"ended its process \(os\._exit, a crash"),
        ("    return float(row['chosen'] == 'a')\n", None),
    ],
)
def test_the_first_stage_tries_the_reward_function(body: str, message: str | None, tmp_path: Path) -> None:
    """Such an error would end PPO after the hours of the earlier stages."""
    file, function = tmp_path / "a.jsonl", tmp_path / "own.py"
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    function.write_text(f"def reward(answer, row):\n{body}")
    config = tiny_config(ppo={"reward_function": f"{function}:reward", "reward_model": False})
    config = config.model_copy(update={"data": DataConfig(name="a", path=str(file))})
    with pytest.raises(UserError, match=f"stage ppo, .*{message}") if message else nullcontext():
        check_data_to_come(config)


def test_a_call_in_advance_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    called, function = tmp_path / "called", tmp_path / "own.py"
    call = f"open({str(called)!r}, 'w').write(f'{{os.getpid()}}\\n')"
    function.write_text(f"import os, time\n\n\ndef reward(answer, row):\n    {call}\n    time.sleep(600)\n")
    rank = Worker(try_reward, f"{function}:reward", [{"prompt": "1?"}], environment={})
    wait_until(lambda: called.exists() and called.read_text().endswith("\n"))
    process = psutil.Process(int(called.read_text()))
    rank.send_signal(signal.SIGKILL)
    try:
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    finally:
        process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_first_stage_refuses_a_critic_warmup_of_all_rollouts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": DataConfig(name="a", path=str(file))}
    prompts = len(load_stage(data["data"], "ppo", seed=1).train)

    def check(warmup: int) -> None:
        ppo = {"batch_size": 1, "steps": None, "epochs": 1.0, "critic_warmup": warmup}
        check_data_to_come(tiny_config(ppo=ppo).model_copy(update=data))

    check(prompts - 1)
    with pytest.raises(UserError, match=rf"ppo\.critic_warmup={prompts} leaves no rollout .* over {prompts} prompts"):
        check(prompts)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"reward": {"max_length": 9}},
            r"stage reward, on a sample .* answers that differ within reward\.max_length",
        ),
        ({"method": "dpo", "dpo": {"max_length": 9}}, r"stage dpo, on a sample .* differ within dpo\.max_length=9"),
        ({"method": "dpo", "dpo": {"max_length": 9, "loss": "kto"}}, r"stage dpo, .* answer token within dpo\.max_len"),
        ({"rollout": {"max_prompt_tokens": 2}}, r"stage ppo, .* records fits .* within rollout\.max_prompt_tokens=2"),
        ({}, None),
    ],
)
def test_the_first_stage_refuses_lengths_that_no_later_example_has(
    keys: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"{n} is long?", "chosen": "a", "rejected": "b"} for n in range(900)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(name="a", path=str(file))
    method = {name: value for name, value in keys.items() if isinstance(value, str)}
    sections = {name: value for name, value in keys.items() if isinstance(value, dict)}
    config = tiny_config(**sections).model_copy(update={"data": data, **method})
    to_come = check_data_to_come(config)
    assert to_come and all(256 <= len(data.sample) <= 512 for data in to_come.values())
    tokenizer = train_tokenizer(["a<|end|>"], 300)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        stage_data.check_lengths_to_come(config, to_come, tokenizer)


def test_held_out_documents_have_eval_examples_parts(tmp_path: Path) -> None:
    """Each document has 20 parts. The parts of an evaluation come from all documents."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n} " * 60}) + "\n" for n in range(10, 99)))
    data = DataConfig(name="a", path=str(file))
    config = tiny_config(sft={"eval_examples": 3, "max_length": 9}).model_copy(update={"data": data})
    records = load_stage(data, "sft", seed=1)
    tokenizer = train_tokenizer(["a"], 300)
    held_out = stage_data.examples(config, "sft", records, tokenizer).held_out
    begins = [tokenizer.decode(part.ids.tolist())[:2] for part in held_out]
    assert len(records.held_out) > 2 and len(begins) == len({*begins}) == 3


@pytest.mark.parametrize("loss", [None, "sigmoid", "kto"])
def test_the_first_stage_counts_the_examples_of_later_stages(loss: str | None, tmp_path: Path) -> None:
    """Their file is not that of SFT. KTO reads each of its pairs as two answers."""
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = [{"prompt": f"{n} is long?", "chosen": f"a{n}" * 9, "rejected": "b"} for n in range(600)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = ["reward", "ppo"] if loss is None else ["reward"]
    sources = [{"path": str(chats), "stages": ["sft"]}, {"path": str(pairs), "stages": kinds}]
    data = DataConfig.model_validate({"name": "x", "sources": sources})
    config = tiny_config() if loss is None else tiny_config(dpo={"loss": loss})
    config = config.model_copy(update={"data": data, "method": "ppo" if loss is None else "dpo"})
    tokenizer = train_tokenizer([row["prompt"] for row in rows], 300)
    sizes = stage_data.check_lengths_to_come(config, check_data_to_come(config), tokenizer)
    assert list(sizes) == (["reward", "ppo"] if loss is None else ["dpo"])
    for stage, size in sizes.items():
        count = len(load_stage(data, stage, seed=1).train)
        assert size.rows == count * (2 if loss == "kto" else 1) > 100
        assert (size.answer is None) == (stage == "ppo")


def test_margins_that_the_data_does_not_have_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    config = tiny_config(reward={"use_margin": True})
    config = config.model_copy(update={"data": DataConfig(name="a", path=str(file))})
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b", "margins": 2} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"reward\.use_margin=true has no effect, because no pair has a margin"):
        check_data_to_come(config)
    file.write_text("".join(json.dumps({**row, "margin": 2}) + "\n" for row in rows))
    check_data_to_come(config)


def test_names_of_control_tokens_in_answers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(["Some text."], 300)
    log_divided("sft", tokenizer)
    assert capsys.readouterr().err == ""
    tokenizer.encode_answers(["a<|end|>", "<|end|><|user|>b<|end|>", "c"])
    log_divided("sft", tokenizer)
    message = capsys.readouterr().err
    assert message.startswith("warning: sft: answers have names of control tokens")
    assert "(<|end|> in 2, <|user|> in 1)" in message and "set model.chat_template=FILE" in message


def test_the_shares_of_a_file_are_a_table_with_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config().model_copy(update={"data": DataConfig(name="pairs", path=str(file))})
    reader = stage_data.open_data(config)
    records = stage_data.stage_records(config, "sft", reader)
    stage_data.check_data_to_come(config, "sft", records, reader)
    counts = {stage: load_stage(config.data, stage, seed=1) for stage in ("sft", "reward", "ppo")}
    rows_of = {stage: len(each.train) for stage, each in counts.items()}
    lines = capsys.readouterr().out.splitlines()
    assert not any("skipped" in line for line in lines)
    title = lines.index("data: several stages read the same file; each prompt belongs to one of them")
    table = [line.split() for line in lines[title + 1 :]]
    assert table[0] == ["stage", "rows", "share", "keys"]
    assert [row[:2] for row in table[1:4]] == [[stage, str(count)] for stage, count in rows_of.items()]
    assert [row[3] for row in table[1:4]] == [
        f"data.stage_shares.{key}" for key in ("sft=0.2", "reward=0.4", "ppo=0.4")
    ]
    assert [int(row[2].rstrip("%")) for row in table[1:4]] == pytest.approx([20, 40, 40], abs=8)
    assert table[4] == ["held", "out", str(len(records.held_out)), "data.eval_fraction=0.05"]
    assert sum(rows_of.values()) + len(records.held_out) == 400
    assert "reserved" not in "\n".join(lines)


def test_a_stage_with_a_file_of_its_own_has_no_share_in_the_table() -> None:
    loaded = {"sft": StageRecords([1, 2], [], {}), "reward": StageRecords([1], [], {stage_data.RESERVED: 3})}
    loaded["ppo"] = StageRecords([1], [], {stage_data.RESERVED: 2, stage_data.OVERWEIGHT: 5})
    own, shared, weighted = stage_data.share_table(tiny_config(), loaded)[2:5]
    assert own.split(maxsplit=3)[1:] == ["2", "100%", "no other stage reads them"]
    assert shared.split()[1:] == ["1", "25%", "data.stage_shares.reward=0.4"]
    assert weighted.split()[1:3] == ["1", "75%"]  # weights leave out rows of the stage's share


def test_without_held_out_prompts_there_are_no_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"Text {n}."}) + "\n" for n in range(40)))
    config = tiny_config().model_copy(update={"data": DataConfig(name="a", path=str(file)), "stage": "sft"})
    assert evaluation_prompts(config, train_tokenizer(["Text"], 300)) == []
    assert capsys.readouterr().out == "no held-out prompts: no prompt is answered\n"


def test_each_conversation_has_one_evaluation_prompt(tmp_path: Path) -> None:
    """The rows of a thread are turns of one conversation. "ALONE" is another prompt."""
    file = tmp_path / "held_out.jsonl"
    rows = [
        {"prompt": [{"role": role, "content": f"{role} {thread}"} for role in ("user", "assistant") * turns][:-1]}
        for thread in range(5)
        for turns in (1, 2, 3)
    ]
    rows += [{"prompt": text} for text in ("Alone", "ALONE")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig.model_validate({"name": "a", "sources": [{"path": str(file), "eval_path": str(file)}]})
    tokenizer = train_tokenizer(["user 1"], 300)
    for most, count in ((128, 7), (3, 3)):
        config = tiny_config(evaluation={"prompts": most}).model_copy(update={"data": data})
        actual = evaluation_prompts(config, tokenizer)
        assert len(actual) == len({prompt.messages[0] for prompt in actual}) == count
    held_out = DataReader(data, seed=1).held_out()
    assert stage_data.choose_prompts(tiny_config(), tokenizer, held_out) == held_out[:8]  # as if the demo made them


def on_every_rank(file: str) -> dict[str, Any]:
    """Return the data of a rank and the number of its reads."""
    read: list[str] = []

    def counted(path: Path) -> Table:
        read.append(path.name)
        return read_table(path)

    sources.read_table = counted
    config = tiny_config().model_copy(update={"data": DataConfig(name="a", path=file)})
    tokenizer = train_tokenizer(["Question 1?"], 300)
    reader = stage_data.open_data(config)
    records = stage_data.stage_records(config, "sft", reader)
    prompts = stage_data.evaluation_prompts(config, tokenizer, reader)
    sent: list[Any] = []
    broadcast = distributed.broadcast_object

    def counted_broadcast(value: Any) -> Any:
        sent.append(broadcast(value))
        return sent[-1]

    stage_data.SENT, distributed.broadcast_object = 4, counted_broadcast
    items, notes = encode_for_all(partial(encode_conversations, tokenizer, max_length=17), records.train)
    distributed.broadcast_object = broadcast
    short = config.model_copy(update={"rollout": RolloutSection(max_prompt_tokens=3)})
    with pytest.raises(UserError, match="held-out prompts fits") as refused:
        stage_data.evaluation_prompts(short, tokenizer, reader)
    return {
        "read": read,
        "records": len(records.train),
        "skipped": records.skipped,
        "items": [(item.ids.tolist(), item.counts.tolist()) for item in items],
        "notes": dict(notes),
        "sent": [len(part) for part in sent if isinstance(part, list)],
        "prompts": prompts,
        "refused": str(refused.value),
    }


def test_the_first_rank_reads_and_encodes_for_all(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [*ROWS, {"prompt": "Question?", "completion": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = run_ranks(on_every_rank, 2, str(file))
    assert (first.pop("read"), second.pop("read")) == (["a.jsonl"], [])
    assert first.pop("records") == len(first["items"]) > 5 and second.pop("records") == 0
    assert max(first["sent"]) == 4 and sum(first["sent"]) == len(first["items"])
    assert first == second and first["notes"]["cut to max_length"] > 0 and first["skipped"]["empty answer"] == 1


def test_the_table_names_the_keys_of_a_held_out_file(tmp_path: Path) -> None:
    for name, count in (("train", 9), ("test", 2)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{name} {n}?", "completion": "a"}) + "\n" for n in range(count))
        )
    source = SourceConfig(path=f"{tmp_path}/train.jsonl", eval_path=f"{tmp_path}/test.jsonl")
    config = tiny_config().model_copy(update={"data": DataConfig(name="mine", sources=[source])})
    records = {"sft": stage_data.stage_records(config, "sft", stage_data.open_data(config))}
    assert stage_data.share_table(config, records)[-1].split() == ["held", "out", "2", "eval_path", "or", "eval_split"]
