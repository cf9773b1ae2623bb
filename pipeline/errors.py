"""The one exception for what a user did: the commands print its message without a traceback and exit with 2."""


class UserError(ValueError):
    """Its message is one clear paragraph that says what is wrong and what to write or do instead."""


class SharedError(UserError):
    """One that every rank raises at the same place, so that they can still end together what is under way."""


class RestartStage(Exception):
    """The stage has to be started again: it ran out of memory, and its folder has smaller limits for the next start."""
