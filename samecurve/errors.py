"""Exceptions by cause. Each class has the exit code of the process, so that a job script can branch on the code.

Launchers turn a worker's exit code into 1; `status.json` in the run directory keeps the real one.
"""

import re
from urllib.parse import unquote_plus

_URL = re.compile(r"[\w+.-]{0,30}:/[^\s\"'<>]+")  # one slash where it was taken for a path
# up to the last @ of the host; a password may have slashes, but no port is one
_USER = re.compile(r"(:/{1,2})(?:[^/?#@:]*:(?!\d+(?:[/?#]|$)).*|[^/?#]*)@")
_PARAMETER = re.compile(r"(?<=[?&;#])([^?&;#=]+)(=[^?&;#]*)?")
# of signed URLs (S3, Google, Azure, CloudFront) and of services that take a key
_SECRET = re.compile(
    "signature|token|secret|passw|pwd|credential|auth(?!or)|session|policy|jwt|key$|key[-_]?(pair|id)|access[-_]?id"
    "|^x-(amz|goog)-|^(sig|se|sp)$",
    re.IGNORECASE,
)
_LONG = 16  # characters of a word that may be a token


def without_credentials(text: str) -> str:
    """Replace users and passwords in URLs, and the values of their signatures, keys and tokens, by ***."""

    def parameter(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if not value:
            return "***" if len(name) >= _LONG else match[0]
        inner = unquote_plus(value)  # may be a URL itself
        is_secret = _SECRET.search(unquote_plus(name)) or without_credentials(inner) != inner
        return f"{name}=***" if is_secret else match[0]

    def cleaned(url: re.Match[str]) -> str:
        is_container = url[0].startswith(("abfs:", "abfss:"))  # Azure's CONTAINER@ACCOUNT
        return _PARAMETER.sub(parameter, url[0] if is_container else _USER.sub(r"\1***@", url[0]))

    return _URL.sub(cleaned, text)


class SamecurveError(Exception):
    """Base class for errors with a known cause; the message says what to do and is printed without a traceback.

    `output_dir` is the output directory of a run that cannot start, if known before its RunDirectory exists.
    `is_printed` is True once this process has printed the message. The message has no credentials of URLs.
    """

    exit_code = 1
    is_printed = False
    output_dir: str | None = None

    def __init__(self, *arguments: object):
        super().__init__(*(without_credentials(str(argument)) for argument in arguments))


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
