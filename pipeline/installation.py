"""Paths and commands of this installation, a checkout or an installed package. Imports only the standard library.

A checkout has `train.py`, `chat.py` and `conf/` at its root. The wheel has the console script `zerochat` and contains
`conf/` as `pipeline/conf/`.
"""

import shlex
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "transformers", "hydra", "pydantic", "yaml", "numpy")
EXTRAS = {"math_verify": "math", "reasoning_gym": "tasks", "openenv": "environments"}
"""Packages that a reward function may import -> the extra of pyproject.toml that contains them."""
ROOT = Path(__file__).resolve().parents[1]  # the folder that Python imports the packages from
IS_CHECKOUT = (ROOT / "conf" / "config.yaml").is_file()
CONF = ROOT / "conf" if IS_CHECKOUT else ROOT / "pipeline" / "conf"
_SCRIPTS = "" if Path("train.py").is_file() else f"{shlex.quote(str(ROOT))}/"  # empty in the folder of the checkout
TRAIN = f"python {_SCRIPTS}train.py" if IS_CHECKOUT else "zerochat train"
CHAT = f"python {_SCRIPTS}chat.py" if IS_CHECKOUT else "zerochat chat"
_ZEROCHAT = f"python {_SCRIPTS}zerochat.py" if IS_CHECKOUT else "zerochat"
DOCTOR, EXPORT = f"{_ZEROCHAT} doctor", f"{_ZEROCHAT} export"
SERVE, REPORT = f"{_ZEROCHAT} serve", f"{_ZEROCHAT} report"


def version() -> str:
    """Return the version of this installation; in a checkout, that of `pyproject.toml`."""
    if not IS_CHECKOUT:
        return metadata.version("zerochat")
    with open(ROOT / "pyproject.toml", "rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an optional extra of pyproject.toml."""
    return f"pip install '.[{extra}]'" if IS_CHECKOUT else f"pip install 'zerochat[{extra}]'"


def advise_on_import(problem: BaseException) -> str:
    """Return what to type if a user's file imports a module that is not found; "" for another problem."""
    if not isinstance(problem, ModuleNotFoundError):
        return ""
    extra = EXTRAS.get(problem.name or "")
    return f": {pip_install(extra) if extra else 'install the package, or set PYTHONPATH to the folder of the module'}"


def require_packages() -> None:
    """End the process with status 1 and one line on Windows, or if a package that zerochat needs cannot be imported."""
    if sys.platform == "win32":
        sys.exit("error: zerochat does not run on Windows: install Linux with `wsl --install`, and zerochat in it")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        remedy = (
            "run `make setup` once, then `. .venv/bin/activate`, or write .venv/bin/python for python"
            if IS_CHECKOUT
            else "install zerochat again with `pip install zerochat`"
        )
        sys.exit(f"error: {', '.join(missing)} can't be imported by {sys.executable}: {remedy}")
