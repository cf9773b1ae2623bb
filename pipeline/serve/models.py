"""Models of a server: their tokenizers, their batches, and the jobs that requests become."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.chat.answer_text import AnswerText
from pipeline.chat.folder import ChatModel
from pipeline.chat.participant import ChatParticipant, load
from pipeline.data.records import Message
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.serve.answers import Choice
from pipeline.serve.batcher import Job, Session, Token
from pipeline.serve.errors import ServeError
from pipeline.serve.requests import ChatRequest, CompletionRequest, SharedFields

LONGEST_CONTEXT = 4096  # tokens of prompt and answer, unless --context is set; the key-value cache grows with it


@dataclass(frozen=True)
class ServedModel:
    """A model of the server. `context` is the number of tokens that prompt and answer may have together."""

    name: str
    tokenizer: ChatTokenizer
    session: Session
    context: int

    def chat_jobs(self, body: ChatRequest) -> list[Job]:
        """Return the jobs of a chat request, one per choice. Raises ServeError."""
        return self._jobs(body, self.encode(body.turns()))

    def completion_jobs(self, body: CompletionRequest) -> list[Job]:
        """Return the jobs of a completion request: the choices of the first prompt, then those of the next one."""
        jobs = []
        for prompt in body.prompts():
            # no template; names of control tokens in the text become control tokens
            ids = self.tokenizer.hf(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
            if not ids or max(ids) >= self.tokenizer.vocab_size:
                raise ServeError(400, f"prompt: token ids must be below {self.tokenizer.vocab_size}", param="prompt")
            jobs += self._jobs(body, ids)
        return jobs

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation. Raises ServeError if the chat template refuses the turns."""
        try:
            return self.tokenizer.encode_prompt(messages)
        except UserError as problem:
            raise ServeError(400, f"messages: {problem}", param="messages") from problem

    def choice(self, body: SharedFields) -> Choice:
        """Return an empty choice for a job of this request."""
        is_chat = isinstance(body, ChatRequest)
        text = AnswerText(self._decode(body), body.stops, strips=is_chat, least=body.min_tokens)
        may_call = isinstance(body, ChatRequest) and body.may_call
        return Choice(text, None if body.likeliest is None else self._describe, may_call=may_call)

    def _jobs(self, body: SharedFields, ids: Sequence[int]) -> list[Job]:
        room = self.context - len(ids)
        if room < 1:
            raise ServeError(
                400,
                f"the prompt has {len(ids)} tokens, and this model has a context of {self.context} tokens; send a "
                "shorter prompt",
                "context_length_exceeded",
            )
        sampling = body.sampling(room, self.tokenizer.end_ids)
        return [Job(ids, sampling, choice, self._decode(body)) for choice in range(body.n)]

    def _decode(self, body: SharedFields) -> Callable[[Sequence[int]], str]:
        """Return the function that turns token ids of an answer into text."""
        return self.tokenizer.decode_unstripped if isinstance(body, ChatRequest) else self._continuation

    def _continuation(self, ids: Sequence[int]) -> str:
        """Return the text of token ids after other text.

        Tokenizers such as that of Llama 2 drop the space before the first word, which separates it from the prompt.
        """
        before, length = self._before
        return self.tokenizer.decode_unstripped([*before, *ids])[length:]

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """The token ids of a letter, and the length of their text."""
        ids: list[int] = self.tokenizer.hf("a", add_special_tokens=False)["input_ids"]
        return ids, len(self.tokenizer.decode_unstripped(ids))

    def _describe(self, token: Token) -> dict[str, Any]:
        """Return the entry of a token in the log-probabilities of a response."""
        assert token.raw is not None, "the sampler computes what the request needs"
        logprob, likeliest = token.raw
        return self._entry(token.token, logprob) | {"top_logprobs": [self._entry(*each) for each in likeliest]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        before, length = self._before  # as in `_continuation`, and with the names of control tokens
        text = str(self.tokenizer.hf.decode([*before, token], clean_up_tokenization_spaces=False))[length:]
        is_whole = "\ufffd" not in text  # a token may be a part of a character
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode()) if is_whole else None}


def load_all(models: Sequence[ChatModel], options: Namespace, *, skip_base: bool = False) -> dict[str, ServedModel]:
    """Load models under different names, with the options of the command line. Raises UserError.

    With `skip_base`, a base model that cannot be loaded is left out with a message.
    """
    if options.slots < 1 or (options.context is not None and options.context < 2):
        raise UserError(f"--slots {options.slots} must be at least 1 and --context {options.context} at least 2")
    loaded: dict[str, ChatParticipant] = {}
    for model in models:
        name = model.name
        while name in loaded:
            name += "+"
        try:
            participant = load(model, trust_remote_code=options.trust_remote_code)
        except UserError as problem:
            if not (model.is_base and skip_base):
                raise
            print(f"{name} is left out: {problem}", file=sys.stderr)
            continue
        participant.name = name
        loaded[name] = participant
    # All weights come first: the batches divide the memory that is then free.
    return {name: serve(each, options.slots, options.context, sharing=len(loaded)) for name, each in loaded.items()}


def serve(participant: ChatParticipant, slots: int, context: int | None, *, sharing: int = 1) -> ServedModel:
    """Create the batch of a model. `sharing` models divide the free memory. Raises UserError if it cannot be served."""
    limit = participant.positions
    if context is not None and limit is not None and context > limit:
        raise UserError(f"--context {context} exceeds the {limit} positions of {participant.name}; set {limit} or less")
    longest = context or min(limit or LONGEST_CONTEXT, LONGEST_CONTEXT)
    try:
        session = participant.rollouts.session(slots, longest, longest, sharing=sharing)
    except ValueError as problem:
        raise UserError(f"{participant.name}: {problem}") from problem
    return ServedModel(participant.name, participant.tokenizer, session, longest)
