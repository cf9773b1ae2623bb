"""The speed of a machine, in seconds per unit of work: measured on this machine, or tabulated for a named GPU.

The measurement runs a block of a Llama model of the same width, at most `WIDEST`, so that it takes about a second for
every model. Products of larger matrices are not faster. A GPU gets sizes that take longer than the host needs to launch
them, and its decode step is not measured: a CUDA graph replays the step without the host. Copies to host memory and
files have the usual speeds `PCIE` and `DISK`. The table has the peak figures of data sheets, of which a training run
reaches `UTILISATION` (Chowdhery et al., 2022, arXiv:2204.02311, report 0.46 for a large model).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.config import TORCH_DTYPE, Precision
from engine.generation.prepacked_linears import PrepackedLinears
from engine.kernels import token_logprobs
from engine.kernels.products import widen_linears
from engine.memory.model_shape import ModelShape
from engine.memory.states import BYTES
from engine.parallel import collectives, dist

WIDEST = {"cpu": 1024, "cuda": 4096}  # the width of the measured block
HEAD_ROWS = {"cpu": 2**13, "cuda": 2**15}  # the vocabulary of the measured head
TOKENS = {"cpu": 512, "cuda": 4096}  # the largest micro-batch of the measurement
PARAMETERS = {"cpu": 2**21, "cuda": 2**26}  # of the measured optimizer step
MESSAGE_BYTES = {"cpu": 2**22, "cuda": 2**26}
RUNS = 2
ADAM_BYTES = 28  # that AdamW reads and writes for each parameter
UTILISATION = 0.4  # of the peak products, in training
READ_SHARE = 0.6  # of the peak bandwidth, in a decode step
FP32_SHARE = 1 / 16  # of the peak in 16 bits


@dataclass(frozen=True)
class Rates:
    """Rates in seconds.

    Of a token and a block's parameter: `forward`, `backward`. Of a token: `head`, forward and backward. `decode`: one
    step of all sequences, of a block's parameter. Of a parameter: AdamW on the device (`adam`) and on the host
    (`host_adam`). Of a byte: `all_reduce`, and `read` of device memory.
    """

    forward: float
    backward: float
    head: float
    decode: float
    adam: float
    host_adam: float
    all_reduce: float

    @property
    def read(self) -> float:
        """AdamW is as fast as the memory."""
        return self.adam / ADAM_BYTES


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet: dense TFLOPS in 16 bits, memory in GB and GB/s, GB/s to another GPU in one direction."""

    tflops: float
    memory: float
    bandwidth: float
    link: float
    has_bf16: bool = True


GPUS = {  # NVIDIA's data sheets; links are NVLink, or PCIe
    "b200": Gpu(2250, 180, 8000, 900),
    "h200": Gpu(989, 141, 4800, 450),
    "h100": Gpu(989, 80, 3350, 450),
    "a100": Gpu(312, 80, 2039, 300),
    "a100-40gb": Gpu(312, 40, 1555, 300),
    "l40s": Gpu(362, 48, 864, 32),
    "a6000": Gpu(155, 48, 768, 32),
    "rtx4090": Gpu(165, 24, 1008, 32),
    "rtx3090": Gpu(71, 24, 936, 16),
    "a10g": Gpu(70, 24, 600, 32),
    "l4": Gpu(121, 24, 300, 32),
    "v100": Gpu(125, 32, 900, 150, has_bf16=False),
    "t4": Gpu(65, 16, 320, 16, has_bf16=False),
}
NETWORK, RANKS_OF_A_MACHINE = 50, 8  # GB/s of a rank between machines; ranks of one machine
HOST = 20  # GB/s of a rank: the host's memory
PCIE, DISK = 1e-9 / 25, 1e-9 / 3  # seconds of a byte of a rank: copies between host and device, an NVMe disk


def tabulated_rates(gpu: Gpu, shape: ModelShape, *, dtype: Precision, ranks: int) -> Rates:
    """Return the rates of one of `ranks` GPUs from its data sheet.

    A parameter needs 2 operations a token in the forward pass and 4 in the backward pass. A decode step of few
    sequences reads each parameter once. A ring all-reduce sends each byte twice.
    """
    operation = 1e-12 / (gpu.tflops * UTILISATION * (FP32_SHARE if dtype == "fp32" else 1))
    read = 1e-9 / (gpu.bandwidth * READ_SHARE)
    return Rates(
        forward=2 * operation,
        backward=4 * operation,
        head=6 * operation * shape.vocabulary * shape.width,
        decode=BYTES[dtype] * read,
        adam=ADAM_BYTES * read,
        host_adam=ADAM_BYTES * 1e-9 / HOST,
        all_reduce=2e-9 / (gpu.link if ranks <= RANKS_OF_A_MACHINE else min(gpu.link, NETWORK)),
    )


