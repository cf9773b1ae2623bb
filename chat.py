"""Talk to a model in the terminal.

python chat.py runs/x                            the newest finished stage of a run
python chat.py runs/x --compare sft,ppo          two stages answer the same
python chat.py path/to/model --temperature 0     any model folder in Hugging Face format
python chat.py runs/x --prompt "What is 2 + 3?"  one answer, for scripts
python chat.py runs/x < questions.txt            a line a turn
"""

import argparse
import io
import secrets
import sys
from pathlib import Path

from pipeline.errors import UserError
from pipeline.imports import kept_for_good
from pipeline.installed import require_packages


def main(arguments: list[str] | None = None) -> int:
    """Run the chat; the exit status."""
    options = _parser().parse_args(arguments)
    require_packages()
    try:
        return _chat(options)
    except UserError as mistake:
        if options.debug:
            raise
        print(f"chat.py: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left
        sys.stderr.close()
        return 1


def _chat(options: argparse.Namespace) -> int:
    # The folder is looked at before torch is imported, so that a wrong one is told at once.
    from pipeline.chat.folder import find, find_each

    models = find_each(options.path, options.compare) if options.compare else [find(options.path)]
    with kept_for_good():
        from engine import Sampling
        from pipeline.chat.session import OPTIONS, Session, typed_lines
        from pipeline.chat.voice import load

    try:
        options.stop = tuple(options.stop)
        sampling = Sampling(**{key.replace("-", "_"): getattr(options, key.replace("-", "_")) for key in OPTIONS})
    except ValueError as problem:
        raise UserError(str(problem)) from problem
    voices = [load(model, trust_remote_code=options.trust_remote_code) for model in models]
    interactive = options.prompt is None and sys.stdin.isatty()
    session = Session(voices, sampling, options.system, labels=len(voices) > 1 or interactive)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an odd byte or a narrow locale is no reason to stop
    if options.prompt is not None:
        return 0 if session.answer(options.prompt) else 130
    if interactive:
        folders = ", ".join(str(model.folder) for model in models)
        print(f"{folders}: /help for commands, Ctrl-D leaves", file=sys.stderr)
        session.run(typed_lines("you> "))
    else:
        session.run(sys.stdin)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chat.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run, a stage of a run, or a model folder")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave")
    parser.add_argument("--compare", metavar="A,B", help="stages of the run (sft, dpo, ppo) or folders, all answer")
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token (default 0.7)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the smallest set with this mass (default 1)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0: all)")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: less of what was said")
    parser.add_argument("--min-new-tokens", type=int, default=0, help="an answer does not end before (default 0)")
    parser.add_argument("--stop", default=[], action="append", metavar="TEXT", help="answers end with this; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens an answer may have (default 256)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(31), help="the same seed, the same answers (default: a new one)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
