"""Lines that describe a stage before it starts: one rendered example, the batch and the optimizer steps.

`zerochat doctor` prints all of them. A starting stage prints the lines about its batch and its optimizer steps.
"""

import math
from collections.abc import Iterator, Sequence

from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import StageSection
from pipeline.config.stages import STAGES
from pipeline.data.tokenizer import ChatTokenizer

FEW_STEPS = 20  # with fewer steps a stage learns little
LONGEST_EXAMPLE = 800  # characters of the rendered example
COLOUR, PLAIN = ("\x1b[32m", "\x1b[0m"), ("[", "]")  # around the tokens of the loss


def rendered_example(tokenizer: ChatTokenizer, ids: Sequence[int], counts: Sequence[bool], *, colour: bool) -> str:
    """Return a conversation as the model reads it, with the tokens of the loss in colour, or in [..] without colour.

    ids (T,): the tokens; counts (T,): True for the tokens of the loss. A long example is shortened in the middle.
    """
    begin, end = COLOUR if colour else PLAIN
    runs = [(_decode(tokenizer, run), counted) for run, counted in _runs(ids, counts)]
    length = sum(len(text) for text, _ in runs)
    limit = LONGEST_EXAMPLE // max(1, len(runs)) if length > LONGEST_EXAMPLE else length
    shown = ((_shortened(text, limit), counted) for text, counted in runs)
    return "".join(f"{begin}{text}{end}" if counted else text for text, counted in shown)


def batch_line(config: RunConfig, stage: str, ranks: int) -> str:
    """Return how ranks, micro-batches and accumulation make the batch of one optimizer step, at full length."""
    section, settings, ppo = getattr(config, stage), config.engine, config.ppo
    group = settings.tensor_parallel * settings.pipeline_parallel * settings.sequence_parallel
    groups, length, rows, kind = ranks // group, section.max_length, section.batch_size, STAGES[stage].examples
    sequences = 2 if stage == "reward" or (stage == "dpo" and config.dpo.reads_pairs) else 1
    if stage == "ppo":
        length = min(length, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
        rows, kind = rows * ppo.samples // ppo.minibatches, "answers"
    share = math.ceil(rows / max(1, groups))
    fitting = min(share, max(1, section.micro_batch_tokens // (length * sequences)))
    unit = f"rank{'s' if groups > 1 else ''}" if group == 1 else f"groups of {group} ranks"
    return (
        f"batch of {rows} {kind} = {groups} {unit} x micro-batch of {fitting} x accumulation over "
        f"{math.ceil(share / fitting)} (with {length} tokens each; shorter ones need fewer)"
    )


def steps_line(config: RunConfig, stage: str, steps: int) -> str:
    """Return the optimizer steps of a stage. `steps`: steps, or rollouts of PPO."""
    if stage != "ppo":
        return f"{steps:,} optimizer steps"
    epochs, minibatches = config.ppo.update_epochs, config.ppo.minibatches
    return f"{steps * epochs * minibatches:,} optimizer steps ({steps:,} rollouts x {epochs} epochs x {minibatches})"


def few_steps(stage: str, section: StageSection, steps: int, examples: int) -> str:
    """Return a warning if the data and the epochs of a stage give few steps, else "".

    A limit that the user has set (`section.steps`) causes no warning. A step of PPO is a rollout.
    """
    if section.steps is not None or steps >= FEW_STEPS:
        return ""
    epochs = math.ceil(FEW_STEPS * section.batch_size / examples)
    return (
        f"{stage}: {steps} {STAGES[stage].step}{'s' if steps > 1 else ''} will hardly change the model: for "
        f"{FEW_STEPS} steps set {stage}.epochs={epochs} or a smaller {stage}.batch_size, or add data"
    )


def _runs(ids: Sequence[int], counts: Sequence[bool]) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the runs of tokens with the same flag."""
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or counts[index] != counts[start]:
            yield ids[start:index], bool(counts[start])
            start = index


def _decode(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids with the names of control tokens. Other control characters are escaped."""
    text = str(tokenizer.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def _shortened(text: str, limit: int) -> str:
    half = max(20, limit // 2)
    return text if len(text) <= 2 * half + 5 else f"{text[:half]} ... {text[-half:]}"
