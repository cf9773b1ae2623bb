"""Run one part of the campaigns."""

import sys
from importlib import import_module

PARTS = ("kills", "faults", "inputs")


def main(arguments: list[str]) -> int:
    """Run the part that the first argument names, with the other arguments, and return its exit status."""
    if not arguments or arguments[0] not in PARTS:
        print(f"usage: python -m tests.campaign {'|'.join(PARTS)} [--seed S]", file=sys.stderr)
        return 2
    return int(import_module(f"tests.campaign.{arguments[0]}").main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
