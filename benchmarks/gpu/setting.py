"""Where and how large the GPU bench runs: the real sizes on a card, tiny ones to try its code on a CPU."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

OPT_1_3B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "ffn_dim": 8192,
    "word_embed_proj_dim": 2048,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "dropout": 0.0,
}
TINY: dict[str, Any] = OPT_1_3B | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "vocab_size": 512,
}


def failure(problem: Exception) -> dict[str, str]:
    """What a row says of a case that failed: what went wrong, and where."""
    where = "".join(traceback.format_exception(problem))
    return {"failed": f"{type(problem).__name__}: {problem}"[:500], "traceback": where[-4000:]}


@dataclass(frozen=True)
class Setting:
    """`quick` leaves out what does not fit into five minutes; `tiny` shrinks all sizes."""

    device: torch.device
    tiny: bool = False
    quick: bool = False

    @property
    def shape(self) -> dict[str, Any]:
        """An OPT configuration's fields: 1.3B, or tiny."""
        return TINY if self.tiny else OPT_1_3B

    @property
    def name(self) -> str:
        return "tiny" if self.tiny else "opt-1.3b"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    def of(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else full

    def build(self) -> nn.Module:
        """A model with random weights on the device, as it computes."""
        return self._made(self.shape, self.device, self.dtype)

    def blueprint(self, shape: dict[str, Any] | None = None) -> nn.Module:
        """A model without memory, in fp32 as its masters will be."""
        return self._made(shape or self.shape, "meta", torch.float32)

    def _made(self, shape: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **shape), dtype=dtype)
        return model

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """The median of `repeats` runs after one to warm up, the device waited for."""
        work()
        taken = []
        for _ in range(repeats):
            self.wait()
            began = perf_counter()
            work()
            self.wait()
            taken.append(perf_counter() - began)
        return sorted(taken)[len(taken) // 2]

    def clear(self) -> None:
        """Give memory back that nothing holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def lost(self) -> bool:
        """Whether the device fails whatever it is asked from now on, as after an illegal address; for this process."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def peak_gib(self) -> float:
        """The most that was allocated since `clear`; 0 off GPUs."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
