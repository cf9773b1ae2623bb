"""Parallelism from outside the module. The names in `__all__` are what other rooms use, as `engine.distributed`.

- The process group: `start`, `stop`, `arrange`, `world`, `World`.
- Collectives over all ranks: `barrier`, `broadcast_object`, `from_first`, `gather_objects`, `max_over_ranks`,
  `sum_over_ranks`.
- Sequence parallelism inside a module: `sequence_shard`, `SequenceShard`, `check_heads`.
- `request_stop` and `stop_requested`: a stop of all ranks after the same step.
- `bytes_sent`: the bytes that this rank has sent so far, by purpose.
"""

from engine.parallel.comm_stats import sent as bytes_sent
from engine.parallel.dist import (
    World,
    arrange,
    barrier,
    broadcast_object,
    from_first,
    gather_objects,
    max_over_ranks,
    start,
    stop,
    sum_over_ranks,
    world,
)
from engine.parallel.sequence import SequenceShard, check_heads, sequence_shard
from engine.parallel.stop_signal import agreed as stop_requested
from engine.parallel.stop_signal import ask as request_stop

__all__ = [
    "SequenceShard",
    "World",
    "arrange",
    "barrier",
    "broadcast_object",
    "bytes_sent",
    "check_heads",
    "from_first",
    "gather_objects",
    "max_over_ranks",
    "request_stop",
    "sequence_shard",
    "start",
    "stop",
    "stop_requested",
    "sum_over_ranks",
    "world",
]
