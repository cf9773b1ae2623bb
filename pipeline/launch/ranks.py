"""Determine the ranks: from torchrun or Slurm, or one process per GPU of this machine (one process without GPUs)."""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError, kind_and_line

SLURM_PORT = 29400
PORTS = range(20_000, 29_000)
EXPANDABLE = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
WSL_GPU = Path("/dev/dxg")
WAITING_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
SPINS = 10_000  # of a waiting thread before it sleeps; libgomp's default is 300,000
BUSY_CORES = 0.5


@dataclass(frozen=True)
class Ranks:
    """The ranks that this launcher starts: `local` ranks of `world`, from rank `first` on."""

    world: int
    first: int
    local: int
    local_first: int
    local_world: int
    address: str
    port: int
    started_by: str = ""
    """"torchrun", "Slurm", or "" if this launcher chose the ranks."""
    agent_store: bool = False
    """Whether torchrun already has a store at address:port."""
    attempt: str = "0"
    """The restart count of torchrun or Slurm, after the job and the step of Slurm.

    A restarted job must not read store keys of the earlier attempt, nor a job those of another job at the same port.
    """
    gpus: int = 0
    """The GPUs of this machine that Slurm gave to the ranks; 0 if it does not report them."""

    @property
    def leads(self) -> bool:
        """Return whether this is the first launcher, which decides what runs and writes the manifest."""
        return self.first == 0


def external_ranks(env: Mapping[str, str]) -> Ranks | None:
    """Return the rank that torchrun or Slurm assigned to this process; None without them.

    A single task of Slurm is no rank: it may be a shell (`srun --pty bash`) on a machine with several GPUs, and starts
    its own ranks. Raise UserError if a variable is missing or invalid.
    """
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if env.get("SLURM_PROCID") and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_STEP_ID" in env):
            ranks = _from_slurm(env)
            return ranks if ranks.world > 1 else None
    except (KeyError, ValueError) as problem:
        raise UserError(
            f"cannot read the variables of torchrun or Slurm ({kind_and_line(problem)}): start through torchrun or "
            "srun, or unset RANK and SLURM_PROCID"
        ) from None
    return None


def prints_mistakes(env: Mapping[str, str]) -> bool:
    """Return whether this process prints the user's mistakes, which all launchers of a job find."""
    with suppress(UserError):  # the environment itself may be the mistake
        ranks = external_ranks(env)
        return ranks is None or ranks.leads
    return True


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    local_rank = int(env.get("LOCAL_RANK", 0))
    return Ranks(
        world=int(env["WORLD_SIZE"]),
        first=int(env["RANK"]),
        local=1,
        local_first=local_rank,
        local_world=int(env.get("LOCAL_WORLD_SIZE", local_rank + 1)),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        started_by="torchrun",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or "0"
    local_rank = int(env.get("SLURM_LOCALID") or 0)
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    return Ranks(
        world=int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1),
        first=int(env["SLURM_PROCID"]),
        local=1,
        local_first=local_rank,
        local_world=int(tasks[0]) if tasks else local_rank + 1,
        address=env.get("MASTER_ADDR") or first_host(hosts),
        port=int(env.get("MASTER_PORT") or SLURM_PORT + int(job) % 1000),
        started_by="Slurm",
        attempt=f"{job}-{env.get('SLURM_STEP_ID', '0')}-{env.get('SLURM_RESTART_COUNT', '0')}",
        gpus=int(env.get("SLURM_GPUS_ON_NODE") or 0),
    )


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's compressed node list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", hosts)
    if match is None:
        raise UserError(f"cannot read the node list '{hosts}': set MASTER_ADDR to the first node's name")
    return match[1] + (match[2] or "") + (match[3] or "")


def own_ranks(requested: int | None, gpus: int) -> Ranks:
    """Return the ranks to start on this machine. Raise UserError if a machine with GPUs has fewer GPUs than ranks."""
    if gpus and requested is not None and requested > gpus:
        available = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        raise UserError(
            f"ranks={requested}, but this machine has {available}: set ranks={gpus} or less "
            "(or start the command with CUDA_VISIBLE_DEVICES= to run on the CPU)"
        )
    count = requested or max(1, gpus)
    return Ranks(count, 0, count, 0, count, "127.0.0.1", free_port())


