"""Count the operators for which the host waits for its device. The count works on any device."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostSyncCounter(TorchDispatchMode):
    """Count in `counts`, by name, the operators that read a number or that need the number of True values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
