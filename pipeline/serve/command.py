"""The command `zerochat serve`: options, models, and the socket of the server."""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chat.folder import ChatModel, find, find_all, find_each
from pipeline.errors import OptionParser, UserError, exit_status
from pipeline.installation import CHAT, SERVE, pip_install
from pipeline.launch.manifest import Manifest
from pipeline.launch.ranks import prepare_single_process

if TYPE_CHECKING:
    from starlette.applications import Starlette

KEY_VARIABLE = "ZEROCHAT_KEY"
KEEP_ALIVE = 75  # seconds; OpenAI's client may send a request on a connection that was idle for almost 5 seconds
LOOPBACK = ("127.0.0.1", "localhost", "::1")
API_GREETING = "serving {models} at {url}/v1, chat page at {url}/ (Ctrl-C ends)"
PAGE_GREETING = "chat page of {models} at {url}/, API at {url}/v1 (Ctrl-C ends)"
USAGE = """\
Serve the models of a run to clients of OpenAI's API.

{serve} runs/x                          the newest finished stage, at http://127.0.0.1:8000/v1
{serve} runs/x --models sft,ppo,base    several models; requests choose by name
{serve} runs/x --host 0.0.0.0 --key K   other machines may connect; clients send the key K
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is interrupted; return the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _serve(options, API_GREETING, default=lambda path: [find(path)]), debug=options.debug)


def page_main(arguments: Sequence[str]) -> int:
    """Serve the page of `chat RUN --web` or `--arena` until the process is interrupted; return the exit status."""
    options = _page_parser().parse_args(arguments)
    command = _serve_arena if options.arena else partial(_serve, greeting=PAGE_GREETING, default=find_all)
    return exit_status(lambda: command(options), debug=options.debug)


def _serve(options: argparse.Namespace, greeting: str, *, default: Callable[[Path], list[ChatModel]]) -> int:
    listener = Listener(options.host, options.port, options.key)
    models = find_each(options.path, options.models, "--models") if options.models else default(options.path)
    prepare_single_process()
    from pipeline.serve.app import create_app
    from pipeline.serve.models import load_all

    served = load_all(models, options, skip_base=not options.models)
    app = create_app(served, key=listener.key)
    listener.run(app, greeting.format(models=", ".join(served), url=listener.url))
    return 0


def _serve_arena(options: argparse.Namespace) -> int:
    listener = Listener(options.host, options.port, options.key)
    models = find_each(options.path, options.models, "--models") if options.models else find_all(options.path)[:2]
    manifest = Manifest.read(options.path.expanduser())
    if len(models) != 2 or not manifest.stages:
        raise UserError(
            f"the arena compares two models of a run, and {options.path} gives {', '.join(m.name for m in models)}: "
            "give a run, and select two models with --models A,B (stages, base, or folders)"
        )
    prepare_single_process()
    from pipeline.serve.app import create_app
    from pipeline.serve.arena import Arena
    from pipeline.serve.models import load_all
    from pipeline.serve.votes import FILE, Contestant, VoteFile

    served = load_all(models, options)
    contestants = [Contestant(name, _version(manifest, m)) for name, m in zip(served, models, strict=True)]
    votes = VoteFile(manifest.run_dir / FILE)
    greeting = f"arena of {' and '.join(served)} at {listener.url}/, votes in {votes.path} (Ctrl-C ends)"
    arena = partial(Arena, list(served.values()), contestants, votes)
    listener.run(create_app(served, key=listener.key, arena=arena), greeting)
    return 0


def _version(manifest: Manifest, model: ChatModel) -> str | None:
    """Return the content hash of a stage's model; None for a model that the run did not train."""
    is_stage = model.folder == manifest.run_dir / model.name / "model"
    return manifest.stages.get(model.name, {}).get("produced", {}).get("model") if is_stage else None


class Listener:
    """The socket of a server with its key. The socket is bound before models are loaded, so that errors come early."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        """Raises UserError if packages are missing, if the address needs a key, or if the port is taken.

        Without `key`, the environment variable is used. White space around the key is removed, as from the keys of
        clients: a file with the key ends with a line break.
        """
        self.host, self.key = host, (key or os.environ.get(KEY_VARIABLE, "")).strip() or None
        missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
        if missing:
            raise UserError(f"{' and '.join(missing)} is not installed: run `{pip_install('serve')}`")
        if host not in LOOPBACK and self.key is None:
            raise UserError(
                f"--host {host} lets other machines connect, so a key is needed: set --key KEY or the environment "
                f"variable {KEY_VARIABLE}"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except (OSError, OverflowError) as problem:
            self.socket.close()
            reason = problem.strerror if isinstance(problem, OSError) else "a port is a number from 0 to 65535"
            raise UserError(f"{host}:{port} cannot be used ({reason}); set another --port") from problem

    @property
    def url(self) -> str:
        """The address with the port that the kernel assigned."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.socket.getsockname()[1]}"

    def run(self, app: "Starlette", greeting: str) -> None:
        """Serve until SIGINT or SIGTERM. Clients that connect after the greeting wait until the server answers."""
        import uvicorn

        self.socket.listen(128)
        print(greeting, file=sys.stderr, flush=True)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=5
        )
        uvicorn.Server(config).run(sockets=[self.socket])


def _parser(prog: str = SERVE, description: str = USAGE.format(serve=SERVE), port: int = 8000) -> OptionParser:
    """Return a parser with the options that the server and its pages share. `port` is the default."""
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} [options] path",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="a run, a stage of a run, or a model folder")
    parser.add_argument("--models", metavar="A,B", help="stages of the run (sft, dpo, ppo), base, or folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=port, help=f"port; 0 takes a free one (default {port})")
    parser.add_argument("--key", help=f"key that clients must send; also read from {KEY_VARIABLE}")
    parser.add_argument("--slots", type=int, default=32, help="sequences of a model that decode at a time (default 32)")
    parser.add_argument(
        "--context",
        type=int,
        help="tokens of prompt and answer together (default: the model's positions, at most 4096)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's folder")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _page_parser() -> OptionParser:
    parser = _parser(f"{CHAT} --web", "Serve a page that chats with all models of a run, or with --models.", port=0)
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--web", action="store_true", help="serve the page instead of a chat in the terminal")
    page.add_argument(
        "--arena", action="store_true", help="hide the names of two models, and write people's votes to RUN/votes.jsonl"
    )
    return parser
