"""Recipes: every mistake with what its message must say, and what a good recipe becomes."""

# ruff: noqa: E501 - one problem, one line

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from report_cases import BLOCK, GOOD, INTEGER, NUMBER, TEXT, Plan, changed, check_report, message, write

from samecurve.config import rules
from samecurve.config.documents import Document
from samecurve.config.inheritance import apply_override, latest_overrides
from samecurve.config.loader import load_recipe, read_recipe
from samecurve.config.rules import in_steps
from samecurve.config.schema import Batch
from samecurve.errors import ConfigurationError
from samecurve.strategy.resolve import command_line, resolve_plan

R = ["r.yaml"]
NO_SIZE = [*R, "tokenizer.vocabulary_size=null"]
STREAM = [*NO_SIZE, "tokenizer.path=t", "data.streaming=true"]
MIXED = [*R, "data.path=null"]
PATHS = ("output_dir", "model.path", "adapter.path", "tokenizer.path", "tokenizer.chat_template", "distill.teacher")
PATHS += ("data.path", "data.pattern", "data.cache_dir", "evaluate.path")
TEMPLATES = ["{{ messages }}", "{% for message in messages %}{{ message.content }}" + "\n" * 300 + "{% endfor %}"]


def r(old, new):
    return changed("r.yaml", old, new)


def add(text):
    return {"r.yaml": GOOD["r.yaml"] + text}


