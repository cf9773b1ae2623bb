"""Kernels: operations that PyTorch does not have, one public name each.

The file of a kernel contains its torch reference and selects the implementation by device: Triton on GPUs
(`engine/kernels_triton`), C on CPUs (`engine/kernels_cpu`), otherwise the reference. All implementations have the same
arguments and return the same results up to rounding. Triton is imported with the first CUDA tensor.
"""

from engine.kernels.decode_attention import Prompts, decode_attention
from engine.kernels.sample import sample
from engine.kernels.token_logprobs import VocabularyShard, token_logprobs
from engine.kernels.varlen import varlen_fits, within_sequences
from engine.kernels_cpu.attention import Families, ragged_attention
from engine.kernels_cpu.library import load_libraries
from engine.kernels_triton.device import has_triton

__all__ = [
    "Families",
    "Prompts",
    "VocabularyShard",
    "decode_attention",
    "has_triton",
    "load_libraries",
    "ragged_attention",
    "sample",
    "token_logprobs",
    "varlen_fits",
    "within_sequences",
]
