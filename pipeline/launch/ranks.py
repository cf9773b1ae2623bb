"""Who the ranks are: given by torchrun or Slurm, or started here, one process a GPU (one on a CPU)."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError

SLURM_PORT = 29400


@dataclass(frozen=True)
class Ranks:
    """The ranks that this launcher starts: `local` of them, the first being `first` of `world`."""

    world: int
    first: int
    local: int
    local_first: int
    local_world: int
    address: str
    port: int
    given_by: str = ""
    """"torchrun", "Slurm", or empty where this launcher chose."""
    agent_store: bool = False
    """True where torchrun already keeps a store at address:port."""
    attempt: str = "0"
    """Counts restarts by torchrun, so that a second attempt reads none of the first one's keys."""

    @property
    def leads(self) -> bool:
        """True on the one launcher that decides and writes the manifest."""
        return self.first == 0


def given_ranks(env: Mapping[str, str]) -> Ranks | None:
    """The rank that torchrun or Slurm gave this process, if one did. Raises UserError where half of it is missing."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_STEP_ID" in env):
        return _from_slurm(env)
    return None


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise UserError("RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT: start through torchrun")
    world, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
    local_rank = int(env.get("LOCAL_RANK", 0))
    return Ranks(
        world=world,
        first=rank,
        local=1,
        local_first=local_rank,
        local_world=int(env.get("LOCAL_WORLD_SIZE", local_rank + 1)),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        given_by="torchrun",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or "0"
    local_rank = int(env.get("SLURM_LOCALID", 0))
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    return Ranks(
        world=int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1),
        first=int(env["SLURM_PROCID"]),
        local=1,
        local_first=local_rank,
        local_world=int(tasks[0]) if tasks else local_rank + 1,
        address=env.get("MASTER_ADDR") or first_host(hosts),
        port=int(env.get("MASTER_PORT") or SLURM_PORT + int(job) % 1000),
        given_by="Slurm",
        attempt=env.get("SLURM_RESTART_COUNT", "0"),
    )


def first_host(hosts: str) -> str:
    """The first host of Slurm's short list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", hosts)
    if match is None:
        raise UserError(f"cannot read the node list '{hosts}': set MASTER_ADDR to the first node's name")
    return match[1] + (match[2] or "") + (match[3] or "")


def own_ranks(asked: int | None, gpus: int) -> Ranks:
    """The ranks to start on this machine. Raises UserError for more ranks than GPUs, where there are any."""
    if gpus and asked is not None and asked > gpus:
        seen = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        raise UserError(
            f"ranks={asked}, but this machine shows {seen}: ranks={gpus} or less "
            "(CUDA_VISIBLE_DEVICES= before the command runs on the CPU)"
        )
    count = asked or max(1, gpus)
    return Ranks(count, 0, count, 0, count, "127.0.0.1", free_port())


def check_given(ranks: Ranks, asked: int | None) -> None:
    """Refuse `ranks=` where somebody else already chose another number."""
    if asked is not None and asked != ranks.world:
        raise UserError(f"ranks={asked}, but {ranks.given_by} gave {ranks.world}: leave ranks= out")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def count_gpus() -> int:
    """GPUs that PyTorch sees here. PyTorch is asked in a process of its own, and only where a driver shows."""
    devices = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return 0
    if not shutil.which("nvidia-smi") and not any(Path(device).exists() for device in devices):
        return 0
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    return int(answer.stdout.split()[-1]) if answer.returncode == 0 and answer.stdout.split() else 0
