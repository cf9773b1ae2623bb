"""The conversation at the terminal: lines in, answers and commands out."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from engine import Sampling
from pipeline.chat.participant import ChatParticipant
from pipeline.errors import UserError

HELP = """\
/reset             forget the conversation
/system TEXT       set the system message; without TEXT remove it
/set               show the sampling options
/set KEY VALUE     temperature (0: the likeliest token), top-p, top-k, min-p, repetition-penalty, min-new-tokens,
                   max-new-tokens, seed, stop (a text at which answers end; "" for none)
/help              this
/quit              leave, as Ctrl-D does
Ctrl-C stops an answer. What is said first is forgotten first when the model's context is full."""


def stop_strings(text: str) -> tuple[str, ...]:
    r"""The string at which answers end, as typed: quotes around it are left out, \n is a line break; none if empty."""
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    bare = (text[1:-1] if quoted else text).replace("\\n", "\n")
    return (bare,) if bare else ()


OPTIONS: dict[str, Callable[[str], int | float | tuple[str, ...]]] = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "repetition-penalty": float,
    "min-new-tokens": int,
    "max-new-tokens": int,
    "seed": int,
    "stop": stop_strings,
}


# Characters that move the cursor, set titles, or change the direction of text or hide it: C0 and C1 controls except tab
# and line feed, direction marks and overrides, tag characters, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


@dataclass
class Session:
    """A chat with one model, or with several that answer the same. Text goes to `out`, remarks to `notes`.

    `labels` puts the model's name before an answer.
    """

    participants: Sequence[ChatParticipant]
    sampling: Sampling
    system: str = ""
    labels: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    notes: TextIO = field(default_factory=lambda: sys.stderr)
    turn: int = 0

    def run(self, lines: Iterable[str]) -> None:
        """Take lines until they end or one says /quit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text:
                self.take(text)

    def take(self, text: str) -> None:
        """Answer one line, or obey it. A mistake is told and changes nothing."""
        try:
            if text.startswith("/"):
                self._obey(text)
            else:
                self.answer(text)
        except UserError as mistake:
            self._note(str(mistake))

    def answer(self, text: str) -> bool:
        """Let every participant answer; False where Ctrl-C stopped one, which skips the others."""
        self.turn += 1
        return all(self._speak(participant, text) for participant in self.participants)

    def _speak(self, participant: ChatParticipant, text: str) -> bool:
        answer = participant.answer(self.system, text, self.sampling, self.turn)
        began = stopped = False
        try:
            for piece in answer:
                if not began and self.labels:
                    self._say(f"{participant.name}> ")
                began = True
                self._say(printable(piece))
        except KeyboardInterrupt:
            stopped = True
        finally:
            answer.close()
            if began or stopped:
                self._say("\n")
        if stopped:
            self._note("(stopped)")
        if participant.dropped:
            self._note(
                f"({participant.name} has forgotten the first {participant.dropped // 2} turns: its context is full)"
            )
        return not stopped

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        words = re.split(r"\s*=\s*|\s+", rest.strip(), maxsplit=1)  # KEY=VALUE as on the command line, too
        if command == "/reset":
            for participant in self.participants:
                participant.reset()
            self.turn = 0
            self._note("(the conversation starts anew)")
        elif command == "/system":
            self.system = rest.strip()
            self._note("(system message set)" if self.system else "(no system message)")
        elif command == "/set":
            if len(words) == 2:
                self.sampling = with_option(self.sampling, *words)
            elif rest:
                raise UserError(f"{line}: to what? /set KEY VALUE")
            self._note("  ".join(f"{key} {_shown(getattr(self.sampling, key.replace('-', '_')))}" for key in OPTIONS))
        elif command == "/help":
            self._note(HELP)
        else:
            raise UserError(f"{line}: there is no such command; /help lists them")

    def _say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _note(self, text: str) -> None:
        self.out.flush()
        print(printable(text), file=self.notes, flush=True)


def _shown(value: int | float | tuple[str, ...]) -> str:
    """A setting as it is typed."""
    if isinstance(value, tuple):
        return " ".join(json.dumps(text, ensure_ascii=False) for text in value) or '""'
    return str(value)


def with_option(sampling: Sampling, key: str, value: str) -> Sampling:
    """The settings with one changed. Raises UserError for a key or a value that is none."""
    key = key.replace("_", "-")
    if key not in OPTIONS:
        raise UserError(f"{key}: there is no such option; there are {', '.join(OPTIONS)}")
    try:
        change: dict[str, Any] = {key.replace("-", "_"): OPTIONS[key](value)}
        return replace(sampling, **change)
    except ValueError as problem:
        reason = str(problem) if "must be" in str(problem) else f"{value} is not a number of the right kind"
        raise UserError(f"{key}: {reason}") from problem


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines from the terminal, with history and editing; Ctrl-D ends them, Ctrl-C begins a new line."""
    with suppress(ImportError):  # some systems have none
        import readline  # noqa: F401  (its import is what makes input() editable)
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