# name, changed files, command line, environment, the report's rows (see report_cases.py)
# fmt: off
CASES = [
    ("unknown block", {}, [*R, "dta.path=x"], {},
     [("command line", "dta", "unknown key", "data")]),
    ("muon with an adapter", {}, [*R, "model.path=m", "adapter.name=lora", "optimizer.name=muon"], {},
     [("command line", "optimizer.name", "muon", "adapter.name", "lora", "adamw")]),
    ("a new tokenizer for a pretrained model", {}, [*R, "model.path=m", "tokenizer.vocabulary_size=300"], {},
     [("command line", "tokenizer.vocabulary_size", "300", "model.path", "null")]),
    ("idle keys of an adapter", {}, [*R, "model.path=m", "adapter={dora: true, rank: 8, quantization: 4bit}"], {},
     [("command line", "adapter.dora", "true", "norms", "quantized", "false"),
      ("command line", "adapter.dora", "true", "adapter.name", "null", "lora", "remove"),
      ("command line", "adapter.quantization", "4bit", "adapter.name", "null", "lora", "remove"),
      ("command line", "adapter.rank", "8", "adapter.name", "null", "lora", "remove")]),
    ("nothing is adapted", {}, [*R, "model.path=m", "adapter={name: lora, target_modules: []}"], {},
     [("command line", "adapter.target_modules", "empty list", "adapter.target_parameters", "name what is adapted")]),
    ("rank and modules", {}, [*R, "adapter.target_modules=3", "adapter.rank=0"], {},
     [("command line", "adapter.rank", "0", "at least 1"),
      ("command line", "adapter.target_modules", "3", "pattern, a list of names or all-linear")]),
    ("an adapter of nothing", {}, [*R, "adapter.name=lora"], {},
     [("command line", "adapter.name", "lora", "pretrained", "model.path", "null")]),
    ("a tokenizer trained on a stream", {}, [*R, "data.streaming=true"], {},
     [("r.yaml:6", "tokenizer.vocabulary_size", "512", "data.streaming", "null", "tokenizer.path")]),
    ("what a stream cannot", {}, [*STREAM, "data.group_by_length=true", "data.packing=false", "data.num_workers=2"], {},
     [("command line", "data.group_by_length", "true", "data.streaming", "false"),
      ("command line", "data.num_workers", "2", "data.streaming", "set it to 0")]),
    ("the first rows of a stream", {}, [*STREAM, "data.path=null", "data.mixture=[{path: 'text.txt#5', weight: 1}]"], {},
     [("command line", "data.mixture.0.max_samples", "5", "data.streaming", "remove one")]),
    ("what only a stream can", {}, [*R, "data.shuffle_buffer_mib=1", "data.path=hf://a/b"], {},
     [("command line", "data.path", "hf://a/b", "URL", "data.streaming: true"),
      ("command line", "data.shuffle_buffer_mib", "1", "data.streaming is false", "remove")]),
    ("a URL to measure on", {}, [*STREAM, "evaluate.path=hf://a/b"], {},
     [("command line", "evaluate.path", "hf://a/b", "only training data", "URL", "data.streaming: true")]),
    ("a stream of chats", {}, [*STREAM, "task=sft"], {},
     [("command line", "data.streaming", "true", "pretrain, continue_pretrain", "task", "sft", "remove")]),
    ("wrong sources", {}, [*MIXED, "data.mixture=[{path: text.txt, weight: 0}, {path: r.yaml}, {path: configs, weight: 1, wieght: 1}, {path: nowhere, weight: 1}]"], {},
     [("command line", "data.mixture.0.weight", "0", "above 0"),
      ("command line", "data.mixture.1.weight", "missing", "add"),
      ("command line", "data.mixture.2.wieght", "unknown key", "weight"),
      ("command line", "data.mixture.3.path", "no such file or folder", "nowhere")]),
    ("sources that do not fit", {}, [*MIXED, "data.mixture=[{path: builtin:python-functions, weight: 1}, {path: ., weight: 1, pattern: ../x}, {path: text.txt, weight: 1, prompt_column: p}]"], {},
     [("command line", "data.mixture.0.path", "builtin:python-functions", "pretrain", "builtin:python-stdlib"),
      ("command line", "data.mixture.1.pattern", "../x", "data.mixture.1.path"),
      ("command line", "data.mixture.2.prompt_column", "p", "task", "sft", "pretrain", "remove")]),
    ("a source twice", {}, [*MIXED, "data.mixture=[{path: ., weight: 1}, {path: ., weight: 2}]"], {},
     [("command line", "data.mixture.1.path", "data.mixture.0")]),
    ("a source without a list", {}, [*MIXED, "data.mixture={path: a}"], {},
     [("command line", "data.mixture", BLOCK, "list")]),
    ("around a mixture", {}, [*R, "data.mixture=[{path: ., weight: 1}]", "data.path=.", "data.pattern=*.md", "data.packing=false", "data.group_by_length=true"], {},
     [("command line", "data.group_by_length", "true", "data.mixture", "false"),
      ("command line", "data.mixture", "data.path", "(.)", "null"),
      ("command line", "data.pattern", "*.md", "data.mixture", "data.mixture.0.pattern")]),
    ("layers without recomputation", {}, [*R, "memory.every_n_layers=3"], {},
     [("command line", "memory.every_n_layers", "3", "every_n_layers", "memory.activation_checkpointing", "none", "remove")]),
    ("every layer", {}, [*R, "memory.every_n_layers=1"], {},
     [("command line", "memory.every_n_layers", "1", "at least 2")]),
    ("compile and offload", {}, [*R, "compile=full", "memory.activation_checkpointing=offload"], {},
     [("command line", "compile", "full", "offload", "regional")]),
    ("unknown nested", r("micro_batch_size", "micro_batch_sise"), R, {},
     [("r.yaml:11", "batch.micro_batch_sise", "unknown key", "micro_batch_size")]),
    ("idle key", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  betas: [0.9, 0.99]\n  name: sgd"), R, {},
     [("r.yaml:15", "optimizer.betas", "a list", "adamw, lion, muon, adamw_bf16 and adamw_8bit", "optimizer.name", "sgd")]),
    ("groups without effect", {}, [*R, "optimizer.groups=[{pattern: a}, {pattern: b, frozen: true, weight_decay: 0}, {frozen: true}]"], {},
     [("command line", "optimizer.groups.2.pattern", "missing", "add")]),
    ("an idle group", {}, [*R, "optimizer.groups=[{pattern: a}, {pattern: b, frozen: true, weight_decay: 0}]"], {},
     [("command line", "optimizer.groups.0.pattern", "'a'", "sets nothing", "frozen: true"),
      ("command line", "optimizer.groups.1.pattern", "'b'", "is frozen", "weight_decay")]),
    ("weights of tokens", {}, [*R, "data.token_weights=true", "loss.implementation=liger"], {},
     [("command line", "data.token_weights", "Liger", "auto"),
      ("command line", "data.token_weights", "task: sft", "pretrain")]),
    ("labels of another kind", {}, [*R, "task=classify", "data.path=builtin:python-modules", "classify.problem_type=multi_label", "data.packing=false"], {},
     [("command line", "classify.problem_type", "multi_label", "builtin:python-modules", "data.path")]),
    ("classes of a number", {}, [*R, "task=classify", "data.path=r.yaml", "classify.problem_type=regression", "data.packing=false", "data.labels=[a, b]", "checkpoint={best: eval_f1, every_steps: 2}", "evaluate={every_steps: 2, path: text.txt}"], {},
     [("command line", "checkpoint.best", "eval_f1", "eval_loss, eval_mae, eval_pearson", "one of these"),
      ("command line", "data.labels", "a list", "regression", "remove")]),
    ("fp32 weights and kahan", {}, [*R, "optimizer.bf16_rounding=kahan"], {},
     [("command line", "optimizer.bf16_rounding", "kahan", "adamw_bf16", "optimizer.name", "adamw")]),
    ("bf16 weights", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  name: adamw_bf16\n  betas: [0.9, 0.999]"), [*R, "precision=fp32"], {},
     [("r.yaml:15", "optimizer.name", "adamw_bf16", "precision", "fp32", "bf16"),
      ("r.yaml:16", "optimizer.betas", "0.999", "0.99", "adamw")]),
    ("idle momentum", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  momentum: 0.5"), R, {},
     [("r.yaml:15", "optimizer.momentum", "0.5", "sgd and muon", "optimizer.name", "adamw")]),
    ("unknown elsewhere", add("learning_rate: 1e-3\n"), R, {},
     [("r.yaml:15", "learning_rate", "unknown key", "optimizer.learning_rate")]),
    ("of another framework", add("num_train_epochs: 3\nlr: 1e-3\nlora: true\ndeepspeed: x\n"), [*R, "batch.per_device_train_batch_size=2"], {},
     [("r.yaml:15", "num_train_epochs", "unknown key", "epochs"),
      ("r.yaml:16", "lr", "unknown key", "optimizer.learning_rate"),
      ("r.yaml:17", "lora", "unknown key", "adapter.name: lora"),
      ("r.yaml:18", "deepspeed", "unknown key", "--strategy configs/zero3.yaml"),
      ("command line", "batch.per_device_train_batch_size", "unknown key", "batch.micro_batch_size")]),
    ("a block as a value", {}, [*R, "model=runs/s2/model", "schedule=linear"], {},
     [("command line", "model", "runs/s2/model", BLOCK, "model.path=runs/s2/model"),
      ("command line", "schedule", "linear", BLOCK, "schedule.name=linear")]),
    ("nearly a recipe", {"recipes/sft.yaml": "steps: 1"}, ["recipes/sft.yml"], {},
     [("recipes/sft.yml", "", "No such file or directory", "recipes/sft.yml", "recipes/sft.yaml")]),
    ("a recipe's name", {"recipes/sft.yaml": "steps: 1"}, ["sft"], {},
     [("sft", "", "No such file or directory", "(sft)", "recipes/sft.yaml")]),
    ("nearly a strategy's name", {}, [*R, "--strategy", "zero22"], {},
     [("zero22", "", "No such file or directory", "(zero22)", "configs/zero2.yaml")]),
    ("1e-3 text", r("1e-3", '"1e-3"'), R, {},
     [("r.yaml:14", "optimizer.learning_rate", "1e-3", NUMBER, "remove the quotes")]),
    ("float int", r("steps: 10", "steps: 1e3"), R, {},
     [("r.yaml:2", "steps", "1000.0", INTEGER, "1000")]),
    ("float frac", r("steps: 10", "steps: 1.5"), R, {},
     [("r.yaml:2", "steps", "1.5", INTEGER)]),
    ("bool as int", r("steps: 10", "steps: true"), R, {},
     [("r.yaml:2", "steps", "true", INTEGER)]),
    ("profile order", add("profile: {steps: [3, 2]}\n"), R, {},
     [("r.yaml:15", "profile.steps", "[3, 2]", "swap")]),
    ("profile end", add("profile: {steps: [9, 11], ranks: [0, 1]}\n"), R, {},
     [("r.yaml:15", "profile.ranks", "1", "1 process", "0"),
      ("r.yaml:15", "profile.steps", "[9, 11]", "steps", "10")]),
    ("profile zero", add("profile: {steps: [0, 2]}\n"), R, {},
     [("r.yaml:15", "profile.steps.0", "0", "at least 1")]),
    ("profile one number", add("profile: {steps: 3}\n"), R, {},
     [("r.yaml:15", "profile.steps", "3", "list")]),
    ("zero lr", r("1e-3", "0"), R, {},
     [("r.yaml:14", "optimizer.learning_rate", "0", "above 0")]),
    ("seed", add("seed: 4294967296\n"), R, {},
     [("r.yaml:15", "seed", "4294967296", "at most 2147483647")]),
    ("small vocabulary", r("512}", "257}"), R, {},
     [("r.yaml:6", "tokenizer.vocabulary_size", "257", "at least 258")]),
    ("nowhere", {}, [*R, "output_dir=", "data.path=", "model.path=", "tokenizer.path=", "evaluate.path="], {},
     [("command line", "data.path", '""', "not empty"),
      ("command line", "evaluate.path", '""', "not empty"),
      ("command line", "model.path", '""', "not empty"),
      ("command line", "output_dir", '""', "not empty"),
      ("command line", "tokenizer.path", '""', "not empty")]),
    ("fraction", r("  path: text.txt", "  path: text.txt\n  validation_fraction: 1.0"), R, {},
     [("r.yaml:9", "data.validation_fraction", "1.0", "below 1")]),
    ("betas short", r("1e-3", "1e-3\n  betas: [0.9]"), R, {},
     [("r.yaml:15", "optimizer.betas.1", "missing", "add")]),
    ("betas long", r("1e-3", "1e-3\n  betas: [0.9, 0.9, 0.9]"), R, {},
     [("r.yaml:15", "optimizer.betas", "a list", "2 values", "3")]),
    ("betas value", r("1e-3", "1e-3\n  betas: [0.9, 1.5]"), R, {},
     [("r.yaml:15", "optimizer.betas.1", "1.5", "below 1")]),
    ("betas text", r("1e-3", "1e-3\n  betas: high"), R, {},
     [("r.yaml:15", "optimizer.betas", "high", "list")]),
    ("section scalar", r("batch:\n  global_batch_size: 8\n  micro_batch_size: 1\n  sequence_length: 64\n", "batch: 8\n"), R, {},
     [("r.yaml:9", "batch", "8", BLOCK)]),
    ("date", r("runs/x", "2024-01-01\nseed: 2024-01-01"),
     R, {}, [("r.yaml:2", "seed", "2024-01-01", INTEGER)]),
    ("bool text", r("  path: text.txt", "  path: text.txt\n  packing: maybe"), R, {},
     [("r.yaml:9", "data.packing", "maybe", "true or false")]),
    ("path number", r("runs/x", "7"), R, {},
     [("r.yaml:1", "output_dir", "7", TEXT)]),
    ("null", r("steps: 10", "steps:"), R, {},
     [("r.yaml:2", "steps", "null", INTEGER)]),
    ("duplicate", add("steps: 20\n"), R, {},
     [("r.yaml:15", "steps", "line 2", "keep one")]),
    ("duplicate nested", r("  micro_batch_size: 1\n", "  micro_batch_size: 1\n  micro_batch_size: 2\n"), R, {},
     [("r.yaml:12", "batch.micro_batch_size", "line 11", "keep one")]),
    ("syntax", r("steps: 10", "steps: [10"), R, {},
     [("r.yaml:3", "", "invalid YAML", "expected ',' or ']', but got ':'")]),
    ("tag", r("steps: 10", "steps: !!int ten"),
     R, {}, [("r.yaml", "", "invalid YAML", "invalid literal", "ten")]),
    ("alias in itself", r("steps: 10", "steps: &a [*a]"),
     R, {}, [("r.yaml:2", "", "invalid YAML", "an alias refers to a value that contains it")]),
    *((f"a name that no disk takes in {key}", {}, [*R, f"{key}=" + "a" * 300], {},
       [("command line", key, "300 bytes", "255")]) for key in PATHS),
    *((f"a NUL in {key}", {}, [*R, rf'{key}="~a\0b"'], {}, [("command line", key, "~a", "NUL")]) for key in PATHS),
    ("a long path", {}, [*R, "evaluate.path=" + "ab/" * 2000], {},
     [("command line", "evaluate.path", "6000 bytes", "4095")]),
    ("a NUL in a source", {}, [*MIXED, r'data.mixture=[{path: "a\0b", weight: 1}, {path: text.txt, weight: 1}]'], {},
     [("command line", "data.mixture.0.path", "NUL")]),
    ("a NUL in the path of a config", {}, [*R, r'model.config="a\0b"'], {},
     [("command line", "model.config", "null byte")]),
    *((f"a template in place of its file, {len(text)}", {}, [*R, "task=sft", "data.path=r.yaml", "data.packing=false", f"tokenizer.chat_template={text}"], {},
       [("command line", "tokenizer.chat_template", "is a template itself", "path of that file")]) for text in TEMPLATES),
    ("tab", r("  path: text", "\tpath: text"), R, {},
     [("r.yaml:8", "", "invalid YAML", "found character '\\t'")]),
    ("list", {"r.yaml": "- a\n"}, R, {},
     [("r.yaml", "", "a list", BLOCK)]),
    ("empty", {"r.yaml": ""}, R, {},
     [("r.yaml", "data.path", "missing", "set it to a file"),
      ("r.yaml", "model", "neither path", "add one"),
      ("r.yaml", "output_dir", "missing", "add")]),
    ("no file", {}, ["none.yaml"], {},
     [("none.yaml", "", "No such file or directory", "(none.yaml)")]),
    ("folder", {}, ["configs"], {},
     [("configs", "", "Is a directory", "(configs)")]),
    ("base missing, nothing else", {"r.yaml": "base: bace.yaml\nsteps: two\nschedule: {decay_steps: 3}\ndata: {path: gone}\n"}, R, {},
     [("r.yaml:1", "base", "no such file", "bace.yaml", "relative to r.yaml"),
      ("r.yaml:2", "steps", "two", INTEGER),
      ("r.yaml:4", "data.path", "no such file or folder", "gone")]),
    ("base broken", {"base.yaml": "steps: [1\n", "r.yaml": "base: base.yaml\nseed: one\n"}, R, {},
     [("base.yaml:2", "", "invalid YAML", "expected ',' or ']', but got '<stream end>'"),
      ("r.yaml:2", "seed", "one", INTEGER)]),
    ("base circle", {"r.yaml": "base: b.yaml\n", "b.yaml": "base: r.yaml\n"}, R, {},
     [("b.yaml:1", "base", "r.yaml", "remove")]),
    ("base number", add("base: 3\n"), R, {},
     [("r.yaml:15", "base", "3", "path of a recipe file")]),
    ("base's mistake", {"sub/base.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two"), "r.yaml": "base: sub/base.yaml\nseed: one\n"}, R, {},
     [("r.yaml:2", "seed", "one", INTEGER),
      ("sub/base.yaml:2", "steps", "two", INTEGER)]),
    ("override unknown", {}, ["r.yaml", "batch.micro=2"], {},
     [("command line", "batch.micro", "unknown key", "global_batch_size, micro_batch_size, sequence_length")]),
    ("override syntax", {}, ["r.yaml", "steps"], {},
     [("command line", "", "steps", "key.path=value")]),
    ("override yaml", {}, ["r.yaml", "optimizer.betas=[0.9"], {},
     [("command line", "optimizer.betas", "invalid YAML", "expected ',' or ']', but got '<stream end>'")]),
    ("override through value", {}, ["r.yaml", "steps.more=1"], {},
     [("command line", "steps.more", "steps", "10", "no keys")]),
    ("both model", r("model:", "model:\n  path: m"), R, {},
     [("r.yaml:4", "model", "path", "config", "null")]),
    ("no model", r("  config: {model_type: llama, num_hidden_layers: 4}", "  attention: eager"), R, {},
     [("r.yaml:4", "model", "path", "config", "add")]),
    ("no model type", r("model_type: llama, ", ""), R, {},
     [("r.yaml:5", "model.config", "missing", "model_type: llama")]),
    ("config sizes", r("llama, num_hidden_layers: 4", "gpt2, n_layer: 0, num_attention_heads: -1, vocab_size: 0"), R, {},
     [("r.yaml:5", "model.config.n_layer", "0", "at least 1"),
      ("r.yaml:5", "model.config.num_attention_heads", "-1", "at least 1"),
      ("r.yaml:5", "model.config.vocab_size", "0", "at least 1")]),
    ("config numbers", r("num_hidden_layers: 4", "num_hidden_layers: 100000000000000000000, initializer_range: .nan, rope_parameters: {rope_theta: .nan}"), R, {},
     [("r.yaml:5", "model.config.initializer_range", "NaN", "finite number"),
      ("r.yaml:5", "model.config.num_hidden_layers", "100000000000000000000", "at most 10,000"),
      ("r.yaml:5", "model.config.rope_parameters.rope_theta", "NaN", "finite number")]),
    ("many steps", {}, [*R, f"steps={'9' * 30}", f"seed=0x{'f' * 4000}"], {},
     [("command line", "seed", "16000 bits", "at most 2147483647"),
      ("command line", "steps", "999999999999999999999999999999", "at most 99999999")]),
    ("model type", r("model_type: llama", "model_type: 3"), R, {},
     [("r.yaml:5", "model.config.model_type", "3", TEXT, "llama")]),
    ("positions", r("num_hidden_layers: 4", "num_hidden_layers: 4, max_position_embeddings: 63"), R, {},
     [("r.yaml:12", "batch.sequence_length", "64", "max_position_embeddings", "model.config", "63", "at most 63")]),
    ("positions of gpt2", r("llama, num_hidden_layers: 4", "gpt2, n_positions: 32"), R, {},
     [("r.yaml:12", "batch.sequence_length", "64", "n_positions", "model.config", "32", "at most 32")]),
    ("positions of a folder", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./m"), "m/config.json": '{"n_positions": 8}'}, NO_SIZE, {},
     [("r.yaml:12", "batch.sequence_length", "64", "n_positions", "config.json", "8", "at most 8")]),
    ("model folder at home", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ~/nothing"), NO_SIZE, {},
     [("r.yaml:5", "model.path", "no such folder", os.path.expanduser("~/nothing"))]),
    ("model of an adapter", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: runs/lora/model"), "runs/lora/run.json": "{}", "runs/lora/model/adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, NO_SIZE, {},
     [("r.yaml:5", "model.path", "runs/lora/model has no adapter_model.safetensors", "copy the whole folder")]),
    ("model folder", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./nothing"), NO_SIZE, {},
     [("r.yaml:5", "model.path", "no such folder", "nothing")]),
    ("model empty folder", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./configs"), NO_SIZE, {},
     [("r.yaml:5", "model.path", "configs", "config.json", "Hugging Face model folder")]),
    ("an adapter", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./run/model"), "run/model/adapter_config.json": "{}", "run/run.json": "{}"}, NO_SIZE, {},
     [("r.yaml:5", "model.path", "run/model/adapter_config.json", "base_model_name_or_path", "missing", "correct the file")]),
    ("the run of an adapter", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: run"), "run/model/adapter_config.json": '{"base_model_name_or_path": "org/base"}', "run/run.json": "{}"}, NO_SIZE, {},
     [("r.yaml:5", "model.path", "set model.path to run/model to train it further", "python -m samecurve merge run", "run/merged")]),
    ("a run", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./run"), "run/model/config.json": "{}"}, NO_SIZE, {},
     [("r.yaml:5", "model.path", "run", "config.json", "run/model")]),
    ("wildcards", r("text.txt", "books/*.txt"), R, {},
     [("r.yaml:8", "data.path", "no such file or folder", "books/*.txt", "wildcards", "folder books", "data.pattern='*.txt'")]),
    ("both tok", r("512}", "512, path: t}"), R, {},
     [("r.yaml:6", "tokenizer", "path", "vocabulary_size", "keep one")]),
    ("no tok", r("tokenizer: {vocabulary_size: 512}\n", ""), R, {},
     [("r.yaml", "tokenizer", "tokenizer.path", "tokenizer.vocabulary_size", "add")]),
    ("no data", r("  path: text.txt", "  packing: true"), R, {},
     [("r.yaml:7", "data.path", "missing", "builtin:python-stdlib", "data.path=")]),
    ("eval path", add("evaluate: {path: nope, every_steps: 5}\n"), R, {},
     [("r.yaml:15", "evaluate.path", "no such file or folder", "nope")]),
    ("the hub's keys of a file", {}, [*R, "data.split=test", "data.config=a", "data.revision=v1", "evaluate.split=test"], {},
     [("command line", "data.config", '"a"', "text.txt", "remove"),
      ("command line", "data.revision", "v1", "text.txt", "remove"),
      ("command line", "data.split", "test", "text.txt", "remove"),
      ("command line", "evaluate.split", "test", "text.txt", "evaluate.path")]),
    ("the hub's keys of what is built in", {}, [*R, "data.path=builtin:python-stdlib", "data.split=test"], {},
     [("command line", "data.split", "test", "builtin:python-stdlib", "remove")]),
    ("a split and a pattern", {}, [*R, "data.path=org/name", "data.pattern=*.txt", "data.split=test"], {},
     [("command line", "data.split", "test", "data.pattern", "keep one")]),
    ("bad rows of a stream", {}, [*NO_SIZE, "tokenizer.path=t", "data.streaming=true", "data.bad_rows=drop"], {},
     [("command line", "data.bad_rows", "drop", "data.streaming", "stop")]),
    ("a revision of a URL", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name@v1", "data.streaming=true", "data.revision=v2"], {},
     [("command line", "data.revision", "v2", "hf://datasets/org/name@v1", "hf://datasets/OWNER/NAME@REVISION")]),
    ("the split that is trained on", {}, [*R, "data.path=org/name", "evaluate.split=train"], {},
     [("command line", "evaluate.split", "train", "another split")]),
    ("a split beside files", {}, [*R, "data.path=org/name", "data.pattern=a*", "evaluate.split=test"], {},
     [("command line", "evaluate.split", "test", "data.pattern", "evaluate.path")]),
    ("a split beside a file", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name/a.jsonl", "data.streaming=true", "evaluate.split=test"], {},
     [("command line", "evaluate.split", "test", "data.path", "evaluate.path")]),
    ("another revision to measure on", {}, [*R, "data.path=org/name", "evaluate.split=test", "evaluate.revision=v1"], {},
     [("command line", "evaluate.revision", "v1", "data.revision", "main", "set it to main")]),
    ("the split that is trained on, in other words", {}, [*R, "data.path=org/name", "data.revision=main", "evaluate.path=org/name", "evaluate.split=train", "evaluate.config=default"], {},
     [("command line", "evaluate.split", "train", "another split")]),
    ("the split that is trained on, of a URL", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name@main", "data.streaming=true", "evaluate.path=org/name", "evaluate.split=train"], {},
     [("command line", "evaluate.split", "train", "another split")]),
    ("no split to measure on", {}, [*R, "evaluate.path=org/name"], {},
     [("r.yaml", "evaluate.split", "missing", "org/name", "validation or test")]),
    ("a config that nothing reads", {}, [*R, "data.path=org/name", "evaluate.config=a"], {},
     [("command line", "evaluate.config", '"a"', "evaluate.split")]),
    ("a split of a mixture", {}, [*R, "data.path=null", "data.mixture=[{path: org/name, weight: 1}, {path: text.txt, weight: 1, split: test}]", "data.split=a"], {},
     [("command line", "data.mixture.1.split", "test", "text.txt", "remove"),
      ("command line", "data.split", '"a"', "data.mixture")]),
    ("the file that is trained on", {}, [*R, "evaluate.path=./text.txt"], {},
     [("command line", "evaluate.path", "./text.txt", "data.path (text.txt)", "data.validation_fraction")]),
    ("a file of the folder that is trained on", {"folder/a.txt": "words", "folder/held_out.txt": "words"}, [*R, "data.path=folder", "evaluate.path=folder/held_out.txt"], {},
     [("command line", "evaluate.path", "folder/held_out.txt", "data.path (folder)", "data.pattern")]),
    ("a folder of a source", {"folder/a.txt": "words", "folder/x/b.txt": "words"}, [*R, "data.path=null", "data.mixture=[{path: text.txt, weight: 1}, {path: folder, weight: 1, pattern: '**/*.txt'}]", "evaluate.path=folder/x"], {},
     [("command line", "evaluate.path", "folder/x", "data.mixture.1.path (folder)", "data.mixture.1.pattern")]),
    ("data in output_dir", {"runs/x/mine.txt": "words"}, [*R, "data.path=runs/x/mine.txt", "evaluate.path=runs/x"], {},
     [("command line", "data.path", "runs/x/mine.txt", "output_dir", "(runs/x)", "move"),
      ("command line", "evaluate.path", "runs/x", "output_dir", "(runs/x)", "move")]),
    ("pattern out", {}, [*R, "data.pattern=../*.txt"], {},
     [("command line", "data.pattern", "../*.txt", "data.path")]),
    ("grouped packed", {}, [*R, "data.group_by_length=true"], {},
     [("command line", "data.group_by_length", "true", "data.packing", "false")]),
    ("two numbers of rows", {}, [*R, "data.path=text.txt#5", "data.max_samples=6"], {},
     [("command line", "data.max_samples", "6", "text.txt#5", "remove")]),
    ("some of the evaluation data", {}, [*R, "evaluate.path=text.txt#5"], {},
     [("command line", "evaluate.path", "text.txt#5", "whole", "set the path to text.txt")]),
    ("truncation of packed texts", {}, [*R, "data.truncation=left"], {},
     [("command line", "data.truncation", "left", "pretrain", "next row", "data.packing to false")]),
    ("truncation of a stream", {}, [*R, "data.truncation=drop", "data.packing=false", "data.streaming=true", "tokenizer.vocabulary_size=null", "tokenizer.path=."], {},
     [("command line", "data.truncation", "drop", "data.streaming", "right")]),
    ("truncation of masked text", {}, [*R, "task=mlm", "data.packing=false", "data.truncation=error"], {},
     [("command line", "data.truncation", "error", "sft", "dpo", "mlm", "remove")]),
    ("all of a pair", {}, [*R, "task=dpo", "data.train_on=all", "data.packing=false"], {},
     [("command line", "data.train_on", "all", "assistant or completion")]),
    ("keep what is one row", {}, [*R, "task=sft", "data.train_on=all", "data.reasoning=keep"], {},
     [("command line", "data.reasoning", "keep", "data.train_on=all", "one row anyway", "remove")]),
    ("variables of no template", {}, [*R, "task=sft", "data.chat=false", "data.chat_template_kwargs={a: 1}"], {},
     [("command line", "data.chat_template_kwargs", "data.chat=false", "remove")]),
    ("completion of messages", {}, [*R, "task=sft", "data.train_on=completion", "data.messages_column=m"], {},
     [("command line", "data.train_on", "completion", "data.messages_column", "assistant", "prompt_column", "completion_column")]),
    ("pretrain's key", {}, [*R, "task=sft", "data.text_column=t"], {},
     [("command line", "data.text_column", "t", "pretrain, continue_pretrain, classify, process_reward, mlm", "task", "sft", "remove")]),
    ("another task's data", {}, [*R, "task=sft", "data.path=builtin:python-stdlib"], {},
     [("command line", "data.path", "builtin:python-stdlib", "sft", "builtin:python-functions")]),
    ("columns", {}, [*R, "task=sft", "data.messages_column=m", "data.prompt_column=p"], {},
     [("command line", "data.messages_column", "data.prompt_column", "keep one")]),
    ("messages plain", {}, [*R, "task=sft", "data.messages_column=m", "data.chat=false"], {},
     [("command line", "data.chat", "false", "true", "prompt_column")]),
    ("one class", {}, [*R, "task=classify", "data.packing=false", "data.labels=[even]"], {},
     [("command line", "data.labels", "a list", "at least 2", "1")]),
    ("no rank, no source", {}, [*R, "profile.ranks=[]", "data.mixture=[]"], {},
     [("command line", "data.mixture", "a list", "at least 1", "0"),
      ("command line", "profile.ranks", "a list", "at least 1", "0")]),
    ("modules", {}, [*R, "adapter.target_modules=[1]"], {},
     [("command line", "adapter.target_modules", "a list", "pattern, a list of names or all-linear")]),
    ("numbers in words", {}, [*R, "optimizer.learning_rate=nan", "optimizer.epsilon=1e999", "steps=infinity"], {},
     [("command line", "optimizer.epsilon", "Infinity", "finite number"),
      ("command line", "optimizer.learning_rate", "nan", NUMBER),
      ("command line", "steps", "infinity", INTEGER)]),
    ("class twice", {}, [*R, "task=classify", "data.packing=false", "data.labels=[a, b, a]"], {},
     [("command line", "data.labels", "a", "twice", "remove")]),
    ("packed texts", {}, [*R, "task=mlm"], {},
     [("r.yaml:7", "data.packing", "true", "mlm", "false")]),
    ("packed pairs", {}, [*R, "task=dpo"], {},
     [("r.yaml:7", "data.packing", "true", "dpo", "false")]),
    ("keys of other tasks", {}, [*R, "dpo.beta=0.5", "reward.center_rewards_coefficient=0.1", "data.chosen_column=good", "data.train_on=all", "data.label_column=l", "embed.temperature=1"], {},
     [("command line", "data.chosen_column", "good", "dpo, reward", "task", "pretrain", "remove"),
      ("command line", "data.label_column", "l", "classify", "task", "pretrain", "remove"),
      ("command line", "data.train_on", "all", "sft, distill, dpo", "task", "pretrain", "remove"),
      ("command line", "dpo.beta", "0.5", "dpo", "task", "pretrain", "remove"),
      ("command line", "embed.temperature", "1", "embed", "task", "pretrain", "remove"),
      ("command line", "reward.center_rewards_coefficient", "0.1", "reward", "task", "pretrain", "remove")]),
    ("one column for both", {}, [*R, "task=dpo", "data.packing=false", "data.rejected_column=chosen"], {},
     [("command line", "data.rejected_column", "chosen", "data.chosen_column")]),
    ("simpo", {}, [*R, "task=dpo", "data.packing=false", "dpo={loss: simpo, label_smoothing: 0.1}"], {},
     [("command line", "dpo.gamma", "missing", "simpo", "0.1 to 0.8"),
      ("command line", "dpo.label_smoothing", "0.1", "sigmoid", "dpo.loss", "simpo", "0")]),
    ("margin", {}, [*R, "task=dpo", "data.packing=false", "dpo.gamma=0.5"], {},
     [("command line", "dpo.gamma", "0.5", "simpo", "dpo.loss", "sigmoid", "null")]),
    ("a single row", {}, [*R, "task=embed", "data.packing=false", "batch.global_batch_size=1"], {},
     [("command line", "batch.global_batch_size", "1", "embed", "2")]),
    ("a column twice", {}, [*R, "task=embed", "data.packing=false", "data.negative_columns=[a, positive]"], {},
     [("command line", "data.negative_columns", "positive", "data.positive_column", "remove")]),
    ("no teacher", {}, [*R, "task=distill"], {},
     [("r.yaml", "distill.teacher", "missing", "folder or hub name")]),
    ("teacher folder", {}, [*R, "task=distill", "distill.teacher=./t", "data.path=builtin:python-functions"], {},
     [("command line", "distill.teacher", "no such folder", "t")]),
    ("no template", {}, [*R, "task=sft", "tokenizer.chat_template=t.jinja"], {},
     [("command line", "tokenizer.chat_template", "no such file", "t.jinja", "chatml")]),
    ("flash packed", r("  config: {", "  attention: flash_attention_2\n  config: {"), [*R, "batch.micro_batch_size=2"], {},
     [("r.yaml:5", "model.attention", "flash_attention_2", "batch.micro_batch_size", "2", "1", "sdpa", "data.packing: false")]),
    ("flash fp32", r("  config: {", "  attention: flash_attention_2\n  config: {"), [*R, "precision=fp32"], {},
     [("r.yaml:5", "model.attention", "flash_attention_2", "fp32", "sdpa", "precision: bf16")]),
    ("warmup", add("schedule:\n  warmup_steps: 10\n"), R, {},
     [("r.yaml:16", "schedule.warmup_steps", "10", "steps", "10", "at most 9", "warmup_ratio")]),
    ("steps and epochs", add("epochs: 2\n"), R, {},
     [("r.yaml:15", "epochs", "2", "steps", "10", "keep one")]),
    ("epochs of a stream", {}, [*R, "data.streaming=true", "tokenizer.vocabulary_size=null", "tokenizer.path=.", "epochs=2"], {},
     [("command line", "epochs", "2", "stream", "give steps")]),
    ("epochs of a mixture", {}, [*R, "data.mixture=[{path: r.yaml, weight: 1}, {path: text.txt, weight: 1}]", "checkpoint.every_epochs=0.5"], {},
     [("command line", "checkpoint.every_epochs", "0.5", "header", "give checkpoint.every_steps")]),
    ("two warm-ups", add("schedule:\n  warmup_steps: 5\n  warmup_ratio: 0.1\n"), R, {},
     [("r.yaml:17", "schedule.warmup_ratio", "0.1", "warmup_steps", "5", "keep one")]),
    ("decay cosine", add("schedule:\n  decay_steps: 5\n"), R, {},
     [("r.yaml:16", "schedule.decay_steps", "5", "wsd", "schedule.name", "cosine", "remove")]),
    ("wsd none", add("schedule:\n  name: wsd\n"), R, {},
     [("r.yaml:15", "schedule.decay_steps", "missing", "wsd")]),
    ("wsd long", add("schedule:\n  name: wsd\n  warmup_steps: 5\n  decay_steps: 6\n"), R, {},
     [("r.yaml:18", "schedule.decay_steps", "6", "5", "10", "at most 5")]),
    ("keep", add("checkpoint: {keep: 1}\n"), R, {},
     [("r.yaml:15", "checkpoint.keep", "1", "at least 2")]),
    ("best", add("checkpoint: {best: eval_loss, every_steps: 3}\n"), [*R, "data.validation_fraction=0.1", "evaluate.every_steps=2"], {},
     [("r.yaml:15", "checkpoint.best", "eval_loss", "3", "evaluate.every_steps", "2", "divisor of checkpoint.every_steps")]),
    ("best of another task", add("checkpoint: {best: eval_f1}\n"), [*R, "data.validation_fraction=0.1", "evaluate.every_steps=200"], {},
     [("r.yaml:15", "checkpoint.best", "eval_f1", "pretrain measures eval_loss, eval_perplexity")]),
    ("best without checkpoints", add("checkpoint: {best: eval_loss, every_steps: 0}\n"), R, {},
     [("r.yaml:15", "checkpoint.best", "eval_loss", "checkpoint.every_steps is 0")]),
    ("export best", add("export: {checkpoint: best}\n"), R, {},
     [("r.yaml:15", "export.checkpoint", "best", "checkpoint.best names no metric", "eval_loss")]),
    ("patience", add("evaluate: {patience: 2}\n"), R, {},
     [("r.yaml:15", "evaluate.patience", "2", "no evaluation", "evaluate.every_steps")]),
    ("rollback", add("numerics: {rollback_ratio: 2.0}\n"), [*R, "checkpoint.every_steps=0"], {},
     [("r.yaml:15", "numerics.rollback_ratio", "2", "checkpoint.every_steps", "0", "above 0")]),
    ("resume", {}, [*R, "--resume", "gone"], {},
     [("command line", "--resume", "gone", "no such folder", "auto, none or a checkpoint", "RUN/checkpoints/step_00000040")]),
    ("resume best", {"runs/x/checkpoints/step_00000040/state.json": "{}"}, [*R, "--resume", "best"], {},
     [("command line", "--resume", "no best checkpoint", "checkpoint.best", "runs/x has step_00000040")]),
    ("resume run", {"run/checkpoints/step_00000040/state.json": "{}"}, [*R, "--resume", "run"], {},
     [("command line", "--resume", "run", "holds checkpoints but is none", "run/checkpoints/step_00000040")]),
    ("fresh", {}, [*R, "--resume", ".", "--fresh"], {},
     [("command line", "--fresh", "--resume .", "keep one")]),
    ("eval", add("evaluate: {every_steps: 100}\n"), R, {},
     [("r.yaml:15", "evaluate.every_steps", "100", "data.validation_fraction", "evaluate.path")]),
    ("several", {"r.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two").replace("bf16", "int8").replace("text.txt", "gone")}, [*R, "seed=x"], {},
     [("r.yaml:2", "steps", "two", INTEGER),
      ("r.yaml:3", "precision", "int8", "'fp32', 'bf16' or 'fp16'"),
      ("r.yaml:8", "data.path", "no such file or folder", "gone"),
      ("command line", "seed", "x", INTEGER)]),
]
# fmt: on


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with the good files."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    return tmp_path


