"""Console output of a run: a progress bar on a terminal, plain lines in a log file, nothing on ranks other than 0.

Step time and memory are shown beside `predicted` of run.json.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from samecurve.config.schema_training import Batch
from samecurve.storage.jsonl import EvenlySpaced
from samecurve.storage.terminal import TextConsole

if TYPE_CHECKING:
    from samecurve.config.schema import Memory
    from samecurve.interfaces.engine import EngineDescription
    from samecurve.run.metadata import RunFacts

LABEL_WIDTH = 12
WARM_STEPS = 4
QUANTITIES = {"step_seconds": ("step", "s"), "peak_memory_gib": ("peak memory, rank 0", "GiB")}


class Progress:
    """Context manager that prints the header, the progress of the steps, and log lines.

    Args:
        every_steps: steps between plain lines; the first and the last step always have one.
        enabled: False on all ranks but 0, where every method does nothing.
        console: where to print; by default the standard output.
        started: when the process began, in time.time() seconds; None asks the operating system.

    Attributes:
        total_steps: of the run; epochs become steps once the rows are known.
        advice: returns a line to print once the run is warm, after WARM_STEPS steps; "" for none.
    """

    def __init__(
        self,
        total_steps: int,
        every_steps: int = 10,
        enabled: bool = True,
        console: Console | None = None,
        started: float | None = None,
    ):
        self.total_steps, self._every, self._enabled = total_steps, every_steps, enabled
        self._console = console or TextConsole()
        self._started = started
        # what a step costs must not depend on the steps before it
        self._num_steps, self._seconds = 0, 0.0  # seconds: without the first step's
        self._records = EvenlySpaced()
        self._predicted: dict = {}
        self._done = 0
        self._live: Live | None = None
        self.advice: Callable[[], str] = str

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating the bar; its last state stays on the screen."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def log(self, line: str) -> None:
        if self._enabled and line:
            with contextlib.suppress(OSError):  # as TextConsole
                self._console.print(line, markup=False, soft_wrap=True)

    def header(self, facts: RunFacts) -> None:
        """Print the configuration in effect, before the first step."""
        self._predicted = facts.predicted
        for label, text in header_lines(facts):
            self.log(f"{label:<{LABEL_WIDTH}}{text}")

    def step(self, record: dict, smoothed_loss: float | None) -> None:
        """Show the progress after a step. record: the step's line of metrics.jsonl."""
        if not self._enabled:
            return
        self._records.add({name: record[name] for name in QUANTITIES})
        self._seconds += record["step_seconds"] if self._num_steps else 0.0
        self._num_steps += 1
        self._done = record["step"]
        numbers = numbers_of(record, smoothed_loss)
        if self._console.is_terminal:
            step = record["step"]
            row = Table.grid(padding=(0, 1))
            row.add_row(f"step {step}/{self.total_steps}", ProgressBar(self.total_steps, step, width=32), self._rest())
            with contextlib.suppress(OSError):
                if self._live is None:
                    self._live = Live(console=self._console, auto_refresh=False)
                    self._live.start()
                self._live.update(Group(row, Columns(numbers, padding=(0, 2))), refresh=True)
        elif record["step"] in (1, self.total_steps) or record["step"] % self._every == 0 or self._first():
            position = f"{record['step']:>{len(str(self.total_steps))}}/{self.total_steps}"
            self.log("  ".join(filter(None, [f"step {position}", *numbers, self._rest()])))
        if self._first():
            if self._started is None:
                import psutil

                self._started = psutil.Process().create_time()
            self.log(f"first step done {time.time() - self._started:.1f} s after this process started")
        if self._num_steps == WARM_STEPS:
            self.log(self.advice())
        if record["step"] == self.total_steps and is_shown(self._predicted):
            for name, text in compare_with_prediction(self._predicted, self._records).items():
                self.log(f"{name}: {text}")

    def evaluation(self, step: int, metrics: dict) -> None:
        """Print the results of an evaluation. metrics: the task's eval_* numbers."""
        numbers = "  ".join(f"{name.removeprefix('eval_')} {number(value)}" for name, value in metrics.items())
        self.log(f"evaluation after step {step}: {numbers}")

    def _first(self) -> bool:
        return self._num_steps == 1

    def _rest(self) -> str:
        # without the first step, which includes start-up costs
        num_steady, left = self._num_steps - 1, self.total_steps - self._done
        return f"left {duration(self._seconds / num_steady * left)}" if num_steady else ""


