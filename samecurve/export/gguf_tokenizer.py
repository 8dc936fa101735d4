"""The tokenizer in a GGUF's metadata, and the Modelfile of Ollama with the chat template and the stop tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import transformers
from gguf import TokenType
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from samecurve.data.chat_encoder import end_tokens
from samecurve.data.time_limit import RenderTimeout, render_limit
from samecurve.errors import ConfigurationError, NumericError
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SPACE = "\u2581"  # how SentencePiece writes a space
# Texts with digits, cases, accents, contractions, code and white space, on which splits of text differ.
PROBES = (
    "The year 2024, 1234567 and 3.14: don't, DON'T, we'll.",
    "def f(x_1):\n    return {'a': [1, 2]}  # x\n\n\n\tEND",
    "Grüße, Ærøskøbing, привет, 你好世界, こんにちは, 👩\u200d🚀 x\u0303",
    "  two  spaces   and a\ttab \r\n end ",
    "CamelCaseWord HTTPServer <b>html</b> a/b\\c ... !!! $5",
)
_NUM_CTX = 8192  # Ollama allocates the cache of the whole context at once


class TokenTable(NamedTuple):
    """A tokenizer in llama.cpp's terms: one token, type and score per row of the embedding.

    Attributes:
        model: gpt2 (byte-level BPE) or llama (SentencePiece's BPE with bytes for the unknown).
        pre: llama.cpp's name of the regular expression that splits text.
        ignore_merges: whether a word that is a token is not merged from parts; llama.cpp knows it by `pre`.
        space_prefix: whether a text begins with a space.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    ignore_merges: bool = False
    space_prefix: bool = False


def token_table(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[TokenTable | None, str]:
    """Describe a tokenizer, for an embedding of `num_rows` rows. Returns (table, "") or (None, why there is none)."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None, f"tokenizer: {type(tokenizer).__name__} has no tokenizer.json, from which its splits are known"
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    # an added token may have no row: Gemma 3's tokenizer has one for images, which its text models never meet
    added = tokenizer.added_tokens_decoder
    with_row = (index for index in tokenizer.get_vocab().values() if index < num_rows or index not in added)
    model, num_tokens = description["model"], max(with_row) + 1
    if model["type"] != "BPE":
        return None, f"tokenizer: found {model['type']}; BPE is known"
    if num_tokens > num_rows:
        return None, f"tokenizer: found {num_tokens:,} tokens, but the embedding has {num_rows:,} rows"
    table = TokenTable("llama", "default", [], [], [], [], bool(model.get("ignore_merges")))
    if model.get("byte_fallback"):
        space_prefix = _space_prefix(description)
        if space_prefix is None:
            return None, "tokenizer: replaces or splits text as neither Llama's nor Gemma's does"
        table = table._replace(space_prefix=space_prefix)
    else:
        pre = _pre(description, table.ignore_merges)
        if pre is None:
            return None, "tokenizer: splits text by a rule for which llama.cpp's name is not known here"
        table = table._replace(model="gpt2", pre=pre)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    table.merges.extend(" ".join(pair) for pair in pairs)
    _add_tokens(table, tokenizer, num_rows, {"".join(pair): -float(rank) for rank, pair in [*enumerate(pairs)][::-1]})
    return table, ""


def _add_tokens(table: TokenTable, tokenizer: PreTrainedTokenizerFast, num_rows: int, ranks: dict[str, float]) -> None:
    """Fill the table's rows. ranks: minus the place of the first merge that makes a token."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    added, is_sentencepiece = tokenizer.added_tokens_decoder, table.model == "llama"
    for index in range(num_rows):
        token, kind = names.get(index, f"[PAD{index}]"), TokenType.NORMAL
        if index not in names:
            kind = TokenType.UNUSED
        elif is_sentencepiece and index == tokenizer.unk_token_id:
            kind = TokenType.UNKNOWN
        elif index in added and added[index].special:
            kind = TokenType.CONTROL
        elif index in added:
            token, kind = token.replace(SPACE, " "), TokenType.USER_DEFINED
        elif is_sentencepiece and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kind = TokenType.BYTE
        table.tokens.append(token)
        table.types.append(kind)
        table.scores.append(ranks.get(token, -float(len(ranks))))


def _pre(description: dict, ignore_merges: bool) -> str | None:
    """Return llama.cpp's name of a byte-level tokenizer's splits; None for others."""
    splits = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if splits is None:
        raise ConfigurationError(f"--format gguf: needs transformers 5.23 or later, found {transformers.__version__}")
    if (description["normalizer"] or {"type": "NFC"})["type"] != "NFC":  # llama.cpp leaves text as it is
        return None
    first: dict[str, Any] = description["pre_tokenizer"] or {"type": None}
    stages: list[dict[str, Any]] = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    kinds = [stage["type"] for stage in stages]
    if kinds[-1] != "ByteLevel" or stages[-1].get("add_prefix_space") or len(kinds) > 2:
        return None
    if stages[-1].get("use_regex", True):
        digits = kinds == ["Digits", "ByteLevel"] and stages[0]["individual_digits"]
        name = "gpt-2" if kinds == ["ByteLevel"] else "smollm" if digits else None
        return None if ignore_merges else name
    if kinds[0] != "Split" or stages[0]["behavior"] != "Isolated" or stages[0]["invert"]:
        return None
    known = {"qwen2": False, "qwen35": False, "gpt-4o": False, "llama-bpe": True, "tekken": True, "smaug-bpe": False}
    pattern = stages[0]["pattern"].get("Regex")
    return next((name for name, ignores in known.items() if (splits[name], ignores) == (pattern, ignore_merges)), None)


def _space_prefix(description: dict) -> bool | None:
    """Return whether a tokenizer with SentencePiece's spaces begins a text with one; None if it does other things."""
    normalizer: dict[str, Any] = description["normalizer"] or {"type": None}
    pre: dict[str, Any] = description["pre_tokenizer"] or {"type": None}
    stages: list[dict[str, Any]] = normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if pre["type"] == "Metaspace" and stages == [{"type": None}] and not pre["split"]:
        return pre["prepend_scheme"] != "never"
    # Gemma's Split of spaces finds none: they are replaced before
    if stages[-1] != replace or pre["type"] not in (None, "Split"):
        return None
    return {1: False, 2: stages[0] == {"type": "Prepend", "prepend": SPACE} or None}.get(len(stages))


def add_to(writer: gguf.GGUFWriter, table: TokenTable, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Add the tokenizer, the tokens that end a text and a turn, and the chat template to a file's metadata."""
    writer.add_tokenizer_model(table.model)
    writer.add_tokenizer_pre(table.pre)
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.types)
    if table.model == "llama":
        writer.add_token_scores(table.scores)
        writer.add_add_space_prefix(table.space_prefix)
    else:
        writer.add_token_merges(table.merges)
    for kind in ("bos", "eos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{kind}_token_id")) is not None and index < len(table.tokens):
            getattr(writer, f"add_{kind}_token_id")(index)
    ends = [index for index in stops(tokenizer, source) if index != tokenizer.eos_token_id]
    for kind, index in zip(("eot", "eom"), ends, strict=False):
        getattr(writer, f"add_{kind}_token_id")(index)
    begins, ended = _adds(tokenizer)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ended)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _adds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether the tokenizer puts the beginning of text before, and the end of text behind, what it encodes."""
    ids = tokenizer("a").input_ids
    return ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id


def stops(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    """List the ids that end a generation, by tokenizer, chat template and generation_config.json of `source`."""
    stored = read_record(source / "generation_config.json").value or {}
    return end_tokens(tokenizer, stored.get("eos_token_id"))


def check(file: Path, tokenizer: PreTrainedTokenizerBase, table: TokenTable) -> str:
    """Compare the tokens of PROBES with those of the tokenizer that transformers makes of the file.

    Returns a sentence. Raises NumericError where they differ.
    """
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)  # see token_table
    ours, theirs = tokenizer.backend_tokenizer, other.backend_tokenizer
    theirs.model.ignore_merges = table.ignore_merges  # llama.cpp knows this by `pre`, transformers 5.23 does not
    if table.model == "llama" or table.pre == "smollm":  # nor these splits, nor the space before a text
        theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
    probes = [*PROBES, *(f"a{token}b" for token in tokenizer.all_special_tokens if token in table.tokens)]
    for text in probes:
        expected, read_back = (one.encode(text, add_special_tokens=False) for one in (tokenizer, other))
        if expected != read_back:
            raise NumericError(f"{file}: deleted: {text!r} is {expected} in the model, but {read_back} in the file")
    return f"{len(probes)} texts give the same tokens"


def modelfile(file: str, source: Path) -> str:
    """Return the Modelfile for `ollama create`: file, template, stop tokens and length of the context."""
    tokenizer, config = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    lines = [f"FROM ./{file}"]
    template = go_template(tokenizer) if tokenizer.chat_template else "{{ .Prompt }}"
    if template is None:
        lines.append(
            "# no TEMPLATE: the chat template is not text around each message; Ollama looks for one that it knows"
        )
    else:
        lines.append(f'TEMPLATE """{template}"""')
    for token in tokenizer.convert_ids_to_tokens(stops(tokenizer, source)):
        lines.append(f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}")
    return "\n".join([*lines, f"PARAMETER num_ctx {min(context_length(config), _NUM_CTX)}", ""])


def context_length(config: PreTrainedConfig) -> int:
    """Return the number of positions at which llama.cpp computes what the model does."""
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "phi3") and window:  # llama.cpp computes full attention, equal up to the window
        return min(length, window)
    return length


def go_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Translate a chat template that writes a fixed text before and after each message to Ollama's (Go's) language.

    The texts are found by rendering, and tried on conversations. Returns None for a template that does more.
    """

    def render(roles: str, prompt: bool = True) -> str:
        named = {"s": "system", "u": "user", "a": "assistant"}
        messages = [{"role": named[role], "content": f"<<{index}>>"} for index, role in enumerate(roles)]
        with render_limit():
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)  # of tokenize=False
        bos = tokenizer.bos_token if _adds(tokenizer)[0] else None  # llama.cpp adds it, too
        return text.removeprefix(bos) if isinstance(bos, str) else text

    try:
        after = render("su", False).partition("<<1>>")[2]
        parts = re.split("<<[0-9]>>", render("suau"))
        before_answer, prompt = parts[2].removeprefix(after), parts[4].removeprefix(after)
        after_answer = render("sua", False).partition("<<2>>")[2]
        before_user = parts[3].removeprefix(after_answer)
        around = {
            "s": (parts[0], parts[1].removesuffix(before_user)),
            "u": (before_user, after),
            "a": (before_answer, after_answer),
        }
        default = render("u").partition("<<0>>")[0].removesuffix(before_user)
        for roles in ("u", "uau", "uauau", "su", "suau", "suauau"):
            body = "".join(f"<<{index}>>".join(around[role]) for index, role in enumerate(roles))
            if render(roles) != ("" if "s" in roles else default) + body + prompt:
                return None
    except (TemplateError, IndexError, RenderTimeout):  # a template may refuse roles, or have no end
        return None
    if any(mark in part for part in (default, prompt, *sum(around.values(), ())) for mark in ("{{", '"""')):
        return None
    cases = " else ".join(
        f'if eq .Role "{name}" }}}}{around[name[0]][0]}{{{{ .Content }}}}{around[name[0]][1]}{{{{'
        for name in ("system", "user", "assistant")
    )
    default = default and f"{{{{ if not .System }}}}{default}{{{{ end }}}}"
    return f"{default}{{{{ range .Messages }}}}{{{{ {cases} end }}}}{{{{ end }}}}{prompt}"