def planned(*overrides) -> Plan:
    plan = message(Path.cwd(), ["r.yaml", *overrides], {})
    assert isinstance(plan, Plan), plan
    return plan


def load(files=None, *overrides):
    write(Path.cwd(), files or {})
    return planned(*overrides).recipe


def test_splits_of_the_hub_that_may_be_asked_for():
    mixture = "[{path: org/name, weight: 1}, {path: org/name, weight: 1, split: extra, config: b}]"
    for overrides in (
        ["data.path=org/name", "data.split=test", "data.config=a", "data.revision=v1"],
        ["data.path=org/name", "evaluate.split=validation", "evaluate.every_steps=5"],
        ["data.path=org/name", "data.config=en", "evaluate.split=train", "evaluate.config=de"],
        ["evaluate.path=org/name", "evaluate.split=test", "evaluate.revision=v1"],
        ["data.path=null", f"data.mixture={mixture}"],
        ["data.path=.", "data.split=train"],
    ):
        planned(*overrides)


@pytest.mark.parametrize(("files", "argv", "environ", "rows"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_report(files, argv, environ, rows, folder):
    write(folder, files)
    report, code = message(folder, argv, environ)
    check_report(report, rows)
    assert code == ConfigurationError.exit_code


@pytest.mark.parametrize(
    "given",
    [
        ["data.path=folder", "data.pattern=a*.txt", "evaluate.path=folder/b.txt"],
        ["data.path=folder/a.txt", "evaluate.path=folder/b.txt"],
        ["data.path=folder", "evaluate.path=folder/.hidden/c.txt"],
    ],
)
def test_files_beside_those_that_are_trained_on_are_evaluated_on(given, folder):
    write(folder, {f"folder/{name}.txt": "words" for name in ("a", "b", ".hidden/c")})
    assert load(None, *given).evaluation is not None


def test_good_recipe():
    recipe = load()
    assert recipe.optimizer.learning_rate == 1e-3  # plain PyYAML reads this as text
    assert recipe.model.config == {"model_type": "llama", "num_hidden_layers": 4}
    assert recipe.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(("text", "number"), [("1e-4", 1e-4), ("1E5", 1e5), ("+.5", 0.5), ("3", 3.0), ("2.", 2.0)])
def test_numbers_of_yaml_1_2(text, number):
    assert load(r("1e-3", text)).optimizer.learning_rate == number


def test_overrides_are_typed_by_the_schema():
    overrides = ["output_dir=2024-01-01", "seed=4", "optimizer.betas=[0.8, 0.9]", "data.cache_dir=7"]
    overrides += ["model.config.hidden_size=8", "tokenizer.path=null", "data.text_column=", "compile=off"]
    recipe = load(None, *overrides)
    assert (recipe.output_dir, recipe.seed, recipe.data.cache_dir) == ("2024-01-01", 4, "7")
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.model.config["hidden_size"] == 8 and recipe.model.config["num_hidden_layers"] == 4
    assert (recipe.tokenizer.path, recipe.data.text_column, recipe.compile) == (None, "", "off")


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*.md", "a: b: c", "@home", "%x", "!!int ten"])
def test_what_is_no_yaml_is_text(pattern):
    assert load(None, f"data.pattern={pattern}").data.pattern == pattern


def test_base_is_merged_block_by_block():
    files = {
        "sub/base.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two"),
        "sub/middle.yaml": "base: base.yaml\nsteps: 3\nbatch: {micro_batch_size: 2}\n",
        "r.yaml": "base: sub/middle.yaml\nmodel: {config: {num_hidden_layers: 2}}\n",
    }
    recipe = load(files)
    assert recipe.steps == 3
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (8, 2)
    assert recipe.model.config == {"model_type": "llama", "num_hidden_layers": 2}


def test_anchors_are_not_duplicates():
    merged = r("  micro_batch_size: 1", "  <<: {micro_batch_size: 4}\n  micro_batch_size: 2")
    assert load(merged).batch.micro_batch_size == 2


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"steps: \xff")
    report, code = message(tmp_path, R, {})
    check_report(report, [("r.yaml", "", "not UTF-8", "(r.yaml)")])
    assert code == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["seed=1", "model.path=a", "seed=2", "model={path: b}"], ["seed=2", "model={path: b}"]),
        (
            ["schedule={name: wsd, decay_steps: 5}", "schedule.decay_steps=2"],
            ['schedule={"name": "wsd"}', "schedule.decay_steps=2"],
        ),
        (
            ["optimizer={learning_rate: 1e-5}", "optimizer.name=lion"],
            ["optimizer={learning_rate: 1e-5}", "optimizer.name=lion"],
        ),
        (["data.pattern=**/*.md", "data.pattern=*.py"], ["data.pattern=*.py"]),
    ],
)
def test_commands_replace_what_they_add_to(given, kept):
    assert latest_overrides(given) == kept
    document = Document("r.yaml")
    for argument in kept:
        apply_override(document, argument)
    assert document.problems == []


