"""Random damage to JSON files, weights and values of the command line, by a seed."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.messages import describe
from pipeline.config.schema import RunConfig
from tests.campaign.bad_data import chats, lines
from tests.campaign.bad_models import FOLDER
from tests.campaign.bad_runs import AGAIN, ALL
from tests.campaign.cases import EITHER, SFT, TINY, Case

VALUES = [None, True, False, 0, -1, 10**20, 1.5, -1e308, "", "text", "\x1b[31m", [], [1], {}, {"a": 1}, "ä", "0" * 3000]
WORDS = ["null", "true", "-1", "0", "1e400", "nan", "text", "''", "[]", "[1]", "{}", "{a:1}", "9" * 20, "ä"]
COSTLY = {"ranks", "stage", "run_dir", "name", "debug"}  # a value may be legal and start many processes, or another run


def cases(seed: int, count: int) -> list[Case]:
    """Return random cases. Each may work or end with one message."""
    return [_case(f"{seed}-{number}") for number in range(count)]


def _case(seed: str) -> Case:
    """Return one case."""
    draw = random.Random(seed)
    kind = draw.choice(("manifest", "config", "tokenizer", "data", "weights", "value"))
    if kind == "value":
        keys = [key for key, text in describe(RunConfig).items() if text and ".N." not in key and key not in COSTLY]
        arguments = (*TINY, *SFT, f"{draw.choice(keys)}={draw.choice(WORDS)}")
        return Case("random", f"{kind} {seed}: {arguments[-1]}", arguments, status=EITHER)
    damage: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
        "manifest": ("runs/x/manifest.json", (*ALL, *AGAIN), ("model", "run")),
        "config": ("model/config.json", FOLDER, ("model",)),
        "tokenizer": ("model/tokenizer.json", FOLDER, ("model",)),
        "data": ("a.jsonl", FOLDER, ("model",)),
        "weights": ("model/model.safetensors", FOLDER, ("model",)),
    }
    file, arguments, needs = damage[kind]
    change = _flip_bytes if kind == "weights" else partial(_replace, by_line=kind == "data")
    return Case("random", f"{kind} {seed}", arguments, status=EITHER, prepare=_damaged(file, change, draw), needs=needs)


def _damaged(file: str, change: Callable[[Path, random.Random], None], draw: random.Random) -> Callable[[], None]:
    def prepare() -> None:
        rows = [row | {"chosen": "yes", "rejected": "no"} for row in chats(60)]
        Path("a.jsonl").write_text(lines(rows))
        change(Path(file), draw)

    return prepare


def _flip_bytes(file: Path, draw: random.Random) -> None:
    """Change some bytes, half of them in the header."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(draw.choice((2000, len(content))))] = draw.randrange(256)
    file.write_bytes(content)


def _replace(file: Path, draw: random.Random, *, by_line: bool) -> None:
    """Replace random nodes of a JSON file, or of each line of a JSONL file, by values of other types."""
    texts = file.read_text().splitlines() if by_line else [file.read_text()]
    values = [json.loads(text) for text in texts]
    for value in values if by_line else values * draw.randint(1, 2):
        _mutate(value, draw)
    file.write_text("\n".join(json.dumps(value) for value in values) + "\n")


def _mutate(value: Any, draw: random.Random) -> None:
    """Replace or remove one node."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
            value = value[key]
            continue
        if draw.random() < 0.2:
            del value[key]
        else:
            value[key] = draw.choice(VALUES)
        return
