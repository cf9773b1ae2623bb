"""Data files that are damaged, odd or legal but extreme."""

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
    ("not JSON", "a.jsonl", "hello\n", "a line is not a JSON object: line 1"),
    ("cut off", "a.jsonl", lines(chats(3))[:-9], "1 of 3 rows cannot be used.*first: line 3"),
    ("100,000 brackets in .json", "a.json", "[" * 100_000, "is not JSON"),
    ("an image", "a.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    ("other columns", "a.jsonl", lines([{"body": "a"}] * 40), "the columns match no known form"),
    ("prompts alone", "a.jsonl", lines([{"prompt": f"a{n}"} for n in range(40)]), "needs answers to imitate"),
    ("labels without kto", "a.jsonl", lines(chats(label=False)), "label is false|no label|rows cannot be used"),
    ("escape sequences in a role", "a.jsonl", lines(turns("user", "\x1b[31mred")), r"of the role"),
    ("5,000 digits in messages of a cell", "a.csv", f'messages\n"[{DIGITS}]"\n', "messages that is not JSON"),
]
LEGAL: list[tuple[str, str, str | bytes]] = [
    ("a byte order mark", "a.jsonl", "\ufeff" + lines(chats())),
    ("CRLF", "a.jsonl", lines(chats()).replace("\n", "\r\n")),
    ("one line of forty cut off", "a.jsonl", lines(chats())[:-9]),
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
]
PAIRS: list[tuple[str, list[Any], str]] = [
    ("equal answers", pairs(rejected="same", chosen="same"), "chosen equals rejected"),
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
        ("a link to nothing", "a.jsonl", "there is no such file", _link),
        ("a folder named like a file", "d.jsonl", "has no", Path("d.jsonl").mkdir),
    ):
        found.append(Case("data", name, (*sft, f"data.path={path}"), says, prepare=prepare))
    for name, keys, says in (("eval_path is path", "eval_path: a.jsonl", "no usable row is left"),):
        source = f"data.sources=[{{path: a.jsonl, {keys}}}]"
        found.append(Case("data", name, (*sft, source), says, prepare=writes("a.jsonl", lines(chats()))))
    return found


def _link() -> None:
    Path("a.jsonl").symlink_to("nothing.jsonl")