def header_lines(facts: RunFacts) -> list[tuple[str, str]]:
    """Build the header as (label, text) pairs."""
    plan, engine, model = facts.plan, facts.engine, facts.model
    recipe, strategy, counts = plan.recipe, plan.strategy, facts.counts
    rows, length = recipe.batch.global_batch_size, recipe.batch.sequence_length
    texts = facts.data.get("sequences_per_row", 1)  # for example both answers of a pair, or a text and its positive
    counted = "" if counts == "tokens" else f"the loss is the mean over {counts}, counted as `tokens` in metrics.jsonl"
    new_head = ", ".join(model.new_head)
    loss = ["output head and cross-entropy together"] if engine.loss_implementation == "liger" else []
    kernels, whole_bytes = [*engine.kernels, *loss], engine.whole_gradient_bytes
    whole = f"unsharded while accumulating: {whole_bytes / 2**20:,.1f} MiB on each rank"
    count, trained = engine.num_parameters, engine.num_trained_parameters
    part = f"{trained:,} of them trained ({trained / count:.2%}), " if trained != count else ""
    warmup = f", {recipe.warmup_steps} of them warm-up" if recipe.warmup_steps else ""
    lines = [
        ("recipe", f"{plan.recipe_path} ({recipe.task}, {recipe.steps} steps{warmup})"),
        ("epochs", _epochs(facts)),
        *(("", note) for note in plan.notes),
        ("strategy", strategy.name + (f" ({strategy.file})" if strategy.file else "")),
        ("engine", f"{engine.engine} on {facts.device}"),
        ("world", _world(strategy.launcher, engine)),
        ("mesh", _mesh(engine)),
        ("parameters", f"{count:,} in all, {part}{engine.num_parameters_per_rank:,} on this rank"),
        ("model", model.package),
        *(("unproven", use) for use in model.unproven),
        ("new head", new_head and f"drawn from seed {recipe.seed}, {len(model.new_head)} parameters: {new_head}"),
        (
            "read from",
            model.dequantized and f"{model.dequantized}; trained in {recipe.precision}, exported unquantized",
        ),
        ("constants", model.constants),
        ("kept", model.kept_tensors and f"of model.path, for the export, unchanged: {model.kept_tensors}"),
        ("not read", model.unread_tensors and f"of model.path: {model.unread_tensors}"),
        ("not read", f"of model.config: {', '.join(model.unread_keys)}" if model.unread_keys else ""),
        (
            "precision",
            f"{recipe.precision}: weights {engine.weight_dtype}, reduction {engine.reduce_dtype or 'none'}",
        ),
        ("warning", facts.precision_warning or ""),
        ("fp8", fp8_line(facts)),
        *batch_lines(recipe.batch, engine.dims.dp, padded=engine.dims.pp > 1),
        ("tokens", f"{rows * texts * length:,} per step = {rows} rows x {f'{texts} texts x ' * (texts > 1)}{length}"),
        ("", counted),
        *(("optimizer", group) for group in facts.optimizer_groups),
        ("dropout", ", ".join(f"{name} {rate}" for name, rate in model.dropout.items())),
        ("router loss", facts.router_loss),
        ("attention", attention_line(facts)),
        ("kernels", f"liger: {', '.join(kernels)}" if kernels else ""),
        ("memory", _memory(recipe.memory)),
        ("gradients", f"{whole} (memory.gradient_sync: last_micro_batch)" if whole_bytes else ""),
        ("allocator", facts.allocator),
        ("compile", facts.compile_choice or recipe.compile.replace("off", "")),
        *_data(facts.data),
        *announced(facts.predicted),
        ("output", str(recipe.output_dir)),
    ]
    return [(label, text) for label, text in lines if text]


def _epochs(facts: RunFacts) -> str:
    """Say how often the run reads each row; "" for streams and mixtures, whose sources say so themselves."""
    num_rows, recipe = facts.data.get("train", {}).get("rows"), facts.plan.recipe
    if not num_rows or recipe.data.mixture:
        return ""
    size = recipe.batch.global_batch_size
    passes = recipe.steps * size / num_rows
    return f"{passes:.4g} passes over {num_rows:,} rows, {num_rows / size:,.4g} steps each"


