"""Models with random weights, a tokenizer, and common arguments of trainers. Nothing is downloaded."""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

# Arguments of a transformers trainer: steps on the CPU, without logging, saving or progress bars.
TRAINER_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def random_model(shape: Mapping[str, Any], *, scores: bool = False) -> Any:
    """Return a language model, or a classifier with one label, in fp32."""
    torch.manual_seed(0)
    fields = dict(shape)
    if scores:
        fields["num_labels"] = 1
    config = AutoConfig.for_model(**fields)
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    return auto.from_config(config)


def word_tokenizer(shape: Mapping[str, Any]) -> Any:
    """Return a tokenizer with one word per token id."""
    words = {f"t{index}": index for index in range(shape["vocab_size"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t3")), pad_token="t1", eos_token="t2", unk_token="t3"
    )
