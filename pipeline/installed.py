"""Whether this Python has what zerochat needs, asked before an import misses it with a traceback."""

import sys
from importlib.util import find_spec

NEEDED = ("torch", "transformers", "hydra", "pydantic", "yaml", "numpy")


def require_packages() -> None:
    """End the process with one line where packages are missing: most often .venv is not activated."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: {', '.join(missing)} can't be imported by {sys.executable}: run `make setup` once, then "
            "`. .venv/bin/activate`, or write .venv/bin/python for python"
        )
