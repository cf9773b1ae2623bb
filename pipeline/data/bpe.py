"""A tokenizer trained on the run's own texts: byte-level BPE (Sennrich et al., 2016), digits one by one.

Byte level: every byte has a token, so any text can be written and comes back as it was. One token a digit makes
sums learnable for small models. Training is deterministic: equal texts in equal order give an equal tokenizer.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
SMALLEST_VOCABULARY = 256 + 2 + len(ROLE_TOKENS)


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of at most `vocab_size` tokens, with a chat template, `<|end|>` as its eos and a padding token."""
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
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
