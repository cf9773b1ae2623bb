"""The commands, the Python blocks and the YAML files of README.md and docs/, and the commands of `--help`, are valid.

Each command is composed and checked as `zerochat` does before any work. Words in capitals stand for a user's file.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml

import zerochat
from pipeline.chat.command import _parser as chat_parser
from pipeline.config import check_engine
from pipeline.config.check import validate
from pipeline.config.compose import compose_jobs, parse_command
from pipeline.config.schema import DataConfig
from pipeline.export.command import _parser as export_parser
from pipeline.report.report import _parser as report_parser
from pipeline.serve.command import _page_parser
from pipeline.serve.command import _parser as serve_parser
from tests.composed import config_of

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STAGES = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}
PROGRAM = re.compile(r"(python|zerochat|torchrun) ")
CODE = re.compile(r"^(?: {4,}\S[^\n]*\n)+|^```sh\n.*?^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command line of a page: indented or in a block of `sh`, without comments and "..."."""
    for block in CODE.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if re.match(r"\s*(ZEROCHAT_KEY=\S+ )?(python|zerochat|torchrun|sbatch) ", line):
                yield [word for word in shlex.split(line, comments=True) if word != "..."]


def check_training(words: Sequence[str], stage: str | None = None) -> None:
    words = ["data=demo" if word == "data=mine" else word for word in words]  # the reader writes conf/data/mine.yaml
    command = parse_command([*words, *([f"stage={stage}"] if stage is not None else [])])
    if command.multirun:
        for job in compose_jobs(command):
            validate(job.raw)
    else:
        config_of(*command.overrides)


def check_chat(words: Sequence[str]) -> None:
    parser = _page_parser() if {"--web", "--arena"} & set(words) else chat_parser()
    parser.parse_args(list(words))


CHECKS: dict[str, Callable[[Sequence[str]], object]] = {
    "train": check_training,
    "train.py": check_training,
    "train.sbatch": check_training,
    "doctor": check_training,
    "chat": check_chat,
    "chat.py": check_chat,
    "serve": lambda words: serve_parser().parse_args(list(words)),
    "export": lambda words: export_parser().parse_args(list(words)),
    "report": lambda words: report_parser().parse_args(list(words)),
    "pipeline.report": lambda words: report_parser().parse_args(list(words)),
    **{package: partial(check_training, stage=stage) for package, stage in STAGES.items()},
}


def split(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the name of a command in CHECKS and its arguments; None for other programs, such as `python -m venv`."""
    names = [Path(word).name for word in words]
    found = next((name for name in names if name in CHECKS), None)
    return (found, list(words[names.index(found) + 1 :])) if found is not None else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engine, "find_spec", lambda name: True)  # vLLM is no package of the tests
    for name, words in filter(None, map(split, commands(page.read_text(encoding="utf-8")))):
        CHECKS[name](words)


def test_commands_are_found() -> None:
    text = "\n    python train.py model=opt-1.3b \\\n        sft.lr=1  # why\n\n```sh\nzerochat serve x\nls\n```\n"
    words = [["python", "train.py", "model=opt-1.3b", "sft.lr=1"], ["zerochat", "serve", "x"]]
    assert list(commands(text)) == words
    assert [split(each) for each in words] == [("train.py", ["model=opt-1.3b", "sft.lr=1"]), ("serve", ["x"])]
    assert split(["python", "-m", "venv", "my-env"]) is None
    found = [split(words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert sum(each is not None for each in found) > 60


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `zerochat WORDS --help` prints."""
    try:
        assert zerochat.main([*words, "--help"]) == 0
    except SystemExit as end:  # argparse
        assert end.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "count"), [("train", 9), ("doctor", 2), ("chat", 7), ("serve", 3), ("export", 4), ("report", 2)]
)
def test_the_examples_of_help_are_valid(name: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """An explanation follows two spaces; `<` is the shell's."""
    lines = [line.strip() for line in help_of(capsys, name).splitlines()]
    examples = [shlex.split(line.partition("  ")[0].partition(" < ")[0]) for line in lines if PROGRAM.match(line)]
    assert len(examples) == count
    for words in examples:
        found = split(words)
        assert found is not None
        CHECKS[found[0]](found[1])


def test_each_command_is_in_the_readme_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^  ([a-z]+)((?: \S+)*)  +\S.*$", help_of(capsys), re.MULTILINE)
    assert (
        [name for name, _ in lines] == list(zerochat.COMMANDS) == [name for name in CHECKS if name in zerochat.COMMANDS]
    )
    for name, words in lines:
        assert f"`{name}`" in readme or f"`zerochat {name}`" in readme
        values = {"KEY=VALUE": ["model=tiny"], "FORM": ["folder"], "...": []}
        CHECKS[name]([value for word in words.split() for value in values.get(word, [word])])


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("trian", "did you mean zerochat train?"),
        ("reprot", "did you mean zerochat report?"),
        ("sft.lr=1e-5", "write zerochat train sft.lr=1e-5"),
        ("help", "zerochat --help explains them"),
        ("--helpp", "zerochat --help explains them"),
    ],
)
def test_an_unknown_command_is_one_line_with_advice(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert zerochat.main([word]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(
        f"error: {word} is not a command of zerochat (train, doctor, chat, serve, export, report"
    )
    assert shown.err.endswith(f": {advice}\n") and shown.err.count("\n") == 1 and not shown.out


def test_python_and_yaml_are_valid() -> None:
    sources = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
            compile(block, f"{page.name} block {number + 1}", "exec")
        for block in re.findall(r"^    # conf/data/\w+\.yaml\n(?:    .*\n)+", text, re.MULTILINE):
            DataConfig.model_validate(yaml.safe_load(block))
            sources += 1
    assert sources
