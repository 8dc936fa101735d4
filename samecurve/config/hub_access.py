"""Access to the Hugging Face hub, tried once before its client retries for half a minute."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import MutableMapping
from urllib.parse import urlsplit

from samecurve.config.schema import Recipe
from samecurve.specs.data_names import address, is_hub_name

PATIENCE = 3.0  # seconds
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def use_cache_without_hub(
    recipe: Recipe, environ: MutableMapping[str, str] = os.environ, patience: float = PATIENCE
) -> str:
    """Set HF_HUB_OFFLINE if the recipe names something on the hub and the hub cannot be reached.

    The client reads the variable when it is imported. With a proxy nothing is tried, because the proxy may reach it.

    Returns:
        A line to print, "" where nothing was changed.
    """
    data = (source.path for source in recipe.data.sources())
    wanted = [path for path in recipe.model_paths if is_hub_name(path)]
    wanted += [path for path in data if path and address(path)]
    is_decided = {"HF_HUB_OFFLINE", *PROXIES} & environ.keys()
    if not wanted or is_decided:
        return ""
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co")
    if answers(endpoint, patience):
        return ""
    environ["HF_HUB_OFFLINE"] = "1"
    return f"{endpoint} cannot be reached: of {', '.join(wanted)} only what the cache holds is used"


def answers(url: str, patience: float) -> bool:
    """Whether the URL's host accepts a connection within `patience` seconds, the look-up of its name included."""
    parts, connected = urlsplit(url), threading.Event()
    where = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)

    def connect() -> None:
        try:
            socket.create_connection(where, patience).close()
        except (OSError, UnicodeError):
            return
        connected.set()

    # a look-up cannot be interrupted, and may take longer than any patience
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience)
    return connected.is_set()
