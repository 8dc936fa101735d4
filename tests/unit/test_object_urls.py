"""`output_dir` as the URL of a store, and `checkpoint.mirror`."""

from __future__ import annotations

import pytest
from report_cases import missing

from samecurve.cli import commands
from samecurve.config.documents import Document
from samecurve.config.paths import RULES, split_output_url
from samecurve.data.opening import unreadable
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
    for url in ("simplecache::s3://user:SECRET@bucket/run", "https://bucket/run?X-Amz-Signature=SECRET&a=b"):
        assert commands.main(["summary", url]) == 2
        said = capsys.readouterr().err
        assert "***" in said and "SECRET" not in said


KEYS = ["data.path", "evaluate.path", "data.mixture", "checkpoint.mirror", "output_dir"]
KEYS += ["model.path", "tokenizer.path", "adapter.path"]


@pytest.mark.parametrize(
    "url",
    [
        "https://user:SECRET@host/x.jsonl",
        "https://user:SECRET@[host/x.jsonl",
        "https://host/x.jsonl?X-Amz-Signature=SECRET",
        "simplecache::https://user:SECRET@host/x.jsonl",
        "zip://x.jsonl::https://host/x.zip?sig=SECRET",
    ],
)
@pytest.mark.parametrize("key", KEYS)
def test_credentials_in_data_urls_are_refused(key, url, capsys):
    value = f"[{{path: '{url}', weight: 1}}]" if key == "data.mixture" else url
    given = [] if key.startswith("data") else ["data.path=builtin:python"]
    assert commands.main(["inspect", "recipes/pretrain.yaml", *given, f"{key}={value}", "steps=700"]) == 2
    said = "".join(capsys.readouterr())
    assert ("give credentials in the environment only" in said or key == "adapter.path") and "SECRET" not in said


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Signature=secret",
        "sig=secret",
        "access_token=secret",
        "api_key=secret",
        "hf_secretsecretsecret",
        "Key-Pair-Id=secret",
        "Policy=secret",
        "GoogleAccessId=secret",
    ],
)
def test_only_queries_with_credentials_are_secret(query):
    for url in (f"https://host/x.jsonl?{query}", f"https://host/x.jsonl#{query}"):
        assert "secret" not in credentials_problem(url) != ""
    for url in ("https://host/x.jsonl?download=true&rev=main&v", "abfs://container@account.dfs.core.windows.net/x"):
        assert credentials_problem(url) == ""


def test_errors_of_signed_urls_are_cleaned():
    error = OSError("403, url='https://host/x.jsonl?X-Amz-Signature=SECRET&part=1'")
    text = str(unreadable("https://host/x.jsonl", error))
    assert "SECRET" not in text and "Signature=***&part=1'" in text
