"""Write docs/model_families.md: `python -m scripts.pages.model_families > docs/model_families.md`."""

from __future__ import annotations

from samecurve.specs.model_families import PACKAGED, PIPELINED, ROUND_TRIP, TEMPLATED, TEXT_TWINS, families

_TESTS = {  # by column
    "loads": "unit/test_round_trip.py",
    "packs": "unit/test_packed_rows.py",
    "tp": "distributed/test_tensor_parallel.py",
    "cp": "distributed/test_context_parallel.py",
    "ep": "distributed/test_expert_parallel.py",
    "pipeline": "unit/test_pipeline_split.py",
    "Liger": "unit/test_liger.py",
    "template": "unit/test_known_templates.py",
}
_HEADER = """\
# Model families

<!-- Written by `python -m scripts.pages.model_families` from specs/model_families.py. Do not edit. -->

A family is the `model_type` of a config. What a run does with it is

- *proven* where the test in the column's head compares it with transformers or with one process;
- *allowed* where nothing refuses it for its family, but that test does not compare it;
- *refused* where the run stops with the reason.

In column

- *loads*, a run reads what transformers wrote, trains a step and exports; plain transformers reads the export, with the
  same logits; families with constants do each of it in [`test_constants.py`](../tests/unit/test_constants.py), and all
  but the encoders do it under FSDP and ZeRO-3 in [`test_families.py`](../tests/distributed/test_families.py);
- *packs*, a packed document has the logits of the document alone; refused families need `data.packing: false`;
- *tp*, *cp* and *ep*, tensor, context and expert parallelism have one process's curve; *with ep* in the first: proven
  together with expert parallelism, refused without it ([more limits](strategies.md#tensor-parallelism));
- *pipeline*, the layers of stages have the model's logits and gradients; PyTorch's schedules and DeepSpeed's pipeline
  divide the same layers;
- *Liger*, `model.kernels: liger` has PyTorch's loss and gradients;
- *template*, rows under a chat template with which models of the family are published have transformers' tokens
  and, where TRL has a template for training, its masks. Other [templates](data.md#conversations) are allowed as long as
  the text of an answer can be told apart.

Families without a line are refused in the columns from packs to Liger, and load (*allowed*) where no check of a model
refuses them, for example that its modules set their own weights. No language model is trained of {refused}: there
a position sees the following tokens.
"""
_FOOTER = """
## Models that also read images or sound

The text part of these is trained ([`test_packaged.py`](../tests/unit/test_packaged.py), all but `gemma3n`): {packaged}.
All but `deepseek_vl`, `gemma3n` and `lfm2_vl` are also compared under FSDP and ZeRO-3. The line of the text part's
family says what is allowed beyond that; packed rows, tensor parallelism and pipelines are not proven for the package
itself; {twins}.
In `paligemma` a position sees the following tokens, so no language model is trained of it.
`glm4v`, `glm4v_moe`, `glm46v`, `glm_ocr`, `qwen2_5_omni` and `qwen3_omni_moe` are refused: transformers has no causal
class of their text part.
"""


def render_page() -> str:
    """Return the text of docs/model_families.md."""
    both = families("expert_and_tensor_parallel")
    proven = {
        "loads": ROUND_TRIP,
        "packs": families("packed") | families("separated"),
        "tp": families("tensor_parallel") | both,
        "cp": families("context_parallel"),
        "ep": families("expert_parallel"),
        "pipeline": PIPELINED,
        "Liger": families("liger"),
        "template": TEMPLATED,
    }
    refused = families("not_causal")
    heads = " | ".join(f"[{column}](../tests/{test})" for column, test in _TESTS.items())
    lines = [_HEADER.format(refused=_listed(refused)), f"| family | {heads} |", "|---" * (len(_TESTS) + 1) + "|"]
    for family in sorted(frozenset().union(*proven.values()) - refused):
        cells = []
        for column in _TESTS:
            otherwise = "allowed" if column in ("loads", "template") else "refused"
            cell = "proven" if family in proven[column] else otherwise
            cells.append("with ep" if column == "tp" and family in both else cell)
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    twins = ", ".join(f"`{name}` is trained as `{twin}`" for name, (twin, _) in TEXT_TWINS.items())
    return "\n".join(lines) + "\n" + _FOOTER.format(packaged=_listed(PACKAGED - {"paligemma"}), twins=twins)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    print(render_page(), end="")
