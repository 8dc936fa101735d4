"""`output_dir` as the URL of a store, and `checkpoint.mirror`."""

from __future__ import annotations

import pytest
from report_cases import missing

from samecurve.cli import commands
from samecurve.config.documents import Document
from samecurve.config.paths import RULES, split_output_url
from samecurve.data.opening import unreadable
from samecurve.errors import without_credentials
from samecurve.storage.object_store import credentials_problem, url_problem


def split(**content) -> Document:
    document = Document("recipe.yaml", content)
    split_output_url(document)
    return document


def test_a_url_becomes_a_local_folder_and_a_mirror(monkeypatch):
    monkeypatch.setenv("SAMECURVE_STAGING", "/fast")
    found = split(output_dir="s3://bucket/a/run", checkpoint={"keep": 3})
    assert found.content == {
        "output_dir": "/fast/s3/bucket/a/run",
        "checkpoint": {"keep": 3, "mirror": "s3://bucket/a/run"},
    }
    assert split(output_dir="runs/a").content == {"output_dir": "runs/a"}


def test_two_stores_are_refused():
    found = split(output_dir="s3://bucket/a", checkpoint={"mirror": "s3://bucket/b"})
    assert [problem.key for problem in found.problems] == ["checkpoint.mirror"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://key:secret@bucket/run", "credentials in the environment only"),
        ("s3://bucket/run?token=secret", "credentials in the environment only"),
        ("s3://bucket/run?versionId=4", "has no query"),
        ("bucket/run", "expected PROTOCOL://BUCKET/FOLDER"),
        ("s4://bucket/run", "knows no protocol s4"),
        ("memory://bucket/run", ""),
    ],
)
def test_the_url_of_a_store(url, text):
    problem = url_problem(url)
    assert text in problem and bool(text) == bool(problem)
    assert "secret" not in problem


def test_a_missing_package_is_named(monkeypatch):
    def absent(protocol):
        raise ImportError

    monkeypatch.setattr("fsspec.get_filesystem_class", absent)
    ((key, problem),) = RULES[0](lambda key: "s3://bucket/run")
    assert key == "checkpoint.mirror"
    assert not missing(problem, ("found s3://bucket/run", "not installed", "pip install s3fs"))


def test_commands_say_that_they_read_local_folders(capsys):
    assert commands.main(["summary", "s3://bucket/run"]) == 2
    assert "s3://bucket/run: commands read local run directories" in capsys.readouterr().err


SIGNED = "https://host/x.jsonl?"
SECRETS = [
    "https://user:SECRET@host/x.jsonl",
    "https://user:SECRET@[host/x.jsonl",
    "https://user:SE/SECRET@host/x.jsonl",
    "https://SECRET@host/x.jsonl",
    "simplecache::https://user:SECRET@host/x.jsonl",
    "zip://x.jsonl::https://user:SECRET@host/x.zip",
    f"{SIGNED}X-Amz-Signature=SECRET",
    f"{SIGNED}a=1&X-Amz-Credential=SECRET",
    f"{SIGNED}X-Goog-SignedHeaders=SECRET",
    f"{SIGNED}Key-Pair-Id=SECRET&Policy=SECRET",
    f"{SIGNED}Policy=SECRET",
    f"{SIGNED}AWSAccessKeyId=SECRET",
    f"{SIGNED}GoogleAccessId=SECRET",
    f"{SIGNED}se=SECRET",
    f"{SIGNED}a=1;sig=SECRET",
    f"simplecache::{SIGNED}access%5Ftoken=SECRET",
    "https://proxy/?url=https%3A%2F%2Fuser%3ASECRET%40host",
]
PATHS = ["data.path", "data.cache_dir", "evaluate.path", "data.mixture", "model.path", "tokenizer.path", "adapter.path"]
PATHS += ["tokenizer.chat_template", "distill.teacher", "checkpoint.mirror", "output_dir", "model.config"]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("key", PATHS)
def test_credentials_in_urls_are_refused(key, url, capsys):
    value = f"[{{path: '{url}', weight: 1}}]" if key == "data.mixture" else url
    given = [] if key in ("data.path", "data.mixture") else ["data.path=builtin:python-stdlib"]
    assert commands.main(["inspect", "recipes/pretrain.yaml", *given, f"{key}={value}", "steps=700"]) == 2
    said = "".join(capsys.readouterr())
    assert "SECRET" not in said
    assert "give credentials in the environment only" in said or key == "model.config"


@pytest.mark.parametrize("url", SECRETS)
def test_no_error_shows_credentials(url, capsys):
    """Whatever quotes the URL: a redirect to a signed one, an argument that is no run, an unknown option."""
    error = unreadable("https://host/x", OSError(f"403 for url {url} ({url})"))
    assert "SECRET" not in str(error) and "https://" in str(error) and "host/x" in str(error)
    for arguments in (["evaluate", "RUN", url], [url], ["summary", "RUN", f"--data={url}"], ["path", url]):
        try:
            assert commands.main(arguments) == 2
        except SystemExit as stopped:
            assert stopped.code == 2
        assert "SECRET" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "url",
    [
        "https://host:8000/x.jsonl?download=true&rev=main&v&author=a",
        "hf://datasets/owner/name@refs/convert/parquet/x.parquet",
        "s3://bucket/run@2/a:b",
        "https://[::1]:9000/x#part",
        "simplecache::https://host/x.jsonl",
        "abfs://container@account.dfs.core.windows.net/x",
    ],
)
def test_urls_without_credentials_are_shown_whole(url):
    assert credentials_problem(url) == ""
    assert without_credentials(f"{url}: could not be read (a@b)") == f"{url}: could not be read (a@b)"


@pytest.mark.parametrize("url", ["s3://[bucket/run", "https://[host"])
def test_a_url_that_cannot_be_split(url, capsys):
    for key in ("output_dir", "checkpoint.mirror"):
        assert commands.main(["inspect", "recipes/pretrain.yaml", f"{key}={url}", "steps=700"]) == 2
        assert f"found {url}, expected PROTOCOL://BUCKET/FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    "query", ["X-Amz-Signature=secret", "sig=secret", "access_token=secret", "api_key=secret", "hf_secretsecretsecret"]
)
def test_only_queries_with_credentials_are_secret(query):
    for url in (f"https://host/x.jsonl?{query}", f"https://host/x.jsonl#{query}"):
        assert "secret" not in credentials_problem(url) != ""
    assert credentials_problem("https://host/x.jsonl?download=true&rev=main&v") == ""
