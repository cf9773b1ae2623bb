"""Parity checks of a model before training: its fast paths must compute the same numbers as its own forward.

The log-probabilities are compared at a low temperature, where they are differences of logits. Differences are measured
relative to the norm. The checks thus detect errors in models with small logits, too.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine import Engine, attention, distributed, oom
from pipeline.data.batch import Documents, true_indices
from pipeline.errors import UserError, kind_and_line
from pipeline.models.attention import use_documents
from pipeline.models.internals import set_attention
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import own_field

# The largest relative difference that rounding causes between two computations of the same numbers. A wrong mask or a
# missing scale causes larger differences.
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
SAME = 1e-5  # tolerance for the same operations in the same order
LOW_TEMPERATURE = 0.01  # temperature of the comparisons
TRIAL_TOKENS = 128  # tokens of the trial in training mode; random routing assigns some of them to other experts
SHORT = (9, 7, 5)  # lengths of the documents in the trial of packed rows


def verify(engine: Engine, *, max_length: int) -> bool:
    """Compare the fast paths of a model with its own forward, and select a fallback for each path that differs.

    Returns whether the model supports packed rows. Prints a warning about each fallback. Collective, for an engine
    around a `Policy` or a `Scorer`. Sets these attributes of the module:

    use_logits: True if a policy's own logits differ from head(hidden)
    packs: True if the model supports packed rows, with documents of up to `max_length` tokens
    steady: True if training mode changes the numbers of a model without dropout

    Raises UserError if

    - the model supports fewer than `max_length` positions
    - the model's own forward fails
    - the number of a token depends on the tokens after it, as in an encoder
    - `engine.sequence_parallel` is used and the model does not support packed rows
    """
    module = engine.module
    assert isinstance(module, Policy | Scorer)
    tolerance, name = TOLERANCE[engine.config.dtype], type(module.backbone).__name__
    _check_positions(module.backbone, max_length)
    with engine.scoring():
        _check_runs(module, engine.config.dtype)
        if isinstance(module, Policy):
            module.use_logits = _needs_logits(engine, module, tolerance)
            if module.use_logits:
                warn_once(f"{name} changes the logits of its head: all logits are computed, which needs more memory")
        if not _is_causal(module, tolerance):
            raise UserError(
                f"{name} attends to later tokens, as encoders do, so it cannot generate text: set model= to a causal "
                "language model"
            )
        module.packs = _packs(engine, module, tolerance, max_length)
        module.steady = _differs_in_training(module, max_length)
    if module.steady:
        module.eval()
        warn_once(f"training mode changes the results of {name} (noise, random routing): it trains in evaluation mode")
    if not module.packs and distributed.world().sequence > 1:
        raise UserError(
            f"engine.sequence_parallel={distributed.world().sequence} needs packed rows, which {name} does not "
            "support: set engine.sequence_parallel=1, and engine.activation_checkpointing=true for long sequences"
        )
    if not module.packs:
        warn_once(f"{name} does not support packed rows: batches are padded instead")
    return module.packs


@cache
def warn_once(text: str) -> None:
    """Print a warning on rank 0, unless this process has printed it before."""
    if distributed.is_rank_zero():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def adopt(engine: Engine, like: Engine) -> None:
    """Apply the results of `verify` for the engine `like` to another engine around the same architecture."""
    module, verified = engine.module, like.module
    assert isinstance(module, Policy | Scorer) and isinstance(verified, Policy | Scorer)
    if isinstance(module, Policy) and isinstance(verified, Policy):
        module.use_logits = verified.use_logits
    module.steady = verified.steady
    module.packs = verified.packs and use_documents(module.backbone)


def _check_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raise UserError if the model supports fewer tokens than `max_length`, although its configuration has positions.

    Some families reserve positions for padding. Others change all rotary frequencies above a length (LongRoPE), so the
    numbers of a token would depend on the lengths of other sequences in the batch.
    """
    limit, configured = attention.max_positions(model), own_field(model.config, "max_position_embeddings")
    if limit is not None and limit < min(max_length, configured):
        raise UserError(
            f"{type(model).__name__} supports sequences of {limit} tokens, not {max_length}: the other positions are "
            "for padding, or its rotary frequencies change above that length (longrope). Lower the stage's max_length, "
            "or rollout.max_prompt_tokens and rollout.max_new_tokens"
        )


