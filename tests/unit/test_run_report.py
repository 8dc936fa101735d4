"""`python -m samecurve report`: what is on the page, of good runs and of broken ones, and of two side by side."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from samecurve.cli import commands
from samecurve.reports.run_summary import differences, flattened
from samecurve.run.run_directory import RunDirectory

FACTS = {
    "recipe_path": "recipes/x.yaml",
    "overrides": ["seed=1"],
    "output_dir": "runs/x",
    "strategy": "ddp",
    "strategy_path": "configs/ddp.yaml",
    "engine": "DistributedDataParallel",
    "world_size": 2,
    "device": "cpu",
    "precision": "fp32",
    "recipe": {"output_dir": "runs/x", "steps": 4, "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95]}},
    "accelerate": {"distributed_type": "MULTI_GPU"},
    "deepspeed": None,
    "versions": {"torch": "2.13.0"},
    "data": {"train": {"rows": 40}},
    "start_step": 0,
    "resumed_from": None,
}
OWN = {"start_step": 2, "resumed_from": "runs/x/checkpoints/step_00000002"}


def written(folder: Path, name: str, content: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def record(step: int, loss: float | None, **more) -> dict:
    found = {"step": step, "loss": loss, "grad_norm": loss, "learning_rate": 1e-3, "tokens": 100, "step_seconds": 0.5}
    found |= {"tokens_per_second": 200.0, "mfu": None, "hfu": None, "peak_memory_gib": 1.5, "data_wait_fraction": 0.25}
    return found | {"skipped_steps": 0, **more}


def record_all(folder: Path, records: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))


@pytest.fixture
def run(tmp_path) -> Path:
    """Four steps in two sessions."""
    folder = tmp_path / "a"
    written(folder / "previous" / "1", "run.json", FACTS | {"strategy": "zero3", "world_size": 4})
    written(folder / "previous" / "1", "status.json", {"state": "preempted", "reason": "<SIGTERM>"})
    written(folder, "run.json", FACTS | OWN)
    written(folder, "status.json", {"state": "done"})
    record_all(folder, [record(1, 8.0), record(2, None), record(3, 7.0, eval_loss=7.5, eval_f1=0.5), record(4, 6.0)])
    return folder


def made(capsys, *arguments) -> str:
    """The page's text; where it is, is what the command prints."""
    code = commands.main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    page = Path(out.strip()).read_text()
    assert "<script" not in page and not re.findall(r"(?:src|href)=|url\(|@import", page)
    Balanced().feed(page)
    return page


