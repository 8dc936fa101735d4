"""Errors by blame. Each class has the exit code that the process ends with, so a job script can branch on it.

Launchers turn a worker's exit code into 1; `status.json` in the run directory keeps the real one.
"""


class SamecurveError(Exception):
    """An error with a known cause; its message says what to do and is printed without a traceback.

    output_dir: of the run that cannot start, where that is known before its RunDirectory is made.
    """

    exit_code = 1
    output_dir: str | None = None


class ConfigurationError(SamecurveError):
    """The recipe, the strategy's files or the command line; the message holds every problem found."""

    exit_code = 2


class DataError(SamecurveError):
    """The training data or the tokenizer."""

    exit_code = 3


class CheckpointError(SamecurveError):
    """A checkpoint that cannot be used."""

    exit_code = 4


class NumericError(SamecurveError):
    """A loss or gradient that is not finite; the weights are those of the last good step."""

    exit_code = 5


class TopologyError(SamecurveError):
    """The world or the strategy asked for is not the one that runs."""

    exit_code = 6


class StorageError(SamecurveError):
    """A file could not be written."""

    exit_code = 7


class RepeatedFailureError(SamecurveError):
    """The same step failed again after every automatic restart."""


class Preempted(SamecurveError):
    """The run was told to stop, saved a checkpoint and can go on from it: not a failure."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class NothingToDo(SamecurveError):
    """The run is done already, and all that it left is still there: not a failure."""

    exit_code = 0


class HangError(SamecurveError):
    """No progress for watchdog.timeout_seconds."""

    exit_code = 124  # as timeout(1) of coreutils


class PeerError(SamecurveError):
    """Another rank ended, so this one cannot go on; the code is that rank's, where it is known.

    is_reporter: True on the lowest surviving rank, which prints the message and waits for no other rank.
    """

    is_reporter = False

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code
