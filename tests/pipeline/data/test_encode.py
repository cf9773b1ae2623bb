"""Encoding: examples that are too long are truncated or dropped, and counted."""

import pytest

from pipeline.data import encode
from pipeline.data.encode import encode_conversations, encode_preferences, encode_prompts
from pipeline.data.records import Conversation, Document, Message, Preference, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from tests.pipeline.data.templates import chat, tokenizer

SHORT = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"  # one token for each byte
EOS = 1


@pytest.fixture(scope="module")
def bytewise() -> ChatTokenizer:
    return ChatTokenizer(tokenizer(SHORT))


def test_conversations_are_truncated_on_the_right(bytewise: ChatTokenizer) -> None:
    records = [Conversation(chat(*texts), "s") for texts in (("abc", "de"), ("ab", "cdef"), ("abcdef", "g"))]
    items, notes = encode_conversations(bytewise, records, max_length=6)
    # "abc</s>de</s>" has 7 tokens and "ab</s>cdef</s>" 8. The first 6 tokens of "abcdef</s>g</s>" are the prompt.
    assert [len(item.ids) for item in items] == [6, 6]
    assert [item.counts.tolist() for item in items] == [[False] * 4 + [True] * 2, [False] * 3 + [True] * 3]
    assert all(item.ids[-1] != EOS for item in items)
    assert notes == {"cut to max_length": 2, "no answer within max_length": 1}
    full, notes = encode_conversations(bytewise, records, max_length=100)
    assert [int(item.ids[-1]) for item in full] == [EOS] * 3 and not notes


def test_all_tokens_can_be_trained(bytewise: ChatTokenizer) -> None:
    (item,), _ = encode_conversations(bytewise, [Conversation(chat("abc", "de"), "s")], max_length=9, loss_on="all")
    assert item.counts.tolist() == [True] * 7
    assert (item.ids.itemsize, item.counts.itemsize) == (4, 1)  # bytes of an id and of a flag


def test_documents_are_divided_and_every_token_is_trained(bytewise: ChatTokenizer) -> None:
    texts = ("abcdefgh", "xyz", "klmnopq")  # with </s> 9, 4 and 8 tokens
    records = [Document((Message("text", text),), "s") for text in texts]
    conversation = Conversation(chat("ab", "c"), "s")
    items, notes = encode_conversations(bytewise, [*records, conversation], max_length=4)
    rows = [item.ids.tolist() for item in items]
    ids = {text: [*bytewise.encode_answer(text)[:-1], EOS] for text in texts}
    assert rows[:2] == [ids["abcdefgh"][:4], ids["abcdefgh"][4:8]]  # the last part, only </s>, has no predicted token
    assert rows[2:5] == [ids["xyz"], ids["klmnopq"][:4], ids["klmnopq"][4:]]
    assert all(all(item.counts) for item in items[:5]) and items[5].counts.tolist() == [False] * 3 + [True]
    assert notes == {"documents divided at max_length": 2, "cut to max_length": 1}


def test_truncated_answers_have_no_end_token(bytewise: ChatTokenizer) -> None:
    def pair(prompt: str, chosen: str, rejected: str) -> Preference:
        return Preference(chat(prompt), Message("assistant", chosen), Message("assistant", rejected), "s", margin=0.5)

    records = [
        pair("a", "bc", "d"),
        pair("a", "bcdefg", "hijklmn"),
        pair("abcdef", "b", "c"),
        pair("a", "bcdeX", "bcdeY"),
    ]
    pairs, notes = encode_preferences(bytewise, records, max_length=6)
    assert [(len(p.chosen), len(p.rejected)) for p in pairs] == [(5, 4), (6, 6)]
    assert [(p.chosen[-1] == EOS, p.rejected[-1] == EOS) for p in pairs] == [(True, True), (False, False)]
    assert (pairs[0].margin, pairs[0].source) == (0.5, "s")
    assert notes == {"cut to max_length": 1, "prompt fills max_length": 1, "answers equal within max_length": 1}


def test_long_prompts_are_dropped(bytewise: ChatTokenizer) -> None:
    records = [Prompt(chat(text), "s") for text in ("abc", "abcdef")]
    items, notes = encode_prompts(bytewise, records, max_tokens=4)
    assert [(list(item.ids), item.row) for item in items] == [(bytewise.encode_prompt(chat("abc")), None)]
    assert notes == {"prompt longer than max_prompt_tokens": 1}


def test_long_encoding_prints_its_progress(
    bytewise: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 6))  # seconds at each reading
    monkeypatch.setattr(encode.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(encode, "CHUNK", 2)
    encode_prompts(bytewise, [Prompt(chat("abc"), "s")] * 9, max_tokens=20)
    assert capsys.readouterr().out.splitlines() == ["2 of 9 records tokenized", "6 of 9 records tokenized"]


def test_data_without_any_usable_example_is_refused(bytewise: ChatTokenizer) -> None:
    with pytest.raises(
        UserError,
        match=r"records fits \(the shortest has 4 tokens\) within rollout.max_prompt_tokens=2 ",
    ):
        encode_prompts(bytewise, [Prompt(chat("abc"), "s")], max_tokens=2)
    with pytest.raises(UserError, match=r"None of 1 records has an answer .* sft.max_length=3"):
        short = [Conversation(chat("abc", "d"), "s")]
        encode_conversations(bytewise, short, max_length=3)
    none, notes = encode_prompts(bytewise, [], max_tokens=2)
    assert not none and not notes
