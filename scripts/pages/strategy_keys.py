"""Write docs/strategy_keys.md: `python -m scripts.pages.strategy_keys > docs/strategy_keys.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samecurve.config.documents import KeyPath
from samecurve.strategy.accelerate_keys import ACCELERATE, INLINE, NoEffect, RecipeOwned, Rejected, Table, ValueRule
from samecurve.strategy.deepspeed_keys import DEEPSPEED, SECOND_NAMES, STAGES
from scripts.pages.capabilities import pinned

_HEADER = """\
# What gets in: strategy files

<!-- Written by `python -m scripts.pages.strategy_keys` from strategy/accelerate_keys.py and deepspeed_keys.py. Do not
edit. -->

Every key of an Accelerate YAML and of a DeepSpeed JSON, as `accelerate config`, Trainer, LLaMA-Factory, axolotl and
others write them. A key is

- *used*: it does here what it does there;
- *recipe*: it means what that key of the recipe means. Where the recipe does not give the key, the file's value counts,
  and a line of the header says so; also where a base file or `recipes/sft.yaml` gives it for its small model from
  scratch, which `model.path` replaces. Where both give it, they must agree; `"auto"` leaves the value to the recipe;
- *no effect*: known, and changes nothing here. A line of the header lists those that a file has;
- *refused*: it would change the run and is not built. A value that enables nothing, such as `false`, has no effect.

Any other key is an error with the nearest name. Keys that begin with `_`, `#` or `//` are comments. Numbers and truth
values may be text. Where a library's default is asked for by `"auto"`, it counts. `run.json` has what was taken from a
file as `from_strategy`, and what had no effect, each with its reason, as `no_effect`.
"""
_OF_DOCUMENTS = """
## Files as a whole

- A YAML with `distributed_type: DEEPSPEED` that names no JSON gets one of its own keys: {inline}. Without `zero_stage`
  the stage is 2, which is Accelerate's default. Beside a JSON, these keys must agree with it.
- `zero_optimization.stage` 0, or no such block, is DDP, and DeepSpeed's other keys have no effect.
- `fsdp_config` without `fsdp_version`, or with version 1, is trained by FSDP2: `fsdp_sharding_strategy` `FULL_SHARD`
  and `SHARD_GRAD_OP` are `fsdp_reshard_after_forward` true and false; `HYBRID_SHARD` makes each machine a replica;
  `NO_SHARD` is DDP. What `accelerate to-fsdp2` writes is taken as it is.
- Second names of DeepSpeed's keys: {second}.
- A block `optimizer` or `scheduler` whose values are all `"auto"` leaves them to the recipe. A scheduler with numbers
  but without `warmup_type` has DeepSpeed's default, `schedule.warmup_type: log`, and one without `warmup_num_steps`
  warms up for 1000 steps where the recipe does not say.
- `train_micro_batch_size_per_gpu` without the other two numbers of a batch is one step of each rank, as in DeepSpeed.
- What tools write without being asked contradicts no recipe: `mixed_precision: no`, `dynamo_backend: NO`,
  `fsdp_activation_checkpointing: false`, and `use_cpu: true` where there is no accelerator.
- What only `accelerate launch` reads (`gpu_ids`, `main_process_port`, ...) has no effect under another launcher.
- `deepspeed_config_file` is looked for from the working directory, then from the YAML's folders.
- A name that promises another strategy, such as `zero2.json` with offload, is mentioned in the header.
"""


@dataclass(frozen=True)
class Row:
    """One key. kind: "used", "recipe", "no effect" or "refused"; meaning: values, the recipe's key, or the reason."""

    key: str
    kind: str
    meaning: str


def rows(table: Table, path: KeyPath = ()) -> Iterator[Row]:
    """Yield the keys of a table and of the blocks in it."""
    for name, rule in table.items():
        key = ".".join((*path, name))
        if isinstance(rule, dict):
            yield from rows(rule, (*path, name))
        elif isinstance(rule, ValueRule):
            stages = STAGES.get(name) if path[:1] == ("zero_optimization",) else None
            only = f"; at stage {' and '.join(map(str, stages))}, without effect at others" if stages else ""
            yield Row(key, "used", f"{rule.expected}{only}")
        elif isinstance(rule, RecipeOwned):
            yield Row(key, "recipe", ", ".join(f"`{part}`" for part in rule.by.split(" / ")))
        elif isinstance(rule, NoEffect):
            yield Row(key, "no effect", rule.reason)
        elif isinstance(rule, Rejected):
            yield Row(key, "refused", rule.reason)


def render_page() -> str:
    """The whole page, Markdown."""
    lines = [_HEADER]
    for title, table in (("Accelerate's YAML", ACCELERATE), ("DeepSpeed's JSON", DEEPSPEED)):
        lines += [f"## {title}\n", "| key | | values, key of the recipe, or reason |\n|---|---|---|"]
        lines += [f"| `{row.key}` | {row.kind} | {pinned(row.meaning)} |" for row in rows(table)] + [""]
    second = ", ".join(f"`{name}`" for name in SECOND_NAMES)
    lines.append(_OF_DOCUMENTS.format(inline=", ".join(f"`{key}`" for key in INLINE), second=second).strip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(render_page())
