"""What a micro-batch must offer to be healed."""

from typing import Protocol, Self, runtime_checkable


@runtime_checkable
class Divisible(Protocol):
    """A micro-batch that knows how to be cut. Its loss is a sum over its rows, so that cutting does not change it."""

    @property
    def size(self) -> int:
        """Tokens, padding included: what memory goes with."""
        ...

    def halves(self) -> tuple[Self, Self] | None:
        """The first and the second half of the rows, in order; None where there is nothing left to cut."""
        ...

    def nothing(self) -> Self:
        """A micro-batch in which nothing counts, as small as a forward and backward pass takes it."""
        ...
