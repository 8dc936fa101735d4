"""Exceptions by cause. Each class has the exit code of the process, so that a job script can branch on the code.

Launchers turn a worker's exit code into 1; `status.json` in the run directory keeps the real one.
"""


class SamecurveError(Exception):
    """Base class for errors with a known cause; the message says what to do and is printed without a traceback.

    `output_dir` is the output directory of a run that cannot start, if known before its RunDirectory exists.
    `is_printed` is True once this process has printed the message.
    """

    exit_code = 1
    is_printed = False
    output_dir: str | None = None


class ConfigurationError(SamecurveError):
    """Invalid recipe, strategy file or command line; the message lists every problem found."""

    exit_code = 2


class DataError(SamecurveError):
    """Unusable training data or tokenizer."""

    exit_code = 3


class CheckpointError(SamecurveError):
    """Unusable checkpoint or exported model."""

    exit_code = 4


class NumericError(SamecurveError):
    """Non-finite loss or gradient (the weights are those of the last good step), or a model that computes wrongly."""

    exit_code = 5


class TopologyError(SamecurveError):
    """Difference between the requested and the live world size or strategy."""

    exit_code = 6


class StorageError(SamecurveError):
    """Failure to write a file."""

    exit_code = 7


class WorkerError(SamecurveError):
    """Death of a process that prepares data, after a checkpoint was saved."""


class RepeatedFailureError(SamecurveError):
    """Failure of the same step after every automatic restart."""


class Preempted(SamecurveError):
    """Stop on request after a checkpoint was saved, from which the run can resume; not a failure."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class NothingToDo(SamecurveError):
    """The run has already completed, and its outputs still exist; not a failure."""

    exit_code = 0


class HangError(SamecurveError):
    """No progress for watchdog.timeout_seconds."""

    exit_code = 124  # as timeout(1) of coreutils


class PeerError(SamecurveError):
    """Another rank exited, so this rank cannot continue; the exit code is that rank's if known.

    `is_reporter` is True on the lowest surviving rank, which prints the message and waits for no other rank.
    `is_reported` is True on a rank that knows that another one has printed it.
    """

    is_reporter = False
    is_reported = False

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code
