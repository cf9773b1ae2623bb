"""Reasoning of models that think before they answer: trained on, and left to the model by prompts."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.data.encode import encode_conversations, encode_prompts
from pipeline.data.records import Message
from pipeline.data.template import DEFAULT_TEMPLATE, THINKING
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from tests.pipeline.data.templates import CHATML, OPENED, REASONING, to_records, tokenizer
from tests.pipeline.data.test_formats import table_of
from tests.pipeline.data.test_tool_calls import counted

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Add 2 and 3."},
    {"role": "assistant", "content": "5", "reasoning_content": "2 and 3 <|im_end|>"},
    {"role": "user", "content": "And 1."},
    {"role": "assistant", "content": "6", "reasoning_content": "5 and 1"},
]
SPECIAL = ("<|im_start|>", "<|im_end|>")


def saved(folder: Path, template: str) -> str:
    hf = tokenizer(template, *SPECIAL)
    hf.add_tokens(["<think>", "</think>"])
    hf.save_pretrained(str(folder / "saved"))
    return str(folder / "saved")


def items_of(own: ChatTokenizer, turns: list[dict[str, Any]]) -> Any:
    records, _ = to_records(table_of("t", [{"messages": turns}]), "sft", "s", bad_row_limit=0.0)
    return encode_conversations(own, records, max_length=10_000)[0]  # type: ignore[arg-type]


def test_each_answer_is_trained_with_its_reasoning(tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, REASONING), thinking=True)
    items = items_of(own, TURNS)
    for item, end in zip(items, (4, 2), strict=True):
        expected = own.hf.apply_chat_template(TURNS[:end], tokenize=False)
        assert own.hf.decode(item.ids) == str(expected).rstrip("\n")
    blocks = ["<think>\n5 and 1\n</think>\n\n6<|im_end|>", "<think>\n2 and 3 <|im_end|>\n</think>\n\n5<|im_end|>"]
    assert [counted(own, item.ids, item.counts) for item in items] == [[block] for block in blocks]
    assert items[1].ids.tolist().count(own.end_id) == 2  # after the question and the answer: the name above is text
    assert own.hf.convert_tokens_to_ids("<think>") in items[0].ids


def test_reasoning_may_be_part_of_the_content(tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, REASONING), thinking=True)
    written = [
        {"role": t["role"], "content": f"<think>\n{t['reasoning_content']}\n</think>\n\n{t['content']}"}
        if "reasoning_content" in t
        else t
        for t in TURNS
    ]
    for name in ("reasoning", "thinking"):
        renamed = [{name if key == "reasoning_content" else key: text for key, text in t.items()} for t in TURNS]
        expected = [item.ids.tolist() for item in items_of(own, TURNS)]
        assert [item.ids.tolist() for item in items_of(own, renamed)] == expected
        assert [item.ids.tolist() for item in items_of(own, written)] == expected


@pytest.mark.parametrize("content", ["b", "<think>\n\n</think>\n\nb"])
def test_an_answer_without_reasoning_has_an_empty_block(content: str, tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, REASONING), thinking=True)
    (item,) = items_of(own, [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}])
    assert counted(own, item.ids, item.counts) == ["<think>\n\n</think>\n\nb<|im_end|>"]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_may_open_the_block_of_reasoning_in_every_prompt(thinking: bool, tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, OPENED), thinking=thinking)
    first, second = items_of(own, TURNS)[::-1]
    begin = "<|im_start|>user\nAdd 2 and 3.<|im_end|>\n<|im_start|>assistant\n"
    rest = "2 and 3 <|im_end|>\n</think>\n\n5<|im_end|>"
    assert own.hf.decode(first.ids) == f"{begin}<think>\n{rest}" and counted(own, first.ids, first.counts) == [rest]
    begin += "5<|im_end|>\n<|im_start|>user\nAnd 1.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    rest = "5 and 1\n</think>\n\n6<|im_end|>"
    assert own.hf.decode(second.ids) == begin + rest and counted(own, second.ids, second.counts) == [rest]
    answer = own.decode(second.ids[second.counts])  # as the model writes it, and as a client sends it back
    chat = [TURNS[0], {"role": "assistant", "content": answer}, TURNS[2]]
    records, _ = to_records(table_of("t", [{"prompt": chat}]), "ppo", "s", bad_row_limit=0.0)
    assert answer == "5 and 1\n</think>\n\n6"
    assert own.hf.decode(own.encode_prompt(records[0].messages)) == begin.replace("\n5<", "\n6<")
    assert (
        own.hf.decode(own.encode_messages([Message("user", "And 1.")]))
        == "\n" + begin[begin.index("<|im_start|>user\nAnd") :]
    )
    (plain,) = items_of(own, [TURNS[0], {"role": "assistant", "content": "5"}])
    assert counted(own, plain.ids, plain.counts) == ["\n</think>\n\n5<|im_end|>"]


def test_prompts_leave_the_reasoning_to_a_model_that_thinks(tmp_path: Path) -> None:
    folder = saved(tmp_path, REASONING)
    records, _ = to_records(table_of("t", [{"prompt": TURNS[:3]}]), "ppo", "s", bad_row_limit=0.0)
    history = "<|im_start|>user\nAdd 2 and 3.<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    expected = f"{history}<|im_start|>user\nAnd 1.<|im_end|>\n<|im_start|>assistant\n"
    thinks, plain = load_tokenizer(folder, thinking=True), load_tokenizer(folder)
    for own, end in ((thinks, ""), (plain, "<think>\n\n</think>\n\n")):
        items, _ = encode_prompts(own, records, max_tokens=10_000)  # type: ignore[arg-type]
        assert own.hf.decode(items[0].ids) == expected + end
    answer = "<think>\nWell.\n</think>\n\n6"
    assert thinks.decode(thinks.encode_answer(answer)) == answer  # reward functions see the reasoning


def test_an_episode_goes_on_after_reasoning(tmp_path: Path) -> None:
    """The template writes no reasoning before earlier answers, so their block is not what a message follows."""
    names = "(m.tool_calls | map(attribute='function.name') | join if m.tool_calls else '')"
    calls = REASONING.replace("m.content + '<|im_end|>", f"m.content + {names} + '<|im_end|>")
    for role, template in (("user", REASONING), ("tool", calls)):
        own = load_tokenizer(saved(tmp_path / role, template), thinking=True)
        expected = f"\n<|im_start|>{role}\nAnd 1.<|im_end|>\n<|im_start|>assistant\n"
        assert own.hf.decode(own.encode_messages([Message(role, "And 1.")])) == expected


def test_without_thinking_reasoning_is_left_out(tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, REASONING))
    without = [{key: t[key] for key in ("role", "content")} for t in TURNS]
    assert [i.ids.tolist() for i in items_of(own, TURNS)] == [i.ids.tolist() for i in items_of(own, without)]


def test_a_saved_tokenizer_thinks_and_renders_as_before(tmp_path: Path) -> None:
    own = load_tokenizer(saved(tmp_path, REASONING), thinking=True)
    own.save(tmp_path / "again")
    asked = [Message("user", "Add 2 and 3.")]
    again = load_tokenizer(str(tmp_path / "again"), thinking=True)
    assert str(again.hf.chat_template).count(THINKING) == 1 and again.fingerprint() == own.fingerprint()
    assert load_tokenizer(str(tmp_path / "again")).encode_prompt(asked) == own.encode_prompt(asked)
    for prompt in (True, False):
        texts = [
            str(each.apply_chat_template(TURNS[:-1], tokenize=False, add_generation_prompt=prompt))
            for each in (again.hf, tokenizer(REASONING, *SPECIAL))
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_TEMPLATE])
def test_a_template_without_reasoning_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.thinking=true: .* does not write the reasoning.*chat_template=FILE"):
        load_tokenizer(saved(tmp_path, template), thinking=True)
