"""Parallelism outside of the module. Other rooms use the names in `__all__`, as `engine.distributed`.

- The process group: `start`, `stop`, `set_parallelism`, `world`, `World`, `is_rank_zero`.
- Collectives over all ranks: `barrier`, `broadcast_object`, `gather_objects`, `max_over_ranks`, `sum_over_ranks`.
- Sequence parallelism inside a module: `sequence_shard`, `SequenceShard`, `check_heads`.
- `request_stop` and `stop_requested`: a stop of all ranks after the same step.
- `observe_collectives`, `observe_work`: a context around each collective, and a call after each part of other work.
- `to_device`: a copy of a small tensor to the device, without waiting for the device.
- `bytes_sent`: the bytes that this rank has sent since its start, by purpose.
"""

from engine.host_memory import to_device
from engine.parallel.collectives import bytes_sent
from engine.parallel.dist import (
    World,
    barrier,
    broadcast_object,
    gather_objects,
    is_rank_zero,
    max_over_ranks,
    observe_collectives,
    observe_work,
    request_stop,
    set_parallelism,
    start,
    stop,
    stop_requested,
    sum_over_ranks,
    world,
)
from engine.parallel.sequence import SequenceShard, check_heads, sequence_shard

__all__ = [
    "SequenceShard",
    "World",
    "barrier",
    "broadcast_object",
    "bytes_sent",
    "check_heads",
    "gather_objects",
    "is_rank_zero",
    "max_over_ranks",
    "observe_collectives",
    "observe_work",
    "request_stop",
    "sequence_shard",
    "set_parallelism",
    "start",
    "stop",
    "stop_requested",
    "sum_over_ranks",
    "to_device",
    "world",
]
