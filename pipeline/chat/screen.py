"""Text from a model on its way to a terminal."""

import re
from collections.abc import Callable, Sequence

# What moves cursors, sets titles, turns the direction of writing or hides text: C0 and C1 controls except tab and line
# feed, direction marks and overrides, tag characters, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNFINISHED = "\ufffd"


def printable(text: str) -> str:
    """The text without anything that would drive a terminal."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


class Detokenizer:
    """Text of tokens as they come, each piece once it is sure.

    A character may be spread over several tokens: what decodes to the replacement character at the end waits for more.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self.text = ""

    def feed(self, token: int) -> str:
        """Add a token; returns the text that is sure now and was not before."""
        self._ids.append(token)
        return self._advance(self._decode(self._ids).rstrip(_UNFINISHED))

    def finish(self) -> str:
        """What still waits: there are no more tokens."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        if not text.startswith(self.text):
            return ""  # a decoder that changes what it said before: better silent than twice
        new, self.text = text[len(self.text) :], text
        return new
