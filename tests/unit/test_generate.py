"""generate and chat, with a model whose every next token is known: each token has
one successor, which an output head that reads a one-hot embedding tells."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from chat_templates import tokenizer_of
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from samecurve.cli import commands
from samecurve.data.tokenizer import BEGIN_OF_TEXT, BEGIN_OF_TURN, CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN
from samecurve.inference import chat
from samecurve.inference.generation import GenerationOptions
from samecurve.inference.generator import TextGenerator, load_generator, sample

HELLO = ["\n", "h", "i", END_OF_TURN]


def tokenizer(template: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and the markers. Its eos is not what ends a turn, as in many base models."""
    names = (BEGIN_OF_TEXT, END_OF_TEXT, None, BEGIN_OF_TURN, END_OF_TURN)
    return tokenizer_of(CHAT_TEMPLATE if template else None, *names)


def written(folder, successors, template: bool = True, positions: int = 512):
    """A model folder. successors: characters or markers, each followed by the next one."""
    found = tokenizer(template)
    size = 2 * -(-len(found) // 2)
    shape = {"hidden_size": size, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**shape, vocab_size=len(found), max_position_embeddings=positions, eos_token_id=None)
    model = LlamaForCausalLM(config)
    ids = [found.encode(each, add_special_tokens=False)[0] for each in successors]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(found), size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in zip(ids, ids[1:], strict=False):
            model.lm_head.weight[after, before] = 1.0
    model.save_pretrained(folder)
    found.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def polite(tmp_path_factory):
    return written(tmp_path_factory.mktemp("polite"), HELLO)


def test_a_chat_model_answers_a_turn_and_stops_at_its_end(polite, capsys):
    assert load_generator(polite).end_tokens == [
        tokenizer().eos_token_id,
        tokenizer().convert_tokens_to_ids(END_OF_TURN),
    ]
    assert commands.main(["generate", str(polite), "--prompt", "say", "--temperature", "0", "--system", "be"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("[say]\nhi\n") and "a user's message" in out


def test_raw_continues_the_text(polite, capsys):
    arguments = ["generate", str(polite), "--prompt", "h", "--temperature", "0", "--max_new_tokens", "2", "--raw"]
    assert commands.main(arguments) == 0
    assert capsys.readouterr().out.endswith("[h]i\n")
    assert commands.main([*arguments, "--system", "be"]) == 2
    assert "gets the prompt as plain text" in capsys.readouterr().err


@pytest.mark.parametrize("adds", [False, True])
def test_a_text_begins_as_the_runs_documents_did(adds, polite, monkeypatch):
    """Whether or not the tokenizer itself adds the token that begins a text; the empty prompt is this token alone."""
    generator = load_generator(polite, raw=True)
    one = generator.tokenizer
    begin, ids = one.bos_token_id, one("hi", add_special_tokens=False)["input_ids"]
    if adds:
        marks = [(BEGIN_OF_TEXT, begin)]
        one.backend_tokenizer.post_processor = TemplateProcessing(f"{BEGIN_OF_TEXT} $A", special_tokens=marks)
    asked: list[list] = []
    monkeypatch.setattr(
        TextGenerator, "generate", lambda _, encoded, options: asked.append(encoded["input_ids"].tolist())
    )
    for recipe, expected in ((cast(Any, object()), [begin, *ids]), (None, [begin, *ids] if adds else ids)):
        known = replace(generator, recipe=recipe)
        for prompt, tokens in (("hi", expected), ("", [begin])):
            with suppress(TypeError):  # the stand-in has no answer
                sample(known, prompt, None, cast(Any, None), 1)
            assert asked.pop() == [tokens]
    rows = replace(generator, recipe=cast(Any, object())).encode(["hi", "h"], rendered=False)
    assert rows["input_ids"].tolist() == [[begin, *ids], [one.pad_token_id, begin, ids[0]]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


def test_another_head_is_refused(tmp_path, capsys):
    """A tied output head would be made of its embedding, and write nonsense."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=300)
    config.tie_word_embeddings = True
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert commands.main(["generate", str(tmp_path)]) == 2
    assert "the model is a LlamaForSequenceClassification, which does not generate text; use" in capsys.readouterr().err


def test_what_does_not_fit_is_told(tmp_path, capsys):
    folder = written(tmp_path, HELLO, positions=16)
    assert commands.main(["generate", str(folder), "--prompt", "x" * 40]) == 2
    assert "the model only 16 positions" in capsys.readouterr().err
    assert commands.main(["generate", str(folder), "--temperature", "-1"]) == 2
    assert commands.main(["generate", str(folder), "--max_new_tokens", "0"]) == 2


# chat


def test_a_question_through_a_pipe(polite, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("how are you\n"))
    assert commands.main(["chat", str(polite), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "hi\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert commands.main(["chat", str(polite)]) == 2
    assert "standard input: found no prompt" in capsys.readouterr().err


def test_a_model_without_a_template_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert commands.main(["chat", str(written(tmp_path, HELLO, template=False))]) == 2
    assert "the model has no chat template; use python -m samecurve generate" in capsys.readouterr().err


def test_a_thought_is_no_part_of_an_answer(polite, monkeypatch):
    """As gpt-oss writes them. Neither `generate` nor the conversation of `chat` keeps the thought."""
    generator = load_generator(polite)
    generator.tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>"]})
    text = "<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes"
    answer = torch.tensor(generator.tokenizer.encode(text, add_special_tokens=False))

    def generate(input_ids, streamer=None, **_):
        if streamer:
            for ids in (input_ids[0], *answer[:, None]):
                streamer.put(ids)
            streamer.end()
        return torch.cat([input_ids[0], answer])[None]

    monkeypatch.setattr(generator.model, "generate", generate)
    assert sample(generator, "say", None, GenerationOptions(64, 0.0), 0) == "yes"
    talk = chat.ChatSession(generator, GenerationOptions(64, 0.0), print_=lambda piece: None)
    talk.answer("say")
    assert talk.turns[-1]["content"] == "yes"
    assert replace(generator, chat=False).text(answer.tolist()) == "analysishmfinalyes"


def talked(folder, lines, print_=None) -> chat.ChatSession:
    talk = chat.ChatSession(load_generator(folder), GenerationOptions(8, 0.0), print_=print_)
    given = iter(lines)

    def read(_):
        try:
            line = next(given)
        except StopIteration:
            raise EOFError from None
        if isinstance(line, BaseException):
            raise line
        return line

    assert chat.read_and_answer(talk, read) == 0
    return talk


def test_a_conversation_keeps_its_turns(polite, capsys):
    talk = talked(polite, ["one", "", KeyboardInterrupt(), "two"])
    said = [{"role": "user", "content": text} for text in ("one", "two")]
    answer = {"role": "assistant", "content": "hi"}
    assert talk.turns == [said[0], answer, said[1], answer]
    assert capsys.readouterr().out.count("hi\n") == 2


def test_commands(polite, capsys):
    talk = talked(polite, ["one", "/system be brief", "two", "/what", "/quit", "three"])
    assert talk.system == "be brief" and [turn["content"] for turn in talk.turns] == ["two", "hi"]
    assert "/what: unknown command; /system" in capsys.readouterr().out
    assert talked(polite, ["one", "/reset"]).turns == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_written(tmp_path):
    folder = written(tmp_path, ["\n", "a", " ", "a"])
    pieces = []

    def print_(text):
        pieces.append(text)
        if len("".join(pieces)) >= 2:
            pieces.clear()
            raise KeyboardInterrupt

    talk = chat.ChatSession(load_generator(folder), GenerationOptions(500, 0.0), print_=print_)
    talk.answer("go")
    assert talk.turns[1]["content"].startswith("a") and len(talk.turns[1]["content"]) < 20


def test_a_conversation_that_is_too_long_goes_on_without_the_turn(tmp_path, capsys):
    talk = talked(written(tmp_path, HELLO, positions=64), ["one", "x" * 80])
    assert len(talk.turns) == 2
    assert (
        "the model only 64 positions; shorten the prompt; /reset begins a new conversation" in capsys.readouterr().out
    )


# lm_eval

TOY = """
task: toy
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["i", "x"]
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_the_command_of_lm_eval(polite, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        commands.main(
            ["lm_eval", str(polite), "arc_easy", "--show", "--harness_options", "--num_fewshot 5", "--limit", "9"]
        )
        == 0
    )
    words = shlex.split(capsys.readouterr().out)
    assert words[1:6] == ["-m", "lm_eval", "run", "--model", "hf"] and words[-3:] == [
        "--apply_chat_template",
        "--num_fewshot",
        "5",
    ]
    loaded = json.loads(words[words.index("--model_args") + 1])
    assert loaded == {"pretrained": str(polite), "tokenizer": str(polite), "dtype": "float32"}
    assert words[words.index("--tasks") + 1] == "arc_easy" and words[words.index("--limit") + 1] == "9"
    assert commands.main(["lm_eval", str(polite), "arc_easy", "--raw"]) == 2
    assert capsys.readouterr().err.endswith("install it: pip install -c constraints.txt -r requirements-eval.txt\n")


def test_lm_eval_has_a_time_limit(polite, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("samecurve.inference.lm_eval.build_command", lambda *_: ["sleep", "60"])
    assert commands.main(["lm_eval", str(polite), "arc_easy", "--timeout_minutes", "0.005"]) == 124
    assert "lm_eval: not finished after --timeout_minutes 0.005" in capsys.readouterr().err


@pytest.mark.full
def test_lm_eval_counts_what_is_known(polite, tmp_path):
    """h is followed by i, so three of four are right."""
    pytest.importorskip("lm_eval")
    rows = [{"question": "h", "answer": answer} for answer in (0, 0, 0, 1)]
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "toy.yaml").write_text(TOY % (tmp_path / "toy.jsonl"))
    arguments = ["--raw", "--output", str(tmp_path / "results"), "--harness_options", f"--include_path {tmp_path}"]
    assert commands.main(["lm_eval", str(polite), "toy", *arguments]) == 0
    (found,) = (tmp_path / "results").rglob("results*.json")
    assert json.loads(found.read_text())["results"]["toy"]["acc,none"] == 0.75
