"""The numbers of rows that decode steps are made ready for; a step with fewer is filled up."""


def bucket(rows: int) -> int:
    """The least of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ... that holds so many rows: a third too many at most."""
    size = 1
    while size < rows:
        size *= 2
    return size * 3 // 4 if size >= 32 and rows <= size * 3 // 4 else size
