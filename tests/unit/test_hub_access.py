"""The hub is tried once, quickly, and only where a recipe names something on it."""

from __future__ import annotations

import socket
import threading

import pytest

from samecurve.config import hub_access, loader

CLOSED = "http://127.0.0.1:9"


def recipe(*overrides: str):
    return loader.load_recipe("recipes/sft.yaml", ["model.path=owner/name", *overrides])


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_without_the_hub_its_cache_is_used():
    environ = {"HF_ENDPOINT": CLOSED}
    line = hub_access.use_cache_without_hub(recipe("data.path=owner/chats"), environ)
    assert environ["HF_HUB_OFFLINE"] == "1" and "of owner/name, owner/chats only what the cache holds" in line


def test_a_hub_that_answers_is_used(listening):
    environ = {"HF_ENDPOINT": listening}
    assert hub_access.use_cache_without_hub(recipe(), environ) == "" and "HF_HUB_OFFLINE" not in environ


@pytest.mark.parametrize(
    "given", [{"HF_HUB_OFFLINE": "0"}, {"https_proxy": "http://proxy"}, {"http_proxy": "http://proxy"}]
)
def test_what_the_user_decided_stays(given):
    environ = {"HF_ENDPOINT": CLOSED, **given}
    assert hub_access.use_cache_without_hub(recipe(), environ) == ""
    assert environ == {"HF_ENDPOINT": CLOSED, **given}


def test_local_files_need_no_hub():
    environ = {"HF_ENDPOINT": CLOSED}
    local = loader.load_recipe("recipes/quickstart.yaml", [])
    assert hub_access.use_cache_without_hub(local, environ) == "" and len(environ) == 1


def test_a_name_server_that_is_silent_costs_no_more_than_the_patience(monkeypatch):
    looking = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [looking.wait(600)][:0])
    assert not hub_access.answers("https://huggingface.co", 0.1) and not looking.is_set()
    looking.set()
