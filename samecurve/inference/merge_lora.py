"""`merge`: merges an adapter into its base model, and compares the stored result with the unmerged model."""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from samecurve.errors import NumericError
from samecurve.export.config_files import settle_config, write_generation_config
from samecurve.export.convert import copy_as
from samecurve.export.hf_export import put_in_place
from samecurve.export.model_card import ADAPTED_CONFIG, CARD, PICTURE, ExportInfo, write_card
from samecurve.export.weight_shards import METADATA, UNCHANGED, Shard, name_shards, write_kept
from samecurve.inference import folders, loading
from samecurve.models.packaged import PROCESSOR_FILES
from samecurve.models.pretrained import Pretrained, constants
from samecurve.models.skeleton import construct
from samecurve.models.weight_conversion import Storage
from samecurve.models.weight_files import Stored, weight_files
from samecurve.specs.precision import DTYPES
from samecurve.storage.atomic import storage_errors
from samecurve.storage.filesystem import check_links, is_own_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, LENGTH = 4, 64
# W x + s B (A x) and (W + s B A) x are rounded at different places. fp32 has a relative rounding error of
# 2^-24 = 6e-8, which the sums and layers of a model make a few hundred times larger. A wrongly merged adapter differs
# by far more than this tolerance.
TOLERANCE = 1e-4


def run(arguments: argparse.Namespace, folder: Path, base: str, output: Path) -> int:
    """Run the command `merge` on an adapter's folder. Returns the exit code."""
    loading.check_base_model(arguments.run, base)
    dtype = DTYPES[arguments.dtype]
    partial, cast = (output.with_name(f"{output.name}.{name}") for name in ("partial", "cast"))
    rounding = ""
    try:
        print(_merge(folder, base, partial, arguments.trust_remote_code))
        if arguments.dtype != "fp32":  # after the check, which needs fp32
            with storage_errors(cast):
                rounding = copy_as(partial, cast, getattr(torch, dtype)).text(arguments.dtype)
                shutil.rmtree(partial)
                cast.rename(partial)
            print(f"{rounding}, which the check above does not include" if rounding else "no weight was rounded")
        directory = folders.run_directory(arguments.run)
        if directory is not None:  # a folder with an adapter alone does not know its run
            write_card(directory, ExportInfo(dtype, merged=True, rounding=rounding), partial)
        put_in_place(partial, output)
    finally:
        for leftover in (partial, cast):
            shutil.rmtree(leftover, ignore_errors=True)
    print(f"merged model: {output}")
    return 0


def _merge(folder: Path, base: str, output: Path, trust_remote_code: bool) -> str:
    """Merge, read the result back and compare its logits. Returns a sentence that states the differences.

    Raises NumericError if the logits differ from those of the unmerged model by more than TOLERANCE times the largest.
    """
    head = loading.stored_head(folder, trust_remote_code)
    adapted, tokenizer = loading.load_with_tokenizer(folder, head, trust_remote_code=trust_remote_code)
    from peft import PeftModel  # noisy unless `load` ran before it

    assert isinstance(adapted, PeftModel)  # cli/merge.py refuses a folder without an adapter
    # draw token ids from the whole vocabulary, (ROWS, LENGTH), or shorter for a model with fewer positions
    config = adapted.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or LENGTH
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(config.vocab_size, (ROWS, min(LENGTH, positions)), generator=generator)
    base_logits, expected = _without_matrices(adapted, rows), _logits(adapted, rows)
    # safe_merge refuses weights that are not finite.
    merged = adapted.merge_and_unload(safe_merge=True)
    kept = Pretrained(merged, merged, base).kept("keep")
    settle_config(merged, merged.config, tokenizer, kept)
    generation = merged.generation_config if merged.can_generate() else None
    if generation is not None:
        merged.generation_config = GenerationConfig()  # save_pretrained refuses what some base models have
    with storage_errors(output):
        _save(merged, output, kept)
        if generation is not None:
            write_generation_config(generation, tokenizer, output)
        # Copy the tokenizer and the task's own files from the adapter's folder. Raises as `check_links`.
        check_links(folder)
        start = next(iter(weight_files(base).values())).file.parent
        for path in (*folder.iterdir(), *filter(is_own_file, map(start.joinpath, PROCESSOR_FILES))):
            skipped = path.name.startswith("adapter_") or path.name in (CARD, PICTURE, ADAPTED_CONFIG)
            if skipped or (output / path.name).exists():
                continue
            shutil.copytree(path, output / path.name) if path.is_dir() else shutil.copyfile(path, output / path.name)
    del adapted, merged  # the merged model is read back without them in memory
    merged_logits = _logits(loading.load_model(str(output), head, trust_remote_code=trust_remote_code), rows)
    difference, effect = ((other - expected).abs().max().item() for other in (merged_logits, base_logits))
    limit = TOLERANCE * expected.abs().max().item()
    outputs = "states" if head.kind == "embedding" else "logits"
    text = (
        f"checked on {ROWS} rows of {rows.shape[1]} tokens: the merged model's {outputs} differ from those of {base} "
        f"with the adapter by at most {difference:.1e} (allowed: {limit:.1e}); the adapter changes them by {effect:.1e}"
    )
    if not difference <= limit:
        raise NumericError(f"the merged model differs from the adapted one and was deleted: {text}")
    return text


def _save(model: PreTrainedModel, output: Path, kept: Mapping[str, Stored]) -> None:
    """Write a model. What no training changes, as a router's bias, and `kept` get files that no conversion rounds."""
    # a new model's: the merged one trains nothing, as it was loaded for inference
    names = constants(construct(type(model), copy.deepcopy(model.config), torch.device("meta")))
    trained, unchanged = model.state_dict(), {}
    for name in names:
        unchanged[name] = trained.pop(name).clone()
    model.save_pretrained(output, state_dict=trained)
    if not unchanged and not kept:
        return
    files: dict[Path, list[str]] = {}
    for name, stored in weight_files(str(output)).items():
        files.setdefault(stored.file, []).append(name)
    shards = [Shard(path, "model", names) for path, names in sorted(files.items())]
    if unchanged:
        path, converted = output / "constants.safetensors", Storage(model).convert(unchanged)
        save_file(converted, path, metadata=METADATA)
        shards.append(Shard(path, UNCHANGED, [*converted]))
    name_shards([*shards, *write_kept(output, kept)])


def _logits(model: PreTrainedModel, rows: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(input_ids=rows)
    return output.logits if "logits" in output else output.last_hidden_state


def _without_matrices(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the logits without the LoRA matrices. A head trained with the adapter stays, as the base has none."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    logits = _logits(model, rows)
    for layer in layers:
        layer.enable_adapters(True)
    return logits
