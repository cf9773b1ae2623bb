"""Test private interfaces with the oldest and the newest torch and transformers that pyproject.toml allows.

    python -m tests.versions            makes a virtual environment for each in a temporary folder (minutes, 10 GB)
    python -m tests.versions PYTHON...  uses environments that exist: each PYTHON is an interpreter

An environment has torch and transformers of its own. Other packages are those of this interpreter, if they fit. The
newest versions are those of the package index. Exit status 1 if a test fails. CI runs this once a week.
"""

import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers")
TESTS = (
    "tests/engine/parallel",
    "tests/engine/offload",
    "tests/engine/test_zero.py",
    "tests/engine/test_passes.py",
    "tests/engine/test_checkpoint.py",
    "tests/engine/memory/test_activations.py",
    "tests/engine/generation/test_prepacked_linears.py",
    "tests/engine/generation/test_transformers_fallback.py",
    "tests/engine/kernels_triton/test_compile.py",
    "tests/pipeline/models",
    "tests/step1_sft/test_sft.py",
)
"""The tests that cover `engine/internals.py`, `pipeline/models/internals.py`, Triton's compiler and torch.compile."""


def bounds() -> dict[str, tuple[str, str]]:
    """Return (oldest version, requirement) of each library. pip resolves the requirement to the newest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    results = {}
    for requirement in project["dependencies"]:
        name, _, rest = requirement.partition(">=")
        if name in LIBRARIES:
            oldest, comma, _ = rest.partition(",<")
            assert comma, f"{requirement} has no upper bound"
            results[name] = (oldest, requirement)
    return results


def make_environment(folder: Path, pins: list[str]) -> Path:
    """Install these requirements and what the project needs beside them; return the interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", place], check=True, capture_output=True, text=True).stdout.strip()
    (Path(packages) / "base.pth").write_text(sysconfig.get_path("purelib"))  # later on the path than its own packages
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    others = [each for each in project["dependencies"] if each.partition(">=")[0] not in LIBRARIES]
    install = [python, "-m", "pip", "install", "-q", "--upgrade-strategy", "only-if-needed"]
    subprocess.run([*install, "--upgrade", *pins], check=True)
    subprocess.run([*install, *pins, *others, "pytest", "pytest-xdist"], check=True)
    return python


def run_tests(python: Path) -> bool:
    """Print the versions, run the tests, and return whether all passed."""
    show = "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
    subprocess.run([python, "-c", show], check=True)
    return subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], cwd=ROOT).returncode == 0


def main() -> int:
    if len(sys.argv) > 1:
        passed = [run_tests(Path(python)) for python in sys.argv[1:]]
        return 0 if all(passed) else 1
    oldest = [f"{name}=={version}" for name, (version, _) in bounds().items()]
    newest = [requirement for _, requirement in bounds().values()]
    with tempfile.TemporaryDirectory() as folder:
        pythons = [make_environment(Path(folder) / f"{n}", pins) for n, pins in enumerate((oldest, newest))]
        passed = [run_tests(python) for python in pythons]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
