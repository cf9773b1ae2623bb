"""A model in the chat: its conversation, the turns that fit its context, and its answers as a stream."""

from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import Generator, Sampling, attention
from pipeline.chat.answer_text import AnswerText
from pipeline.chat.folder import ChatModel
from pipeline.data.records import Message, replace_surrogates
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError, first_line

if TYPE_CHECKING:
    from pipeline.models.source import ModelSource


@dataclass
class ChatParticipant:
    """One model with its conversation.

    positions: the length of the model's context in tokens; None without a limit
    """

    name: str
    rollouts: Generator
    tokenizer: ChatTokenizer
    positions: int | None
    turns: list[Message] = field(default_factory=list)
    dropped: int = 0  # the number of oldest messages that no longer fit

    def answer(self, system: str, text: str, sampling: Sampling, turn: int) -> abc.Generator[str, None, None]:
        """Yield the answer to `text` as it is generated, and add both to the conversation.

        An interrupted answer is added as far as it was generated. `turn` is the sample seed. Raises UserError if the
        message does not fit the context without earlier turns, or if generation raises FloatingPointError.
        """
        system, messages = replace_surrogates(system), [*self.turns, Message("user", replace_surrogates(text))]
        bound = None if self.positions is None else self.positions - min(sampling.max_new_tokens, self.positions // 2)
        fitting, prompt = fit(system, messages, self.tokenizer.encode_prompt, bound)
        turns = [message for message in fitting if message.role != "system"]
        self.dropped += len(messages) - len(turns)
        available = sampling.max_new_tokens if self.positions is None else self.positions - len(prompt)
        longest = min(sampling.max_new_tokens, available)
        sampling = replace(
            sampling,
            max_new_tokens=longest,
            min_new_tokens=min(sampling.min_new_tokens, longest),
            end_ids=self.tokenizer.end_ids,
        )
        answered = AnswerText(
            self.tokenizer.decode_unstripped, sampling.stop, strips=True, least=sampling.min_new_tokens
        )
        try:
            for token in self.rollouts.stream(prompt, sampling, turn, self.tokenizer.decode_unstripped):
                yield answered.feed(token)
            yield answered.finish()
        except FloatingPointError as error:
            raise UserError(f"{self.name}: {error}") from error
        finally:
            self.turns = [*turns, Message("assistant", answered.text)]

    def reset(self) -> None:
        """Clear the conversation."""
        self.turns, self.dropped = [], 0


def fit(
    system: str, turns: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], bound: int | None
) -> tuple[list[Message], list[int]]:
    """Return the system message with the newest turns that fit into `bound` tokens, and the token ids of their prompt.

    The oldest question and its answer are dropped first. The system message and the last turn are never dropped. Raises
    UserError if they exceed `bound`.
    """
    head = [Message("system", system)] if system else []
    prompt: list[int] = []
    for first in range(0, len(turns), 2):
        messages = [*head, *turns[first:]]
        prompt = encode(messages)
        if bound is None or len(prompt) <= bound:
            return messages, prompt
    raise UserError(
        f"the message is too long: with the system message it has {len(prompt)} tokens, and at most {bound} fit "
        "together with the answer; write a shorter message, or set a smaller max-new-tokens"
    )


def load(model: ChatModel, *, trust_remote_code: bool = False) -> ChatParticipant:
    """Load a model folder. Raises UserError if the folder has no chat model, or if the model cannot be loaded."""
    import torch

    from pipeline.config.schema import ModelConfig
    from pipeline.models.source import check_kind, resolve

    if model.is_base:
        source, tokenizer = _base_source(model.folder)
    else:
        settings = ModelConfig(name=model.name, trust_remote_code=trust_remote_code)
        source, tokenizer = resolve(settings, 0, folder=model.folder), None
    check_kind(source, wanted="ForCausalLM")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = _random_module(source) if source.folder is None else _stored_module(source)
    tokenizer = tokenizer or load_tokenizer(str(source.folder))
    tokenizer.vocab_size = min(tokenizer.vocab_size, source.config.get_text_config().vocab_size)
    try:
        module = module.eval().to(device)
        rollouts = Generator(module, device)
        rollouts.refresh()  # runs a few tokens as a trial
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise UserError(
            f"{model.folder} does not fit into the free memory of the GPU ({reason}): end other programs on this GPU, "
            "load fewer models, or write CUDA_VISIBLE_DEVICES= in front of the command to use the CPU"
        ) from error
    except ValueError as error:
        raise UserError(f"{model.folder}: {error}") from error
    return ChatParticipant(model.name, rollouts, tokenizer, attention.max_positions(module))


def _base_source(run: Path) -> tuple["ModelSource", ChatTokenizer]:
    """Return the base model of a run, with the tokenizer and the chat template of the run."""
    from pipeline.launch.worker import read_config
    from pipeline.models.source import resolve
    from pipeline.models.stage_models import adopt_special_ids

    stage = next(run.glob("*/config.yaml")).parent
    try:
        config = read_config(stage)
    except ValueError as problem:
        raise UserError(
            f"{stage}/config.yaml was written by another version of zerochat, so the base model of {run} is unknown: "
            "give the folder of the base model instead of base"
        ) from problem
    tokenizer = load_tokenizer(str(run / "tokenizer" if (run / "tokenizer").is_dir() else stage / "model"))
    source = resolve(config.model, config.seed)
    adopt_special_ids(source, tokenizer)
    return source, tokenizer


def _stored_module(source: "ModelSource") -> Any:
    """Return the model of a folder. Raises UserError if it cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from pipeline.models.weights import check_report

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(source.folder),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_report` names the tensor
            trust_remote_code=source.trust_remote_code,
            dtype="auto",
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{source.folder} cannot be loaded: {first_line(error)}") from error
    module, report = loaded
    check_report(source, report)
    return module


def _random_module(source: "ModelSource") -> Any:
    """Return a model with the random weights that the first stage of its run started from."""
    from transformers import AutoModelForCausalLM

    from pipeline.models.modules import Policy
    from pipeline.models.weights import fill

    policy = Policy(AutoModelForCausalLM.from_config(source.config))
    fill(policy, "lm.", policy.lm, source)
    return policy.lm
