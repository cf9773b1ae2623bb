"""The first day of a newcomer: `python -m tests.newcomer` runs it on the installed wheel in an empty folder.

The steps: build the wheel, install it into a fresh virtual environment, execute the tutorial as printed (doctor, plan,
three stages, chat, transformers), train on each file format, chat and vote in Chromium, train on the votes, serve,
answer the `openai` client, export, load the export with transformers, and execute the cells of the notebook.

    python -m tests.newcomer                   everything; needs a package index and Chromium, takes 10 to 20 minutes
    python -m tests.newcomer --venv FOLDER     installs only the wheel into an existing environment
    python -m tests.newcomer --folder FOLDER   works in this folder and keeps it
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
from openai import OpenAI
from playwright.sync_api import Browser, expect

from tests.newcomer.notebook import to_program
from tests.newcomer.page import run_page
from tests.pipeline.serve.chromium import chromium

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "first_chat_model.md"
NOTEBOOK = ROOT / "examples" / "free_gpu.ipynb"
FIRST_ANSWER_SECONDS = 15.0  # an aim, not a check: a busy machine is slower
ANSWERS = {  # of the tutorial's model at temperature 0, also printed by the tutorial
    "Where is my red lamp?": "Hello! It is on its way and arrives on Monday. Can I help you with anything else?",
    "Can I return my blue chair?": "Hello! You can return it within 30 days. Can I help you with anything else?",
}
FEWEST_STEPS = ["tracking=none", "evaluation.prompts=8", "rollout.max_new_tokens=32"]


ROWS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "completions": lambda prompt, answer: {"prompt": prompt, "completion": answer},
    "openai": lambda prompt, answer: {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    },
    "sharegpt": lambda prompt, answer: {
        "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
    },
    "alpaca": lambda prompt, answer: {"instruction": prompt, "input": "", "output": answer},
    "texts": lambda prompt, answer: {"text": f"{prompt} {answer}"},
}
"""Rows of a file by the name of their form."""


@dataclass(frozen=True)
class Newcomer:
    """Somebody with an installed package and a folder."""

    venv: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of an activated virtual environment, without the checkout."""
        rest = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return {**rest, "VIRTUAL_ENV": str(self.venv), "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}"}

    def type(self, *words: str) -> str:
        """Run a command and return what it prints to standard output. Its standard error is printed if it fails."""
        print("$", *words, flush=True)
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def server(self, *words: str) -> Iterator[str]:
        """Run a command that serves until Ctrl-C. Provides the address that it prints."""
        print("$", *words, flush=True)
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        seen = []
        try:
            for line in process.stdout:
                seen.append(line)
                if address := re.search(r"http://[\d.]+:\d+", line):
                    yield address[0]
                    break
            else:
                raise AssertionError(f"no address:\n{''.join(seen)}")
        finally:
            process.terminate()
            process.wait()


def install(venv: Path) -> None:
    """Build the wheel and install it; into a new virtual environment with its dependencies if there is none yet."""
    new = not venv.exists()
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *quiet, "--no-deps", "-w", folder, str(ROOT)], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        if new:
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [
            str(venv / "bin" / "python"),
            "-m",
            "pip",
            "install",
            *quiet,
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        print(f"installs {wheel.name} into {venv}{' with its dependencies' if new else ''}", flush=True)
        if new:
            subprocess.run([*pip, f"{wheel}[serve]"], check=True)
        else:
            subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)


