"""Uploads an exported folder to the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import ConfigurationError, SamecurveError, StorageError
from samecurve.storage.checksums import check_checksums
from samecurve.storage.filesystem import check_links

# What a run has and its model does not need; a user may have put it into the folder.
LEFT_OUT = (
    *("run.json", "status.json", "*.jsonl", "*.log", "*.pt", "*.pth", "*.distcp", "*.partial*", ".*", "*/.*"),
    *("optimizer*", "checkpoints/*", "previous/*", "stacks/*", "tensorboard/*", "wandb/*"),
)
_NAME = re.compile(r"(?![-.])[\w.\-]+/(?![-.])[\w.\-]{1,96}", re.ASCII)
_FIX = "make a token with write permission at https://huggingface.co/settings/tokens, and run hf auth login"


@dataclass(frozen=True)
class Push:
    """A repository of the hub to upload to.

    Attributes:
        name: OWNER/NAME.
        is_public: whether a new repository can be read by everyone. An existing one stays as it is.
        dry_run: list the files and upload nothing.
    """

    name: str
    is_public: bool
    dry_run: bool

    def check(self) -> None:
        """Raise ConfigurationError for a name that no repository can have, or if the hub does not take the token."""
        if not _NAME.fullmatch(self.name) or re.search(r"--|\.\.", self.name):
            raise ConfigurationError(f"--push: found {self.name}, expected OWNER/NAME, for example my-name/my-model")
        if not self.dry_run:
            from huggingface_hub import HfApi

            try:
                HfApi().whoami()
            except Exception as error:
                raise self._explained(error) from error

    def upload(self, folder: Path) -> None:
        """Upload a folder's files, or with `dry_run` list them.

        Raises:
            CheckpointError: a file is not what was exported, by SHA256SUMS, or a link out of the folder.
            ConfigurationError: the hub refuses the token or the name.
            StorageError: the upload failed for another reason; what was uploaded is not sent again.
        """
        check_checksums(folder)
        check_links(folder)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        kept = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)]
        sizes = {name: (folder / name).stat().st_size for name in kept}
        for name in names:
            print(f"  {name}  {sizes[name] / 1e6:,.1f} MB" if name in sizes else f"  {name}  not uploaded")
        kind = "public" if self.is_public else "private"
        total = f"{len(kept)} files, {sum(sizes.values()) / 1e6:,.1f} MB"
        if self.dry_run:
            print(f"--dry_run: {total} of {folder} would go to {self.name} ({kind} if new); nothing was uploaded")
            return
        from huggingface_hub import HfApi

        try:
            api = HfApi()
            api.create_repo(self.name, private=not self.is_public, exist_ok=True)
            text = "Upload with samecurve"
            done = api.upload_folder(
                repo_id=self.name, folder_path=folder, allow_patterns=kept, ignore_patterns=[], commit_message=text
            )
        except Exception as error:
            raise self._explained(error) from error
        print(f"{total} uploaded to {self.name}: {done.commit_url}")

    def _explained(self, error: Exception) -> SamecurveError:
        from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

        code = getattr(getattr(error, "response", None), "status_code", None)
        where = f"--push {self.name}"
        if isinstance(error, OfflineModeIsEnabled):
            return ConfigurationError(f"{where}: HF_HUB_OFFLINE is set; unset it to upload")
        if isinstance(error, LocalTokenNotFoundError):
            return ConfigurationError(f"{where}: no token of the hub here; {_FIX}, or set HF_TOKEN")
        if code == 401:
            return ConfigurationError(f"{where}: the hub does not know the token (HF_TOKEN or hf auth login); {_FIX}")
        if code == 403:
            owner = self.name.partition("/")[0]
            return ConfigurationError(f"{where}: the token may not write to {owner}; {_FIX}, or push to your own name")
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return StorageError(f"{where}: not uploaded: {reason}; run the same command again to go on")
