"""python -m engine.memory model=opt-13b gpus=8: what DeepSpeed's estimators print, our own prediction, this machine."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.memory.estimates import all_estimates
from engine.memory.machine import Machine, this_machine
from engine.memory.pieces import pieces_of
from engine.memory.shapes import Shape, shape_of
from engine.memory.stages import Demand, ppo_demand, reward_demand, sft_demand
from engine.memory.workload import Workload

GIB = 2**30
KEYS: dict[str, Any] = {
    "model": "opt-1.3b",
    "critic": None,
    "reference": True,
    "reward_model": True,
    "gpus": 1,
    "nodes": 1,
    "dtype": "bf16",
    "checkpointing": False,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "sequence_parallel": 1,
    "states": "fp32",
    "micro_batch_tokens": 8192,
    "max_length": 1024,
    "prompt": 512,
    "answer": 256,
    "rollout_batch": 64,
    "lora_rank": 0,
    "nvme_path": None,
}
DEFAULTS = {key: str(value).lower() if isinstance(value, bool) else value for key, value in KEYS.items()}
USAGE = (
    "python -m engine.memory model=NAME|FOLDER|JSON gpus=8\n"
    "  keys, with their defaults: "
    + ", ".join(f"{key}={said}" for key, said in DEFAULTS.items() if said is not None)
    + "\n  critic=NAME is the reward model's base and the critic's; reward_model=false has none, reference=false "
    "(ppo.kl_coef=0) no reference; gpus are those of one node; lora_rank=8 trains adapters beside all linear layers "
    "of the models that answer; nvme_path=FOLDER is on the disk of the nvme tiers"
)


def main(arguments: Sequence[str]) -> int:
    """Print the tables; 2 for a mistake."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        keys = parse(arguments)
        actor = shape_of(keys["model"], keys["tensor_parallel"])
        critic = _critic(keys)
        machine = this_machine(keys["nvme_path"])
        pieces_of(actor, keys["pipeline_parallel"])
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with suppress(BrokenPipeError):  # the reader left, as `head` does
        print("\n".join(tables(actor, critic, keys, machine)), flush=True)
    return 0


