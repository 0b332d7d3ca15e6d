"""Failures a user can mend, and the exit code each one ends in.

A message says what is wrong, where, how much, and what to do about it.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130


class DraftmillError(Exception):
    """Base of every failure that draftmill explains instead of showing a traceback."""

    exit_code = EXIT_FAILED


class RecipeError(DraftmillError, ValueError):
    """A recipe or a flag that cannot be followed."""

    exit_code = EXIT_USAGE


class InputError(DraftmillError, ValueError):
    """Input data or a target that cannot be used as it is."""


class StorageError(DraftmillError, OSError):
    """A file or an object that is missing, cut, or different from its record."""


class ServingError(DraftmillError, RuntimeError):
    """An engine that refused, failed, died, or answered with something else than an answer."""


class DataGateError(DraftmillError, ValueError):
    """A gate refused what a room made; the message names figures, threshold and the flag that overrides it."""

    exit_code = EXIT_REFUSED