def measure_rates(shape: ModelShape, *, dtype: Precision, length: int, rows: int) -> Rates:
    """Measure this machine for a model; every rank calls. `length` tokens a sequence, `rows` sequences decode together.

    Sequences longer than `TOKENS`, compiled blocks, and the communication of tensor and sequence groups inside of
    blocks are not measured.
    """
    device = dist.world().device
    forward, backward, decode = _block_seconds(shape, dtype, device, length, rows)
    adam = _adam_seconds(device)
    return Rates(
        forward=forward,
        backward=backward,
        head=_head_seconds(shape, dtype, device) if shape.vocabulary else 0.0,
        # On a GPU a step of few sequences reads each parameter once, and the products of many sequences take longer.
        decode=decode if device.type == "cpu" else max(BYTES[dtype] * adam / ADAM_BYTES, rows * forward),
        adam=adam,
        host_adam=adam if device.type == "cpu" else _adam_seconds(torch.device("cpu")),
        all_reduce=_all_reduce_seconds(device) if dist.world().size > 1 else 0.0,
    )


def _block_seconds(
    shape: ModelShape, dtype: Precision, device: torch.device, length: int, rows: int
) -> tuple[float, float, float]:
    """Return the rates `forward`, `backward` and `decode` (0 on a GPU)."""
    body = _build_block(shape, dtype, device)
    parameters = sum(parameter.numel() for parameter in body.layers.parameters())
    length = min(length, TOKENS[device.type])
    sequences = max(1, TOKENS[device.type] // length)
    inputs = torch.zeros(sequences, length, body.config.hidden_size, dtype=TORCH_DTYPE[dtype], device=device)
    next_inputs = inputs.new_zeros(rows, 1, body.config.hidden_size)

    def run(vectors: torch.Tensor) -> torch.Tensor:
        return body(inputs_embeds=vectors, use_cache=False).last_hidden_state.sum()  # type: ignore[no-any-return]

    both = _seconds(lambda: run(inputs).backward())
    with torch.no_grad():
        forward = _seconds(lambda: run(inputs))
        with PrepackedLinears(body).applied():
            decode = _seconds(lambda: run(next_inputs)) if device.type == "cpu" else 0.0
    backward, tokens = max(both - forward, forward), sequences * length
    return forward / parameters / tokens, backward / parameters / tokens, decode / parameters


def _build_block(shape: ModelShape, dtype: Precision, device: torch.device) -> Any:
    """Build a Llama body with one block of the model's width and size, or of a proportional smaller size."""
    from transformers import LlamaConfig, LlamaModel  # a second of imports, for the measurement only

    heads = max(1, min(shape.width, WIDEST[device.type]) // 64)
    width = heads * (min(shape.width, WIDEST[device.type]) // heads // 2 * 2)
    size = shape.block * shape.tensor * (width / shape.width) ** 2
    inner = max(width, round((size - 4 * width**2) / (3 * width)))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=min(inner, 8 * width),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=8,
        pad_token_id=None,
    )
    body: Any = LlamaModel(config)
    body.to(device=device, dtype=TORCH_DTYPE[dtype])
    if dtype == "fp32" and device.type == "cpu":
        widen_linears(body)  # as the engine does
    return body.train()


def _head_seconds(shape: ModelShape, dtype: Precision, device: torch.device) -> float:
    count, width = TOKENS[device.type] // 4, min(shape.width, WIDEST[device.type])
    rows = min(shape.vocabulary, HEAD_ROWS[device.type])
    options: dict[str, Any] = {"dtype": TORCH_DTYPE[dtype], "device": device, "requires_grad": True}
    hidden, weight = torch.full((count, width), 0.01, **options), torch.full((rows, width), 0.01, **options)
    targets = torch.zeros(count, dtype=torch.long, device=device)
    seconds = _seconds(lambda: token_logprobs(hidden, weight, targets)[0].sum().backward()) / count
    return seconds * (shape.vocabulary * shape.width) / (rows * width)


def _adam_seconds(device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(PARAMETERS[device.type], device=device))
    parameter.grad = torch.ones_like(parameter)
    return _seconds(torch.optim.AdamW([parameter], fused=True).step) / PARAMETERS[device.type]


def _all_reduce_seconds(device: torch.device) -> float:
    message = torch.zeros(MESSAGE_BYTES[device.type] // 4, device=device)
    return _seconds(lambda: collectives.all_reduce(message)) / message.nbytes


def _seconds(run: Callable[[], Any]) -> float:
    """Return the best time of a few runs after a warm-up run, on the slowest rank."""
    best = math.inf
    for count in range(RUNS + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if count:
            best = min(best, time.perf_counter() - start)
    return dist.max_over_ranks(best)
