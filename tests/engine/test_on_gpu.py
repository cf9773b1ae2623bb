"""The engine on one GPU: updates equal plain PyTorch for all tiers, and generation equals the trained module."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from engine import EngineConfig, OptimizerConfig, Sampling, token_logprobs
from engine.engine import Engine
from engine.kernels import within_sequences
from tests.engine.generation.families import VOCABULARY, build, ragged_prompts
from tests.gpu import DEVICE, ON_GPU, needs_gpu, single_rank  # noqa: F401  a fixture

pytestmark = [*needs_gpu, pytest.mark.usefixtures("single_rank")]
STEPS = 4
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, betas=(0.9, 0.95))


class Policy(nn.Module):
    """A language model, possibly with a tied head. Its forward gives log-probabilities and entropies of its tokens."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
        head = self.lm.get_output_embeddings()  # type: ignore[operator]
        rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        return token_logprobs(rows, head.weight, ids[:, 1:].reshape(-1), bias=head.bias)


def loss(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logprobs, entropy = module(ids)
    upstream = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    return -(logprobs * upstream).sum() - 0.1 * entropy.sum(), {"tokens": float(len(logprobs))}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (4, 20), generator=generator).to(DEVICE) for _ in range(STEPS)]


def plain(family: str) -> list[float]:
    """Return the losses of a plain loop in fp32 on the device with full logits, AdamW and clipping."""
    model = build(family).to(DEVICE)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    losses = []
    for ids in batches():
        logp = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1).flatten(0, 1)
        upstream = torch.linspace(-1, 1, len(logp), device=DEVICE)
        chosen = logp.gather(-1, ids[:, 1:].reshape(-1, 1))[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        value = (-(chosen * upstream).sum() - 0.1 * entropy.sum()) / len(logp)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


LAYOUTS = [*({"zero_stage": stage} for stage in range(4)), {"zero_stage": 3, "activation_checkpointing": True},
           {"zero_stage": 2, "offload_optimizer": "cpu"}, {"zero_stage": 3, "offload_optimizer": "nvme"},
           {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}]  # fmt: skip


# OPT's head is its embedding; llama has a head of its own.
CASES = [*(("opt", layout) for layout in LAYOUTS), ("llama", {"zero_stage": 3, "offload_optimizer": "nvme"})]


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_updates_equal_plain_pytorch(family: str, layout: dict) -> None:
    engine = Engine(Policy(build(family)), EngineConfig(dtype="fp32", **layout), optimizer=OPTIMIZER)
    losses = [engine.update([ids], loss, ids[:, 1:].numel()).loss for ids in batches()]
    assert losses == pytest.approx(plain(family), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_generation_equals_the_trained_module(stage: int, dtype: str) -> None:
    """Train and generate in turn. Each flip uses the new weights, and the engine's parity check runs in each."""
    engine = Engine(
        Policy(build("opt")), EngineConfig(zero_stage=stage, dtype=dtype), optimizer=OPTIMIZER, rollout_path="lm"  # type: ignore[arg-type]
    )  # fmt: skip
    engine.flip.parity_check_every = 1
    prompts = ragged_prompts(3, 9, 6)
    tolerance = 1e-3 if dtype == "fp32" else 0.15
    for ids in batches():
        engine.update([ids], loss, ids[:, 1:].numel())
        with engine.generating() as rollouts:
            answers = rollouts.generate(prompts, Sampling(9, seed=1), [0, 1, 2])
            assert rollouts.fallback is None and engine.flip.checked
        with engine.scoring() as module:
            for prompt, answer in zip(prompts, answers, strict=True):
                row = torch.tensor([prompt + answer.token_ids], device=DEVICE)
                logprobs = module(row)[0][len(prompt) - 1 :]
                gap = (logprobs.cpu() - torch.tensor(answer.logprobs)).abs()
                assert gap.mean() <= tolerance


def test_frozen_weights_are_shared_and_the_inference_model_survives_a_release() -> None:
    engine = Engine(Policy(build("opt").to(DEVICE)), EngineConfig(zero_stage=0, dtype="fp32"), rollout_path="lm")
    results = []
    for keep in (True, False, True):
        with engine.generating(keep=keep) as rollouts:
            results.append(rollouts.generate(ragged_prompts(4, 7), Sampling(6, seed=2), [0, 1]))
            assert engine.flip.bytes == 0
    assert results[0] == results[1] == results[2]


def test_attention_builds_no_plan_for_each_length() -> None:
    """PyTorch prefers cuDNN's attention on H100 and B200. It builds a plan for each new shape."""
    if not ON_GPU:
        pytest.skip("the kernels of a GPU")
    rows = torch.randn(200, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    heads, starts = rows.transpose(0, 1)[None], torch.tensor([0, 200], dtype=torch.int32, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        within_sequences(rows, rows, rows, (starts, starts), (200, 200), scale=None, window=None)
    assert not any("cudnn" in event.key for event in profiler.key_averages())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_groups_have_the_flight_recorder_that_the_launcher_reads() -> None:
    """From torch 2.15, "nccl" is ProcessGroupNCCL2 by default, which does not make the pipe of the recorder."""
    if not ON_GPU:
        pytest.skip("NCCL")
    assert os.environ["TORCH_DIST_USE_NCCL2"] == "0"
    if torch.distributed.get_backend() == "nccl":  # the simulated device has another backend
        backend = torch.distributed.group.WORLD._get_backend(DEVICE)  # type: ignore[union-attr]
        assert "NCCL2" not in type(backend).__name__
