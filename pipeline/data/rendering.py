"""Show an example as the model reads it, with the tokens of the loss marked, so that a wrong template is visible."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from pipeline.data.tokenizer import ChatTokenizer

LONGEST_EXAMPLE = 800  # characters of the rendered example


def token_line(tokenizer: ChatTokenizer) -> str:
    """Return one line with the special tokens and their ids: those that end an answer, begin and padding."""

    def named(token: int | None) -> str:
        return "none" if token is None else f"{tokenizer.hf.convert_ids_to_tokens(token)} ({token})"

    ends = ", ".join(map(named, tokenizer.end_ids))
    begin, padding = named(tokenizer.hf.bos_token_id), named(tokenizer.pad_id)
    return f"tokens: answers end with {ends}; begin token: {begin}; padding: {padding}"


def example_lines(tokenizer: ChatTokenizer, ids: Sequence[int], counts: Sequence[bool]) -> Iterator[str]:
    """Yield the lines that show an example, with the tokens of the loss in [..].

    ids (T,): the tokens; counts (T,): True for the tokens of the loss. A long example is shortened in the middle.
    """
    yield f"first example, {len(ids)} tokens; the loss includes the {sum(counts)} tokens in [..]:"
    grouped = groupby(zip(ids, counts, strict=True), itemgetter(1))
    runs = [(_decode(tokenizer, [token for token, _ in run]), counted) for counted, run in grouped]
    length = sum(len(text) for text, _ in runs)
    limit = LONGEST_EXAMPLE // len(runs) if length > LONGEST_EXAMPLE else length
    shown = ((_shortened(text, limit), counted) for text, counted in runs)
    text = "".join(f"[{text}]" if counted else text for text, counted in shown)
    yield from (f"  | {line}" for line in text.split("\n"))


def _decode(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids with the names of control tokens. Other control characters are escaped."""
    text = str(tokenizer.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def _shortened(text: str, limit: int) -> str:
    half = max(20, limit // 2)
    return text if len(text) <= 2 * half + 5 else f"{text[:half]} ... {text[-half:]}"
