"""A request to stop that any rank may make, and that all learn of at the same place: in the next sum that they make
anyway.

So ranks agree after which step to stop, at no cost: `dist.sum_over_ranks`, which every update calls, carries it.
"""

_asked_here = False
_agreed = False


def ask() -> None:
    """This rank asks all to stop; safe in a signal's handler."""
    global _asked_here
    _asked_here = True


def asked_here() -> bool:
    """Whether this rank asked."""
    return _asked_here


def learn(asked_anywhere: bool) -> None:
    """What the ranks had asked when they made a sum."""
    global _agreed
    _agreed = _agreed or asked_anywhere


def agreed() -> bool:
    """Whether any rank had asked when the last sum was made: the same on all ranks until they make the next."""
    return _agreed


def forget() -> None:
    """Nobody asks any more."""
    global _asked_here, _agreed
    _asked_here = _agreed = False
