"""Run folders whose files are damaged, missing or of other types, and inputs that change between two starts.

The fixture is a finished run of SFT, reward model and PPO of the model folder, with checkpoints.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.bad_configs import writes
from tests.campaign.bad_data import lines, pairs
from tests.campaign.cases import PPO, REWARD, SFT, SHORT, Case

RUN = Path("runs/x")
ALL = ("model.path=model", *SHORT, *SFT[1:], *REWARD[1:], *PPO, "stage=all", "data.path=a.jsonl")
"""The command of the fixture."""
DATA = writes("a.jsonl", lines(pairs(60)))
MANIFEST = RUN / "manifest.json"
AGAIN = ("ppo.lr=2e-5",)  # makes PPO run again, which reads the models of the earlier stages
MANIFESTS: list[tuple[str, Any]] = [
    ("empty", ""),
    ("no stages", '{"identity": {}, "request": ""}'),
    ("a status of another type", {"sft": {"status": 3}}),
    ("an unknown status", {"sft": {"status": "half"}}),
    ("inputs as a list", {"sft": {"consumed": []}}),
    ("models as a text", {"sft": {"consumed": {"config": "", "settings": {}, "data": "", "models": "m"}}}),
    ("outputs as a list", {"sft": {"produced": []}}),
    ("a time of a number", {"ppo": {"finished": 3}}),
    ("100,000 brackets", "[" * 100_000),
]


def cases() -> list[Case]:
    """Return the cases."""

    def case(name: str, says: str, change: Callable[[], None], *more: str, status: int = 2) -> Case:
        return Case("run", name, (*ALL, *more), says, status, _after(change), ("model", "run"))

    rot, lose = partial(_flip, RUN / "sft/model/model.safetensors"), partial(shutil.rmtree, RUN / "ppo/model")
    skipped = "ppo: finished before with the same settings, skipped"
    found = [case("nothing changed", skipped, lambda: None, status=0)]
    found += [case(f"manifest: {name}", "manifest.json cannot be read", _manifest(what)) for name, what in MANIFESTS]
    found += [
        case("a stage without inputs", "does not record its inputs", _without_inputs, status=0),
        case("no manifest, stage=ppo", "has no finished sft stage|no actor model", MANIFEST.unlink, "stage=ppo"),
        case("the reward model was edited", "not as the reward stage made", _edit, *AGAIN),
        case("bit rot in the SFT model", "is not as the sft stage made it", rot, *AGAIN),
        case("the PPO model is gone", "exported again from the newest checkpoint", lose, status=0),
        case("config.yaml is gone", skipped, (RUN / "sft/config.yaml").unlink, status=0),
        case("config.yaml is damaged", skipped, writes("runs/x/ppo/config.yaml", "{["), status=0),
        case("summary.json is damaged", skipped, writes("runs/x/ppo/summary.json", "{["), status=0),
        case("summary.json has other types", skipped, _summary, status=0),
        case("metrics.jsonl is garbage", skipped, writes("runs/x/ppo/metrics.jsonl", b"\xff\xfe\n{}\n[1]\n"), status=0),
        case("samples.jsonl is garbage", skipped, writes("runs/x/ppo/samples.jsonl", b"\xff\n{}\n[1]\n"), status=0),
        case("an unfinished export", skipped, writes("runs/x/sft/model.tmp/part-0.safetensors", ""), status=0),
        case("a stage that is a file", "ppo: runs again", _file, status=0),
        case("another seed", "seed was 1, is 2", lambda: None, "seed=2", status=0),
    ]
    found += [
        case(f"checkpoint: {name}", says, _checkpoint(change), status=status)
        for name, says, change, status in (
            ("the checksums are {}", "step-1 is damaged|are damaged", writes("checksums.json", "{}"), 2),
            ("the state is garbage", "are damaged", writes("state.json", "garbage"), 2),
            ("rot in the tensors", "are damaged", lambda: _flip(Path("tensors-0.safetensors")), 2),
            ("a file of notes", "exported again", writes("notes.txt", "mine"), 0),
        )
    ]
    for file, name, content in (
        ("out_of_memory.json", "cut off", "{"),
        ("out_of_memory.json", "a negative number", '{"micro_batch_tokens": -5}'),
        ("rollbacks.json", "other types", '[{"step": "a", "to": [], "reason": 3}]'),
    ):
        change = _unfinished(writes(f"runs/x/ppo/{file}", content))
        found.append(case(f"{file}: {name}", f"{file} cannot be read", change))
    return found


def _after(change: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        DATA()
        change()

    return prepare


def _manifest(change: Any) -> Callable[[], None]:
    """Return a function that replaces the manifest by a text, or parts of it by other values."""

    def write() -> None:
        if isinstance(change, str):
            MANIFEST.write_text(change)
            return
        content = json.loads(MANIFEST.read_text())
        for key, value in change.items():
            if key in content:
                content[key] = value
            else:
                content["stages"][key] |= value
        MANIFEST.write_text(json.dumps(content))

    return write


def _without_inputs() -> None:
    content = json.loads(MANIFEST.read_text())
    del content["stages"]["ppo"]["consumed"]
    MANIFEST.write_text(json.dumps(content))


def _edit() -> None:
    file = RUN / "reward/model/config.json"
    file.write_text(file.read_text() + " ")


def _flip(file: Path) -> None:
    """Change the last byte of a file, and neither its size nor its times."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _summary() -> None:
    (RUN / "ppo/summary.json").write_text(json.dumps({"final": [], "seconds": "long", "evaluation": 3, "memory": [1]}))


def _file() -> None:
    shutil.rmtree(RUN / "ppo")
    (RUN / "ppo").write_text("")


def _checkpoint(change: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that changes the only checkpoint of PPO, from which the model has to be exported again."""

    def write() -> None:
        shutil.rmtree(RUN / "ppo/model")
        *others, folder = sorted((RUN / "ppo/checkpoints").glob("step-*"))
        for other in others:
            shutil.rmtree(other)
        earlier = Path.cwd()
        os.chdir(folder)
        change()
        os.chdir(earlier)

    return write


def _unfinished(change: Callable[[], None]) -> Callable[[], None]:
    """Return a function that changes a file of an unfinished PPO."""

    def write() -> None:
        shutil.rmtree(RUN / "ppo/model")
        change()

    return write
