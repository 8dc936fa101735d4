"""HTML page of `report`. Runs share the same plots; the first is A, the second B, and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import yaml

from samecurve.metrics.console import spaced
from samecurve.reports.history import History, Point
from samecurve.reports.html import html_document, html_table
from samecurve.reports.plot import (
    COLOURS,
    LARGE,
    LOGARITHMIC_FROM,
    SMALL,
    Scale,
    Series,
    loss_series,
    noisy,
    plot,
    session_marks,
)
from samecurve.reports.run_summary import NOT_KNOWN, Run, aligned, differences, parts, relative_losses, results
from samecurve.run.run_directory import SAMPLES, SAMPLES_LINE
from samecurve.run.sessions import unknown_origin
from samecurve.run.status import refused_text
from samecurve.storage.atomic import utc_timestamp
from samecurve.storage.jsonl import scan

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_RUNS = len(NAMES)
# Perplexity follows from the loss, and counts do not change.
NO_CURVES = ("eval_loss", "eval_perplexity", "eval_tokens", "eval_rows", "eval_pairs", "eval_answers")
FROM_ZERO = Scale(from_zero=True)
MOST_SAMPLES = 6
_STYLE = """
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1rem 1.5rem }
figure { margin: 0; break-inside: avoid } figure:first-child { grid-column: 1 / -1 }
svg { width: 100%; height: auto }
@media print { .plots { grid-template-columns: 1fr 1fr } }
.bad { color: #b00020; white-space: pre-wrap; overflow-wrap: anywhere } .small { color: #5f5f5f }
.samples td { white-space: pre-wrap; font-family: monospace }
summary { font-size: 1.1rem; font-weight: 600; margin-top: 2rem; cursor: pointer }
"""


_NOTE = (
    "MFU counts the model's FLOPs once; HFU also counts recomputation. Both are relative to the device's peak. Memory "
    "is what PyTorch allocated on a GPU, and the process's resident set elsewhere."
)


def render_run_page(runs: Sequence[Run]) -> str:
    title = " and ".join(run.name for run in runs)
    colours = "\n".join(f".name{index} {{ color: {colour} }}" for index, colour in enumerate(COLOURS))
    page = [_introduction(run, index, len(runs) > 1) for index, run in enumerate(runs)]
    distance = Distance(*runs) if len(runs) == 2 else None
    page += _curves(runs, distance)
    for index, run in enumerate(runs):
        page += _samples(run, _of(index, runs))
    page += ["<h2>Results</h2>", _side_by_side([results(run) for run in runs])]
    if len(runs) > 1:
        page += _differences(runs, distance)
    for index, run in enumerate(runs):
        page.append(f"<h2>Sessions{_of(index, runs)}</h2>\n{_sessions(run)}")
    known = [parts(run) for run in runs]
    for name in ("environment", "data"):
        page.append(_folded(name.capitalize(), _side_by_side([facts[name] for facts in known])))
    for index, run in enumerate(runs):
        page += _configuration(run, _of(index, runs))
    page.append(f'<p class="small">Written {utc_timestamp()}.</p>')
    return html_document(title, f"{_STYLE}{colours}\n", page)


def _samples(run: Run, of: str) -> Iterator[str]:
    """Show the last texts of evaluate.samples and of `generate`, those before training first."""
    written: dict[tuple[int, str], str] = {}
    for sample in filter(None, (value for _, value in scan(run.directory / SAMPLES, SAMPLES_LINE))):
        written[sample["step"], sample["prompt"]] = sample["text"]
        if len(written) > MOST_SAMPLES:
            del written[next(iter(written))]
    if not written:
        return
    last = sorted(written.items(), key=lambda item: item[0][0])
    rows = [(f"step {step}" if step else "before training", f"[{prompt}]{text}") for (step, prompt), text in last]
    yield f'<h2>Samples{of}</h2>\n<p>Prompts are in brackets.</p>\n<div class="samples">{html_table(rows)}</div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n{content}</details>"


def _introduction(run: Run, index: int, named: bool) -> str:
    facts = run.facts
    name = f'<b class="name{index % len(COLOURS)}">{NAMES[index]}</b> ' if named else ""
    if facts:
        where = [f"{facts.get('strategy', NOT_KNOWN)} ({facts.get('engine', NOT_KNOWN)})"]
        where += [f"{facts.get('world_size', NOT_KNOWN)} x {facts.get('device', NOT_KNOWN)}"]
        where += [str(facts.get("precision", NOT_KNOWN))]
        text = f"{facts.get('recipe_path', NOT_KNOWN)} under {', '.join(where)}"
    else:
        text = f"run.json: {run.known[-1].problem}" if run.known else "the run ended before it wrote run.json"
    lines = [f"<p>{name}{escape(str(run.directory))}: {escape(text)}</p>"]
    if run.status.get("reason"):
        lines.append(f'<p class="bad">{escape(run.state)}</p>')
    refused = refused_text(run.status)
    if refused:
        lines.append(f'<p class="bad">A later start was refused ({escape(refused)})</p>')
    return "\n".join(lines)


def _of(index: int, runs: Sequence[Run]) -> str:
    return f' of <span class="name{index % len(COLOURS)}">{NAMES[index]}</span>' if len(runs) > 1 else ""


def _side_by_side(columns: Sequence[dict[str, str]]) -> str:
    """Build a table with one column per run. For two runs, rows that differ are highlighted."""
    if not any(columns):
        return f"<p>{NOT_KNOWN}</p>"
    rows = aligned(columns)
    header = ("", *NAMES[: len(columns)]) if len(columns) > 1 else ()
    return html_table(rows, header, [index for index, row in enumerate(rows) if len(set(row[1:])) > 1])


def _differences(runs: Sequence[Run], distance: Distance | None) -> Iterator[str]:
    """Show how far two runs are apart, and what differs between any number of them."""
    yield "<h2>Differences</h2>"
    if distance and distance.num_steps:
        largest = f"differ by at most {distance.largest:.1e}, relative"
        text = largest if distance.largest else "are identical"
        yield f"<p>At the {distance.num_steps:,} steps for which both runs have a loss, they {text}.</p>"
    known = [parts(run) for run in runs]
    for name in known[0]:
        columns = [facts[name] for facts in known]
        if not all(columns):
            of = NAMES[: len(runs)]
            unknown = ", ".join(of[index] for index, column in enumerate(columns) if not column)
            yield f"<p>{name.capitalize()}: not known for {unknown}.</p>"
            continue
        different = differences(columns)
        yield f"<h3>{name.capitalize()}: {len(different)} of {len(set().union(*columns))} keys</h3>"
        if different:
            yield html_table(different, ("", *NAMES[: len(runs)]))


def _curves(runs: Sequence[Run], distance: Distance | None) -> Iterator[str]:
    figures, missing = [], []
    marks = [mark for index, run in enumerate(runs) for mark in session_marks(run.known, index)]
    numbers = [record["step"] for run in runs for record in run.history.records]
    steps = (min(numbers), max(numbers)) if numbers else None
    for name, series, scale in _plots(runs, distance):
        drawn = plot(name, series, marks, scale, steps, SMALL if figures else LARGE)
        (figures if drawn else missing).append(drawn or name)
    if not figures:
        yield "<p>No steps are recorded.</p>"
        return
    if marks:
        yield "<p>Dotted vertical lines mark where a session resumed, with its number in the list below.</p>"
    yield '<div class="plots">'
    yield from (f"<figure>{drawn}</figure>" for drawn in figures)
    yield "</div>"
    yield f'<p class="small">{_NOTE}</p>'
    if missing:
        yield f"<p>Not recorded: {escape(', '.join(missing))}.</p>"


def _plots(runs: Sequence[Run], distance: Distance | None) -> Iterator[tuple[str, list[Series], Scale]]:
    who = [f"{name} " for name in NAMES[: len(runs)]] if len(runs) > 1 else [""]
    labelled = [(index, run.history, label) for index, (run, label) in enumerate(zip(runs, who, strict=True))]

    def of_all(make) -> list[Series]:
        return [series for index, history, label in labelled for series in make(history, index, label)]

    def plain(name: str, factor: float = 1.0) -> list[Series]:
        return [Series(label, times(history, name, factor), index) for index, history, label in labelled]

    far = Scale(logarithmic=True)
    yield "loss", of_all(loss_series), far
    if distance and distance.largest:  # equal runs have nothing to draw
        yield "|loss of B / loss of A - 1|", [Series("B", distance.points, 1)], far
    yield "gradient norm", of_all(lambda history, run, label: noisy(history, "grad_norm", run, label)), far
    yield "learning rate", plain("learning_rate"), FROM_ZERO
    speed = of_all(lambda history, run, label: noisy(history, "tokens_per_second", run, label))
    yield "tokens per second", speed, FROM_ZERO
    utilisation: list[Series] = []
    for index, history, label in labelled:
        mfu, hfu = (times(history, name, 100) for name in ("mfu", "hfu"))
        if mfu == hfu:  # nothing is recomputed
            utilisation.append(Series(f"{label}MFU = HFU", mfu, index))
        else:
            utilisation += [Series(f"{label}MFU", mfu, index), Series(f"{label}HFU", hfu, index, "dashed")]
    yield "MFU and HFU, % of the peak", utilisation, FROM_ZERO
    yield "peak memory of rank 0, GiB", plain("peak_memory_gib"), FROM_ZERO
    yield "waiting for data, % of the step", plain("data_wait_fraction", 100), FROM_ZERO
    names = dict.fromkeys(key for run in runs for key in run.history.curves if key.startswith("eval_"))
    for name in (name for name in names if name not in NO_CURVES):
        dots = [Series(label, history.curves.get(name, []), index, "dots") for index, history, label in labelled]
        yield f"held out: {spaced(name.removeprefix('eval_'))}", dots, Scale()


def times(history: History, name: str, factor: float) -> list[Point]:
    return [(step, None if value is None else factor * value) for step, value in history.curves.get(name, ())]


class Distance:
    """Relative difference of two runs' losses over the steps, in one pass.

    Attributes:
        num_steps: steps for which both have a loss.
        largest: the largest difference, 0 without such a step.
        points: (step, difference), thinned. On a logarithmic axis, steps without a difference become gaps.
    """

    def __init__(self, first: Run, second: Run):
        self.num_steps, self.largest, smallest = 0, 0.0, math.inf

        def records() -> Iterator[dict]:
            nonlocal smallest
            for step, value in relative_losses(first, second):
                if value is not None:
                    self.num_steps += 1
                    self.largest, smallest = max(self.largest, value), min(smallest, value or math.inf)
                yield {"step": step, "distance": value or None, "with_zero": value}

        curves = History(records(), max(first.history.num_steps, second.history.num_steps)).curves
        is_logarithmic = self.largest >= LOGARITHMIC_FROM * smallest
        self.points = curves.get("distance" if is_logarithmic else "with_zero", [])


def _sessions(run: Run) -> str:
    if not run.known:
        return "<p>No sessions are recorded.</p>"
    origin, first = unknown_origin(run.known[0]), run.known[0]
    note = ""
    if first.start_step:
        source = f"from {origin}" if origin else "from a session"
        note = f"<p>The first session listed here resumed {escape(source)}, whose history is elsewhere.</p>\n"
    # a start that ended before its run.json leaves its own state, with the last session's under "earlier"
    latest_is_listed = (run.directory / "run.json").is_file() and "earlier" not in run.status
    if not latest_is_listed:
        note += f"<p>A later start without a run.json of its own: {escape(run.state)}</p>\n"
    rows = []
    for index, session in enumerate(run.known, 1):
        what = [session.facts.get(key, NOT_KNOWN) for key in ("strategy", "engine", "world_size", "device")]
        began = session.facts.get("started", NOT_KNOWN).replace("T", " ").replace("+00:00", " UTC")
        ended = run.state if latest_is_listed and index == len(run.known) else session.ended
        rows.append((index, session.start_step + 1, *what, began, ended))
    header = ("", "from step", "strategy", "engine", "world size", "device", "began", "ended")
    return f"{note}{html_table(rows, header)}"


def _configuration(run: Run, of: str) -> Iterator[str]:
    facts = run.facts
    if not facts:
        return
    typed = escape(" ".join([str(facts.get("recipe_path", "")), *facts.get("overrides", ())]))
    recipe = f"<p>{typed}</p>\n<pre>{_yaml(facts.get('recipe', {}))}</pre>"
    yield _folded(f"Recipe{of}, with every default", recipe)
    files = [
        f"<h3>{name}</h3>\n<pre>{_yaml(facts[name])}</pre>" for name in ("accelerate", "deepspeed") if facts.get(name)
    ]
    path = f"<p>{escape(str(facts.get('strategy_path') or NOT_KNOWN))}</p>"
    yield _folded(f"Strategy{of}", "\n".join([path, *files]))


def _yaml(content: dict) -> str:
    return escape(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
