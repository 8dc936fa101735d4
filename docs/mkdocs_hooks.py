"""Let pages link to files outside of docs/, as they do on a code host: the site holds a copy of each linked file.

A copy is at repository/PATH. Linked Markdown files, such as those of benchmarks/, become pages, whose links count too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that the added pages link to."""
    pending = [file for file in files if file.src_uri.endswith(".md")]
    while pending:
        page = pending.pop()
        for match in LINK.finditer(page.content_string):
            path = _path(page.src_uri, match[3])
            if path.startswith("docs/") or not (ROOT / path).is_file() or files.get_file_from_path(COPIES + path):
                continue
            added = File.generated(config, COPIES + path, abs_src_path=str(ROOT / path))
            files.append(added)
            if path.endswith(".md"):
                pending.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies. A link to a folder becomes its text."""

    def pointed(match: re.Match) -> str:
        path = _path(page.file.src_uri, match[3])
        if (ROOT / path).is_dir():
            return match[2]
        target = path.removeprefix("docs/") if path.startswith("docs/") else COPIES + path
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}[{match[2]}]({relative}{match[4] or ''})"

    return LINK.sub(pointed, markdown)


def _path(page: str, link: str) -> str:
    """The linked file's path in the repository. page: its path in the site's sources."""
    own = page.removeprefix(COPIES) if page.startswith(COPIES) else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), link))
