"""The results of the GPU benchmark as a page: a section for each machine, a table for each group of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.markdown import table
from samecurve.bench.options import UNCHANGED, MeasuredRun, Variant, verdicts

from .cases import GROUPS, MEASURED, WARM_UP, Case, cases

# What others published for the 8B shape on one H200 (full recomputation, bf16 weights, 80.7 GB); see `all_parameters`.
PUBLISHED_TOKENS_PER_SECOND, PUBLISHED_MFU = 10_471, 0.578
# This project's own, as MFU of all N: of the best row of each size that trains all weights on one long text.
GOALS = {"8B": 0.60, "3B": 0.60, "1.2B": 0.55}
_COLUMNS = "case", "tokens/s", "to", "ratio", "MFU", "MFU, all N", "HFU", "peak GiB", "not in kernels", "loss", "commit"


def cases_of(facts: Mapping) -> list[Case]:
    return cases(facts["num_devices"], facts["toy"])


def page(results: Mapping, among: Callable[[Mapping], Sequence[Case]] = cases_of) -> str:
    """results: {machine: {"facts": ..., "rows": {case: row}}}. among: facts of a machine -> the cases that it has."""
    parts = [_heading()]
    for name, machine in ((name, machine) for name, machine in results.items() if machine["rows"]):
        facts, rows = machine["facts"], machine["rows"]
        parts += [f"## {name}", _hardware(facts, rows), *_ceilings(rows.get("ceilings", {}))]
        known = among(facts)
        for group, title in GROUPS.items():
            there = [case for case in known if case.group == group and case.name in rows]
            if group == "options":
                parts += _options(there, rows)
            elif group != "ceilings" and there:
                parts += [f"### {title}", table(_COLUMNS, [_line(case, rows) for case in there])]
        parts += _left_out(rows, known)
    return "\n\n".join(parts) + "\n"


def _heading() -> str:
    published = f"{PUBLISHED_TOKENS_PER_SECOND:,} tokens/s and {PUBLISHED_MFU:.1%}"
    goals = ", ".join(f"{share:.0%} for {size}" for size, share in GOALS.items())
    return f"""# Speed on GPUs

