"""The chat command: `python chat.py` in a checkout, `zerochat chat` in an installed package."""

import argparse
import io
import sys
from pathlib import Path

from pipeline.chat.session import OPTIONS, Session, typed_lines
from pipeline.errors import OptionParser, UserError, exit_status
from pipeline.installation import CHAT, require_packages

USAGE = """\
Chat with a model in the terminal.

{chat} runs/x                            the newest finished stage of a run
{chat} runs/x --compare sft,ppo          two stages answer the same prompt
{chat} path/to/model --temperature 0     any model folder in Hugging Face format
{chat} runs/x --prompt "What is 2 + 3?"  one answer, for scripts
{chat} runs/x < questions.txt            one turn per line
{chat} runs/x --web                      a page in the browser (--web --help lists its options)
{chat} runs/x --arena                    a page where people vote between two models without their names
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the chat and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--web" in arguments or "--arena" in arguments:
        require_packages()
        from pipeline.serve.command import page_main  # the page has options of its own

        return page_main(arguments)
    options = _parser().parse_args(arguments)
    require_packages()
    return exit_status(lambda: _chat(options), debug=options.debug)


def _chat(options: argparse.Namespace) -> int:
    """Load the models and run a session, or answer one prompt. Raises UserError for wrong options or folders."""
    if options.prompt is not None and not options.prompt.strip():  # such as an unset variable of a shell script
        raise UserError(
            '--prompt has no text: write a question, such as --prompt "What is 2 + 3?", or leave the option out to '
            "type questions"
        )
    # The folder is searched before torch is imported, so that a wrong path raises an error at once.
    from pipeline.chat.folder import find, find_each
    from pipeline.launch.ranks import prepare_single_process

    models = find_each(options.path, options.compare) if options.compare else [find(options.path)]
    prepare_single_process()
    from engine import Sampling
    from pipeline.chat.participant import load

    try:
        settings = {key: getattr(options, key) for key in (name.replace("-", "_") for name in OPTIONS)}
        sampling = Sampling(**settings, stop=tuple(options.stop))
    except ValueError as problem:
        raise UserError(str(problem)) from problem
    participants = [load(model, trust_remote_code=options.trust_remote_code) for model in models]
    interactive = options.prompt is None and sys.stdin.isatty()
    session = Session(participants, sampling, options.system, labels=len(participants) > 1 or interactive)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # of invalid bytes; `exit_status` prepares stdout
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
    """Return the parser of the command line."""
    parser = OptionParser(
        prog=CHAT,
        usage=f"{CHAT} [options] path",
        description=USAGE.format(chat=CHAT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="a run, a stage of a run, or a model folder")
    parser.add_argument("--web", action="store_true", help="serve a chat page on this machine")
    parser.add_argument("--arena", action="store_true", help="serve a page of blind votes between two models")
    parser.add_argument("--prompt", metavar="TEXT", help="answer one prompt and exit")
    parser.add_argument("--compare", metavar="A,B", help="answer with each of these models: base, stages or folders")
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    for name, (kind, default, words) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=words)
    parser.add_argument(
        "--stop", default=[], action="append", metavar="TEXT", help="end the answer at this text; repeatable"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's folder")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