def test_unknown_option_comes_with_the_usage():
    with pytest.raises(ConfigurationError) as error:
        resolve_plan(["r.yaml", "--stratgy", "x"], {})
    report, usage, _ = str(error.value).partition("\nusage: train.py [-h]")
    check_report(report, [("command line", "", "--stratgy x", "did you mean --strategy?")])
    assert usage


def test_accumulation_by_hand():
    batch = Batch(global_batch_size=24, micro_batch_size=2, sequence_length=8)
    assert batch.accumulation_steps(4) == 3
    assert batch.micro_batches(4) == [[2, 2, 2]] * 4


@pytest.mark.parametrize(
    ("rows", "micro", "ranks", "expected"),
    [
        (32, 7, 1, [[7, 7, 7, 7, 4]]),
        (32, 4, 7, [[4, 1]] * 4 + [[4, 0]] * 3),
        (32, 2, 7, [[2, 2, 1]] * 4 + [[2, 2, 0]] * 3),
        (8, 1, 3, [[1, 1, 1], [1, 1, 1], [1, 1, 0]]),
        (2, 4, 3, [[1], [1], [0]]),
        (8, 10**12, 2, [[4], [4]]),
    ],
)
def test_uneven_micro_batches_by_hand(rows, micro, ranks, expected):
    batch = Batch(global_batch_size=rows, micro_batch_size=micro, sequence_length=8)
    assert batch.micro_batches(ranks) == expected
    assert {len(shares) for shares in expected} == {batch.accumulation_steps(ranks)}


