"""Run folders whose files are damaged, missing or of other types, and inputs that change between two starts.

The fixture is a finished run of SFT, reward model and PPO of the model folder, with checkpoints.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.bad_configs import writes
from tests.campaign.bad_data import chats, lines, pairs
from tests.campaign.cases import PPO, REWARD, SFT, SHORT, Case

RUN = Path("runs/x")
ALL = ("model.path=model", *SHORT, *SFT[1:], *REWARD[1:], *PPO, "stage=all", "data.path=a.jsonl")
"""The command of the fixture."""
DATA = writes("a.jsonl", lines(pairs(60)))
MANIFEST = RUN / "manifest.json"
COMPUTED_BY_PPO = ("ppo/model", "ppo/checkpoints")
FROM_BASE = ("stage=reward", "reward.init=base")
AGAIN = ("ppo.lr=2e-5",)  # makes PPO run again, which reads the models of the earlier stages
MANIFESTS: list[tuple[str, Any]] = [
    ("cut off", '{"identity": {'),
    ("a list", "[]"),
    ("empty", ""),
    ("no stages", '{"identity": {}, "request": ""}'),
    ("stages as a list", {"stages": []}),
    ("a status of another type", {"sft": {"status": 3}}),
    ("an unknown status", {"sft": {"status": "half"}}),
    ("inputs as a list", {"sft": {"consumed": []}}),
    ("models as a text", {"sft": {"consumed": {"config": "", "settings": {}, "data": "", "models": "m"}}}),
    ("outputs as a list", {"sft": {"produced": []}}),
    ("a time of a number", {"ppo": {"finished": 3}}),
    ("identity as a list", {"identity": []}),
    ("the request as a number", {"request": 3}),
    ("100,000 brackets", "[" * 100_000),
]


def cases() -> list[Case]:
    """Return the cases."""

    def case(name: str, says: str, change: Callable[[], None], *more: str, status: int = 2) -> Case:
        return Case("run", name, (*ALL, *more), says, status, _after(change), ("model", "run"))

    skipped = "ppo: finished before with the same settings, skipped"
    found = [case("nothing changed", skipped, lambda: None, status=0)]
    found += [case(f"manifest: {name}", "manifest.json cannot be read", _manifest(what)) for name, what in MANIFESTS]
    lost = case("a stage without inputs", "does not record its inputs", _record("ppo", "consumed"), status=0)
    found += [
        lost,
        case("no manifest, stage=reward", "has no record of the sft stage", MANIFEST.unlink, "stage=reward"),
        case("no manifest, stage=ppo", "has no finished sft stage|no actor model", MANIFEST.unlink, "stage=ppo"),
        case("no manifest", "its record is gone", MANIFEST.unlink, status=0),
        case("the SFT model was edited", "is not as the sft stage made it", _edit("sft/model/config.json"), *AGAIN),
        case("the reward model was edited", "not as the reward stage made", _edit("reward/model/config.json"), *AGAIN),
        case("bit rot in the SFT model", "is not as the sft stage made it", _rot, *AGAIN),
        case("the SFT model is gone", "exported again from the newest checkpoint", _remove("sft/model"), status=0),
        case("the PPO model is gone", "exported again from the newest checkpoint", _remove("ppo/model"), status=0),
        case("model and checkpoints are gone", "its checkpoints are gone", _remove(*COMPUTED_BY_PPO), status=0),
        case("config.yaml is gone", skipped, (RUN / "sft/config.yaml").unlink, status=0),
        case("config.yaml is damaged", skipped, writes("runs/x/ppo/config.yaml", "{["), status=0),
        case("summary.json is damaged", skipped, writes("runs/x/ppo/summary.json", "{["), status=0),
        case("summary.json has other types", skipped, _summary, status=0),
        case("metrics.jsonl is garbage", skipped, writes("runs/x/ppo/metrics.jsonl", b"\xff\xfe\n{}\n[1]\n"), status=0),
        case("samples.jsonl is garbage", skipped, writes("runs/x/ppo/samples.jsonl", b"\xff\n{}\n[1]\n"), status=0),
        case("the tokenizer is damaged", "the tokenizer cannot be read", _tokenizer, status=2),
        case("unfinished files", skipped, writes("runs/x/sft/.a.json.7.part", "{"), status=0),
        case("an unfinished export", skipped, writes("runs/x/sft/model.tmp/part-0.safetensors", ""), status=0),
        case("a stage that is a file", "ppo: runs again", _file, status=0),
        case("another seed", "seed was 1, is 2", lambda: None, "seed=2", status=0),
        case("another model", "belongs to another configuration", _other_model, "model.path=other"),
        case("the data changed", "sft: runs again .the data changed", _more_data, status=0),
        case("the model's weights changed", "sft: runs again .its base model changed", _weights, status=0),
        case("the model's tokenizer changed", "sft: runs again .the tokenizer's files changed", _template, status=0),
        case("the template changed before stage=reward", "changed since the sft stage", _template, *FROM_BASE),
    ]
    found += [
        case(f"checkpoint: {name}", says, _checkpoint(change), status=status)
        for name, says, change, status in (
            ("the checksums are {}", "step-1 is damaged|are damaged", writes("checksums.json", "{}"), 2),
            ("the checksums are a list", "are damaged", writes("checksums.json", "[]"), 2),
            ("no checksums", "are damaged", lambda: Path("checksums.json").unlink(), 2),
            ("the state is garbage", "are damaged", writes("state.json", "garbage"), 2),
            ("no tensors", "are damaged", lambda: Path("tensors-0.safetensors").unlink(), 2),
            ("cut tensors", "are damaged", lambda: os.truncate("tensors-0.safetensors", 1000), 2),
            ("rot in the tensors", "are damaged", lambda: _flip(Path("tensors-0.safetensors")), 2),
            ("a file of notes", "exported again", writes("notes.txt", "mine"), 0),
        )
    ]
    for file, name, content in (
        ("out_of_memory.json", "a list", "[]"),
        ("out_of_memory.json", "a text", '{"micro_batch_tokens": "few"}'),
        ("out_of_memory.json", "cut off", "{"),
        ("out_of_memory.json", "unknown keys", '{"tokens": 3}'),
        ("out_of_memory.json", "a negative number", '{"micro_batch_tokens": -5}'),
        ("rollbacks.json", "an object", "{}"),
        ("rollbacks.json", "numbers", "[1]"),
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


def _record(stage: str, *keys: str) -> Callable[[], None]:
    """Return a function that removes keys of a stage's record."""

    def write() -> None:
        content = json.loads(MANIFEST.read_text())
        for key in keys:
            del content["stages"][stage][key]
        MANIFEST.write_text(json.dumps(content))

    return write


