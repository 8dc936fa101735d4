"""GGUF, the format of llama.cpp, Ollama and LM Studio: written from a Hugging Face folder, read back and compared.

Names of tensors and metadata are the `gguf` package's. What llama.cpp stores in another form than transformers (rotary
pairs side by side, norms with 1 added) follows its converter (https://github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from samecurve.errors import ConfigurationError, NumericError
from samecurve.export import gguf_tokenizer
from samecurve.export.convert import finish, from_checkpoint
from samecurve.export.hf_export import out_of_range, put_in_place
from samecurve.export.model_card import ExportInfo, write_card
from samecurve.export.push import Push
from samecurve.export.weight_shards import Rounding
from samecurve.models.weight_files import read, weight_files
from samecurve.specs.precision import GGUF_TYPES, PRECISIONS
from samecurve.storage.atomic import storage_errors, write_text
from samecurve.storage.filesystem import check_links

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from samecurve.config.schema import Recipe

REMEDY = "export without --format gguf, and run llama.cpp's convert_hf_to_gguf.py on that folder"
ROWS, LENGTH = 2, 32
TOLERANCE = 1e-4  # part of the largest logit; see verification.TOLERANCE
_BLOCK = 32  # values of a row that share a scale in q8_0


class Family(NamedTuple):
    """How llama.cpp stores and computes a family.

    Attributes:
        arch: llama.cpp's name.
        activation: of the MLP; a file does not state it.
        rotary_pairs: whether the two values of a rotary pair are neighbours; transformers' are half a head apart.
        norm_offset: what is added to the weights of norms.
        ropes: rope types whose parameters a file can state.
        full_every: of how many layers one has full attention and the others a window; 0 for another pattern or none.
    """

    arch: str
    activation: str = "silu"
    rotary_pairs: bool = False
    norm_offset: float = 0.0
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    full_every: int = 0


FAMILIES = {
    "llama": Family("llama", rotary_pairs=True, ropes=("default", "linear", "yarn", "llama3")),
    "mistral": Family("llama", rotary_pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", "gelu_pytorch_tanh", norm_offset=1.0, ropes=("default",), full_every=2),
    "gemma3_text": Family("gemma3", "gelu_pytorch_tanh", norm_offset=1.0, ropes=("default", "linear"), full_every=6),
    "phi3": Family("phi3", ropes=("default",)),
}


def run(
    directory: Path, source: Path, output: Path, made: ExportInfo, recipe: Recipe | None, push: Push | None = None
) -> int:
    """Write a folder with a GGUF, a Modelfile for Ollama and a card. Arguments: see convert.run; made.gguf is set."""
    partial_output, whole = (output.with_name(f"{output.name}.{name}") for name in ("partial", "source"))
    precision, model = PRECISIONS.get(made.dtype, made.dtype.lower()), source
    try:
        with storage_errors(output):
            for leftover in (partial_output, whole):  # of an export that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if recipe is not None:
                from_checkpoint(directory, source, recipe, whole, ExportInfo())
                model = whole
            check_links(model, directory if model is source else None)
            partial_output.mkdir(parents=True)
            rounding, checked = write_gguf(model, partial_output / made.gguf, precision, directory.resolve().name)
            write_text(partial_output / "Modelfile", gguf_tokenizer.modelfile(made.gguf, model))
            write_card(directory, replace(made, rounding=rounding), partial_output)
            put_in_place(partial_output, output)
    finally:
        shutil.rmtree(partial_output, ignore_errors=True)
        shutil.rmtree(whole, ignore_errors=True)
    print("\n".join(filter(None, [checked, rounding])))
    finish(source, output, precision, push)
    return 0


def write_gguf(source: Path, file: Path, precision: str, name: str) -> tuple[str, str]:
    """Write a GGUF of a whole causal language model, read it back with transformers, and compare tokens and logits.

    `precision` is a key of GGUF_TYPES, for matrices. Norms and biases stay in fp32.

    Returns:
        What rounding costs ("" if nothing), and a sentence about the comparison.

    Raises:
        ConfigurationError: no form in GGUF is known for the model or its tokenizer.
        NumericError: what is read back is not what was written.
    """
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    stored = weight_files(str(source))
    problems = _problems(config)
    table, problem = gguf_tokenizer.token_table(tokenizer, config.get_text_config().vocab_size)
    problems += [problem] if problem else []
    if problems or table is None:
        raise ConfigurationError("\n".join([f"{source}: --format gguf: {REMEDY}", *(f"  {text}" for text in problems)]))
    family, rounding, wanted = FAMILIES[config.model_type], Rounding(), Type[GGUF_TYPES[precision]]
    writer = gguf.GGUFWriter(file, family.arch)
    writer.add_name(name)
    extra = _add_config(writer, config)
    gguf_tokenizer.add_to(writer, table, tokenizer, source)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if precision == "fp32" else f"MOSTLY_{wanted.name}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    left_out = {"lm_head.weight"} if config.tie_word_embeddings else set()
    mapped = {key: names.get_name(key, (".weight", ".bias")) or "" for key in stored.keys() - left_out}
    if unknown := sorted(key for key, target in mapped.items() if not target):
        raise ConfigurationError(f"{source}: --format gguf has no name for {', '.join(unknown[:3])}; {REMEDY}")
    for key, target in mapped.items():
        shape, kind = stored[key].shape, _type(stored[key].shape, wanted)
        as_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(target, as_bytes, np.dtype(np.uint8), math.prod(as_bytes), kind)
    for target, values in extra.items():
        writer.add_tensor_info(target, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key in mapped:
        tensor = read(stored, [key])[key].float()
        kind = _type(tensor.shape, wanted)
        if kind == Type.F16 and (error := out_of_range(key, tensor, torch.float16)):
            raise error
        written = gguf.quantize(_as_stored(tensor, key, config).numpy(), kind)
        if kind != Type.F32:
            rounding.add(_as_stored(tensor, key, config), torch.from_numpy(gguf.dequantize(written, kind)))
        writer.write_tensor_data(written)
    for values in extra.values():
        writer.write_tensor_data(values)
    writer.close()
    checked = f"{gguf_tokenizer.check(file, tokenizer, table)}; {_check_logits(source, file, config, wanted)}"
    return rounding.text(precision), checked


def _problems(config: PreTrainedConfig) -> list[str]:
    """List what a file of this family cannot state, so that llama.cpp would compute something else."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return [f"model_type: found {config.model_type}; of {', '.join(FAMILIES)} the form is known and tested"]
    get: Any = lambda key: getattr(config, key, None)  # noqa: E731
    activation = get("hidden_act") or get("hidden_activation")
    problems = []
    if (get("hidden_activation") or activation) != family.activation:
        problems.append(f"activation: found {activation}; llama.cpp computes {family.activation}")
    for part, rope in _ropes(config).items():
        kind, named = rope.get("rope_type", "default"), f"rope_parameters{part and '.'}{part}"
        if kind not in (family.ropes if part != "sliding_attention" else ("default",)):
            problems.append(f"{named}.rope_type: found {kind}; a file can state {', '.join(family.ropes)}")
        given = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
        if given or rope.get("truncate") is False or rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"{named}: found {rope}; of these only type, theta, factor and lengths can be stated")
    if (scale := get("query_pre_attn_scalar")) and (scale != config.head_dim or config.num_hidden_layers in (46, 62)):
        # llama.cpp takes models of 46 (Gemma 2) and 62 layers (Gemma 3) for those of 27 billion parameters
        problems.append(f"query_pre_attn_scalar: found {scale}; known is the size of a head, {config.head_dim}")
    kinds = get("layer_types") or ["full_attention"] * config.num_hidden_layers
    every = family.full_every
    if every:
        usual = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(len(kinds))]
    else:
        usual = ["full_attention"] * len(kinds)
    if list(kinds) != usual and config.model_type != "mistral":
        problems.append(f"layer_types: found {kinds}; llama.cpp computes {usual}")
    if get("attention_bias") and family.arch != "llama":
        problems.append("attention_bias: found true; llama.cpp has none")
    return problems