FROM_SCRATCH = (
    "optimizer.learning_rate: 0.001 of r.yaml:14 was for a model from scratch; 1e-5 to 3e-4 is usual for all weights of "
    "a pretrained one (task pretrain)"
)


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ["model.path=m"],
            [
                "model.path replaces model.config of r.yaml",
                "model.path replaces tokenizer.vocabulary_size of r.yaml",
                FROM_SCRATCH,
                "also of a recipe for a model from scratch: precision bf16, steps 10, batch.global_batch_size 8, "
                "batch.sequence_length 64; give what does not suit",
            ],
        ),
        (["model={path: m}"], ["model.path replaces tokenizer.vocabulary_size of r.yaml", FROM_SCRATCH]),
        (
            ["model={path: m}", "optimizer.learning_rate=2e-5"],
            ["model.path replaces tokenizer.vocabulary_size of r.yaml"],
        ),
        (["tokenizer.path=t"], ["tokenizer.path replaces tokenizer.vocabulary_size of r.yaml"]),
        (["data.mixture=[{path: text.txt, weight: 1.0}]"], ["data.mixture replaces data.path of r.yaml"]),
        (["model.config.hidden_size=8"], []),
    ],
)
def test_what_one_gives_replaces_its_alternative(overrides, notes):
    plan = planned(*overrides)
    assert list(plan.notes) == notes
    if overrides[0] == "model.path=m":
        assert (plan.recipe.model.path, plan.recipe.model.config) == ("m", None)
        assert plan.recipe.tokenizer.vocabulary_size is None