class Balanced(HTMLParser):
    """Every element that HTML does not end by itself is ended, in order."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("html", "meta", "tr", "th", "td"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def row(page: str, name: str) -> list[str]:
    [cells] = re.findall(rf"<tr(?: class=\"marked\")?><th>{re.escape(name)}(<td>.*)", page)
    return cells.split("<td>")[1:]


def plots(page: str) -> list[str]:
    return re.findall(r'font-weight="bold">(.*?)</text>', page)


def test_one_run(run, capsys):
    page = made(capsys, run)
    assert (run / "report.html").exists()
    assert row(page, "state") == ["done"] and row(page, "steps") == ["4 of 4"] and row(page, "sessions") == ["2"]
    assert row(page, "loss, first to last step") == ["8.0000 to 6.0000"]
    assert row(page, "held-out loss, lowest") == ["7.5000 (step 3)"] and row(page, "held-out f1, last") == ["0.5000"]
    assert row(page, "tokens per second, median step") == ["200"] and row(page, "MFU, median step") == ["not known"]
    assert row(page, "peak memory, rank 0") == ["1.50 GiB"]
    assert plots(page) == [
        "loss",
        "gradient norm",
        "learning rate",
        "tokens per second",
        "peak memory of rank 0, GiB",
        "waiting for data, % of the step",
        "held out: f1",
    ]
    assert "Not recorded: MFU and HFU, % of the peak." in page
    assert row(page, "versions.torch") == ["2.13.0"] and row(page, "data.train.rows") == ["40"]
    assert "learning_rate: 0.001" in page and "distributed_type: MULTI_GPU" in page


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
LAYOUT = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }
const all = s => [...document.querySelectorAll(s)].filter(e => e.checkVisibility())
document.body.dataset.layout = JSON.stringify({
  figures: all("figure").map(box), texts: all("figure:first-child text").map(box), tables: all("table").map(box),
  headings: all("h1, h2, summary").map(e => e.textContent),
  overflow: document.documentElement.scrollWidth - innerWidth })
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_what_a_browser_shows(run, width, tmp_path, capsys):
    """The loss first and large, no text over another, nothing wider than the window, details folded away."""
    page = tmp_path / "page.html"
    page.write_text(made(capsys, run) + LAYOUT)
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'user'}"]
    command += [f"--window-size={width},900", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    layout = json.loads(html.unescape(re.search(r'data-layout="([^"]*)"', dom)[1]))
    left, top, right, bottom = layout["figures"][0]
    assert right - left > 0.85 * min(width, 62 * 15) and bottom < 700 and top < 250
    assert layout["tables"] and all(top > bottom for _, top, *_ in layout["tables"]) and layout["overflow"] <= 0
    assert layout["headings"][1:] == [
        "Results",
        "Sessions",
        "Environment",
        "Data",
        "Recipe, with every default",
        "Strategy",
    ]
    texts = layout["texts"]
    for index, (a, b, c, d) in enumerate(texts):
        assert not [e for e in texts[:index] if a < e[2] and e[0] < c and b + 2 < e[3] and e[1] + 2 < d]


def test_samples_before_and_after(run, capsys):
    lines = [{"step": 4, "prompt": "def ", "text": "f(<b>):\n  x"}, {"step": 0, "prompt": "def ", "text": "qq"}]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    page = made(capsys, run)
    assert row(page, "before training") == ["[def ]qq"] and "[def ]f(&lt;b&gt;):\n  x" in page
    assert page.index("</figure>") < page.index("Samples") < page.index("<h2>Results")


def test_where_it_went_on_and_under_what(run, capsys):
    page = made(capsys, run)
    told = "session 2 resumed after step 2: ddp, world size 2"
    assert page.count(f"<g><title>{told}</title>") == len(plots(page))
    assert row(page, "1")[:4] == ["1", "zero3", "DistributedDataParallel", "4"]
    assert row(page, "1")[-1] == "preempted: &lt;SIGTERM&gt;" and row(page, "2")[:2] == ["3", "ddp"]


def test_sessions_that_are_gone_are_told(run, capsys):
    (run / "previous" / "1" / "run.json").unlink()
    assert "The first session listed here resumed from a session, whose history is elsewhere." in made(capsys, run)


def ended_outside_the_loop(run: Path, begins: bool) -> None:
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    (run / "status.json").write_text('{"state": "preempted", "reason": "SIGINT"}')
    directory = RunDirectory(run, resume="auto")
    directory.status("running")
    if begins:
        directory.begin(2)
    directory.status("failed", "no memory", exit_code=1)
    directory.close()


@pytest.mark.parametrize("begins", [True, False])
def test_a_start_without_a_run_json_is_not_taken_for_the_session_before_it(run, begins, capsys):
    ended_outside_the_loop(run, begins)
    assert (run / "run.json").exists() is not begins
    page = made(capsys, run)
    assert row(page, "1")[-1] == "preempted: &lt;SIGTERM&gt;" and row(page, "2")[-1] == "preempted: SIGINT"
    if begins:
        assert "<p>A later start without a run.json of its own: failed: no memory</p>" in page
    else:
        assert re.search(r'<p class="bad">A later start was refused \(exit code 1, [^ ]+: no memory\)</p>', page)


def test_the_last_session_is_in_the_runs_own_state(run, capsys):
    for state in ("running", "done"):
        written(run, "status.json", {"state": state})
        page = made(capsys, run)
        assert row(page, "2")[-1] == state and "A later start" not in page


def test_two_runs_and_what_differs(run, tmp_path, capsys):
    other = tmp_path / "b"
    recipe = {"output_dir": "runs/y", "steps": 4, "optimizer": {"learning_rate": 2e-3, "betas": [0.9, 0.95]}}
    written(
        other, "run.json", FACTS | {"recipe": recipe, "versions": {"torch": "2.11.0", "peft": "1"}, "overrides": []}
    )
    record_all(other, [record(1, 8.0), record(2, 7.5), record(3, 7.7), record(4, 6.0)])
    page = made(capsys, run, other)
    assert (run / "report_b.html").exists() and not (run / "report.html").exists()
    assert "At the 3 steps for which both runs have a loss, they differ by at most 1.0e-01, relative." in page
    assert "<h3>Recipe: 1 of 3 keys</h3>" in page and "<h3>Strategy files: 0 of 1 keys</h3>" in page
    assert row(page, "optimizer.learning_rate") == ["0.001", "0.002"]
    differing = page.partition("Differences")[2].partition("<h2>")[0]
    assert row(differing, "versions.torch") == ["2.13.0", "2.11.0"]
    assert row(differing, "versions.peft") == ["absent", "1"]
    assert "overrides" not in differing and "start_step" not in differing
    assert '<tr class="marked"><th>state<td>done<td>not known' in page
    assert "<tr><th>tokens<td>400<td>400" in page
    assert "|loss of B / loss of A - 1|" in plots(page)


def test_what_a_task_counts_has_its_name(run, capsys):
    written(run, "run.json", FACTS | {"counts": "pairs"})
    page = made(capsys, run)
    assert row(page, "pairs") == ["400"] and "<th>tokens<td>" not in page


def test_many_runs_share_the_plots(run, tmp_path, capsys):
    for name, rate in (("b", 2e-3), ("c", 3e-3)):
        written(tmp_path / name, "run.json", FACTS | {"recipe": {"optimizer": {"learning_rate": rate}}})
        record_all(tmp_path / name, [record(step, 8.0 - rate * step) for step in (1, 2, 3, 4)])
    page = made(capsys, run, tmp_path / "b", tmp_path / "c")
    assert (run / "report_b_c.html").exists()
    differing = page.partition("<h2>Differences</h2>")[2].partition("<h2>")[0]
    assert row(differing, "optimizer.learning_rate") == ["0.001", "0.002", "0.003"]
    assert all(f'<b class="name{index}">{name}</b>' in page for index, name in enumerate("ABC"))
    loss = page.split("<figure>")[1]
    assert all(colour in loss for colour in ("#0072b2", "#d55e00", "#009e73")) and "C exponential mean" in loss


def test_equal_runs_have_no_plot_of_their_distance(run, capsys):
    page = made(capsys, run, run)
    assert "they are identical" in page and "|loss of B / loss of A - 1|" not in plots(page)
    assert 'class="marked"' not in page


@pytest.mark.parametrize(
    ("losses", "logarithmic"), [([8.0, 7.0 * (1 + 1e-7), 6.0 * 1.1], True), ([8.0, 7.0, 6.0 * 1.1], False)]
)
def test_how_far_two_runs_are_apart(run, losses, logarithmic, tmp_path, capsys):
    """No difference has no place on a logarithmic axis, so there it is a gap."""
    record_all(tmp_path / "b", [record(step, loss) for step, loss in zip((1, 3, 4), losses, strict=True)])
    page = made(capsys, run, tmp_path / "b")
    [drawn] = [svg for svg in page.split("<figure>") if "|loss of B / loss of A - 1|" in svg]
    points = re.findall(r"([\d.]+),([\d.]+)", re.search(r'<path d="(M[^"]+)" stroke-linejoin', drawn)[1])
    assert [x for x, _ in points] == (["302.0", "424.0"] if logarithmic else ["58.0", "302.0", "424.0"])
    assert ("(logarithmic)" in drawn) is logarithmic


def test_a_run_that_failed_before_its_first_step(tmp_path, capsys):
    written(tmp_path, "status.json", {"state": "failed", "reason": "rank 1: no <memory>", "exit_code": 1})
    page = made(capsys, tmp_path)
    assert '<p class="bad">failed: rank 1: no &lt;memory&gt;</p>' in page
    assert "before it wrote run.json" in page and "No steps are recorded." in page and plots(page) == []


def test_losses_that_are_no_numbers(run, capsys):
    (run / "metrics.jsonl").write_text(json.dumps(record(1, None)) + "\n" + '{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    page = made(capsys, run)
    assert "loss" not in plots(page) and "Not recorded: loss, " in page


def test_a_long_run_is_a_small_page(run, capsys):
    record_all(run, [record(step, 8.0 - step / 3e4 + step % 7 / 10, mfu=0.4, hfu=0.5) for step in range(1, 5_001)])
    record_all(run.parent / "b", [record(step, 8.0 - step / 4e4 + step % 5 / 10) for step in range(1, 5_001)])
    assert len(made(capsys, run, run.parent / "b")) < 200_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no run here (run.json, metrics.jsonl); give the output_dir of a run"),
        (["a", "nowhere"], "nowhere: no run here"),
        (["a"] * 27, "RUN: found 27 directories, but a report shows 26 at most"),
    ],
)
def test_mistakes(run, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    assert commands.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(run.glob("report*"))


@pytest.mark.parametrize("key", ["resumed_from", "output_dir", "strategy_path"])
@pytest.mark.parametrize("path", ["a\0b/x", "a" * 300 + "/x"])
def test_a_path_that_cannot_be_is_said(path, key, run, capsys):
    written(run, "run.json", FACTS | OWN | {key: path})
    assert f"run.json: {key}: found" in made(capsys, run)


def test_what_is_damaged_is_left_out_and_said(run, capsys):
    (run / "run.json").write_text("half")
    with open(run / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"step": 99, "loss": "text"}\n{"step": \xff}\n' + b"[" * 100_000)
    page = made(capsys, run)
    assert "run.json: damaged: not JSON" in page and "damaged lines of metrics.jsonl" in page and "3, left out" in page


def test_keys_by_hand():
    first = dict(flattened({"a": {"b": 1, "c": None}, "d": [1, 2], "e": {}}))
    assert first == {"a.b": "1", "a.c": "-", "d": "[1, 2]", "e": "-"}
    assert differences([first, first | {"a.b": "2", "f": "x"}]) == [("a.b", "1", "2"), ("f", "absent", "x")]


def test_a_new_run_and_one_that_goes_on_set_the_page_aside(run, tmp_path, capsys):
    made(capsys, run)
    begun(run)
    assert not (run / "report.html").exists() and (run / "previous" / "2" / "report.html").exists()
    written(run, "run.json", FACTS)
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    made(capsys, run)
    begun(run, resume="auto")
    assert not (run / "report.html").exists() and (run / "previous" / "3" / "report.html").exists()


def begun(run, **arguments):
    directory = RunDirectory(run, **arguments)
    directory.begin()
    directory.close()
