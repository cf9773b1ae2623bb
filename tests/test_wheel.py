"""Install the wheel of this checkout, and train and chat with it from an empty folder."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALLEST = [
    "stage=sft", "model=tiny", "data.demo_examples=300", "tracking=none", "seed=1", "sft.steps=1", "sft.batch_size=4",
    "evaluation.prompts=4", "rollout.max_new_tokens=8", "model.architecture.hidden_size=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_every_file_that_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    rooms = ("engine/", "pipeline/", "step1_sft/", "step2_reward/", "step2_dpo/", "step3_ppo/")
    expected = {name for name in listed if name.startswith(rooms)}
    expected |= {f"pipeline/{name}" for name in listed if name.startswith("conf/")}
    assert any(name.endswith(".c") for name in expected) and any(name.endswith(".css") for name in expected)
    assert not expected - names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_an_installed_wheel_trains_and_chats_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    script = site / "bin" / "zerochat"

    def zerochat(*arguments: str) -> str:
        done = subprocess.run(
            [str(script), *arguments],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert zerochat("--version") == f"zerochat {version}\n"
    printed = zerochat("train", "run_dir=run", *SMALLEST)
    assert "zerochat chat run" in printed
    example = printed.partition("sft: tokens: answers end with <|end|> (1)")[2].splitlines()[2]
    assert example.startswith("  | <|user|>") and example.endswith("<|end|>]"), "the example has its loss mask"
    assert (empty / "run" / "sft" / "model" / "model.safetensors").is_file()
    assert "<html" in (empty / "run" / "report.html").read_text()
    assert zerochat("chat", "run", "--prompt", "What is 2 + 3?", "--temperature", "0", "--max-new-tokens", "4")