def test_a_config_file_stands_for_its_fields(tmp_path):
    """Its keys can be overridden, on both sides of it; a file that is none is one problem."""
    (tmp_path / "m").mkdir()
    fields = {"model_type": "llama", "num_hidden_layers": 4, "torch_dtype": "bfloat16"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields))
    for path in ("m", "m/config.json"):
        plan = planned(f"model.config={path}")
        assert plan.recipe.model.config == fields and f"the fields of {Path('m/config.json')}" in plan.notes[-1]
    text = (tmp_path / "r.yaml").read_text()
    (tmp_path / "r.yaml").write_text(re.sub(r"config: \{.*\}", "config: m", text))
    assert planned("model.config.num_hidden_layers=2").recipe.model.config == {**fields, "num_hidden_layers": 2}
    report, _ = message(tmp_path, ["r.yaml", "model.config=none.json"], {})
    assert report.startswith("1 problem") and "command line: model.config: found" in report and "config.json" in report


@pytest.mark.parametrize("block", ["data", "data.mixture.0"])
def test_a_number_of_rows_at_the_end_of_a_path(block, tmp_path):
    given = {"data": "data.path={}", "data.mixture.0": "data.mixture=[{{path: '{}', weight: 1.0}}]"}[block]
    plan = planned(given.format("text.txt#500"))
    source = plan.recipe.data if block == "data" else plan.recipe.data.mixture[0]
    assert (source.path, source.max_samples) == ("text.txt", 500)
    assert plan.notes[-1] == f"{block}.max_samples: 500, the first rows, because the path ends with #500"
    assert f"{block}.max_samples: found 0" in message(tmp_path, ["r.yaml", given.format("text.txt#0")], {})[0]
    (tmp_path / "odd#7").write_text("a file of that name")
    whole = planned(given.format("odd#7"))
    assert "odd#7" in str(whole.recipe.data) and "max_samples:" not in str(whole.notes)