def fp8_line(facts: RunFacts) -> str:
    recipe = facts.plan.recipe
    if recipe.fp8 == "off":
        return ""
    eager = facts.device != "cpu" and recipe.compile == "off"
    advice = "; without compile, scaling to 8 bits runs in separate kernels: set compile: regional" if eager else ""
    return f"{recipe.fp8}: the products of {facts.num_fp8_modules} linear modules{advice}"


def attention_line(facts: RunFacts) -> str:
    chosen, recipe = facts.model.attention or "none", facts.plan.recipe
    if chosen == "eager" and recipe.model.attention == "auto":
        return f"eager: transformers has no sdpa for a {facts.model.model_type}"
    if chosen == "sdpa" and facts.cudnn_attention == "off":
        length = recipe.batch.sequence_length
        lengths = f"{length} tokens" if length % 128 == 64 else "the length of a rank's part of a row"
        return f"sdpa without cuDNN's kernels: their gradients can be NaN at {lengths} (64 modulo 128)"
    return f"{chosen} ({facts.attention_choice})" if facts.attention_choice else chosen


def _memory(memory: Memory) -> str:
    return {
        "none": "",
        "full": "every layer's activations are recomputed",
        "selective": f"layers keep the results of {memory.selective_save} and recompute the rest",
        "every_n_layers": f"the activations of one layer in {memory.every_n_layers} are recomputed",
        "offload": "every layer's activations are recomputed from inputs in host memory",
    }[memory.activation_checkpointing]


def _data(described: dict) -> list[tuple[str, str]]:
    """Build one line per part of the data (a dict of counts) and one for the remaining values."""
    blocks = {name: value for name, value in described.items() if isinstance(value, dict)}
    own_lines = ("chat_template", "rows", "first_bad_rows")
    rest = {name: value for name, value in described.items() if name not in blocks and name not in own_lines}
    lines = [(name, counts) for name, counts in [*blocks.items(), ("data", rest)] if counts]
    texts = [(name, ", ".join(f"{spaced(key)} {number(n)}" for key, n in counts.items())) for name, counts in lines]
    return [*((spaced(name), text) for name, text in texts), *((spaced(n), described.get(n, "")) for n in own_lines)]


def spaced(name: str) -> str:
    return name.replace("_", " ")


def _world(launcher: str, engine: EngineDescription) -> str:
    dims, count = engine.dims, engine.world_size
    parts = [f"{count} {'process' if count == 1 else 'processes'} by {launcher}, {dims.dp} data-parallel"]
    parts += [f"{dims.tp} tensor-parallel"] if dims.tp > 1 else []
    parts += [f"{dims.cp} context-parallel ({engine.context_parallel})"] if dims.cp > 1 else []
    parts += [f"{dims.ep} expert-parallel"] if dims.ep > 1 else []
    if engine.secondary_partition > 1:
        parts.append(f"a second copy of the weights over each {engine.secondary_partition}")
    parts[-1] += " with sequence parallelism" if engine.tp_sequence_parallel else ""
    parts += [f"{dims.pp} pipeline stages"] if dims.pp > 1 else []
    return ", ".join(parts)


def _mesh(engine: EngineDescription) -> str:
    """Describe the order of the ranks; "" if they differ in one dimension, which the line of the world names."""
    names = {"pp": "stages", "dp_replicate": "replicas", "cp": "context-parallel", "tp": "tensor-parallel"}
    names["dp_shard"] = "shards" if engine.sharded else "data-parallel"
    named = [f"{size} {names[name]}" for name, size in engine.mesh.items()]
    return f"{' x '.join(named)}, the last over neighbouring ranks" if len(named) > 1 else ""


def numbers_of(record: dict, smoothed_loss: float | None) -> list[str]:
    """Format the step's numbers as short texts; unknown ones are left out."""
    shown: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("epoch", record.get("epoch"), "{:.2f}".format),
        ("loss", record["loss"], "{:.4f}".format),
        ("smoothed", smoothed_loss, "{:.4f}".format),
        ("lr", record["learning_rate"], "{:.2e}".format),
        ("norm", record["grad_norm"], "{:.3f}".format),
        ("margin", record.get("margin"), "{:.4f}".format),
        ("accuracy", record.get("accuracy"), "{:.0%}".format),
        ("tokens/s", record["tokens_per_second"], lambda rate: _token_rate(rate, record)),
        ("mfu", record["mfu"], "{:.1%}".format),
        ("data wait", record["data_wait_fraction"], "{:.0%}".format),
        ("memory", record["peak_memory_gib"], "{:.2f} GiB".format),
    ]
    return [f"{name} {text(value)}" for name, value, text in shown if value is not None]


