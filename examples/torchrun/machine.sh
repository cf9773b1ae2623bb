#!/usr/bin/env bash
# One torchrun on each of several machines; parameters are sharded inside a machine and replicated across (HSDP).
# The same line on every machine, HOST being one of them:
#   MACHINES=2 HOST=10.0.0.1 examples/torchrun/machine.sh model=llama-3.1-8b name=llama
# On machines without GPUs: GPUS=1, and GLOO_SOCKET_IFNAME=eth0 where there are several network interfaces.

set -euo pipefail
cd "$(dirname "$0")/../.."

machines="${MACHINES:?how many machines}"
host="${HOST:?address of the machine where they meet}"
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
# torchrun itself gives a rank one thread, too few for an optimizer in host memory.
threads=$(($(nproc) / gpus))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"
exec .venv/bin/torchrun \
    --nnodes "${machines}" --nproc-per-node "${gpus}" \
    --rdzv-id "${RUN_ID:-1}" --rdzv-backend c10d --rdzv-endpoint "${host}:${PORT:-29500}" \
    train.py engine=zero3 engine.shard_ranks="${gpus}" "$@"