Measured by `bash scripts/bench_gpu.sh`, which says what it does; the numbers are in results.json. Each case is one run
of train.py, from configs alone: {WARM_UP} steps that are not counted, then {MEASURED} that are. Tokens are trained
ones. MFU counts 6 N + 12 L h s FLOPs per token, N without an embedding that is only looked up; "all N" has it with
that, as others count: by it {published} were published for the 8B shape on
one H200. The goals here are {goals}, by the same, for the best row of a size that trains
all weights on one long text. HFU adds what is computed twice. Memory is what PyTorch allocated at most. "Not in
kernels" is from the profiler, of steps after the measured ones, and the more for what the profiler itself takes. The
loss is that of the first step, which is equal where first weights and rows are. The commit is the one that a row was
measured at. Where a whole model is compiled (compile=full, Trainer's torch_compile), transformers makes a mask of a
single document's positions, too: attention computes what it hides."""


def _hardware(facts: Mapping, rows: Mapping) -> str:
    found = [row.get("versions") or facts["versions"] for row in rows.values()]
    used = {name: sorted({each[name] for each in found if each.get(name)}) for name in facts["versions"]}
    versions = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in used.items() if versions)
    memory = f"{facts['memory_gib']:.0f} GiB each, " if facts.get("memory_gib") else ""
    drivers = ", ".join(_all(rows, "driver")) or "none"
    days = sorted({row["date"][:10] for row in rows.values()})
    return (
        f"{facts['num_devices']} x {facts['device']}, {memory}driver {drivers}, {facts['cores']} cores; {versions}; "
        f"commit {', '.join(_all(rows, 'commit')) or 'not known'}; {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )


def _all(rows: Mapping, key: str) -> list[str]:
    return sorted({row[key] for row in rows.values() if row.get(key)})


def _ceilings(row: Mapping) -> list[str]:
    if row.get("state") != "done":
        return []
    squares = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tflops"].items())
    layers = ", ".join(f"{names} {rate:,.0f}" for names, rate in row["layers_tflops"].items())
    copies = ", ".join(f"{where} {rate:,.0f}" for where, rate in row["copies_gb_per_second"].items())
    return [f"Ceilings: TFLOP/s of squares: {squares}; of the 8B shape's layers: {layers}. Copies in GB/s: {copies}."]


def all_parameters(row: Mapping) -> float | None:
    """MFU by 6 N + 12 L h s with every parameter in N, also those of an embedding that is only looked up."""
    flops = row.get("flops") or {}
    if not flops.get("peak_tflops") or not flops.get("model_per_token") or not row["trains_all"]:
        return None
    attention = 2 * (flops["model_per_token"] - flops["causal_per_token"])
    per_token = 6 * row["num_parameters"] + attention
    return per_token * row["tokens_per_second"] / row["world_size"] / flops["peak_tflops"] / 1e12


def completed(case: Case, rows: Mapping) -> dict:
    """The case's row; of another program, which counts no FLOPs, with those of the same model and rows in train.py."""
    row, twin = rows[case.name], rows.get(case.against, {})
    flops = twin.get("flops") or {}
    if case.program != "trainer" or row["state"] != "done" or not flops.get("peak_tflops"):
        return row
    found = {**row, "flops": flops, "world_size": 1}
    found |= {key: twin[key] for key in ("num_parameters", "trains_all")}
    for name, per_token in (("mfu", "model_per_token"), ("hfu", "hardware_per_token")):
        found[name] = flops[per_token] * row["tokens_per_second"] / flops["peak_tflops"] / 1e12
    return found


def _line(case: Case, rows: Mapping) -> list[str]:
    row = completed(case, rows)
    if row["state"] != "done":
        told = f"{row['state']}: {_cell(row['reason'])}"
        return [case.name, told, *[""] * (len(_COLUMNS) - 3), _commit(row)]
    other = rows.get(case.against, {}).get("tokens_per_second")
    by_all = all_parameters(row) if case.data != "conversations" else None  # not of what is read and not trained
    return [
        case.name,
        f"{row['tokens_per_second']:,.0f}",
        case.against,
        f"{row['tokens_per_second'] / other:.2f}" if other else "",
        *(_percent(share) for share in (row["mfu"], by_all, row["hfu"])),
        f"{row['peak_memory_gib']:.1f}",
        _percent(row["not_in_kernels"]),
        f"{row['losses'][0]:.4f}",
        _commit(row),
    ]


def _options(cases: Sequence[Case], rows: Mapping) -> list[str]:
    """As `bench step` has it."""
    if not cases:
        return []
    base = rows.get(cases[0].against, {})
    done = [case for case in cases if rows[case.name]["state"] == "done" and base.get("state") == "done"]
    among = [Variant(UNCHANGED), *(Variant(case.option) for case in done)]
    known = {UNCHANGED: base} | {case.option: rows[case.name] for case in done}
    found = verdicts({name: [_measured(row)] for name, row in known.items()}, among) if done else []
    lines = [
        [
            each.variant.name,
            f"{each.tokens_per_second:,.0f}",
            f"{each.ratio:.2f}",
            *(_percent(known[each.variant.name][share]) for share in ("mfu", "hfu")),
            f"{each.peak_memory_gib:.1f}",
            f"{each.memory_ratio:.2f}",
            f"{each.loss_difference:.1e}",
            _commit(known[each.variant.name]),
        ]
        for each in found
    ]
    others = [case for case in cases if case not in done]
    lines += [[case.option, _why(rows[case.name]), *[""] * 6, _commit(rows[case.name])] for case in others]
    to = f"to {cases[0].against}"
    columns = "option", "tokens/s", to, "MFU", "HFU", "peak GiB", "ratio", "largest loss difference", "commit"
    return [f"### {GROUPS['options']}", table(columns, lines)]


def _why(row: Mapping) -> str:
    if row["state"] == "done":
        return f"{row['tokens_per_second']:,.0f}"
    return f"{row['state']}: {_cell(row['reason'])}"


def _measured(row: Mapping) -> MeasuredRun:
    """Of as many steps as every case has."""
    return MeasuredRun(row["tokens_per_second"], row["peak_memory_gib"], tuple(row["losses"][: WARM_UP + MEASURED]))


def _left_out(rows: Mapping, among: Sequence[Case]) -> list[str]:
    missing = [case.name for case in among if case.name not in rows]
    return [f"Not run yet: {', '.join(missing)}."] if missing else []


def _commit(row: Mapping) -> str:
    return row.get("commit") or ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]
