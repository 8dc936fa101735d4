"""What the GPU benchmark measures: one case is one run, in processes of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARM_UP, MEASURED, PROFILED = 4, 5, 1
"""Steps of a run: not counted (compilation, first allocations), counted, and recorded by the profiler after them."""

GROUPS = {
    "ceilings": "What the device can do",
    "shapes": "Models, optimizers, lengths and data",
    "peer": "transformers.Trainer on the same rows",
    "devices": "On all GPUs of this machine",
    "options": "Each option of the 1.2B recipe, one at a time",
}
OPTIONS = (
    "compile",
    "fp8",
    "loss",
    "memory.activation_checkpointing",
    "model.attention",
    "model.kernels",
    "optimizer.name",
    "optimizer.implementation",
    "data.num_workers",
)
# what several keys make together
PAIRS = (
    "memory.activation_checkpointing=selective memory.selective_save=attention",
    "compile=regional memory.activation_checkpointing=selective",
    "model.kernels=liger loss.implementation=liger",
    "compile=regional model.kernels=liger",
    "compile=regional fp8=tensorwise",
    "compile=regional fp8=rowwise_with_gw_hp",
    "model.attention=flash_attention_2 batch.micro_batch_size=1",
)
OPTIONS_ON = "1b-documents"
PACKED = {"sdpa": "8b-sft", "varlen": "8b-sft-varlen"}
"""Attention and its case with packed documents: by these `model.attention: auto` chooses on a GPU."""

DECIDING = (
    *PACKED.values(),
    *("1b", "1b-compiled", "1b-kept", "1b-fsdp"),
    *(OPTIONS_ON, "1b:compile=full", "1b:activation_checkpointing=offload"),
    *("8b-offload", "8b-offload-last"),
)
"""Cases that decide a default or a row of docs/gpu.md."""


@dataclass(frozen=True)
class Case:
    """program: train: train.py without its export; trainer: transformers.Trainer; matmul: `bench matmul`.

    recipe: a file beside this one. data: one long text, packed documents of the recipe, or packed conversations.
    against: the case that a ratio is to, "" for none. option: what differs from that, as on the command line.
    seconds: what it needs at least, where that can be more than the limit of the others.
    """

    name: str
    group: str
    recipe: str
    overrides: tuple[str, ...] = ()
    program: Literal["train", "trainer", "matmul"] = "train"
    arguments: tuple[str, ...] = ()
    data: Literal["text", "documents", "conversations"] = "text"
    strategy: str = "single"
    num_processes: int = 1
    profiled: bool = False
    against: str = ""
    option: str = ""
    seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        """The profiler has one step of its own to warm up in."""
        return WARM_UP + MEASURED + (1 + PROFILED if self.profiled else 0)

    @property
    def definition(self) -> dict:
        """What a measured row has to agree with to count as this case's."""
        return {
            "recipe": self.recipe,
            "resolved": _digest(self.recipe),
            "overrides": list(self.overrides),
            "program": " ".join([self.program, *self.arguments]),
            "data": self.data,
            "strategy": self.strategy,
            "files": _digest_of_files(self.strategy),
            "num_processes": self.num_processes,
        }


