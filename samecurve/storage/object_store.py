"""Objects in a store that fsspec can reach (s3://, gs://, ...): verified uploads, parallel reads, retries.

An upload is accepted after the store has shown what it holds: its size, and its ETag if that is the MD5 of what was
sent (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). Where the ETag is something else, as with
server-side keys, the object is read back and hashed. Every request is idempotent, so one whose answer was lost is
repeated.

Credentials come from the environment alone, as the store's own package reads them. Messages of errors are cleaned of
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from samecurve.errors import ConfigurationError, StorageError, without_credentials

PART_BYTES = 32 << 20
MOST_PARTS = 9_000  # S3 takes 10,000
NUM_READERS = 8
# fsspec's name of a protocol -> what pip installs; others are named by fsspec itself
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)

T = TypeVar("T")


class Retries(NamedTuple):
    """Try a request up to `attempts` times, with random waits between.

    The wait after failure k (from 0) is at most `first_seconds` * 2**k and at most `most_seconds`. The randomness keeps
    clients from returning together, see https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter.
    """

    attempts: int = 8
    first_seconds: float = 0.5
    most_seconds: float = 30.0

    def wait(self, attempt: int) -> None:
        time.sleep(random.uniform(0, min(self.first_seconds * 2**attempt, self.most_seconds)))


def is_url(path: str) -> bool:
    return "://" in path


def credentials_problem(url: str) -> str:
    """Say that a URL may hold a secret, and how to give it, "" otherwise. The value is not shown."""
    whole = re.sub(r"[\s\"'<>]", "_", url)  # characters that would end it
    if without_credentials(whole) == whole:
        return ""
    return (
        "the URL has a user, a password, a signature or a token, which records, checkpoints and the model card would "
        "show; give credentials in the environment only (AWS_ACCESS_KEY_ID, HF_TOKEN and the like)"
    )


def url_problem(url: str) -> str:
    """Say what is wrong with the URL of a store and how to mend it, "" if nothing is. Sends no request."""
    if problem := credentials_problem(url):
        return f"{problem}, and here PROTOCOL://BUCKET/FOLDER"
    try:
        parts = urlsplit(url)
    except ValueError:  # for s3://[bucket
        parts = SplitResult("", "", url, "", "")
    if parts.query or parts.fragment:
        return f"found {url}, but the URL of a store has no query; expected PROTOCOL://BUCKET/FOLDER"
    if not is_url(url) or not parts.scheme or not (parts.netloc + parts.path).strip("/"):
        return f"found {url}, expected PROTOCOL://BUCKET/FOLDER, for example s3://bucket/run"
    import fsspec

    try:
        fsspec.get_filesystem_class(parts.scheme)
    except ImportError:
        package = PACKAGES.get(parts.scheme, f"fsspec[{parts.scheme}]")
        return f"found {url}, but the package {package} is not installed; run pip install {package}"
    except ValueError:
        return f"found {url}, but fsspec knows no protocol {parts.scheme}; s3, gs and az are some that it knows"
    return ""


def without_secrets(text: str) -> str:
    """Replace values of environment variables that look like credentials, and what is secret of the URLs in a text."""
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_credentials(text)


class DamagedObjectError(StorageError):
    """An object differs from its checksum at every try: the store accepted an upload that was damaged on the way."""


class ObjectStore:
    """The objects below one URL. Keys are relative to it, with slashes.

    Args:
        url: see `url_problem`.
        busy: called for each part, to report progress of a long transfer.
        files: replaces the fsspec file system in tests.

    Every method raises StorageError if a request fails for good, with the URL and the reason.
    """

    def __init__(
        self, url: str, busy: Callable[[], None] = lambda: None, files: Any = None, retries: Retries | None = None
    ):
        problem = url_problem(url)
        if problem:
            raise ConfigurationError(f"checkpoint.mirror: {problem}")
        self.url, self.busy, self._retries = url.rstrip("/"), busy, retries or Retries()
        if files is None:
            import fsspec

            # a listing has to be the store's answer, not what fsspec remembers of an earlier one
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            files = fsspec.filesystem(urlsplit(url).scheme, **options)
        self._files = files
        self._root = files._strip_protocol(self.url)

    def folders(self, key: str) -> list[str]:
        """List the names of folders and objects directly below `key`; [] if there are none."""

        def listed() -> list[str]:
            try:
                paths = self._files.ls(self._path(key), detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in paths]

        return self._retried(key, listed)

    def sizes(self, key: str) -> dict[str, int]:
        """Map the names of the objects directly below `key` to their sizes in bytes."""

        def listed() -> dict[str, int]:
            entries = self._files.ls(self._path(key), detail=True)
            return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}

        return self._retried(key, listed)

    def read(self, key: str) -> bytes | None:
        """Read a small object; None if it does not exist, or is not what its checksum in the store says."""

        def content() -> bytes | None:
            try:
                return self._files.cat_file(self._path(key))
            except FileNotFoundError:
                return None

        try:
            return self._retried(key, content)
        except DamagedObjectError:
            return None

    def remove(self, key: str) -> None:
        """Remove one object. An object that does not exist is no error: an earlier answer may have been lost."""

        def removed() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(key))

        self._retried(key, removed)

    def write(self, key: str, content: bytes) -> None:
        """Write and verify a small object."""
        # usedforsecurity=False: OpenSSL in FIPS mode refuses MD5 otherwise
        md5, sha256 = hashlib.md5(content, usedforsecurity=False).hexdigest(), hashlib.sha256(content).hexdigest()

        def sent() -> None:
            self._files.pipe_file(self._path(key), content)
            self._check(key, len(content), md5, sha256)

        self._retried(key, sent)

    def upload(self, path: Path, key: str) -> None:
        """Upload a file and verify it. A multipart upload that fails is aborted, so that no hidden parts are paid for.

        Raises:
            OSError: the local file cannot be read.
        """
        size = path.stat().st_size
        if size <= PART_BYTES:
            self.write(key, path.read_bytes())
            return

        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))

        def sent() -> None:
            parts, digest = [], hashlib.sha256()
            with open(path, "rb", buffering=0) as source:
                target = self._files.open(self._path(key), "wb", block_size=part_bytes, autocommit=False)
                left = size  # a log that grows meanwhile is sent as it was, and again at the next time
                try:
                    while piece := source.read(min(part_bytes, left)):
                        left -= len(piece)
                        target.write(piece)
                        digest.update(piece)
                        parts.append(hashlib.md5(piece, usedforsecurity=False).digest())
                        self.busy()
                    target.close()
                    target.commit()
                except BaseException:
                    _discard(target)
                    raise
            # S3 computes its ETag from the MD5 of each part
            joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
            self._check(key, size, f"{joined}-{len(parts)}", digest.hexdigest())

        self._retried(key, sent, path)

    def abort_uploads(self) -> None:
        """Abort what others left unfinished below the URL: a killed process, or a request whose answer was lost.

        Only for the one process that uploads there. S3 lists such uploads; other stores remove them by themselves.
        """
        call = getattr(self._files, "call_s3", None)
        bucket, _, folder = self._root.partition("/")
        if call is None or not folder:  # all of a bucket may hold other runs
            return

        def aborted() -> None:
            listed = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{folder}/")
            for upload in listed.get("Uploads", []):
                try:
                    call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                except FileNotFoundError:  # an earlier answer was lost
                    continue

        self._retried("", aborted)

    def _check(self, key: str, size: int, etag: str, sha256: str) -> None:
        """Raise OSError unless the store holds what was sent."""
        info = self._files.info(self._path(key))
        if info["size"] != size:
            raise OSError(f"{size} bytes were sent and the store holds {info['size']}")
        if str(info.get("ETag", "")).strip('"') == etag:
            return
        digest = hashlib.sha256()
        for start in range(0, size, PART_BYTES):
            digest.update(self._range(key, start, min(start + PART_BYTES, size)))
        if digest.hexdigest() != sha256:
            raise OSError(f"sha256 {sha256} was sent and the store holds {digest.hexdigest()}")

    def download(self, key: str, path: Path, size: int) -> None:
        """Read an object of `size` bytes into a new file, in parallel ranges. The caller verifies its hash.

        Raises:
            OSError: the local file cannot be written.
        """
        with open(path, "wb") as file, ThreadPoolExecutor(NUM_READERS) as readers:
            file.truncate(size)

            def fetch(start: int) -> None:
                end = min(start + PART_BYTES, size)
                os.pwrite(file.fileno(), self._retried(key, lambda: self._range(key, start, end)), start)
                self.busy()

            for _ in readers.map(fetch, range(0, size, PART_BYTES)):
                pass
            file.flush()
            os.fsync(file.fileno())

    def _range(self, key: str, start: int, end: int) -> bytes:
        content = self._files.cat_file(self._path(key), start=start, end=end)
        self.busy()
        if len(content) != end - start:
            raise OSError(f"bytes {start} to {end} were asked for and {len(content)} came")
        return content

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _retried(self, key: str, request: Callable[[], T], local: Path | None = None) -> T:
        for attempt in range(self._retries.attempts):
            try:
                return request()
            except Exception as error:  # each store's package has classes of its own for a cut connection
                if local is not None and not local.exists():
                    raise
                is_last = attempt == self._retries.attempts - 1
                # a refusal or a mistake in the code stays the same, however often it is tried
                if is_last or isinstance(error, (PermissionError, TypeError, AttributeError)):
                    reason = without_secrets(f"{type(error).__name__}: {error}")
                    # s3fs: FlexibleChecksumError, gcsfs: ChecksumError
                    kind = DamagedObjectError if "Checksum" in type(error).__name__ else StorageError
                    # `from None`: a traceback would show the original message, which may have a secret
                    raise kind(f"{self.url}/{key}: {reason} (tried {attempt + 1} times)") from None
                self._retries.wait(attempt)
                self.busy()
        raise AssertionError("unreachable: the last attempt returns or raises")


def _discard(target: Any) -> None:
    """Abort a multipart upload; the error that led here says more than one from aborting."""
    try:
        target.discard()
    except Exception:  # the store does not answer; `abort_uploads` removes what stays
        pass
    with contextlib.suppress(AttributeError):  # fsspec would send the rest when the object is collected
        target.closed = True
