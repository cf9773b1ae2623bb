"""Tokenize conversations, with the same ids for training and for generation.

A conversation is tokenized in segments: the prompt with its generation prompt, the answer with its end token, the
next prompt, and so on. SFT therefore trains on the same ids that generation produces. Contents are plain text: the
characters "<|end|>" in a message never become the control token of that name, so a message cannot end its turn or
begin another one. (The default template marks roles with words, which a message may contain.)
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.records import Message, Turn
from pipeline.data.template import DEFAULT_TEMPLATE, THINKING, USER, ChatTemplate, Segment, content_of
from pipeline.errors import UserError, kind_and_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
# In the content of an answer. A prompt may have opened the block.
_REASONING = re.compile(r"\s*(?:<think>)?\s*(.*?)\s*</think>\s*", re.DOTALL)
_CHUNK = 1024  # texts per call: fast tokenizers store the offsets of one call in memory
_PROBE = "Hello, world! 12345  \n\n\tnaïve 中文 🙂 x_y(z) ... THE END"


class ChatTokenizer:
    """A tokenizer with its chat template. All results depend only on the files of the tokenizer.

    hf: the transformers tokenizer
    end_id: the token after an answer; end_ids: all tokens that end an answer (end_id, then eos)
    pad_id: the padding token; it may equal an end token, because masks are made from lengths
    vocab_size: one more than the largest id
    divided: how many answers had the name of each control token, which was encoded as plain text
    """

    def __init__(self, hf: "PreTrainedTokenizerBase") -> None:
        if hf.eos_token_id is None:
            raise UserError(
                f"The tokenizer {hf.name_or_path or ''} has no end token, so answers would not end. Set eos_token in "
                "its tokenizer_config.json, or select another tokenizer with model.tokenizer=FOLDER."
            )
        if not hf.chat_template:
            hf.chat_template = DEFAULT_TEMPLATE
        self.hf = hf
        self._template = ChatTemplate(hf)
        self._control = self._template.control_tokens()
        names = sorted(((text, token) for token, text in self._control.items()), key=lambda name: -len(name[0]))
        self._control_text = re.compile("|".join(re.escape(text) for text, _ in names))
        after = self._template.after_answer().lstrip()
        self._end_text = next((text for text, _ in names if after.startswith(text)), "")
        self.end_id: int = dict(names).get(self._end_text, hf.eos_token_id)
        self._context, self._template.lead = self._before_answers()
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_id, hf.eos_token_id)))
        self.pad_id: int = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
        self.vocab_size: int = max(len(hf), max(hf.get_vocab().values()) + 1)
        self.divided: Counter[str] = Counter()
        self._layout = lru_cache(maxsize=4096)(self._make_layout)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation and its generation prompt."""
        return self.encode_prompts([messages])[0]

    def encode_answer(self, answer: str) -> list[int]:
        """Return the ids of an answer and its end token."""
        return self.encode_answers([answer])[0]

    def encode_prompts(self, prompts: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the ids of many prompts. One call is faster than many calls of `encode_prompt`."""
        return [ids for ids, _ in self._encode_prompts(prompts)]

    def encode_answers(self, answers: Sequence[str]) -> list[list[int]]:
        """Return the ids of many answers, each with its end token."""
        encoded = []
        answers = [self._template.lead + answer for answer in answers]
        for ids, answer in zip(self._encode_after([self._context] * len(answers), answers), answers, strict=True):
            names = {self._control[token] for token in self._controls(ids)}
            self.divided.update(names)
            encoded.append([*(self._plain(answer) if names else ids), self.end_id])
        return encoded

    def encode_last_answers(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the ids of the answer that ends each conversation, with its end token."""
        if self._template.thinks:
            return [self._encode_rendered(messages) for messages in conversations]
        texts = iter(
            self.encode_answers([messages[-1].content for messages in conversations if not messages[-1].fields])
        )
        return [self._encode_rendered(messages) if messages[-1].fields else next(texts) for messages in conversations]

    def encode_conversations(
        self, conversations: Sequence[Sequence[Message]], *, divide: bool = True
    ) -> list[tuple[list[int], list[bool]]]:
        """Return (ids, counts) of conversations that end with an answer. counts: True for answers and end tokens.

        Some templates render an answer differently if other turns follow. With `divide`, the conversation up to such
        an answer is a row of its own after that of its conversation, in which only this answer counts.
        """
        assert all(messages[-1].role == "assistant" for messages in conversations)
        rows = [part for messages in conversations for part in self._parts(messages, divide=divide)]
        prompts = self._encode_prompts([messages[:-1] for messages, _ in rows])
        answers = self.encode_last_answers([messages for messages, _ in rows])
        return [
            (ids + answer, (counts if is_whole else [False] * len(ids)) + [True] * len(answer))
            for (_, is_whole), (ids, counts), answer in zip(rows, prompts, answers, strict=True)
        ]

    def _parts(self, messages: Sequence[Message], *, divide: bool) -> list[tuple[Sequence[Message], bool]]:
        """Return (messages, whether it is complete) of a conversation, and of its parts up to answers left out."""
        placed = {segment.answer for segment in self._layout(_turns(self._prepared(messages[:-1])))}
        answers = [index for index, message in enumerate(messages[:-1]) if message.role == "assistant" and index]
        left_out = [index for index in answers if divide and index not in placed]
        return [(messages, True), *((messages[: index + 1], False) for index in left_out)]

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids between an answer with its end token and the next answer: messages of the user or of tools."""
        messages = self._prepared(messages)
        fragments = self._template.between(_turns(messages), self._end_text)
        whole = [Message("user", ""), Message("assistant", ""), *messages]
        return self._encode_segments([(self._segment(Segment(fragments, context=self._end_text)), whole)])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts without turns, each with eos, and with bos if the tokenizer writes it."""
        empty = self.hf("", return_attention_mask=False)["input_ids"]
        bos = [self.hf.bos_token_id] if empty[:1] == [self.hf.bos_token_id] else []
        return [
            [*bos, *(self._plain(text) if self._controls(ids) else ids), self.hf.eos_token_id]
            for ids, text in zip(self._encode(texts), texts, strict=True)
        ]

    def decode(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Return the text of an answer up to the first string of `stop` that its last token completes, if there is one.

        Earlier stop strings are part of an answer that had to be longer. Control tokens and surrounding white space are
        left out.
        """
        text = self.decode_unstripped(ids)
        before = self.decode_unstripped(ids[:-1]) if stop else ""
        cut = [each.join(text.split(each)[: before.count(each) + 1]) for each in stop]
        return min(cut, key=len, default=text).strip()

    def decode_unstripped(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without control tokens."""
        content = [token for token in ids if token not in self._control]
        if self.hf.is_fast:  # the wrapper checks the type of each id, which takes longer than decoding
            return str(self.hf.backend_tokenizer.decode(content, skip_special_tokens=True))
        return str(self.hf.decode(content, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def model_pad_id(self) -> int | None:
        """The padding id for the configuration of a model; None if the padding token also ends answers."""
        return None if self.pad_id == self.end_id else self.pad_id

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer and its chat template in Hugging Face format."""
        self.hf.save_pretrained(str(folder))
        if self.hf.unk_token is None:  # without this entry, some classes (Qwen 2) add a token
            file = Path(folder) / "tokenizer_config.json"
            settings = json.loads(file.read_text(encoding="utf-8"))
            text = json.dumps(settings | {"unk_token": None}, indent=2, ensure_ascii=False, sort_keys=True)
            file.write_text(text + "\n", encoding="utf-8")

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of vocabulary, added tokens, chat template and the ids of a probe text."""
        added = {token: str(text.content) for token, text in self.hf.added_tokens_decoder.items()}
        vocabulary = sorted(self.hf.get_vocab().items())
        parts = [vocabulary, added, self.hf.chat_template, self.end_ids, self._encode([_PROBE])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _before_answers(self) -> tuple[str, str]:
        """Return the text that precedes answers when they are encoded, and the white space with which they begin.

        With both, the tokens of an answer are those of the rendered conversation. The template of Idefics 3 writes
        "Assistant:" for generation, and "Assistant: " before an answer. Some tokenizers (sentencepiece) write a space
        before each text, so they need the last character of the prompt. Both are empty if the template also writes
        white space between an answer and its end token (Llama 2), and if no choice gives these tokens.
        """
        prompt, lead = self._template.before_answer()
        if self._template.thinks or not self._template.after_answer().startswith(self._end_text):
            return "", ""
        start, whole = self._encode([prompt, f"{prompt}{lead}a"])
        for context in ("", prompt[-1:]):
            if start + self._encode_after([context], [f"{lead}a"])[0] == whole:
                return context, lead
        return "", ""

    def _encode_after(self, contexts: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that follow contexts, without those of the contexts."""
        starts = {context: self._encode([context])[0] if context else [] for context in set(contexts)}
        together = self._encode([context + text for context, text in zip(contexts, texts, strict=True)])
        encoded = []
        for ids, start, text in zip(together, map(starts.__getitem__, contexts), texts, strict=True):
            encoded.append(ids[len(start) :] if ids[: len(start)] == start else self._encode([text])[0])
        return encoded

    def _prepared(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose fields are plain, and whose reasoning is apart from the content if the model thinks."""
        if not self._template.thinks and not any(message.fields or message.reasoning for message in messages):
            return messages  # the usual case
        prepared = []
        for message in messages:
            content, reasoning = message.content, message.reasoning if self._template.thinks else ""
            if self._template.thinks and not reasoning and message.role == "assistant":
                written = _REASONING.match(content)
                content, reasoning = (content[written.end() :], written[1]) if written else (content, "")
            prepared.append(Message(message.role, content, self._plain_fields(message.fields), reasoning))
        return prepared

    def _plain_fields(self, fields: str) -> str:
        """Return fields whose texts contain no name of a control token: a space follows its first character."""
        names = self._control_text.findall(fields)
        self.divided.update(set(names))
        return self._control_text.sub(lambda name: f"{name[0][0]} {name[0][1:]}", fields) if names else fields

    def _make_layout(self, turns: tuple[Turn, ...]) -> list[Segment]:
        segments: list[Segment] = []
        for segment in self._template.layout(turns, self._end_text):
            follows_answer = bool(segments) and segments[-1].is_answer
            context = self._context if segment.is_answer else self._end_text if follows_answer else ""
            segments.append(self._segment(replace(segment, context=context)))
        return segments

    def _segment(self, segment: Segment) -> Segment:
        """Return a segment with the control ids of its text."""
        own = "".join(fragment for fragment in segment.fragments if isinstance(fragment, str))
        return replace(segment, control=tuple(self._controls(self._encode([own])[0])))

    def _encode_rendered(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the last message, an answer with calls or reasoning, with its end token."""
        messages = self._prepared(messages)
        turns = _turns(messages)
        segment = self._segment(Segment(self._template.answer(turns), context=self._context))
        ids = self._encode_segments([(segment, messages)])[0]
        has_own_end = bool(ids) and ids[-1] in self._control and not self._template.ends(turns)
        return ids if has_own_end else [*ids, self.end_id]

    def _encode_prompts(self, prompts: Sequence[Sequence[Message]]) -> list[tuple[list[int], list[bool]]]:
        """Return (ids, counts) of each prompt. `counts` is True for earlier answers and their end tokens."""
        prompts = [self._prepared(messages) for messages in prompts]
        layouts = [self._layout(_turns(messages)) for messages in prompts]
        pairs = [(segment, messages) for messages, layout in zip(prompts, layouts, strict=True) for segment in layout]
        encoded = iter(self._encode_segments(pairs))
        rows = []
        for layout in layouts:
            row: list[int] = []
            counts: list[bool] = []
            for segment in layout:
                row += next(encoded)
                counts += [segment.is_answer] * (len(row) - len(counts))
            rows.append((row, counts))
        return rows

    def _encode_segments(self, pairs: Sequence[tuple[Segment, Sequence[Message]]]) -> list[list[int]]:
        """Return the ids of segments, each with the messages of its conversation."""
        texts = [segment.text(messages) for segment, messages in pairs]
        encoded = self._encode_after([segment.context for segment, _ in pairs], texts)
        return [
            ids if tuple(self._controls(ids)) == segment.control else self._encode_separately(segment, messages)
            for ids, (segment, messages) in zip(encoded, pairs, strict=True)
        ]

    def _encode_separately(self, segment: Segment, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a segment whose contents include names of control tokens, encoded as plain text."""
        parts = [
            self._encode([fragment])[0] if isinstance(fragment, str) else self._plain(content_of(fragment, messages))
            for fragment in segment.fragments
        ]
        return [token for part in parts for token in part]

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text without control tokens: each name of one is divided after its first character."""
        cuts = [match.start() + 1 for match in re.finditer(f"(?=({self._control_text.pattern}))", text)]
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [token for part in self._encode(parts) for token in part if token not in self._control]

    def _controls(self, ids: Sequence[int]) -> list[int]:
        if self._control.keys().isdisjoint(ids):  # the usual case
            return []
        return [token for token in ids if token in self._control]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = []
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            ids += self.hf(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return ids


def _turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    return tuple(message.turn for message in messages)


def load_tokenizer(folder_or_hub: str, *, chat_template: str | None = None, thinking: bool = False) -> ChatTokenizer:
    """Load the tokenizer of a local folder, or of the hub if the folder does not exist.

    chat_template: a file with a Jinja template that replaces the template of the tokenizer
    thinking: the model thinks before it answers; the saved template contains this
    Code that comes with a tokenizer is never run. Raises UserError if there is no usable tokenizer.
    """
    from transformers import AutoTokenizer

    folder = Path(folder_or_hub).expanduser()
    is_local = folder.exists()
    if not is_local and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", folder_or_hub) or folder_or_hub.startswith(".")):
        raise UserError(f"{folder_or_hub}: there is no such folder. Set model.path or model.tokenizer to a folder.")
    if is_local and not any(any(folder.glob(name)) for name in _VOCABULARIES):
        raise UserError(
            f"{folder}: there is no tokenizer (searched for {', '.join(_VOCABULARIES)}). Copy the tokenizer's files "
            "into this folder, or set model.tokenizer=FOLDER."
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # parsers of vocabularies raise errors of many types
        reason = kind_and_line(error).rstrip(".")
        if is_local:
            remedy = "Set another tokenizer with model.tokenizer=FOLDER."
            raise UserError(f"{folder}: the tokenizer cannot be read: {reason}. {remedy}") from error
        raise UserError(
            f"{folder_or_hub}: there is no such folder, and the hub gives no tokenizer of this name: {reason}. Without "
            "access to the hub, download the model on another machine, copy the folder to this machine, and set "
            "model.path=FOLDER (or model.tokenizer=FOLDER)."
        ) from error
    return with_template(hf, chat_template=chat_template, thinking=thinking)


def with_template(hf: "PreTrainedTokenizerBase", *, chat_template: str | None, thinking: bool) -> ChatTokenizer:
    """Return a tokenizer with these settings (see `load_tokenizer`). Raises UserError if it cannot write reasoning."""
    if chat_template is not None:
        hf.chat_template = _template_text(chat_template)
    if thinking:
        own = hf.get_chat_template() if hf.chat_template else DEFAULT_TEMPLATE
        hf.chat_template = THINKING + own.removeprefix(THINKING)
        try:
            ChatTemplate(hf).answer((USER, Message("assistant", "", reasoning="-").turn))
        except UserError as problem:
            raise UserError(f"model.thinking=true: {problem}") from problem
    return ChatTokenizer(hf)


def _template_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template={path}: cannot be read as UTF-8 text: {error}.") from error
    if not text.strip():
        raise UserError(f"model.chat_template={path}: the file is empty. Write a Jinja template, or remove the key.")
    return text
