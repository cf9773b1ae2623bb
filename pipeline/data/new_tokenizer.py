"""Train a byte-level BPE tokenizer on the data of a run, for models with random weights.

Its chat template marks roles with control tokens.
"""

import re
from collections.abc import Iterable

from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError

_LONGEST_WORD = 1000  # characters
PAD, END = "<|pad|>", "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|system|>' }}"
    "{%- for tool in tools -%}{{ tool.function | tojson }}{{ '\\n' }}{%- endfor -%}{{ '<|end|>' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{ '<|user|><tool_response>' + message.content + '</tool_response><|end|>' }}"
    "{%- else -%}{{ '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{%- endfor -%}"
    "{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
SMALLEST_VOCABULARY = 256 + 2 + len(ROLE_TOKENS)


def _with_short_words(text: str) -> str:
    """Divide words of more than `_LONGEST_WORD` characters. The time of training grows with their square."""
    return re.sub(rf"\S{{{_LONGEST_WORD}}}(?=\S)", r"\g<0> ", text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> ChatTokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016) of at most `vocab_size` tokens, with a chat template.

    Byte level: every byte has a token, so any text can be encoded and decoded. Each digit is one token, which makes
    sums learnable for small models. Equal texts in equal order give an equal tokenizer.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"A byte-level vocabulary needs at least {SMALLEST_VOCABULARY} tokens, not {vocab_size}.")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(map(_with_short_words, texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return ChatTokenizer(tokenizer)
