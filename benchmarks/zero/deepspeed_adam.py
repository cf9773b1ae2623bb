"""DeepSpeed's CPU Adam, in DeepSpeed's environment: `SIZE ...`. Prints the seconds of one step per line of input.

A step does the work of ZeRO-Offload: CPU Adam on fp32 master weights, then a copy to the 16-bit parameters. The first
import compiles the kernel with the machine's compiler.
"""

import sys
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn


def main(sizes: list[int]) -> None:
    torch.manual_seed(2)
    masters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    halves = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    for master in masters:
        master.grad = torch.randn(master.shape) * 1e-3
    optimizer = DeepSpeedCPUAdam(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        with torch.no_grad():
            optimizer.step()
            for half, master in zip(halves, masters, strict=True):
                half.copy_(master)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
