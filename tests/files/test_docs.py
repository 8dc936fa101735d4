"""The documentation is consistent: links and anchors, paths, recipe keys, the generated reference, the site."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import yaml
from pages import PAGES, ROOT, anchors, prose, section, tables, text
from transformers import TrainingArguments

from benchmarks.peers import page as peers
from samecurve.config.schema import Recipe
from samecurve.config.section import Section
from scripts.pages import capabilities, formats, measurements, model_families, museum, recipe_reference, strategy_keys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MKDOCS = os.environ.get("SAMECURVE_MKDOCS", "")


def broken_links(name: str, markdown: str) -> list[str]:
    """Links of a page to files that are not there, or to headings that they do not have."""
    wrong = []
    for link in LINK.findall(markdown):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    assert broken_links(name, prose(name)) == []


def test_enough_links_are_seen():
    assert sum(len(LINK.findall(prose(name))) for name in PAGES) > 100
    assert broken_links("docs/data.md", "[a](nowhere.md) [b](data.md#nothing) [c](#columns) [d](../README.md)") == [
        "nowhere.md",
        "data.md#nothing",
    ]


def test_every_page_is_linked_from_the_readme_and_the_index():
    pages = {Path(name).name for name in PAGES if name.startswith("docs/")} - {"index.md"}
    for name in ("README.md", "docs/index.md"):
        assert {Path(link).name for link in LINK.findall(text(name))} >= pages, name
    listed = re.findall(r"^\s+- [^:]+: (\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert set(listed) == pages | {"index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_paths_are_there(name):
    """Those in backticks that name a file or a folder of the repository."""
    top = {path.name for path in ROOT.iterdir()} - {"runs"}
    spans = [span for span in re.findall(r"`([\w./-]+)`", prose(name)) if "/" in span and span.split("/")[0] in top]
    assert [span for span in spans if not (ROOT / span).exists()] == []


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_names_of_other_trainers_exist():
    """TRL is not installed for this test: its names are from its documentation."""
    titles = ("transformers.Trainer", "TRL", "Accelerate")
    trainer, trl, from_accelerate = (tables(section("docs/from_other_trainers.md", title))[0] for title in titles)
    arguments = {field.name for field in dataclasses.fields(TrainingArguments)} | {"EarlyStoppingCallback"}
    accelerate_names = {*inspect.signature(accelerate.Accelerator).parameters, *dir(accelerate.Accelerator)}
    accelerate_names.add("skip_first_batches")  # a function, too
    theirs = [name for row in trainer for name in spans(row[0])]
    assert len(theirs) > 40 and [name for name in theirs if name not in arguments] == []
    theirs = [name for row in from_accelerate for name in spans(row[0])]
    assert len(theirs) > 20 and [name for name in theirs if name not in accelerate_names] == []
    cells = [row[1] for row in [*trainer, *trl, *from_accelerate]]
    keys = [span.partition(":")[0] for cell in cells for span in spans(cell) if not span.startswith("--")]
    assert len(keys) > 60 and [key for key in keys if not is_key(key)] == []


def test_the_tests_of_replaced_parts_exist():
    _, replaced = tables(section("docs/architecture.md", "Libraries"))
    assert {row[0] for row in replaced} == {"accelerate", "DeepSpeed", "datasets", "peft", "transformers"}
    for row in replaced:
        name, path = re.fullmatch(r"\[`(\w+)`\]\(\.\./(tests/\S+)\)", row[3]).groups()
        assert f"\ndef {name}(" in (ROOT / path).read_text(), row[3]


def is_key(key: str) -> bool:
    """Whether a recipe has the key, with its section."""
    section_name, _, name = key.rpartition(".")
    fields = Recipe.model_fields[section_name].annotation.model_fields if section_name else Recipe.model_fields
    return name in fields


@pytest.mark.parametrize(
    "name", sorted(PAGES.keys() - {"docs/strategy_keys.md", "docs/museum.md"})
)  # of files and of models
def test_recipe_keys_are_keys(name):
    """`data.path`, `memory.selective_save: attention`, data.path=books/; the example of an error has wrong ones."""
    sections = {key: field.annotation for key, field in Recipe.model_fields.items()}
    sections = {key: kind for key, kind in sections.items() if isinstance(kind, type) and issubclass(kind, Section)}
    found = re.findall(
        rf"(?<![\w./-])({'|'.join(sections)})\.(\w+)\b",
        re.sub(r"^ConfigurationError.*?^```", "", text(name), flags=re.M | re.S),
    )
    found = [
        (section, key) for section, key in found if key not in ("md", "py", "yaml", "jsonl", "safetensors", "bin", "pt")
    ]
    assert [f"{section}.{key}" for section, key in found if key not in sections[section].model_fields] == []


def test_the_recipe_reference_is_current():
    fix = "python -m scripts.pages.recipe_reference > docs/recipe_reference.md"
    assert text("docs/recipe_reference.md") == recipe_reference.render_reference(), f"the schema has changed: {fix}"


def test_the_formats_of_rows_are_current():
    fix = "python -m scripts.pages.formats > docs/formats.md"
    assert text("docs/formats.md") == formats.render_page(), f"the table has changed: {fix}"


def test_the_capabilities_are_current():
    fix = "python -m scripts.pages.capabilities > docs/capabilities.md"
    assert text("docs/capabilities.md") == capabilities.render_page(), f"the table has changed: {fix}"


def test_the_model_families_are_current():
    fix = "python -m scripts.pages.model_families > docs/model_families.md"
    assert text("docs/model_families.md") == model_families.render_page(), f"a fact has changed: {fix}"


def test_the_museum_is_current():
    fix = "python -m scripts.pages.museum > docs/museum.md"
    assert text("docs/museum.md") == museum.render_page(), f"an exhibit or a result has changed: {fix}"


def test_the_peers_are_current():
    fix = "python -m benchmarks.peers --page"
    assert text_of("benchmarks/peers.md") == peers.render_page(), f"a result or a note has changed: {fix}"


def test_the_strategy_keys_are_current():
    fix = "python -m scripts.pages.strategy_keys > docs/strategy_keys.md"
    assert text("docs/strategy_keys.md") == f"{strategy_keys.render_page()}\n", f"a table has changed: {fix}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history")
def test_the_ages_of_the_measurements_are_current():
    page = text("docs/benchmarks.md")
    assert page == measurements.with_table(page), "run python -m scripts.pages.measurements"
    assert {Path(row.path).name for row in measurements.MEASURED} >= {
        path.name for path in (ROOT / "benchmarks").glob("*.md")
    }


@pytest.fixture
def today_and_before() -> list[str]:
    """Commits: the newest, and one that the newest change of the engines is not in."""
    if not (ROOT / ".git").exists():
        pytest.skip("no history")
    log = ["git", "log", "-1", "--format=%h", "--abbrev=8"]
    which = [], ["--skip=1", "--", "samecurve/engines"]
    return [subprocess.check_output([*log, *words], cwd=ROOT, text=True).strip() for words in which]


def test_an_old_page_is_seen(today_and_before):
    def same(words: str) -> str:
        return measurements.origin(f"On 2026-11-28 at commit {words}.", ("engines",))[2]

    today, old = today_and_before
    assert [same(today), same(old), same(f"{today} and commit {old}")] == ["yes", "no", "no"]
    assert {same(f"{today}-dirty"), same("0a0a0a0a"), same("")} == {"not known"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history")
def test_pages_are_of_todays_code():
    assert measurements.faults() == []


def test_an_old_page_is_a_fault(tmp_path, today_and_before):
    today, old = today_and_before
    rows = {name: measurements.Measured(str(tmp_path / name), "", "`bench`", ("engines",)) for name in "abcd"}
    for name, commit in zip("abcd", (today, old, f"{today}-dirty", ""), strict=True):
        (tmp_path / name).write_text(f"Measured at commit {commit}.")
    found = measurements.faults([*rows.values()], {})
    assert [Path(line.split()[0]).name for line in found] == ["b", "c", "d"]
    assert f"of {old}, and samecurve/engines may be another since" in found[0] and "again by `bench`" in found[0]
    answered = {row.path: "names alone" for row in rows.values()}
    assert [Path(line.split()[0]).name for line in measurements.faults([*rows.values()], answered)] == ["a"]


class Grown(Section):
    """A section."""

    old: int = 0
    """A meaning
    of two lines."""
    new: int = 0


def test_commits_of_digits_are_told_from_numbers():
    found = [match[0] for match in measurements.COMMIT.finditer("16777216 bytes at commit 68378876 or 1a2b3c4-dirty")]
    assert found == ["68378876", "1a2b3c4-dirty"]


def test_a_new_key_has_to_be_explained():
    assert recipe_reference.meanings(Grown) == {"old": "A meaning of two lines."}
    with pytest.raises(KeyError, match="new"):
        list(recipe_reference.tables(Grown, "grown."))


def test_the_reference_has_every_key():
    def keys(section: type[Section], prefix: str) -> list[str]:
        found = []
        for key, field in section.model_fields.items():
            kind = field.annotation
            inner = isinstance(kind, type) and issubclass(kind, Section)
            found += keys(kind, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
        return found

    listed = re.findall(r"^\| `([\w.\[\]]+)` \|", text("docs/recipe_reference.md"), re.MULTILINE)
    expected = keys(Recipe, "")
    assert sorted(key for key in listed if "[]" not in key) == sorted(expected) and len(expected) > 90
    assert "data.mixture[].weight" in listed


def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_the_site_names_its_files():
    """What mkdocs.yml names exists. The build itself is below, where mkdocs is installed."""
    settings = yaml.safe_load(text_of("mkdocs.yml"))
    assert settings["strict"] is True and settings["docs_dir"] == "docs"
    assert all((ROOT / hook).is_file() for hook in settings["hooks"])
    assert all("==" in line for line in text_of("requirements-docs.txt").splitlines())


@pytest.mark.full
@pytest.mark.skipif(
    not Path(MKDOCS, "mkdocs").is_dir(), reason="SAMECURVE_MKDOCS names no folder that mkdocs is installed in"
)
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"PYTHONPATH": MKDOCS, "PYTHONDONTWRITEBYTECODE": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = [Path(name).stem for name in PAGES if name.startswith("docs/") and name != "docs/index.md"]
    assert all((tmp_path / "site" / page / "index.html").is_file() for page in pages)
    assert (tmp_path / "site" / "repository" / "benchmarks" / "compare.svg").is_file()
