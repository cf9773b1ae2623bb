"""This rank's random generators, as values that JSON takes."""

from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """This rank's random generators, as JSON."""
    state: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back where `random_state` found them."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
