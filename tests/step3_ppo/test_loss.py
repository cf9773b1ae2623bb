"""The losses of policy and critic token by token in float64, with their gradients and metrics."""

import math
import random

import pytest
import torch

from step3_ppo.loss import (
    cispo_loss,
    equal_sequences,
    importance_of,
    log_ratio,
    policy_loss,
    ratio_of,
    sequence_log_ratio,
    summed_log_ratio,
    value_loss,
)

N = 300


def made(seed: int, scale: float, shift: float = 0.0) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(shift, scale) for _ in range(N)]


def policy_by_hand(
    new: list[float], old: list[float], advantages: list[float], clip: float, dual: float | None, high: float
):
    """Return (loss, clipped tokens, approximate KL, sum of ratios) by cases instead of a maximum of two tensors."""
    loss = kl = ratios = 0.0
    clipped = 0
    for a, b, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(a - b)
        held = ratio
        if advantage > 0 and ratio > 1 + high:
            held, clipped = 1 + high, clipped + 1
        if advantage < 0 and ratio < 1 - clip:
            held, clipped = 1 - clip, clipped + 1
        if dual is not None and advantage < 0 and ratio > dual:
            held = dual
        loss -= advantage * held
        kl += ratio - 1 - (a - b)
        ratios += ratio
    return loss, clipped, kl, ratios


@pytest.mark.parametrize(
    ("clip", "dual", "high"),
    [(0.2, None, None), (0.2, 3.0, None), (0.1, 1.5, None), (0.2, 3.0, 0.28), (0.3, None, 0.1)],
)
def test_policy_loss(clip: float, dual: float | None, high: float | None) -> None:
    old, advantages = made(1, 0.5, -2), made(2, 1.5)
    new = [b + d for b, d in zip(old, made(3, 0.8), strict=True)]
    above = clip if high is None else high
    loss, clipped, kl, ratios = policy_by_hand(new, old, advantages, clip, dual, above)
    if dual is not None:
        assert loss != pytest.approx(policy_by_hand(new, old, advantages, clip, None, above)[0], rel=1e-3)
    if high is not None:
        assert loss != pytest.approx(policy_by_hand(new, old, advantages, clip, dual, clip)[0], rel=1e-3)
    tables = (torch.tensor(table) for table in (new, old, advantages))
    actual, sums = policy_loss(*tables, clip=clip, clip_high=high, dual_clip=dual)
    assert actual.item() == pytest.approx(loss, rel=1e-5)
    assert 0 < clipped < N and sums["clip_fraction"] == clipped
    assert float(sums["approx_kl"]) == pytest.approx(kl, rel=1e-4)
    assert float(sums["ratio"]) == pytest.approx(ratios, rel=1e-5)


def test_at_the_old_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs, advantages = torch.tensor(made(4, 1, -2), requires_grad=True), torch.tensor(made(5, 1))
    loss, sums = policy_loss(logprobs, logprobs.detach(), advantages, clip=0.2, dual_clip=3.0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert (float(sums["clip_fraction"]), float(sums["approx_kl"]), float(sums["ratio"])) == (0, 0, N)


def test_cispo_by_hand() -> None:
    """Ratios 1/2, 1, 3 and 10 have the weights 1/2, 1, 3 and 5 in the range 0 to 5. Clipped tokens have a gradient."""
    new = torch.tensor([-1.0, -2.0, -0.5, -0.25], requires_grad=True)
    old = new.detach() - torch.tensor([0.5, 1.0, 3.0, 10.0]).log()
    loss, sums = cispo_loss(new, old, torch.tensor([2.0, -1.0, 1.0, -2.0]), clip=1.0, clip_high=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 2 * 1 - 1 * 2 + 3 * 0.5 - 5 * 2 * 0.25)
    assert new.grad.tolist() == pytest.approx([-0.5 * 2, 1.0, -3.0, 5 * 2])
    assert (sums["clip_fraction"], float(sums["ratio"])) == (1, pytest.approx(14.5))
    bounded, sums = cispo_loss(new, old, torch.ones(4), clip=0.2, weights=torch.tensor([1.0, 1.0, 0.5, 0.0]))
    assert bounded.item() == pytest.approx(0.8 * 1 + 1 * 2 + 0.5 * 1.2 * 0.5) and sums["clip_fraction"] == 3


def test_ratios_stay_finite() -> None:
    far = log_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert far.tolist() == [20.0, -20.0]
    loss, sums = policy_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), clip=0.2, dual_clip=3.0)
    assert loss.item() == 3.0 and math.isfinite(float(sums["approx_kl"]))


LENGTHS = [3, 1, 2]  # tokens of three answers