def _edit(name: str) -> Callable[[], None]:
    return lambda: (RUN / name).write_text((RUN / name).read_text() + " ") and None


def _flip(file: Path) -> None:
    """Change the last byte of a file, and neither its size nor its times."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _rot() -> None:
    _flip(RUN / "sft/model/model.safetensors")


def _remove(*names: str) -> Callable[[], None]:
    return lambda: [shutil.rmtree(RUN / name) for name in names] and None


def _summary() -> None:
    (RUN / "ppo/summary.json").write_text(json.dumps({"final": [], "seconds": "long", "evaluation": 3, "memory": [1]}))


def _tokenizer() -> None:
    """Damage the run's tokenizer before an unfinished SFT reads it."""
    (RUN / "tokenizer/tokenizer.json").write_text("{")
    shutil.rmtree(RUN / "sft/model")


def _file() -> None:
    shutil.rmtree(RUN / "ppo")
    (RUN / "ppo").write_text("")


def _more_data() -> None:
    writes("a.jsonl", lines([*pairs(60), *chats(3)][:60] + pairs(3)))()


def _other_model() -> None:
    shutil.copytree("model", "other")


def _weights() -> None:
    _flip(Path("model/model.safetensors"))
    os.utime("model/model.safetensors")


def _template() -> None:
    file = Path("model/chat_template.jinja")
    file.write_text(file.read_text() + "{# changed #}")


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
