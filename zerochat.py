"""The `zerochat` console script with the commands train, doctor, chat, serve, export and report.

Each command imports its own code when it runs, so that `zerochat` itself starts at once.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from pipeline.installation import require_packages, version

USAGE = """\
usage: zerochat COMMAND ...

  train KEY=VALUE ...   train a chat model (zerochat train --help lists the keys)
  doctor KEY=VALUE ...  check a train command: data, batches, steps (zerochat doctor --help)
  chat RUN              chat with the result (zerochat chat --help)
  serve RUN             serve the result to clients of OpenAI's API (zerochat serve --help)
  export RUN --to FORM  a folder with a model card, adapters, an upload to the hub, or a GGUF file
  report RUN ...        write RUN/report.html again; with several runs, one page over their seeds

  --version             print the version

zerochat trains a chat model from a base language model: SFT, a reward model and PPO, or SFT and DPO.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for an unknown command, 130 after Ctrl-C, also during imports."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(f"zerochat {version()}")
        return 0
    if name not in COMMANDS:
        print(f"error: {name} is not a command of zerochat ({', '.join(COMMANDS)}): {_advice(name)}", file=sys.stderr)
        return 2
    require_packages()
    try:
        return int(import_module(COMMANDS[name]).main(rest))
    except KeyboardInterrupt:
        return 130


def _advice(word: str) -> str:
    """Return what to type instead of a word that is not a command."""
    if "=" in word:
        return f"write zerochat train {word}"
    near = get_close_matches(word, COMMANDS, n=1)
    return f"did you mean zerochat {near[0]}?" if near else "zerochat --help explains them"


COMMANDS = {
    "train": "pipeline.launch.command",
    "doctor": "pipeline.doctor.command",
    "chat": "pipeline.chat.command",
    "serve": "pipeline.serve.command",
    "export": "pipeline.export.command",
    "report": "pipeline.report.report",
}
"""Each command and the module with its `main`."""

if __name__ == "__main__":
    sys.exit(main())
