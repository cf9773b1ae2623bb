"""The text of an answer while its tokens are sampled."""

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # the decoded text of an incomplete character


class Detokenizer:
    """Converts a stream of tokens to text.

    A character may consist of several tokens. Text that ends with the replacement character is held until more tokens
    arrive. Each token is decoded after those of the newest text, because its white space may depend on them. The time
    per token does not grow with the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._newest: list[int] = []  # the tokens of the text that was returned last
        self._held: list[int] = []  # the tokens after these

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is complete now."""
        self._held.append(token)
        text = self.finish()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._newest, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        return self._decode([*self._newest, *self._held])[len(self._decode(self._newest)) :]


class AnswerText:
    """Text of an answer while it is sampled. Text from the first stop string on is left out.

    A stop string that is complete before the answer has `least` tokens does not end the answer: it is part of the text.
    The end of the text is held back while it may be the beginning of a stop string. With `strips`, the text has no
    white space at its ends. Stop strings may have white space, so `decode` must not strip.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], *, strips: bool = False, least: int = 0
    ) -> None:
        self._detokenizer, self._stops, self._strips = Detokenizer(decode), stops, strips
        self._missing = least  # tokens before a stop string can end the answer
        self._held = ""
        self._space: str | None = None  # white space that more text must follow; None before the first text
        self._stopped = False
        self.text = ""  # all text that was returned

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is certain now."""
        self._missing -= 1
        self._held += self._detokenizer.feed(token)
        return self._release(self._length_of_possible_stop())

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        self._held += self._detokenizer.finish()
        return self._release(0)

    def _release(self, hold: int) -> str:
        """Return the held text without its last `hold` characters, or up to the first stop string."""
        begins = [self._held.find(stop) for stop in self._stops if self._missing <= 0 and stop in self._held]
        end = min(begins) if begins else len(self._held) - hold
        text, self._held = "" if self._stopped else self._held[:end], self._held[end:]
        self._stopped = self._stopped or bool(begins)
        text = self._stripped(text) if self._strips else text
        self.text += text
        return text

    def _stripped(self, text: str) -> str:
        """Return the text with the white space before it, and hold the white space at its end."""
        text = text.lstrip() if self._space is None else self._space + text
        shown = text.rstrip()
        if shown or self._space is not None:
            self._space = text[len(shown) :]
        return shown

    def _length_of_possible_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:length])
        )
        return max(lengths, default=0)
