"""Pages of scripts/bench_options.py: the recipe of each of their tables, its variants, and what they cost and save."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.markdown import table

RECIPE = "benchmarks/speed/pretrain.yaml"
WARM_UP = 3


@dataclass(frozen=True)
class Table:
    """processes: of one thread each; of one process all cores. variants: see `bench step --variant`."""

    strategy: str
    processes: int
    overrides: tuple[str, ...]
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    title: str
    text: str
    tables: tuple[Table, ...]


_FSDP, _ZERO = "fsdp_config.fsdp", "zero_optimization.stage3"
LLAMA = "max_position_embeddings: 512, tie_word_embeddings: true}"
# weights that are large beside activations, so that gathering and reducing them is what a step does
WIDE = (
    "model.config={model_type: llama, hidden_size: 768, intermediate_size: 2048, num_hidden_layers: 12, "
    f"num_attention_heads: 12, {LLAMA}"
)
_SMALL_BATCH = (WIDE, "batch.global_batch_size=4", "batch.micro_batch_size=1", "batch.sequence_length=64")
DEEP = (
    "model.config={model_type: llama, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 24, "
    f"num_attention_heads: 4, {LLAMA}"
)
KINDS = ("full", "selective", "every_n_layers", "offload")
PAGES = {
    "sharding": Page(
        "What the keys of ZeRO-3 and FSDP cost and save",
        """A Llama of 91 million parameters, bf16, 4 rows of 64 tokens per step in 2 micro-batches of one row on each of
two processes of one thread, over gloo. Memory is the peak of rank 0's process, with the libraries. Gathering ahead
gains where a network and a device work side by side, which two processes on one machine's cores do not.""",
        (
            Table(
                "fsdp",
                2,
                _SMALL_BATCH,
                (
                    f"{_FSDP}_reshard_after_forward=false",
                    f"{_FSDP}_forward_prefetch=true",
                    f"{_FSDP}_reduce_dtype=bf16",
                ),
            ),
            Table(
                "zero3",
                2,
                _SMALL_BATCH,
                (
                    f"{_ZERO}_prefetch_bucket_size=0",
                    f"{_ZERO}_param_persistence_threshold=0",
                    f"{_ZERO}_max_reuse_distance=0",
                    f"{_ZERO}_max_live_parameters=0",
                    "zero_optimization.reduce_bucket_size=1000000",
                    "communication_data_type=bf16",
                ),
            ),
        ),
    ),
    "activations": Page(
        "What the kinds of activation checkpointing cost and save",
        """A deep and narrow Llama: 24 layers of width 256, bf16, 4 rows of 512 tokens in one micro-batch, one process.
Memory is the peak of the process, with the libraries, the weights and Adam's moments. On a CPU the host's memory is the
device's, so `offload` is as `full` here.""",
        (
            Table(
                "single",
                1,
                (DEEP, "batch.global_batch_size=4", "batch.micro_batch_size=4"),
                (
                    *(f"memory.activation_checkpointing={kind}" for kind in KINDS),
                    "memory.activation_checkpointing=selective memory.selective_save=attention",
                    "memory.activation_checkpointing=every_n_layers memory.every_n_layers=4",
                ),
            ),
        ),
    ),
    "kernels": Page(
        "What the ways to compute a step cost and save",
        """The Llama of benchmarks/speed/ (13.8 million parameters, vocabulary 8,192), bf16, 8 rows of 512 tokens in one
micro-batch, one process. Memory is the peak of the process, with the libraries, the weights and Adam's moments. malloc
keeps what a step frees, in pieces that the next size may not fit into, so these peaks say little of what logits or
masks need at once: tests/unit/test_vocabulary_memory.py measures large ones.""",
        (
            Table(
                "single",
                1,
                (),
                (
                    "compile=regional",
                    "compile=full",
                    "loss.implementation=full",
                    "model.attention=sdpa",
                    "model.attention=eager",
                    "loss.implementation=full model.attention=sdpa",
                ),
            ),
        ),
    ),
}


COLUMNS = "", "seconds a step", "tokens/s", "ratio", "lowest and highest", "peak GiB", "less", "loss differs by"


@dataclass(frozen=True)
class Began:
    """Before anything was started. load: the machine's load average."""

    load: float
    commit: str | None


def heading(page: Page, arguments: str, found: dict, began: Began) -> str:
    """arguments: of the script, as they were typed. found: the page's first table, from `bench step --json`."""
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items() if version)
    hardware = f"{found['device']}, {found['cores']} cores, commit {began.commit}"
    return f"""# {page.title}

Measured on {found["date"][:10]} by `python scripts/bench_options.py {arguments}`: {hardware};
{versions}.
Load average before it began: {began.load:.1f}; a machine that does something else besides gives no speeds to rely on.

{page.text}

The first {WARM_UP} steps are not counted. A ratio is of tokens/s to the recipe as it is in the same round: the median,
the lowest and the highest. The loss is compared at every step."""


def shown(found: dict) -> str:
    base = found["variants"][0]["peak_memory_gib"]
    rows = []
    for each in found["variants"]:
        name = each["variant"]["name"]
        cells = [
            name if each is found["variants"][0] else f"`{name}`",
            f"{each['step_seconds']:.2f}",
            f"{each['tokens_per_second']:,.0f}",
            f"{each['ratio']:.2f}",
            f"{each['lowest']:.2f} to {each['highest']:.2f}",
            f"{each['peak_memory_gib']:.2f}",
            f"{base - each['peak_memory_gib']:.2f}",
            "a loss is missing" if each["loss_difference"] is None else f"{each['loss_difference']:.1e}",
        ]
        rows.append(cells)
    lines = [f"`{name}` did not run: {reason}" for name, reason in found["not_measured"].items()]
    return "\n\n".join([f"## `{found['strategy']}`", table(COLUMNS, rows), *lines])
