#!/usr/bin/env bash
# Start torchrun on one of several machines. Parameters are sharded inside a machine and replicated across (HSDP).
# Run the same line on every machine. HOST is the address of one of them:
#   MACHINES=2 HOST=10.0.0.1 examples/torchrun/machine.sh model=llama-3.1-8b name=llama
# On machines without GPUs, set GPUS=1. If they have several network interfaces, set GLOO_SOCKET_IFNAME=eth0.

set -euo pipefail
cd "$(dirname "$0")/../.."

machines="${MACHINES:?set the number of machines}"
host="${HOST:?set the address of one of the machines}"
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
# By default, torchrun gives a rank one thread, which is too few for an optimizer in host memory.
threads=$(($(nproc) / gpus))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"
exec .venv/bin/torchrun \
    --nnodes "${machines}" --nproc-per-node "${gpus}" \
    --rdzv-id "${RUN_ID:-1}" --rdzv-backend c10d --rdzv-endpoint "${host}:${PORT:-29500}" \
    train.py engine=zero3 engine.shard_ranks="${gpus}" "$@"