@pytest.mark.parametrize(
    ("overrides", "key", "value", "notes"),
    [
        (["seed=3", "steps=20", "seed=4"], "seed", 4, ["seed=4 replaces seed=3 of the command line"]),
        (["seed=3", "seed=3"], "seed", 3, []),
        (
            ["checkpoint.keep=3", "checkpoint={every_steps: 7}"],
            *("checkpoint.keep", 2),
            ["checkpoint={every_steps: 7} replaces checkpoint.keep=3 of the command line"],
        ),
        (
            ["checkpoint={keep: 3}", "checkpoint.every_steps=7", "checkpoint.keep=4"],
            *("checkpoint.keep", 4),
            ["checkpoint.keep=4 replaces checkpoint={keep: 3} of the command line"],
        ),
    ],
)
def test_the_last_of_equal_keys_counts(overrides, key, value, notes):
    source = read_recipe("r.yaml", overrides)
    assert (source.document.problems, source.value(key), source.document.notes) == ([], value, notes)


@pytest.mark.parametrize(
    ("below", "overrides", "warmup"),
    [
        ("", [], 1),
        ("schedule: {warmup_steps: 4}\n", [], 4),
        ("schedule: {warmup_steps: 4}\n", ["schedule.warmup_ratio=0.3"], 3),
        ("schedule: {warmup_ratio: 0.5}\n", [], 5),
        ("schedule: {warmup_ratio: 0.5}\n", ["steps=2"], 1),
        ("schedule: {warmup_ratio: 0.5}\n", ["schedule.warmup_steps=0"], 0),
    ],
)
def test_warmup_in_steps_or_as_a_share(below, overrides, warmup):
    recipe = load(add(below), *overrides)
    assert recipe.warmup_steps == warmup


