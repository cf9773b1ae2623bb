"""The text of an answer while its tokens are sampled."""

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # the decoded text of an incomplete character
_CONTEXT = 8  # tokens that are decoded again, because their text may depend on their neighbours


class Detokenizer:
    """Converts a stream of tokens to text.

    A character may consist of several tokens. Text that ends with the replacement character is held until more tokens
    arrive. Only the last tokens are decoded again for each token, so the time per token does not grow with the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the tokens after `_settled`
        self._settled = ""
        self.text = ""

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is complete now."""
        self._ids.append(token)
        text = self._decode(self._ids)
        new = self._advance(self._settled + text.rstrip(_UNFINISHED))
        if len(self._ids) > 2 * _CONTEXT:
            self._settle(text)
        return new

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        return self._advance(self._settled + self._decode(self._ids))

    def _settle(self, text: str) -> None:
        """Decode the older tokens for the last time, if both parts decode to `text` without each other.

        Parts of a character and white space that `decode` strips do not. A later token is then tried, also if `text`
        ends with a character that may still be incomplete. A broken character before its end stays broken.
        """
        older, newer = self._decode(self._ids[:-_CONTEXT]), self._decode(self._ids[-_CONTEXT:])
        if newer and not text.endswith(_UNFINISHED) and older + newer == text:
            self._settled += older
            del self._ids[:-_CONTEXT]

    def _advance(self, text: str) -> str:
        """Return the text after the text that was returned before.

        A decoder with byte fallback replaces a complete run of bytes if its end is invalid, characters that were
        returned before included. The text then continues with the last replacement character.
        """
        start = len(self.text)
        if not text.startswith(self.text):  # the decoder changed earlier text; do not print it twice
            pairs = enumerate(zip(text, self.text, strict=False))
            common = next((index for index, (new, old) in pairs if new != old), len(text))
            start = text.rfind(_UNFINISHED, common)
            if start < 0:
                return ""
        self.text = text
        return text[start:]


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
