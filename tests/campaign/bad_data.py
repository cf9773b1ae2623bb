"""Data files that are damaged, odd or legal but extreme."""

import gzip
import json
from pathlib import Path
from typing import Any

from tests.campaign.bad_configs import writes
from tests.campaign.cases import REWARD, SFT, TINY, Case

DIGITS = "1" * 5000


def lines(rows: list[Any]) -> str:
    """Return rows as JSONL. Lone surrogates stay escaped."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def chats(count: int = 40, **changes: Any) -> list[dict[str, Any]]:
    """Return rows of prompt and completion. `changes` replaces columns of one row in three."""
    rows = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(count)]
    return [row | (changes if number % 3 == 1 else {}) for number, row in enumerate(rows)]


def pairs(count: int = 40, **changes: Any) -> list[dict[str, Any]]:
    """Return rows of preferences."""
    rows = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": f"No idea {n}."} for n in range(count)]
    return [row | (changes if number % 3 == 1 else {}) for number, row in enumerate(rows)]


def turns(*roles: str, count: int = 40) -> list[dict[str, Any]]:
    """Return rows of messages with these roles."""
    return [{"messages": [{"role": role, "content": f"{role} {n}"} for role in roles]} for n in range(count)]


BROKEN: list[tuple[str, str, str | bytes, str]] = [
    ("empty", "a.jsonl", "", "the file is empty"),
    ("not JSON", "a.jsonl", "hello\n", "a line is not a JSON object .line 1"),
    ("cut off", "a.jsonl", lines(chats(3))[:-9], "1 of 3 rows cannot be used.*first: line 3"),
    ("a list per line", "a.jsonl", "[1]\n", "line 1: it is list, not"),
    ("5,000 digits", "a.jsonl", f'{{"prompt": "a", "completion": {DIGITS}}}\n', "not a JSON object .line 1.*4300"),
    ("5,000 digits in .json", "a.json", f'[{{"prompt": "a", "completion": {DIGITS}}}]', "cannot be read.*4300"),
    ("100,000 brackets", "a.jsonl", "[" * 100_000 + "\n", "line 1: it is nested too deeply"),
    ("100,000 brackets in .json", "a.json", "[" * 100_000, "nested too deeply"),
    ("columns, not rows", "a.json", '{"prompt": ["a"], "completion": ["b"]}', "has columns, not rows"),
    ("a text in .json", "a.json", '"text"', "not a list of objects"),
    ("Latin-1", "a.jsonl", '{"prompt": "\xe4"}\n'.encode("latin-1"), "not UTF-8 text at byte 12"),
    ("an image", "a.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    ("half an archive", "a.jsonl.gz", gzip.compress(lines(chats()).encode())[:60], "cannot be read"),
    ("a broken parquet", "a.parquet", b"PAR1 nothing PAR1", "cannot be read as parquet"),
    ("a broken arrow", "a.arrow", b"ARROW1 nothing", "cannot be read as arrow"),
    ("an unknown suffix", "a.docx", "x", "has no known suffix"),
    ("more cells than the header", "a.csv", "prompt,completion\na,b,c\n", "more cells than the header"),
    ("an open quote", "a.csv", 'prompt,completion\n"a,b\n', "is not CSV"),
    ("other columns", "a.jsonl", lines([{"body": "a"}] * 40), "the columns match no known form"),
    ("upper case columns", "a.jsonl", lines([{"Prompt": "a", "Completion": "b"}] * 40), "write the name in lower case"),
    ("chosen alone", "a.jsonl", lines([{"prompt": "a", "chosen": "b"}] * 40), "no column rejected"),
    ("prompts alone", "a.jsonl", lines([{"prompt": f"a{n}"} for n in range(40)]), "needs answers to imitate"),
    ("null cells", "a.jsonl", lines(chats(completion=None)), "no answer"),
    ("empty answers", "a.jsonl", lines(chats(completion=" ")), "empty answer"),
    ("numbers as prompts", "a.jsonl", lines(chats(prompt=3)), "neither a text nor a list|not a text"),
    ("true as answers", "a.jsonl", lines(chats(completion=True)), "rows cannot be used"),
    ("an unknown role", "a.jsonl", lines(turns("user", "robot")), "of the role 'robot'"),
    ("the assistant alone", "a.jsonl", lines(turns("assistant")), "rows cannot be used"),
    ("a late system message", "a.jsonl", lines(turns("user", "system", "assistant")), "a system message after"),
    ("messages of text", "a.jsonl", lines([{"messages": "hello"}] * 40), "messages are not a list"),
    ("no messages", "a.jsonl", lines([{"messages": []}] * 40), "rows cannot be used|no messages"),
    ("a role of numbers", "a.jsonl", lines([{"messages": [{"role": 1, "content": "a"}]}] * 40), "without a role"),
    ("labels without kto", "a.jsonl", lines(chats(label=False)), "label is false|no label|rows cannot be used"),
    ("one row", "a.jsonl", lines(chats(1)), "same text or first message"),
    (
        "equal prompts",
        "a.jsonl",
        lines([{"prompt": "a", "completion": f"b{n}"} for n in range(40)]),
        "same text or first message",
    ),
    ("escape sequences in a role", "a.jsonl", lines(turns("user", "\x1b[31mred")), r"of the role"),
    ("5,000 digits in messages of a cell", "a.csv", f'messages\n"[{DIGITS}]"\n', "messages are not a list"),
]
LEGAL: list[tuple[str, str, str | bytes]] = [
    ("a byte order mark", "a.jsonl", "\ufeff" + lines(chats())),
    ("CRLF", "a.jsonl", lines(chats()).replace("\n", "\r\n")),
    ("a greeting of the assistant first", "a.jsonl", lines(turns("assistant", "user", "assistant"))),
    ("one line of forty cut off", "a.jsonl", lines(chats())[:-9]),
    ("texts", "a.jsonl", lines([{"text": f"a{n}"} for n in range(40)])),
    ("lone surrogates", "a.jsonl", lines(chats(completion="a\ud800b"))),
    ("zero characters", "a.jsonl", lines(chats(completion="a\x00b"))),
    ("escape sequences", "a.jsonl", lines(chats(prompt="\x1b[31mred", completion="\x1b]0;title\x07"))),
    ("control tokens as text", "a.jsonl", lines(chats(completion="<|end|><|assistant|>yes"))),
    ("Chinese and emoji", "a.jsonl", lines(chats(completion="你好 🙂 e\u0301"))),
    ("a word of one megabyte", "a.jsonl", lines(chats(completion="a" * 1_000_000))),
    ("words of one megabyte", "a.jsonl", lines([*chats(), *chats(3, completion="xyz" * 333_333)])),
    (
        "random letters of one megabyte",
        "a.jsonl",
        lines(chats(3, completion=str(3**2_000_00 % 10**4000) * 200) + chats()),
    ),
    ("huge numbers as answers", "a.jsonl", lines(chats(completion=1e308))),
    ("extra columns", "a.jsonl", lines(chats(extra={"a": [1, {"b": None}]}))),
    ("two rows", "a.jsonl", lines(chats(3))),
    ("a hundred turns", "a.jsonl", lines(turns(*["user", "assistant"] * 50, count=8))),
    ("semicolons", "a.csv", "prompt;completion\n" + "".join(f"a{n};b{n}\n" for n in range(40))),
    ("compressed, with another name", "a.jsonl", gzip.compress(lines(chats()).encode())),
]
PAIRS: list[tuple[str, list[Any], str]] = [
    ("a text margin", pairs(margin="high"), "margin is not a finite number"),
    ("a margin of NaN", pairs(margin=float("nan")), "margin is not a finite number"),
    ("a margin of true", pairs(margin=True), "margin is not a finite number"),
    (
        "a text score",
        [row | {"score_chosen": "9/10", "score_rejected": 1} for row in pairs()],
        "is not a finite number",
    ),
    ("a huge margin", pairs(margin=1e308), "margin is not a finite number"),
    ("equal answers", pairs(rejected="same", chosen="same"), "chosen equals rejected"),
    ("no rejected answers", pairs(rejected=None), "no rejected"),
    ("completions for the reward model", chats(), "needs prompt . chosen . rejected"),
]


def cases() -> list[Case]:
    """Return the cases."""
    sft = (*TINY, *SFT)
    found = [
        Case("data", name, (*sft, f"data.path={file}"), says, prepare=writes(file, content))
        for name, file, content, says in BROKEN
    ]
    found += [
        Case("data", name, (*sft, f"data.path={file}"), status=0, prepare=writes(file, content))
        for name, file, content in LEGAL
    ]
    reward = (*TINY, *REWARD, "reward.use_margin=true", "data.path=a.jsonl")
    found += [Case("data", name, reward, says, prepare=writes("a.jsonl", lines(rows))) for name, rows, says in PAIRS]
    for name, path, says, prepare in (
        ("an empty folder", "d", "the folder has no", Path("d").mkdir),
        ("a link to nothing", "a.jsonl", "there is no such file", _link),
        ("a folder named like a file", "d.jsonl", "has no", Path("d.jsonl").mkdir),
    ):
        found.append(Case("data", name, (*sft, f"data.path={path}"), says, prepare=prepare))
    for name, keys, says in (
        ("a renamed column that is missing", "columns: {x: prompt}", "there is no column x"),
        ("a missing eval_path", "eval_path: b.jsonl", "b.jsonl: there is no such file"),
        ("eval_path is path", "eval_path: a.jsonl", "no usable row is left"),
    ):
        source = f"data.sources=[{{path: a.jsonl, {keys}}}]"
        found.append(Case("data", name, (*sft, source), says, prepare=writes("a.jsonl", lines(chats()))))
    return found


def _link() -> None:
    Path("a.jsonl").symlink_to("nothing.jsonl")