@cache
def _digest(recipe: str) -> str:
    """Of the recipe with all that it is based on and the schema's defaults: any of them can make it another run."""
    content = json.dumps(_resolved(recipe).model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@cache
def _digest_of_files(strategy: str) -> str:
    """Of its YAML and JSON; empty for single, which has none."""
    paths = (ROOT / "configs" / f"{strategy}.yaml", ROOT / "ds_configs" / f"{strategy}.json")
    content = b"".join(path.read_bytes() for path in paths if path.exists())
    return hashlib.sha256(content).hexdigest()[:12] if content else ""


def _resolved(name: str) -> Recipe:
    from samecurve.config import loader

    return loader.load_recipe(str(HERE / name), ["steps=10"])


def cases(num_devices: int, toy: bool = False) -> list[Case]:
    """In the order in which they are measured: those first that decide defaults, then those that say most, a peer
    beside what it is compared with.

    num_devices: GPUs of this machine.
    """
    found = [*_ceilings(), *_sizes(), *_shapes(), *(_devices(num_devices) if num_devices > 1 else ()), *_options()]
    found.sort(key=lambda case: (case.group != "ceilings", case.name not in DECIDING))
    return [_as_toy(case) for case in found] if toy else found


def _ceilings() -> Iterator[Case]:
    yield Case("ceilings", "ceilings", "llama_8b.yaml", program="matmul", data="documents")


BF16, COMPILED = "optimizer.name=adamw_bf16", "compile=regional"
KEPT = "memory.activation_checkpointing=none"
TWO_ROWS = "batch.micro_batch_size=2"


def _sizes() -> Iterator[Case]:
    """Each size as it is, compiled, and compiled with nothing computed twice; then each as transformers.Trainer has it.

    What is computed twice is no model FLOP: where the device's matrix products reach 80 % of the data sheet's, full
    recomputation cannot reach 60 % MFU, so the third kind is the one that may.
    The largest does not fit into one GPU with fp32 weights and moments: 16 bytes each are 128 GB before anything is
    computed. Trainer's bf16 weights are rounded to the nearest, which loses most small updates.
    """
    # what one of 32 wider layers keeps of four rows would not fit beside 64 GB of weights, gradients and moments
    sizes = {"8b": ((BF16,), (TWO_ROWS,)), "3b": ((), ()), "1b": ((), ())}
    for size, (overrides, fewer) in sizes.items():
        plain = Case(size, "shapes", f"llama_{size}.yaml", overrides, profiled=True)
        yield plain
        for name, more in (("compiled", (COMPILED,)), ("kept", (COMPILED, KEPT, *fewer))):
            yield replace(plain, name=f"{size}-{name}", overrides=(*overrides, *more), against=size)
    for size, (overrides, _) in sizes.items():
        trainer = Case(f"{size}-trainer", "peer", f"llama_{size}.yaml", overrides, "trainer", against=size)
        yield trainer
        yield replace(trainer, name=f"{size}-trainer-compiled", arguments=("--compile",))


def _shapes() -> Iterator[Case]:
    """Other rows, lengths, optimizers and ways to save memory."""

    def case(size: str, name: str, *overrides: str, **fields) -> Case:
        given = {"against": size, "profiled": True, **fields}
        return Case(f"{size}-{name}", "shapes", f"llama_{size}.yaml", overrides, **given)

    def long(num_rows: int) -> tuple[str, ...]:
        rows = f"batch.global_batch_size={num_rows}", TWO_ROWS
        return "batch.sequence_length=8192", *rows

    selective = "memory.activation_checkpointing=selective"
    yield case("8b", "selective", BF16, COMPILED, selective, TWO_ROWS)
    yield case("3b", "selective", COMPILED, selective, TWO_ROWS)
    # autocast keeps what goes from layer to layer in fp32; FSDP's mixed precision, also with one shard, in bf16
    for size in ("3b", "1b"):
        yield case(size, "fsdp", COMPILED, KEPT, strategy="fsdp", against=f"{size}-kept")
    yield case("1b", "documents", data="documents")
    trainer = case("1b", "trainer-documents", program="trainer", profiled=False, data="documents", against=OPTIONS_ON)
    yield replace(trainer, group="peer")
    yield case("8b", "documents", BF16, data="documents")
    yield case("8b", "lora", "adapter.name=lora")
    yield case("8b", "8bit", "optimizer.name=adamw_8bit")
    yield case("8b", "8192", BF16, *long(4))
    yield case("3b", "8192", *long(4))
    yield case("1b", "8192", *long(8))
    yield case("8b", "sft", BF16, data="conversations", against="")
    yield case("8b", "sft-varlen", BF16, "model.attention=varlen", data="conversations", against="8b-sft")
    yield case("8b", "lora-sft", "adapter.name=lora", data="conversations", against="8b-sft")
    yield case("1b", "sft", data="conversations", against="")
    # host memory: 60 GiB with bf16 weights and moments, 48 GiB; the 8B one with fp32 masters would want 120 GiB
    # by count its update on 16 cores moves 2 TB a step
    offload = case("8b", "offload", BF16, strategy="fsdp_offload", profiled=False, seconds=600.0, against="")
    yield offload
    # gradients of several micro-batches are added on the CPU, or on the GPU and copied once
    last = "memory.gradient_sync=last_micro_batch"
    yield replace(offload, name="8b-offload-last", overrides=(BF16, last), against="8b-offload")
    yield case("3b", "offload", strategy="zero2_offload", profiled=False)


def _devices(num_devices: int) -> Iterator[Case]:
    """fp32 weights and moments, as many rows for each device as the single one had."""
    for strategy in ("fsdp", "zero3"):
        batch = f"batch.global_batch_size={8 * num_devices}"
        case = Case(f"8b-{strategy}", "devices", "llama_8b.yaml", (batch,), strategy=strategy, against="8b")
        yield replace(case, num_processes=num_devices, profiled=True)


def _options() -> Iterator[Case]:
    from samecurve.bench.options import variants

    found = [variant.overrides for variant in variants(_resolved("llama_1b.yaml"), OPTIONS)[1:]]
    for overrides in [*found, *(tuple(pair.split()) for pair in PAIRS)]:
        option = " ".join(overrides)
        name = "1b:" + ",".join(text.rpartition(".")[2] for text in overrides)
        case = Case(name, "options", "llama_1b.yaml", tuple(overrides), data="documents")
        yield replace(case, against=OPTIONS_ON, option=option)


def _as_toy(case: Case) -> Case:
    """Another model and shorter rows; all else stays."""
    overrides = (text.replace("sequence_length=8192", "sequence_length=128") for text in case.overrides)
    return replace(case, recipe="llama_toy.yaml", overrides=tuple(overrides))


def chosen(among: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those of these names, groups or models (llama_8b), all without a name. Raises SystemExit for an unknown one."""
    known = {name for case in among for name in _names(case)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--only: found {unknown[0]}, which is no case and no group here; --list shows them")
    return [case for case in among if not names or not _names(case).isdisjoint(names)]


def _names(case: Case) -> set[str]:
    return {case.name, case.group, Path(case.recipe).stem}
