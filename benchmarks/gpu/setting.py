"""Device and size of the GPU measurements: real sizes on a GPU, tiny sizes to test the code on a CPU."""

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
    """Return the fields of a failed case: the error and its traceback."""
    text = "".join(traceback.format_exception(problem))
    return {"failed": f"{type(problem).__name__}: {problem}"[:500], "traceback": text[-4000:]}


@dataclass(frozen=True)
class Setting:
    """`quick` skips what does not fit into five minutes. `tiny` reduces all sizes."""

    device: torch.device
    tiny: bool = False
    quick: bool = False

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of an OPT configuration: 1.3B or tiny."""
        return TINY if self.tiny else OPT_1_3B

    @property
    def name(self) -> str:
        return "tiny" if self.tiny else "opt-1.3b"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    def of(self, full: Any, tiny: Any) -> Any:
        """Return `full`, or `tiny` if the sizes are tiny."""
        return tiny if self.tiny else full

    def build(self) -> nn.Module:
        """Return a model with random weights on the device, in compute precision."""
        return self._create(self.shape, self.device, self.dtype)

    def blueprint(self, shape: dict[str, Any] | None = None) -> nn.Module:
        """Return a model on the meta device, in fp32."""
        return self._create(shape or self.shape, "meta", torch.float32)

    def _create(self, shape: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **shape), dtype=dtype)
        return model

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Return the median seconds of `repeats` runs after a warm-up. Wait for the device after each."""
        work()
        times = []
        for _ in range(repeats):
            self.wait()
            start = perf_counter()
            work()
            self.wait()
            times.append(perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def clear(self) -> None:
        """Release unused memory, and reset the peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def is_lost(self) -> bool:
        """Whether every further operation of this process on the device fails, as after an illegal address."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def peak_gib(self) -> float:
        """Return the peak of allocated memory since `clear` in GiB, or 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