def _ropes(config: PreTrainedConfig) -> dict[str, dict]:
    """Return rope parameters by kind of layer; "" for a config with one kind."""
    rope = config.rope_parameters or {}
    return rope if all(isinstance(value, dict) for value in rope.values()) and rope else {"": rope}


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_config(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Add the model's sizes and its rotary embedding. Returns tensors to write beside the weights, fp32, by name."""
    window = getattr(config, "sliding_window", None) or 0
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(window)
    elif config.model_type == "phi3":
        writer.add_sliding_window(window)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_context_length(gguf_tokenizer.context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            getattr(writer, f"add_{key}")(getattr(config, key))
    ropes = _ropes(config)
    rope = ropes.get("full_attention") or ropes[""]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        exponents = torch.arange(0, _head_dim(config), 2).float() / _head_dim(config)
        return {"rope_freqs.weight": (rope["rope_theta"] ** -exponents / frequencies).numpy()}
    if kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    return {}


def _type(shape: torch.Size | tuple[int, ...], wanted: Type) -> Type:
    if len(shape) < 2:
        return Type.F32
    return Type.F16 if wanted == Type.Q8_0 and shape[-1] % _BLOCK else wanted


def _as_stored(tensor: Tensor, key: str, config: PreTrainedConfig) -> Tensor:
    """Return a weight of transformers' in llama.cpp's form, fp32, of the same shape."""
    family = FAMILIES[config.model_type]
    if family.norm_offset and key.endswith("norm.weight"):
        return tensor + family.norm_offset
    if family.rotary_pairs and any(f".{part}_proj." in key for part in "qk"):
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


@torch.no_grad()
def _check_logits(source: Path, file: Path, config: PreTrainedConfig, wanted: Type) -> str:
    """Compare the logits of the file with those of the source, exact and with its matrices rounded as in the file.

    Returns a sentence. Raises NumericError if the file's differ from the rounded source's by more than TOLERANCE.
    """
    as_llama = {**config.to_dict(), "model_type": "llama"}  # a file does not say that it is Mistral's
    as_read = LlamaConfig.from_dict(as_llama) if config.model_type == "mistral" else config
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    rows = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    exact = model(rows).logits
    for parameter in model.parameters():
        kind = _type(parameter.shape, wanted)
        values = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
        parameter.copy_(torch.from_numpy(values).view(parameter.shape))
    rounded = model(rows).logits
    del model  # the other is read without it in memory
    other = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, config=as_read, **options).eval()
    logits = other(rows).logits
    difference, cost = ((logits - values).abs().max().item() for values in (rounded, exact))
    limit = TOLERANCE * exact.abs().max().item()
    if not difference <= limit:
        raise NumericError(
            f"{file}: deleted: read back by transformers, its logits differ from the model's by {difference:.1e} "
            f"({limit:.1e} is allowed); {REMEDY}"
        )
    compared = (
        f"differ by at most {difference:.1e} (allowed: {limit:.1e}), and by {cost:.1e} with the rounding of weights"
    )
    return f"logits read back from the file {compared}"