def _check_runs(module: Policy | Scorer, dtype: str) -> None:
    """Raise UserError if the model's own forward fails on a row of tokens, in training or in evaluation mode."""
    if isinstance(module, Policy):
        module.use_logits = True
    try:
        for mode in (True, False):
            module.train(mode)
            _numbers(module, _tokens(module, 16))
    except Exception as problem:  # a forward with other requirements may raise any error
        if oom.is_out_of_memory(problem) or isinstance(problem, UserError):
            raise
        raise UserError(
            f"{type(module.backbone).__name__} cannot run a row of tokens in {dtype} ({kind_and_line(problem)}): "
            "change engine.dtype, model.attention or model.quantize, or select another model"
        ) from problem


def _is_causal(module: Policy | Scorer, tolerance: float) -> bool:
    """Return whether most tokens have the same numbers if other tokens, or no tokens, follow them.

    A few tokens may differ: rounding may change which experts process them.
    """
    row = _tokens(module, 16)
    other = torch.cat([row[:, :8], row[:, :8].flip(1)], dim=1)
    first = 8 - isinstance(module, Policy)  # a policy has no number for the first token
    plain, *others = (_numbers(module, each)[:first] for each in (row, other, row[:, :8]))
    size = plain.abs().median().clamp_min(torch.finfo(plain.dtype).tiny)
    difference = max(((each - plain).abs().median() / size).item() for each in others)
    return distributed.max_over_ranks(difference) <= tolerance


def _needs_logits(engine: Engine, policy: Policy, tolerance: float) -> bool:
    """Return whether the log-probabilities of head(hidden) differ from those of the model's own logits.

    The adapters of a head are only in its own forward. They begin with zero, so the comparison would not detect them.
    """
    if hasattr(policy.lm.get_output_embeddings(), "lora_A"):
        return True
    row = _tokens(policy, 16)
    policy.use_logits = False
    fast = _tried(engine, lambda: _numbers(policy, row))
    policy.use_logits = True
    return fast is None or _differs(fast, _numbers(policy, row), tolerance)


def _differs_in_training(module: Policy | Scorer, max_length: int) -> bool:
    """Return whether training mode changes the numbers of a model without dropout. A model with dropout returns False.

    Noise on a router changes few choices, so a trial may miss it. A positive field named jitter in the configuration
    counts as a difference without a trial.
    """
    drops = any(isinstance(submodule, nn.Dropout) and submodule.p > 0 for submodule in module.modules())
    rates = module.backbone.config.get_text_config().to_dict()
    positive = {key for key, rate in rates.items() if isinstance(rate, float) and rate > 0}
    if drops or any("dropout" in key for key in positive):
        return False
    if any("jitter" in key for key in positive):
        return True
    row = _tokens(module, min(TRIAL_TOKENS, max_length, attention.max_positions(module.backbone) or TRIAL_TOKENS))
    in_evaluation = _numbers(module, row)
    module.train()
    in_training = torch.cat([_numbers(module, row) for _ in range(2)])  # twice: random choices may agree once
    module.eval()
    return _differs(in_training, in_evaluation.repeat(2), SAME)


def _tried(engine: Engine, work: Callable[[], Tensor]) -> Tensor | None:
    """Return the result of `work`; None if it fails. After a failure the engine discards the pass.

    Raises out-of-memory errors.
    """
    try:
        return work()
    except Exception as problem:  # a forward with other requirements may raise any error
        if oom.is_out_of_memory(problem):
            raise
    engine.discard()
    return None


