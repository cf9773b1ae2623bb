"""A wish that any rank may have, and that all learn of at the same place: in the next sum that they make anyway.

So ranks agree after which step to stop, at no cost: `dist.sum_over_ranks`, which every update calls, carries it.
"""

_mine = False
_known = False


def make() -> None:
    """This rank wishes; safe in a signal's handler."""
    global _mine
    _mine = True


def mine() -> bool:
    """Whether this rank wishes."""
    return _mine


def learn(everywhere: bool) -> None:
    """What the ranks wished when they made a sum."""
    global _known
    _known = _known or everywhere


def known() -> bool:
    """Whether any rank wished when the last sum was made: the same on all ranks until they make the next."""
    return _known


def forget() -> None:
    """Nobody wishes any more."""
    global _mine, _known
    _mine = _known = False
