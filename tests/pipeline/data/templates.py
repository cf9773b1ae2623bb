"""Chat templates of the usual kinds, small tokenizers, conversations and records for the tests of this folder."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.data.files import Table
from pipeline.data.records import Message
from pipeline.data.sources import RecordTable
from pipeline.data.template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = (  # no token marks the answer, and spaces surround it
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = (  # an empty reasoning block only before the last answer
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = (  # tools in a system turn, calls as tagged JSON, results as turns of the user
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT_CALLS = (  # ids, a content or calls, arguments as texts, results as JSON
    "{% if tools %}{{ '[TOOLS]' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ '[RESULT]' + m.content | tojson + '[/RESULT]' }}"
    "{% elif m.tool_calls %}{{ '[CALL]' }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
REASONING = (  # a block of reasoning before the last answer, which the generation prompt leaves to the model
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
OPENED = (  # as DeepSeek R1 and QwQ: a prompt opens the block of reasoning, and a conversation has none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
SPACE = (  # as Idefics 3: a space between the generation prompt and the answer
    "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
NEWLINE = (  # as Zephyr and TinyLlama: a line break between the generation prompt and the answer
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SWITCH = (  # as Nemotron 3 and Qwen 3.8: reasoning unless it is switched off
    "{{ '/think\n' if enable_thinking | default(true) else '/no_think\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n<think>' + ('\n' if enable_thinking | default(true) else '</think>') }}{% endif %}"
)
NO_GENERATION_PROMPT = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"


def tokenizer(template: str | None, *special: str, **keys: str) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with `<s>` (bos), `</s>` (eos) and these special tokens first."""
    backend = Tokenizer(models.BPE(vocab={}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", *special]
    trainer = trainers.BpeTrainer(
        special_tokens=specials, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator([], trainer)
    keys = {"bos_token": "<s>", "eos_token": "</s>"} | keys
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=list(special), **keys)
    hf.chat_template = template
    return hf


def chat(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    """Return alternating messages of user and assistant."""
    turns = tuple(Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(contents))
    return ((Message("system", system), *turns)) if system else turns


def segments(hf: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Return [(text, is_answer)] of a conversation: the texts of the prompt, then the last answer if there is one."""
    turns = tuple(message.turn for message in messages)
    answered = turns[-1].role == "assistant"
    layout = ChatTemplate(hf).layout(turns[:-1] if answered else turns)
    texts = [(segment.text(messages), segment.is_answer) for segment in layout]
    return [*texts, (messages[-1].content, True)] if answered else texts


def to_records(
    table: Table, stage: str, source: str, bad_row_limit: float, *, rows: bool = False, labels: bool = False
) -> tuple[list[Any], Counter[str]]:
    """Return the records of a stage in a table, and the number of skipped rows by reason."""
    records = RecordTable(table, source, keeps_rows=rows)
    found, skipped = records.for_stage(stage, bad_row_limit, labels=labels)
    return [record for record, _ in found], skipped