def _packs(engine: Engine, module: Policy | Scorer, tolerance: float, max_length: int) -> bool:
    """Return whether documents in one packed row have the same numbers as in separate rows.

    One of the documents is longer than the model's window if `max_length` allows it. If the numbers agree, attention
    within documents remains selected. Otherwise the previous attention function is restored. A model whose own
    positions do not count from 0, or that mixes tokens outside of attention, is not supported.
    """
    model = module.backbone
    lengths = (max(SHORT[0], _beyond_window(model.config.get_text_config(), max_length)), *SHORT[1:])
    first, second, third = _tokens(module, sum(lengths)).split(lengths, dim=1)
    separate = [_numbers(module, first), _numbers(module, second), _numbers(module, torch.cat([first, third], dim=1))]
    previous = attention.attention_name(model)
    if not _counts_from_zero(engine, module, first) or not use_documents(model):
        return False
    # The third document continues the first. Its numbers are the last ones of the row that contains both.
    continuation = separate[2][-(len(third[0]) - isinstance(module, Policy)) :]
    documents = Documents(lengths, (None, None, 0))
    row = torch.cat([first, second, third], dim=1)
    packed = _tried(engine, lambda: _numbers(module, row, documents))
    is_equal = packed is not None and not _differs(
        packed, torch.cat([separate[0], separate[1], continuation]), tolerance
    )
    is_equal = is_equal and not _mixes_documents(engine, module, row, documents)
    if not is_equal:
        set_attention(model, previous)
    return is_equal


def _mixes_documents(engine: Engine, module: Policy | Scorer, row: Tensor, documents: Documents) -> bool:
    """Return whether the second document depends on the first, as with a convolution or a recurrence over the row.

    The embeddings of the first document are NaN. The small weights of a new model thus do not hide the dependence.
    """
    share = distributed.sequence_shard(row.shape[1])
    first = max(documents.lengths[0] - (0 if share is None else share.first), 0)  # of this rank's tokens

    def replace_first(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        return torch.cat([torch.full_like(embedded[:, :first], torch.nan), embedded[:, first:]], dim=1)

    hook = module.backbone.get_input_embeddings().register_forward_hook(replace_first)
    numbers = _tried(engine, lambda: _numbers(module, row, documents))
    hook.remove()
    begin, count = (length - isinstance(module, Policy) for length in documents.lengths[:2])
    mixes = numbers is None or bool(numbers[begin : begin + count].isnan().any())
    return distributed.max_over_ranks(float(mixes)) > 0


def _counts_from_zero(engine: Engine, module: Policy | Scorer, row: Tensor) -> bool:
    """Return whether the positions 0, 1, ... give the same numbers as the positions that the model chooses."""
    positions = {"position_ids": torch.arange(row.shape[1], device=row.device)[None]}
    hook = module.backbone.base_model.register_forward_pre_hook(
        lambda _, arguments, keywords: (arguments, keywords | positions), with_kwargs=True
    )
    numbers = _tried(engine, lambda: _numbers(module, row))
    hook.remove()
    return numbers is not None and not _differs(numbers, _numbers(module, row), SAME)


def _beyond_window(text: Any, max_length: int) -> int:
    """Return a number of tokens above every attention window smaller than `max_length`; 0 without such a window."""
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((window + 8 for window in windows if window and max_length > window), default=0)


def _numbers(module: Policy | Scorer, row: Tensor, documents: Documents | None = None) -> Tensor:
    """Return the log-probabilities or values of a row of N tokens.

    A policy gives log-probabilities of all tokens but the first of each document. A scorer gives N values.
    """
    if isinstance(module, Scorer):
        width = cast(nn.Linear, module.model.score).in_features
        head = torch.linspace(-1, 1, width, device=row.device)  # the model's own head may be zero
        return module(row, documents=documents, head=head)[0]
    counts = torch.ones_like(row, dtype=torch.bool)
    counts[0, list(documents.starts) if documents else [0]] = False
    logprobs: Tensor = module(row, true_indices(counts), temperature=LOW_TEMPERATURE, documents=documents)[0]
    return logprobs


def _tokens(module: Policy | Scorer, count: int) -> Tensor:
    """Return a row of token ids, (1, count), spread over the vocabulary."""
    vocabulary = module.backbone.config.get_text_config().vocab_size
    return (torch.arange(1, count + 1, device=distributed.world().device) * 7919 % vocabulary)[None]


def _differs(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether the relative difference of two tensors exceeds a tolerance on any rank. Collective."""
    return (
        distributed.max_over_ranks(((a - b).norm() / b.norm().clamp_min(torch.finfo(b.dtype).tiny)).item()) > tolerance
    )