def check_rank_count(ranks: Ranks, requested: int | None) -> None:
    """Raise UserError if ranks= differs from the number of ranks that torchrun or Slurm started.

    Without ranks=, raise UserError if Slurm started fewer tasks on this machine than it gave GPUs.
    """
    if requested is None and ranks.local_world < ranks.gpus:
        tasks = f"{ranks.local_world} task{'s' if ranks.local_world > 1 else ''}"
        raise UserError(
            f"Slurm started {tasks} on a machine with {ranks.gpus} GPUs, and each task is a rank with one GPU: start "
            f"one task per GPU (srun --ntasks-per-node={ranks.gpus}, as examples/slurm/train.sbatch) or one torchrun "
            f"per machine (examples/slurm/torchrun.sbatch); ranks={ranks.world} uses only some of the GPUs"
        )
    if requested is not None and requested != ranks.world:
        raise UserError(f"ranks={requested}, but {ranks.started_by} started {ranks.world} ranks: remove ranks=")


def free_port() -> int:
    """Return a free TCP port of this machine.

    Rank 0 opens the port seconds later. The operating system takes the ports of outgoing connections from a range above
    these, so that no connection takes the port in the meantime.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"every TCP port from {PORTS[0]} to {PORTS[-1]} of this machine is in use: free one of them")


def may_have_gpus() -> bool:
    """Return whether this machine has a GPU driver and the environment does not hide the GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    devices = (Path("/dev/nvidiactl"), WSL_GPU, Path("/dev/kfd"))
    return shutil.which("nvidia-smi") is not None or any(device.exists() for device in devices)


def allocator_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return settings for ranks on GPUs. The user's settings of PyTorch's allocator have priority.

    Row lengths differ between micro-batches, and blocks of fixed size would leave gaps. Segments that grow leave none.
    On WSL 2, the drivers of some GPUs fail at the first of these segments (pytorch/pytorch#192330).
    NCCL registers the buffers of a CUDA graph as one allocation each, and such a graph hangs if the buffers are in
    expandable segments (pytorch/pytorch#158029). Registration only saves copies, so it is off.
    """
    configured = [env[name] for name in ALLOCATOR_VARIABLES if name in env]
    if not configured and not WSL_GPU.exists():
        return {ALLOCATOR_VARIABLES[0]: EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}
    return {"NCCL_GRAPH_REGISTER": "0"} if EXPANDABLE in ",".join(configured) else {}


def thread_settings(local_world: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return OpenMP's settings for the ranks of this machine, which divide its cores. Those in `env` have priority."""
    threads = {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", str(max(1, usable_cores() // local_world)))}
    return threads | waiting_settings({**env, **threads})


def usable_cores(system: Path = Path("/")) -> int:
    """Return the cores that this process may use: fewer than those of the machine in a container or a job of Slurm.

    A container may have a quota of CPU time instead of cores of its own. With a thread for each core of the machine,
    the kernel would stop all threads for most of each period. `system` is the root of the file system.
    """
    cores = (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()) or 1
    return min([cores, *(max(1, round(quota)) for quota in _cpu_quotas(system))])


def _cpu_quotas(system: Path) -> Iterator[float]:
    """Yield the cores that each control group of this process, and each of its parents, may use on average."""
    membership, mounted = system / "proc/self/cgroup", system / "sys/fs/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted  # version 1 or 2
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        own = root / path.lstrip("/")  # in a container, this folder may be missing: its own group is then the root
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                if quota > 0:  # -1: no quota
                    yield quota / period
            if group == root:
                break


def waiting_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return OpenMP's settings for how threads wait for each other; {} if `env` has one thread or such settings.

    By default a waiting thread spins for milliseconds. If another program uses a core, the waiting threads take the
    time of the thread that they wait for, in each operator. Threads that sleep are slower on an idle machine. So they
    sleep at once only if other programs are busy now, and otherwise spin for about 0.1 ms
    (docs/engineering/measurements.md, Busy machines).
    """
    if env.get("OMP_NUM_THREADS") == "1" or env.keys() & WAITING_VARIABLES:
        return {}
    import psutil  # here, because the commands report missing packages themselves

    busy_cores = psutil.cpu_percent(interval=0.3) / 100 * (psutil.cpu_count() or 1)
    return {"OMP_WAIT_POLICY": "passive"} if busy_cores > BUSY_CORES else {"GOMP_SPINCOUNT": str(SPINS)}


def prepare_single_process() -> None:
    """Set the environment of a command without ranks, before it imports torch.

    Schedulers give the variables of ranks to every process of a job, also to a shell in it. The engine would wait for
    the other ranks.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= thread_settings(1, os.environ)


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch can use.

    A subprocess imports PyTorch, and only if this machine has a GPU driver. The launcher itself does not import it.
    `device_count` alone also counts GPUs whose driver is too old for this PyTorch.
    """
    if not may_have_gpus():
        return 0
    counted = "torch.cuda.is_available() and torch.cuda.device_count()"
    command = [sys.executable, "-P", "-c", f"import torch; print(int({counted}))"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return int(result.stdout.split()[-1]) if result.returncode == 0 and result.stdout.split() else 0
