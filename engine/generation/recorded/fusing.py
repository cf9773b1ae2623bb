"""Short calls that follow each other, in one call of a kernel of ours each (`engine/kernels/rows.py`).

Only where nobody else reads what is computed between them, and shapes and types are what the kernel takes; all else
stays as it is, and everything does where there is no compiler. The numbers are rounded where the model rounds them.
"""

from torch import Tensor

from engine.generation.recorded.fusions.fused import Fused, settle_views
from engine.generation.recorded.fusions.gates import fuse_gates
from engine.generation.recorded.fusions.norms import fuse_norms
from engine.generation.recorded.fusions.rotary import fuse_angles, fuse_rotary
from engine.generation.recorded.graph import Graph
from engine.generation.recorded.recording import Call, Recording


def fuse(recording: Recording) -> Recording:
    """The recording with fewer calls."""
    if any(call.mutates for call in recording.calls):
        return recording
    graph = Graph(recording)
    fuse_angles(graph)
    fuse_rotary(graph)
    fuse_norms(graph)
    fuse_gates(graph)
    settle_views(graph)
    _keep_output(graph)
    return graph.finished()


def _keep_output(graph: Graph) -> None:
    """What is returned is copied from memory that the next step writes."""
    output = graph.recording.output
    place, maker = graph.place(output), graph.makers.get(output)
    base = None if place is None else graph.makers.get(place.base)
    if maker is not None and base is not None and isinstance(base.function, Fused):
        copied = graph.new(graph.forms[output])
        graph.put([maker, Call(Tensor.clone, (output,), {}, (copied,))], at=maker)
        graph.output = copied
