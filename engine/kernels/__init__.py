"""Kernels: one public name each. This module picks the implementation."""

from engine.kernels.token_logprobs import token_logprobs

__all__ = ["token_logprobs"]
