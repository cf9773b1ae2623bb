"""Pipeline parallelism: the blocks of a language model dealt out over ranks, micro-batches passed from rank to rank.

GPipe: Huang et al., 2019, arXiv:1811.06965; one forward, one backward: Narayanan et al., 2019, arXiv:1806.03377. The
schedules and their messages are `torch.distributed.pipelining`'s. Every rank gets the micro-batches of a step whole and
runs the model's own forward on them, so masks, positions and rotary angles are there; only hidden states are sent.
"""

from engine.parallel.pipeline.everywhere import everywhere
from engine.parallel.pipeline.piece import Piece, cut, piece_of
from engine.parallel.pipeline.schedule import Guard, Pipeline

__all__ = ["Guard", "Piece", "Pipeline", "cut", "everywhere", "piece_of"]