def test_log_ratios_of_sequences_by_hand() -> None:
    new, old = torch.tensor([0.0, -1.0, -2.0, -3.0, -1.0, -1.0]), torch.tensor([-0.5, -1.0, -1.0, -1.0, -2.0, -30.0])
    mean, total = sequence_log_ratio(new, old, lengths=LENGTHS), summed_log_ratio(new, old, lengths=LENGTHS)
    assert mean.tolist() == pytest.approx([-0.5 / 3] * 3 + [-2.0] + [15.0] * 2)
    assert total.tolist() == pytest.approx([-0.5] * 3 + [-2.0] + [20.0] * 2)  # 30 is clamped
    assert sequence_log_ratio(new[:0], old[:0], lengths=[]).tolist() == []


def test_sequence_ratio_loss_is_the_mean_over_answers_by_hand() -> None:
    """GSPO: 1/G sum of -min(s A, clip(s) A) with the geometric mean s of the ratios of an answer, and its gradient."""
    new = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.1, -2.3, -0.7, -2.0, -1.0, -2.8])
    advantages = [1.5, 2.0, -1.0]
    ratios = [math.exp((0.1 + 0.3 + 0.2) / 3), math.exp(1.0), math.exp(-0.1)]
    held = [ratios[0], 1.3, ratios[2]]  # the second answer is clipped at 1.3
    weights = equal_sequences(LENGTHS, tokens=6, sequences=3)
    assert weights.tolist() == pytest.approx([2 / 3] * 3 + [2.0] + [1.0] * 2)
    flat = torch.tensor([a for a, n in zip(advantages, LENGTHS, strict=True) for _ in range(n)])
    loss, sums = policy_loss(
        new, old, flat, clip=0.3, dual_clip=None, weights=weights, ratio=ratio_of("sequence", LENGTHS)
    )
    expected = -sum(a * s for a, s in zip(advantages, held, strict=True)) / 3
    assert loss.item() / 6 == pytest.approx(expected, rel=1e-5)
    assert float(sums["clip_fraction"]) == 1.0  # the single token of the clipped answer
    by_token = [math.exp(each) - 1 - each for each in (0.1, 0.3, 0.2, 1.0, 0.0, -0.2)]
    assert float(sums["approx_kl"]) == pytest.approx(sum(by_token), rel=1e-4)
    (loss / 6).backward()
    gradient = [-1.5 * ratios[0] / 9] * 3 + [0.0] + [1.0 * ratios[2] / 6] * 2  # -A s / (G |y|)
    assert new.grad.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [1.5, 0.5, 2.0, 0.5, 0.5, 2.0]),
        ("token_mask", [1.5, 0.5, 0.0, 0.5, 0.5, 0.0]),
        ("sequence", [2.0] * 3 + [0.5] + [1.75] * 2),
        ("sequence_mask", [0.0] * 3 + [0.5] + [1.75] * 2),
    ],
)
def test_importance_weights_by_hand(kind: str, expected: list[float]) -> None:
    """Ratios 1.5, 0.5, 4 (product 3), 0.5, and 0.5, 3.5 (product 1.75), with the cap 2."""
    generator = torch.full((6,), -3.0)
    old = (generator + torch.tensor([1.5, 0.5, 4.0, 0.5, 0.5, 3.5]).log()).requires_grad_()
    weights, sums = importance_of(kind, LENGTHS)(old, generator, 2.0)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5) and not weights.requires_grad
    assert float(sums["importance_truncated"]) == (2 if "token" in kind else 3)
    assert float(sums["importance_weight"]) == pytest.approx(sum(expected), rel=1e-5)


def value_by_hand(values: list[float], old: list[float], returns: list[float], clip: float | None):
    loss, clipped = 0.0, 0
    for v, o, r in zip(values, old, returns, strict=True):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        plain, held = (v - r) ** 2, (near - r) ** 2
        loss += 0.5 * max(plain, held)
        clipped += held > plain
    return loss, clipped


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_value_loss(clip: float | None) -> None:
    old, returns = made(6, 1), made(7, 2)
    values = [o + d for o, d in zip(old, made(8, 0.5), strict=True)]
    expected, clipped = value_by_hand(values, old, returns, clip)
    actual, sums = value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), clip=clip)
    assert actual.item() == pytest.approx(expected, rel=1e-5)
    assert float(sums["value_clip_fraction"]) == clipped
    assert (clipped == 0) == (clip is None)


def test_a_value_clipped_away_from_its_return_gets_no_gradient() -> None:
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    loss, _ = value_loss(values, torch.zeros(3), torch.tensor([2.0, -2.0, 2.0]), clip=0.2)
    loss.backward()
    # The first value is clipped at 0.2, the second moved away from its return, and the third moved little.
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 3.0, -1.9]))


def test_without_tokens_the_loss_is_zero_with_a_graph() -> None:
    empty = torch.zeros(0, requires_grad=True)
    policy, _ = policy_loss(empty, empty.detach(), empty.detach(), clip=0.2, dual_clip=3.0)
    cispo, _ = cispo_loss(empty, empty.detach(), empty.detach(), clip=0.2)
    value, _ = value_loss(empty, empty.detach(), empty.detach(), clip=0.2)
    (policy + cispo + value).backward()
    assert policy.item() == cispo.item() == value.item() == 0
