"""The terminal session of the chat: reads lines, runs commands and prints answers."""

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError

if TYPE_CHECKING:  # the command line is parsed before torch is imported
    from engine import Sampling
    from pipeline.chat.participant import ChatParticipant

OPTIONS: dict[str, tuple[type, float, str]] = {
    "temperature": (float, 0.7, "0 selects the likeliest token (default 0.7)"),
    "top-p": (float, 1.0, "sample from the smallest set of tokens with this probability (default 1)"),
    "top-k": (int, 0, "sample from the k likeliest tokens (default 0: all)"),
    "min-p": (float, 0.0, "skip tokens below this share of the highest probability"),
    "repetition-penalty": (float, 1.0, "above 1: repeat less of the text so far"),
    "min-new-tokens": (int, 0, "shortest answer in tokens (default 0)"),
    "max-new-tokens": (int, 256, "longest answer in tokens (default 256)"),
    "seed": (int, secrets.randbits(31), "the same seed gives the same answers (default: random)"),
}
"""The sampling settings with one value: their type, default and meaning. They can also be set during a chat."""

HELP = f"""\
/reset             forget the conversation
/system TEXT       set the system message; without TEXT remove it
/set               show the sampling options
/set KEY VALUE     {", ".join(OPTIONS)},
                   stop (a text at which answers end; "" for none)
/help              this
/quit              leave, as Ctrl-D does
Ctrl-C stops an answer. When the context of the model is full, the oldest turns are removed."""


def stop_strings(text: str) -> tuple[str, ...]:
    r"""Return the stop string as typed, without quotes around it and with \n as a line break. Empty text gives none."""
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    bare = (text[1:-1] if quoted else text).replace("\\n", "\n")
    return (bare,) if bare else ()


SETTERS: dict[str, Callable[[str], Any]] = {name: kind for name, (kind, *_) in OPTIONS.items()} | {"stop": stop_strings}


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
    """A chat with one model, or with several models that answer the same prompts.

    Answers go to stdout, messages to stderr.

    labels: whether the model's name precedes each answer
    """

    participants: "Sequence[ChatParticipant]"
    sampling: "Sampling"
    system: str = ""
    labels: bool = False
    turn: int = 0

    def run(self, lines: Iterable[str]) -> None:
        """Process lines until they end or a line is /quit or /exit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text:
                self.take(text)

    def take(self, text: str) -> None:
        """Answer one line, or run it as a command if it starts with a slash. Prints the message of a UserError."""
        try:
            if text.startswith("/"):
                self._obey(text)
            else:
                self.answer(text)
        except UserError as mistake:
            note(str(mistake))

    def answer(self, text: str) -> bool:
        """Print the answer of every participant. Return False if Ctrl-C stopped one; the others are then skipped."""
        self.turn += 1
        return all(self._speak(participant, text) for participant in self.participants)

    def _speak(self, participant: "ChatParticipant", text: str) -> bool:
        """Print the answer of one participant as it is generated. Return False if Ctrl-C stopped it."""
        answer = participant.answer(self.system, text, self.sampling, self.turn)
        has_output = has_text = stopped = False
        try:
            for fragment in answer:
                has_text = has_text or bool(fragment.strip())
                if not has_output and self.labels:
                    say(f"{participant.name}> ")
                has_output = True
                say(printable(fragment))
        except KeyboardInterrupt:
            stopped = True
        finally:
            answer.close()
            if has_output or stopped:
                say("\n")
        if stopped:
            note("(stopped)")
        elif not has_text:
            note(f"({participant.name} ended its answer without a word)")
        if dropped := participant.dropped // 2:
            turns = "turn is" if dropped == 1 else f"{dropped} turns are"
            note(f"({participant.name}: the oldest {turns} left out, because the context is full)")
        return not stopped

    def _obey(self, line: str) -> None:
        """Run a command. Raises UserError for an unknown command or option."""
        command, _, rest = line.partition(" ")
        words = re.split(r"\s*=\s*|\s+", rest.strip(), maxsplit=1)  # KEY=VALUE is accepted, too
        if command == "/reset":
            for participant in self.participants:
                participant.reset()
            self.turn = 0
            note("(the conversation starts anew)")
        elif command == "/system":
            self.system = rest.strip()
            note("(system message set)" if self.system else "(no system message)")
        elif command == "/set":
            if len(words) == 2:
                self.sampling = with_option(self.sampling, *words)
            elif rest:
                raise UserError(f"{line}: to what? /set KEY VALUE")
            note("  ".join(f"{key} {_shown(getattr(self.sampling, key.replace('-', '_')))}" for key in SETTERS))
        elif command == "/help":
            note(HELP)
        else:
            raise UserError(f"{line}: there is no such command; /help lists them")


def say(text: str) -> None:
    """Write text of an answer at once."""
    print(text, end="", flush=True)


def note(text: str) -> None:
    """Print a message."""
    print(printable(text), file=sys.stderr, flush=True)


def _shown(value: int | float | tuple[str, ...]) -> str:
    """Return a setting in the form in which the user types it."""
    if isinstance(value, tuple):
        return " ".join(json.dumps(text, ensure_ascii=False) for text in value) or '""'
    return str(value)


def with_option(sampling: "Sampling", key: str, value: str) -> "Sampling":
    """Return the settings with one value changed. Raises UserError for an unknown key or an invalid value."""
    key = key.replace("_", "-")
    if key not in SETTERS:
        raise UserError(f"{key}: there is no such option; there are {', '.join(SETTERS)}")
    try:
        change: dict[str, Any] = {key.replace("-", "_"): SETTERS[key](value)}
        return replace(sampling, **change)
    except ValueError as problem:
        kind = "an integer" if SETTERS[key] is int else "a number"
        reason = str(problem) if "must be" in str(problem) else f"{value} is not {kind}"
        raise UserError(f"{key}: {reason}") from problem


def typed_lines(prompt: str) -> Iterator[str]:
    """Yield lines from the terminal, with history and editing.

    Ctrl-D ends the lines. Ctrl-C discards the current line.
    """
    with suppress(ImportError):  # some systems have no readline
        import readline  # noqa: F401  (its import is what makes input() editable)
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