def train_on_each_format(newcomer: Newcomer) -> None:
    """Train two steps of SFT on the tutorial's pairs in each file format, and on each other form of a row."""
    rows = [json.loads(line) for line in (newcomer.folder / "pairs.jsonl").read_text().splitlines()]
    (newcomer.folder / "pairs.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.csv.write_csv(table, newcomer.folder / "pairs.csv")
    pyarrow.csv.write_csv(table, newcomer.folder / "pairs.tsv", pyarrow.csv.WriteOptions(delimiter="\t"))
    pyarrow.parquet.write_table(table, newcomer.folder / "pairs.parquet")
    with pyarrow.ipc.new_file(newcomer.folder / "pairs.arrow", table.schema) as file:
        file.write_table(table)
    for name, form in ROWS.items():
        lines = [json.dumps(form(row["prompt"], row["chosen"])) for row in rows]
        (newcomer.folder / f"{name}.jsonl").write_text("\r\n".join(lines))  # line ends of Windows
    files = ["pairs.json", "pairs.csv", "pairs.tsv", "pairs.parquet", "pairs.arrow"]
    for name in [*files, *(f"{name}.jsonl" for name in ROWS)]:
        run = name.replace(".", "-")
        keys = ["model=tiny", "stage=sft", f"data.path={name}", f"name={run}", "sft.steps=2", *FEWEST_STEPS]
        newcomer.type("zerochat", "train", *keys)
        summary = json.loads((newcomer.folder / "runs" / run / "sft" / "summary.json").read_text())
        assert summary["steps"] == 2, summary


def chat_in_browser(newcomer: Newcomer, browser: Browser) -> float:
    """Ask one question on the chat page. Returns the seconds from the command to the first answer."""
    question, expected = next(iter(ANSWERS.items()))
    start = time.monotonic()
    with newcomer.server("zerochat", "chat", "runs/shop", "--web") as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        page.locator("summary").click()
        page.fill("#temperature", "0")
        page.fill("#text", question)
        page.click("#send")
        expect(page.locator("#again")).to_be_enabled()
        seconds = time.monotonic() - start
        answer = page.locator(".assistant").text_content() or ""
        page.screenshot(path=newcomer.folder / "chat_page.png")
    print(f"the chat page answered after {seconds:.1f} s: {answer}", flush=True)
    assert expected in answer, answer
    return seconds


def vote_in_browser(newcomer: Newcomer, browser: Browser) -> None:
    """Vote for the longer answer in twelve rounds of the arena."""
    things = ["lamp", "chair", "table", "shirt", "coat", "watch", "radio", "phone", "clock", "bag", "cup", "bowl"]
    command = ("zerochat", "chat", "runs/shop", "--arena", "--port", "0")
    with newcomer.server(*command) as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        for thing in things:
            page.fill("#text", f"Can I return my red {thing}?")
            page.keyboard.press("Enter")
            expect(page.locator("#ballot")).to_be_visible()
            left, right = (len(text) for text in page.locator(".side .assistant").all_text_contents()[-2:])
            vote = "left" if left > right else "right" if right > left else "both"
            page.click(f"button[value={vote}]")
            expect(page.locator("#ballot")).to_be_hidden()
        print("arena:", page.locator("#rate").text_content(), flush=True)
        page.screenshot(path=newcomer.folder / "arena.png")
    votes = (newcomer.folder / "runs" / "shop" / "votes.jsonl").read_text().splitlines()
    assert len(votes) == len(things)


def train_on_votes(newcomer: Newcomer) -> None:
    """Train two steps of DPO on the votes, from the model that people voted on."""
    votes = ["data.path=runs/shop/votes.jsonl", "name=voted", *FEWEST_STEPS]
    start = ["stage=dpo", "actor=runs/shop/ppo", "dpo.steps=2"]
    printed = " ".join(newcomer.type("zerochat", "train", "model=tiny", *start, *votes).split())
    assert re.search(r"the mean gold score went from \S+ after PPO to \S+ after DPO", printed), printed


def ask_server(newcomer: Newcomer) -> None:
    """Ask the served model each question through the `openai` client."""
    with newcomer.server("zerochat", "serve", "runs/shop", "--port", "0") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        for question, expected in ANSWERS.items():
            messages = [{"role": "user", "content": question}]
            answer = client.chat.completions.create(model="ppo", messages=messages, max_tokens=32, temperature=0)  # type: ignore
            print("openai:", answer.choices[0].message.content, flush=True)
            assert answer.choices[0].message.content == expected


def export(newcomer: Newcomer) -> None:
    """Export a folder and load it with transformers."""
    newcomer.type("zerochat", "export", "runs/shop", "--to", "folder", "--output", "shop-model")
    program = (newcomer.folder / "use_model.py").read_text().replace("runs/shop/ppo/model", "shop-model")
    (newcomer.folder / "use_export.py").write_text(program)
    assert newcomer.type("python", "use_export.py") == newcomer.type("python", "use_model.py")


def run_notebook(newcomer: Newcomer) -> None:
    """Execute the cells of the notebook with the tiny model and the tutorial's pairs."""
    steps = "sft.steps=2 reward.steps=2 ppo.steps=1 sft.batch_size=8 reward.batch_size=8 ppo.batch_size=8"
    values = {"MODEL": "model=tiny", "DATA": "data.path=pairs.jsonl", "LENGTHS": "rollout.max_new_tokens=32"}
    program = to_program(NOTEBOOK, {**values, "MEMORY": "", "STEPS": steps})
    (newcomer.folder / "notebook.py").write_text(program)
    print(newcomer.type("python", "notebook.py"), flush=True)


def main() -> int:
    """Run all steps. Each failure ends the script with the output of the failed command."""
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, help="an existing virtual environment that gets the wheel")
    parser.add_argument("--folder", type=Path, help="an empty or new folder to work in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        venv = (options.venv or Path(temporary) / "venv").absolute()
        folder = (options.folder or Path(temporary) / "empty").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        assert not any(folder.iterdir()), f"{folder} is not empty"
        install(venv)
        newcomer = Newcomer(venv, folder)
        for printed in run_page(TUTORIAL, folder, newcomer.environment):
            print(printed, flush=True)
        train_on_each_format(newcomer)
        with chromium() as browser:
            seconds = chat_in_browser(newcomer, browser)
            vote_in_browser(newcomer, browser)
        train_on_votes(newcomer)
        ask_server(newcomer)
        export(newcomer)
        run_notebook(newcomer)
    print(f"finished; first answer of the chat page: {seconds:.1f} s (aim: {FIRST_ANSWER_SECONDS:g} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
