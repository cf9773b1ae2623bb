"""Models, a tokenizer and a trainer's settings as transformers has them, random weights, nothing from a hub."""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

# Of a trainer of transformers': on the CPU, and nothing beside the steps.
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def model(shape: Mapping[str, Any], *, scores: bool = False) -> Any:
    """A language model, or a classifier with one label, in fp32."""
    torch.manual_seed(0)
    fields = dict(shape)
    if scores:
        fields["num_labels"] = 1
    config = AutoConfig.for_model(**fields)
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    return auto.from_config(config)


def tokenizer(shape: Mapping[str, Any]) -> Any:
    """One word a token."""
    words = {f"t{place}": place for place in range(shape["vocab_size"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t3")), pad_token="t1", eos_token="t2", unk_token="t3"
    )