def _token_rate(rate: float, record: dict) -> str:
    """Format the tokens read per second, which other tools count, and beside them those trained if they are fewer."""
    read = record["input_tokens"] / record["step_seconds"]
    return f"{read:,.0f} ({rate:,.0f} trained)" if rate < 0.95 * read else f"{rate:,.0f}"


def number(value: object) -> str:
    """Format a value: 1,234 for counts, four decimals for other numbers, text unchanged."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3:20 min, 2:05 h."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def batch_lines(batch: Batch, ranks: int, padded: bool) -> list[tuple[str, str]]:
    """Build the lines as (label, text) pairs; an uneven division has one for its cost.

    Args:
        padded: whether every micro-batch has the rows of the largest one, as in a pipeline.
    """
    rows, shares = batch.global_batch_size, batch.micro_batches(ranks)
    steps, most = len(shares[0]), max(map(max, shares))
    if rows == most * steps * ranks:
        return [("batch", f"{rows} rows = {most} micro x {steps} accumulation x {ranks} data-parallel")]
    groups = Counter(tuple(share) for share in shares)
    split = "; ".join(f"{_sum(share)} on {count} of {ranks} ranks" for share, count in groups.items())
    busiest = most * steps if padded else sum(shares[0])
    idle = 1 - rows / (busiest * ranks)
    lines = [("batch", f"{rows} rows = {_sum(shares[0]) if ranks == 1 else split}")]
    return lines + [("", f"the uneven division leaves {idle:.1%} of the devices' time unused")] * (idle > 0)


def _sum(sizes: Iterable[int]) -> str:
    """Write a rank's micro-batches as a sum: 4 x 7 + 4."""
    terms = Counter(sizes).items()  # in order of appearance: the full ones, the rest, the empty ones
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in terms)


def announced(predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Build the header's lines: what the run is predicted to take, and what that rests on."""
    if not is_shown(predicted):
        return []
    parts = [f"{name} {_with_interval(predicted, key, unit)}" for key, (name, unit) in QUANTITIES.items()]
    return [("predicted", f"{', '.join(parts)} (80 % intervals)"), ("", predicted["basis"])]


def is_shown(predicted: Mapping[str, Any]) -> bool:
    """Whether there is a prediction whose rates were measured or published; on assumed ones it says nothing."""
    return "step_seconds" in predicted and not predicted.get("assumed")


def compare_with_prediction(predicted: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Compare the session's records with the prediction: `0.35 s; predicted 0.32 s (0.2 to 0.9), 9 % too low`.

    Args:
        metrics: records of the steps since the session's start. The first one, which compiles and allocates, counts
            only where it is alone.

    Returns:
        A text for each quantity; {} without a record.
    """
    misses, metrics = {}, list(metrics)
    for key, (name, unit) in QUANTITIES.items():
        values = [record[key] for record in metrics if record.get(key)]
        if not values:
            continue
        measured = max(values) if key == "peak_memory_gib" else statistics.median(values[1:] or values)
        text = f"{measured:.3g} {unit}"
        if key in predicted:
            low, high = predicted[f"{key}_interval"]
            error = predicted[key] / measured - 1
            # a smaller difference would be shown as 0%
            is_close = not math.isfinite(error) or abs(error) < 0.005
            miss = "as measured" if is_close else f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"
            place = "" if low <= measured <= high else ", outside the interval"
            text += f"; predicted {_with_interval(predicted, key, unit)}, {miss}{place}"
        misses[name] = text
    return misses


def of_session(facts: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Compare the records of the last session with the prediction in its run.json; {} where none is shown."""
    return compare_with_prediction(facts["predicted"], metrics) if is_shown(facts.get("predicted") or {}) else {}


def _with_interval(predicted: Mapping[str, Any], key: str, unit: str) -> str:
    low, high = predicted[f"{key}_interval"]
    return f"{predicted[key]:.3g} {unit} ({low:.3g} to {high:.3g})"