def _critic(keys: dict[str, Any]) -> Shape | None:
    """The reward model's and the critic's shape; None where the model's family has no such model.

    Raises ValueError for one that was named.
    """
    try:
        return shape_of(keys["critic"] or keys["model"], keys["tensor_parallel"], scores=True)
    except ValueError:
        if keys["critic"]:
            raise
        return None


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words over the defaults. Raises ValueError."""
    found = dict(KEYS)
    for word in arguments:
        key, equals, text = word.lstrip("-").partition("=")
        if key not in KEYS:
            raise ValueError(f"{word}: there is no such key\n{USAGE}")
        if not equals:
            raise ValueError(f"{word}: write {key}=VALUE")
        found[key] = _value(key, text)
    if found["dtype"] not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype={found['dtype']}: write bf16, fp16 or fp32")
    if found["states"] not in ("fp32", "bf16"):
        raise ValueError(f"states={found['states']}: write fp32 or bf16")
    if found["states"] == "bf16" and (found["dtype"] != "bf16" or found["tensor_parallel"] > 1):
        raise ValueError("states=bf16 needs dtype=bf16 tensor_parallel=1")
    for key in ("tensor_parallel", "pipeline_parallel", "sequence_parallel"):
        if found["gpus"] * found["nodes"] % found[key]:
            raise ValueError(f"{key}={found[key]} does not divide the number of GPUs")
    if found["pipeline_parallel"] > 1 and (found["tensor_parallel"] > 1 or found["states"] == "bf16"):
        raise ValueError("pipeline_parallel needs tensor_parallel=1 states=fp32")
    if found["sequence_parallel"] > 1 and found["tensor_parallel"] * found["pipeline_parallel"] > 1:
        raise ValueError("sequence_parallel needs tensor_parallel=1 pipeline_parallel=1")
    return found


def _value(key: str, text: str) -> Any:
    if isinstance(KEYS[key], bool):
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text}: write true or false")
        return text == "true"
    if isinstance(KEYS[key], int):
        least = min(1, KEYS[key])
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ValueError(f"{key}={text}: write a whole number, at least {least}")
        return int(text)
    return text


def tables(actor: Shape, critic: Shape | None, keys: dict[str, Any], machine: Machine) -> Iterator[str]:
    """The lines of all tables."""
    ranks, pieces = keys["gpus"] * keys["nodes"], keys["pipeline_parallel"]
    if actor.tensor > 1:
        yield f"one of {actor.tensor} parts that tensor groups hold; DeepSpeed's estimates do not know of them"
    yield f"{actor.name}: {actor.parameters / 1e6:,.0f} M parameters, largest layer {actor.largest_layer / 1e6:,.0f} M"
    yield _capacity(machine)
    yield f"\nDeepSpeed's estimate of model states, {keys['gpus']} GPUs a node x {keys['nodes']} nodes (GiB)"
    yield f"  {'':34}{'a GPU':>9}{'a host':>9}"
    for row in all_estimates(actor.parameters, actor.largest_layer, gpus=keys["gpus"], nodes=keys["nodes"]):
        yield f"  {row.name:34}{row.device / GIB:9.2f}{row.host / GIB:9.2f}"
    counted = f"{ranks} rank{'s' if ranks > 1 else ''}"
    yield f"\nThis engine, bytes a device at the height of each stage, {counted}, {keys['dtype']} (GiB)"
    linears = [layer for layer in actor.linears if not layer.is_head]
    work = Workload(
        ranks=ranks // (actor.tensor * pieces),
        dtype=keys["dtype"],
        pieces=pieces,
        sequence=keys["sequence_parallel"],
        joins=keys["sequence_parallel"] > 1,
        step_tokens=4 * pieces * keys["micro_batch_tokens"],
        adapters=keys["lora_rank"] * sum(layer.ins + layer.outs for layer in linears),
        adapted=sum(layer.numbers for layer in linears) if keys["lora_rank"] else 0,
        **{key: keys[key] for key in _SHARED},
    )
    if work.sequence > 1:
        yield f"  every {work.sequence} ranks share out the tokens of a micro-batch"
    if pieces > 1:
        yield from _piece_rows(actor, work, machine)
        return
    stages: tuple[str, ...] = ("sft", "reward", "dpo", "ppo") if keys["reward_model"] else ("sft", "dpo", "ppo")
    if critic is None:
        yield f"  transformers has no reward model and no critic of {actor.name}'s family: critic=NAME is another one"
        stages = ("sft", "dpo")
    heads = "".join(f"{head:>9}" for head in ("states", *stages, "host", "files"))
    yield f"  {'':26}{heads}   highest phase of {stages[-1]}"
    for name, choice in _choices(work):
        pairs = replace(choice, sides=2, copies=True)
        demands = {"sft": sft_demand(actor, choice), "dpo": sft_demand(actor, pairs)}
        if critic is not None:
            own_reference = keys["reference"] and not choice.adapters  # under adapters it is the actor
            demands["reward"] = reward_demand(critic, replace(pairs, adapters=0, adapted=0))
            demands["ppo"] = ppo_demand(
                actor, critic, choice, own_reference=own_reference, has_reward=keys["reward_model"]
            )
        yield _row(name, [demands[stage] for stage in stages], machine, keys["gpus"])


_SHARED = ("states", "checkpointing", "micro_batch_tokens", "max_length", "prompt", "answer", "rollout_batch")


def _piece_rows(shape: Shape, work: Workload, machine: Machine) -> Iterator[str]:
    """Fine-tuning in a pipeline: the height of each piece, with four micro-batches a piece in a step."""
    names = list(sft_demand(shape, work).phases)
    yield f"  {'sft, in pieces':26}" + "".join(f"{name:>17}" for name in names)
    for name, choice in _choices(work):
        if choice.stage < 3 and choice.offload_optimizer == "none":
            demand = sft_demand(shape, choice)
            heights = [demand.height(phase) for phase in demand.phases]
            over = [machine.device is not None and height > machine.device for height in heights]
            cells = (f"{height / GIB:16.2f}{'!' if much else ' '}" for height, much in zip(heights, over, strict=True))
            yield f"  {name:26}" + "".join(cells)
    yield f"  {work.micro_batches} micro-batches a step; pipelines are for sft, with ZeRO 0 to 2 and no offload"


def _choices(work: Workload) -> Iterator[tuple[str, Workload]]:
    """From fastest to leanest."""
    for stage in range(4):
        yield f"zero{stage}", replace(work, stage=stage)
    recomputing = 3 if work.pieces == 1 else 2
    yield f"zero{recomputing}, recomputing", replace(work, stage=recomputing, checkpointing=True)
    if work.states == "bf16":
        return  # which are not offloaded
    lean = replace(work, stage=3, checkpointing=True)
    yield "zero2, optimizer on host", replace(work, stage=2, offload_optimizer="cpu")
    yield "zero2, optimizer on NVMe", replace(work, stage=2, offload_optimizer="nvme")
    yield "zero3, shards on host", replace(lean, offload_optimizer="cpu", offload_parameters="cpu")
    yield "zero3, all on NVMe", replace(lean, offload_optimizer="nvme", offload_parameters="nvme")


def _row(name: str, demands: Sequence[Demand], machine: Machine, gpus: int) -> str:
    """`demands` of the stages; fine-tuning is the first, and the last is told by owner."""
    held = ("parameters", "optimizer", "gathered", "ahead", "gradients", "reducing")
    states = sum(demands[0].phases["train"][owner] for owner in held) - demands[0].overlaps["train"]
    cells = "".join(_cell(demand, machine) for demand in demands)
    here = "".join(
        f"{size / GIB:8.2f}{'!' if size > most else ' '}"
        for size, most in (
            (max(demand.host for demand in demands) * gpus, machine.host),
            (max(demand.nvme for demand in demands) * gpus, machine.disk),
        )
    )
    return f"  {name:26}{states / GIB:9.2f}{cells}{here}   {_owners(demands[-1])}"


def _cell(demand: Demand, machine: Machine) -> str:
    over = machine.device is not None and demand.peak > machine.device
    return f"{demand.peak / GIB:8.2f}{'!' if over else ' '}"


def _owners(demand: Demand) -> str:
    parts = sorted(demand.phases[demand.worst].items(), key=lambda part: -part[1])
    return f"{demand.worst}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size > GIB / 20)


def _capacity(machine: Machine) -> str:
    host = f"{machine.host / GIB:.1f} GiB of host memory, {machine.disk / GIB:.0f} GiB of disk"
    if machine.device is None:
        return f"this machine: no GPU, {host} (! does not fit)"
    return f"this machine: {machine.devices} GPUs of {machine.device / GIB:.1f} GiB, {host} (! does not fit)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
