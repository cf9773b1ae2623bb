"""A model that takes part in the chat: its conversation, what of it fits into the model's context, its answers."""

from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine import Generator, Sampling, attention
from pipeline.chat.folder import ChatModel
from pipeline.chat.screen import Detokenizer
from pipeline.data.records import Message
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.data.turns import whole_characters
from pipeline.errors import UserError


@dataclass
class Voice:
    """One model with its own side of the conversation. `positions` is the model's context, None for no bound."""

    name: str
    rollouts: Generator
    tokenizer: ChatTokenizer
    positions: int | None
    turns: list[Message] = field(default_factory=list)
    dropped: int = 0  # messages, the oldest, that were forgotten: they did not fit any more

    def answer(self, system: str, text: str, sampling: Sampling, turn: int) -> abc.Generator[str, None, None]:
        """Say the answer to `text`, piece by piece, and remember both; an answer that is cut off counts as it stands.

        `turn` numbers the random stream. Raises UserError where the message alone does not fit.
        """
        system, said = whole_characters(system), [*self.turns, Message("user", whole_characters(text))]
        bound = None if self.positions is None else self.positions - min(sampling.max_new_tokens, self.positions // 2)
        messages, prompt = fit(system, said, self.tokenizer.encode_prompt, bound)
        kept = [message for message in messages if message.role != "system"]
        self.dropped += len(said) - len(kept)
        room = sampling.max_new_tokens if self.positions is None else self.positions - len(prompt)
        longest = min(sampling.max_new_tokens, room)
        sampling = replace(
            sampling,
            max_new_tokens=longest,
            min_new_tokens=min(sampling.min_new_tokens, longest),
            end_ids=self.tokenizer.end_ids,
            pad_id=self.tokenizer.pad_id,
        )
        pieces = Detokenizer(self.tokenizer.decode)
        try:
            for token in self.rollouts.stream(prompt, sampling, turn, self.tokenizer.decode):
                yield pieces.feed(token)
            yield pieces.finish()
        except FloatingPointError as error:
            raise UserError(f"{self.name}: {error}") from error
        finally:
            self.turns = [*kept, Message("assistant", pieces.text)]

    def reset(self) -> None:
        self.turns, self.dropped = [], 0


def fit(
    system: str, turns: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], bound: int | None
) -> tuple[list[Message], list[int]]:
    """The system message and the newest turns whose prompt has at most `bound` tokens, and its ids.

    The oldest question leaves together with its answer; the system message and the last turn never do.
    """
    head = [Message("system", system)] if system else []
    for first in range(0, len(turns), 2):
        messages = [*head, *turns[first:]]
        prompt = encode(messages)
        if bound is None or len(prompt) <= bound:
            return messages, prompt
    raise UserError(
        f"the message is too long: with the system message it makes {len(prompt)} tokens, and the model has room for "
        f"{bound} beside its answer; write less, or set a smaller max-new-tokens"
    )


def load(model: ChatModel, *, trust_remote_code: bool = False) -> Voice:
    """Load a model folder. Raises UserError where it can't be talked to."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from pipeline.config.schema import ModelConfig
    from pipeline.models.source import check_kind, resolve
    from pipeline.models.weights import check_report

    source = resolve(ModelConfig(name=model.name, trust_remote_code=trust_remote_code), 0, folder=model.folder)
    kind = next(iter(source.config.architectures or []), "")
    if kind.endswith("ForSequenceClassification"):
        raise UserError(f"{model.folder} holds a reward model ({kind}): it scores answers and has none of its own")
    check_kind(source, wanted="ForCausalLM")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            model.folder,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            dtype="auto",
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{model.folder} can't be loaded: {reason}") from error
    module, report = found
    check_report(source, report)
    tokenizer = load_tokenizer(str(model.folder))
    module = module.eval().to(device)
    rollouts = Generator(module, device)
    try:
        rollouts.refresh()  # tries a few tokens
    except ValueError as error:
        raise UserError(f"{model.folder}: {error}") from error
    return Voice(model.name, rollouts, tokenizer, attention.max_positions(module))