def test_a_misspelt_key_in_a_rule_fails(monkeypatch):
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, lambda value: value("optimizer.learning_rat")))
    with pytest.raises(KeyError, match="learning_rat"):
        read_recipe("r.yaml")


@pytest.mark.parametrize(
    ("layer", "overrides", "expected"),
    [
        (
            "task: sft\nadapter: {name: lora}\n",
            [],
            "1e-4 to 5e-4 is usual for an adapter on a pretrained one (task sft)",
        ),
        ("task: sft\n", [], "1e-5 to 5e-5 is usual for all weights of a pretrained one (task sft)"),
        ("task: dpo\n", ["adapter.name=lora"], "5e-6 to 5e-5 is usual for an adapter on"),
        ("task: dpo\n", [], "5e-7 to 5e-6 is usual for all weights of"),
        ("task: sft\n", ["optimizer.name=lion"], "1e-6 to 2e-5 is usual for all weights of"),
        ("task: sft\n", ["optimizer.name=sgd"], "was for a model from scratch"),
        ("task: sft\n", ["optimizer.learning_rate=1e-5"], ""),
        ("task: sft\noptimizer: {learning_rate: 1e-5}\n", [], ""),
    ],
)
def test_usual_learning_rates_by_task_adapter_and_optimizer(layer, overrides, expected, tmp_path):
    recipe = f"base: base.yaml\nmodel: {{path: m}}\ndata: {{packing: false}}\n{layer}"
    write(tmp_path, {"base.yaml": GOOD["r.yaml"], "r.yaml": recipe})
    notes = [note for note in planned(*overrides).notes if note.startswith("optimizer.learning_rate")]
    assert len(notes) == bool(expected) and all(expected in note for note in notes)
    assert not notes or ("usual" in notes[0]) == ("usual" in expected)


def test_a_recipe_replaces_what_its_base_says():
    files = {"base.yaml": GOOD["r.yaml"], "r.yaml": "base: base.yaml\nmodel: {path: m}\n"}
    recipe = load(files, "model.config={model_type: gpt2}", "tokenizer.vocabulary_size=300")
    assert (recipe.model.path, recipe.model.config) == (None, {"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("overrides", "steps", "evaluated", "saved"),
    [
        (["epochs=3"], 17, 0, 200),  # 43 rows are 5.375 steps of 8: 16.125 in all
        (["epochs=3", "evaluate.every_epochs=1", "checkpoint.every_epochs=1"], 17, 5, 5),
        (["epochs=0.5", "evaluate.every_epochs=0.5", "checkpoint.every_epochs=1"], 3, 3, 6),
        (["steps=4", "evaluate.every_epochs=0.01"], 4, 1, 200),
    ],
)
def test_epochs_become_steps(tmp_path, overrides, steps, evaluated, saved):
    typed = [*overrides, "batch.global_batch_size=8", "data.validation_fraction=0.1", "schedule.warmup_steps=1"]
    recipe = in_steps(load_recipe(str(tmp_path / "r.yaml"), typed), num_rows=43)
    assert (recipe.steps, recipe.evaluate.every_steps, recipe.checkpoint.every_steps) == (steps, evaluated, saved)


def test_a_home_folder_is_found_in_every_path(tmp_path, monkeypatch):
    """A shell does not replace the ~ behind a =, and a folder of this name invites `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.txt").write_text("words")
    (tmp_path / "more.txt").write_text("words")
    mixture = "[{path: ~/rows.txt, weight: 1}, {path: ~/more.txt, weight: 2}]"
    given = ["output_dir=~/runs/x", "data.path=~/rows.txt", "data.cache_dir=~/cache", "evaluate.path=~/more.txt"]
    made = load_recipe("recipes/quickstart.yaml", [*given, "data.validation_fraction=0"])
    paths = (made.output_dir, made.data.path, made.data.cache_dir, made.evaluate.path)
    assert paths == tuple(f"{tmp_path}/{name}" for name in ("runs/x", "rows.txt", "cache", "more.txt"))
    mixed = load_recipe("recipes/quickstart.yaml", ["data.path=null", f"data.mixture={mixture}"])
    assert [source.path for source in mixed.data.sources()] == [f"{tmp_path}/rows.txt", f"{tmp_path}/more.txt"]


@pytest.mark.parametrize(
    ("option", "hint", "not_said"),
    [
        ("--num_train_epochs", "use epochs", "--num_processes"),
        ("--fsdp", "", "--fresh"),
        ("--num_proces", "did you mean --num_processes?", "--fresh"),
    ],
)
def test_options_of_other_trainers_are_told_their_keys(option, hint, not_said):
    with pytest.raises(ConfigurationError) as error:
        command_line().parse_intermixed_args(["recipes/quickstart.yaml", option, "3"])
    said = str(error.value).partition("usage")[0]
    assert hint in said and not_said not in said


@pytest.mark.parametrize(
    ("epochs", "step", "samples", "steps"),
    [(2, 0, 0, 11), (2, 4, 32, 11), (2, 4, 64, 7), (2, 11, 88, 11), (1e-9, 0, 0, 1)],
)
def test_epochs_count_the_rows_of_the_checkpoint(tmp_path, epochs, step, samples, steps):
    """Also those that were read in steps of another size: 64 rows in 4 steps."""
    overrides = [f"epochs={epochs}", "batch.global_batch_size=8", "schedule.warmup_steps=0"]
    assert in_steps(load_recipe(str(tmp_path / "r.yaml"), overrides), 43, step, samples).steps == steps


def test_a_multiple_of_epochs_is_one_of_steps(tmp_path):
    """0.3 / 0.1 is no integer in floating point."""
    every = ["evaluate.every_epochs=0.1", "checkpoint.every_epochs=0.3", "checkpoint.best=eval_loss"]
    typed = ["steps=50", *every, "batch.global_batch_size=32", "data.validation_fraction=0.1"]
    recipe = in_steps(load_recipe(str(tmp_path / "r.yaml"), typed), 1120)
    assert (recipe.evaluate.every_steps, recipe.checkpoint.every_steps) == (4, 12)


def test_steps_of_epochs_have_to_suit_the_schedule(tmp_path):
    recipe = load_recipe(
        str(tmp_path / "r.yaml"), ["epochs=1", "schedule.warmup_steps=50", "batch.global_batch_size=8"]
    )
    with pytest.raises(ConfigurationError, match="warm-up must end earlier; use at most 5.*\n43 rows are 5.375 steps"):
        in_steps(recipe, num_rows=43)
