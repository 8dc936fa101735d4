"""Recipes: every mistake with its whole message, and what a good recipe becomes."""

# ruff: noqa: E501 - a message stands in one piece, so that a search for it finds it

from __future__ import annotations

from importlib.metadata import version

import pytest
from report_cases import GOOD, Plan, changed, expected, message, write

from samecurve.config.documents import Document
from samecurve.config.overrides import apply_override, latest_overrides
from samecurve.config.schema import Batch
from samecurve.errors import ConfigurationError
from samecurve.strategy.resolve import resolve_plan

R = ["r.yaml"]
TRANSFORMERS = version("transformers")
NO_SIZE = [*R, "tokenizer.vocabulary_size=null"]


def r(old, new):
    return changed("r.yaml", old, new)


def add(text):
    return {"r.yaml": GOOD["r.yaml"] + text}


# name, changed files, command line, environment, the report's lines
# fmt: off
CASES = [
    ("unknown top", add("precison: bf16\n"), R, {},
     ["r.yaml:15: precison: unknown key; did you mean precision?"]),
    ("unknown nested", r("micro_batch_size", "micro_batch_sise"), R, {},
     ["r.yaml:11: batch.micro_batch_sise: unknown key; did you mean micro_batch_size?"]),
    ("idle key", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  betas: [0.9, 0.99]\n  name: sgd"), R, {},
     ["r.yaml:15: optimizer.betas: found a list, but only adamw, lion, muon, adamw_bf16 and adamw_8bit read it and optimizer.name is sgd; leave it out"]),
    ("fp32 weights and kahan", {}, [*R, "optimizer.bf16_rounding=kahan"], {},
     ['command line: optimizer.bf16_rounding: found "kahan" (text), but only adamw_bf16 reads it and optimizer.name is adamw; leave it out']),
    ("bf16 weights", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  name: adamw_bf16\n  betas: [0.9, 0.999]"), [*R, "precision=fp32"], {},
     ["r.yaml:15: optimizer.name: found adamw_bf16, whose weights are bf16, but precision is fp32; use bf16 there, or another optimizer",
      "r.yaml:16: optimizer.betas: found 0.999, but a bf16 mean does not see a change of 0.001 of itself, which rounding undoes; use at most 0.99, or adamw"]),
    ("idle momentum", r("learning_rate: 1e-3", "learning_rate: 1e-3\n  momentum: 0.5"), R, {},
     ["r.yaml:15: optimizer.momentum: found 0.5, but only sgd and muon read it and optimizer.name is adamw; leave it out"]),
    ("unknown elsewhere", add("learning_rate: 1e-3\n"), R, {},
     ["r.yaml:15: learning_rate: unknown key; it belongs at optimizer.learning_rate"]),
    ("of another framework", add("num_train_epochs: 3\nlr: 1e-3\nlora: true\ndeepspeed: x\n"), [*R, "batch.per_device_train_batch_size=2"], {},
     ["r.yaml:15: num_train_epochs: unknown key; here it is called steps: a run's length is in optimizer steps; an epoch is the rows of the data / batch.global_batch_size",
      "r.yaml:16: lr: unknown key; here it is called optimizer.learning_rate",
      "r.yaml:17: lora: unknown key; here it is called adapter.name: lora",
      "r.yaml:18: deepspeed: unknown key; a recipe does not say how it is spread over devices; that is the strategy's: --strategy configs/zero3.yaml",
      "command line: batch.per_device_train_batch_size: unknown key; here it is called batch.micro_batch_size"]),
    ("a block as a value", {}, [*R, "model=runs/s2/model", "schedule=linear"], {},
     ['command line: model: found "runs/s2/model" (text), a block of keys is needed; did you mean model.path=runs/s2/model?',
      'command line: schedule: found "linear" (text), a block of keys is needed; did you mean schedule.name=linear?']),
    ("nearly a recipe", {"recipes/sft.yaml": "steps: 1"}, ["recipes/sft.yml"], {},
     ["recipes/sft.yml: cannot be read: No such file or directory (recipes/sft.yml); did you mean recipes/sft.yaml?"]),
    ("a recipe's name", {"recipes/sft.yaml": "steps: 1"}, ["sft"], {},
     ["sft: cannot be read: No such file or directory (sft); did you mean recipes/sft.yaml?"]),
    ("a strategy's name", {}, [*R, "--strategy", "zero2"], {},
     ["zero2: cannot be read: No such file or directory (zero2); did you mean configs/zero2.yaml?"]),
    ("unknown far", add("logging: {zzz: 1}\n"), R, {},
     ["r.yaml:15: logging.zzz: unknown key; legal here: every_steps"]),
    ("missing", r("  sequence_length: 64\n", ""), R, {},
     ["r.yaml:9: batch.sequence_length: missing; add it"]),
    ("missing section", r("optimizer:\n  learning_rate: 1e-3\n", ""), R, {},
     ["r.yaml: optimizer: missing; add it"]),
    ("text for int", r("steps: 10", "steps: two"), R, {},
     ['r.yaml:2: steps: found "two" (text), a whole number is needed']),
    ("1e-3 text", r("1e-3", '"1e-3"'), R, {},
     ['r.yaml:14: optimizer.learning_rate: found "1e-3" (text), a number is needed; remove the quotes']),
    ("float int", r("steps: 10", "steps: 1e3"), R, {},
     ["r.yaml:2: steps: found 1000.0, a whole number is needed; write 1000"]),
    ("float frac", r("steps: 10", "steps: 1.5"), R, {},
     ["r.yaml:2: steps: found 1.5, a whole number is needed"]),
    ("bool as int", r("steps: 10", "steps: true"), R, {},
     ["r.yaml:2: steps: found true, a whole number is needed"]),
    ("profile order", add("profile: {steps: [3, 2]}\n"), R, {},
     ["r.yaml:15: profile.steps: found [3, 2]; it is the first step and the last one, so swap them"]),
    ("profile end", add("profile: {steps: [9, 11], ranks: [0, 1]}\n"), R, {},
     ["r.yaml:15: profile.ranks: found 1, but the ranks of 1 process are 0 alone; name those",
      "r.yaml:15: profile.steps: found [9, 11], but steps is 10; end with a step that there is"]),
    ("profile zero", add("profile: {steps: [0, 2]}\n"), R, {},
     ["r.yaml:15: profile.steps.0: found 0, a number of at least 1 is needed"]),
    ("profile one number", add("profile: {steps: 3}\n"), R, {},
     ["r.yaml:15: profile.steps: found 3, a list is needed"]),
    ("choice", r("bf16", "int8"), R, {},
     ["r.yaml:3: precision: found \"int8\" (text), one of 'fp32', 'bf16' or 'fp16' is needed"]),
    ("zero lr", r("1e-3", "0"), R, {},
     ["r.yaml:14: optimizer.learning_rate: found 0, a number above 0 is needed"]),
    ("inf lr", r("1e-3", ".inf"), R, {},
     ["r.yaml:14: optimizer.learning_rate: found Infinity, a finite number is needed"]),
    ("negative", add("schedule: {warmup_steps: -1}\n"), R, {},
     ["r.yaml:15: schedule.warmup_steps: found -1, a number of at least 0 is needed"]),
    ("seed", add("seed: 4294967296\n"), R, {},
     ["r.yaml:15: seed: found 4294967296, a number of at most 2147483647 is needed"]),
    ("small vocabulary", r("512}", "257}"), R, {},
     ["r.yaml:6: tokenizer.vocabulary_size: found 257, a number of at least 258 is needed"]),
    ("nowhere", {}, [*R, "output_dir=", "data.path=", "model.path=", "tokenizer.path=", "evaluate.path="], {},
     ['command line: data.path: found "" (text), text that is not empty is needed',
      'command line: evaluate.path: found "" (text), text that is not empty is needed',
      'command line: model.path: found "" (text), text that is not empty is needed',
      'command line: output_dir: found "" (text), text that is not empty is needed',
      'command line: tokenizer.path: found "" (text), text that is not empty is needed']),
    ("fraction", r("  path: text.txt", "  path: text.txt\n  validation_fraction: 1.0"), R, {},
     ["r.yaml:9: data.validation_fraction: found 1.0, a number below 1 is needed"]),
    ("betas short", r("1e-3", "1e-3\n  betas: [0.9]"), R, {},
     ["r.yaml:15: optimizer.betas.1: missing; add it"]),
    ("betas long", r("1e-3", "1e-3\n  betas: [0.9, 0.9, 0.9]"), R, {},
     ["r.yaml:15: optimizer.betas: found a list, 2 values are needed, not 3"]),
    ("betas value", r("1e-3", "1e-3\n  betas: [0.9, 1.5]"), R, {},
     ["r.yaml:15: optimizer.betas.1: found 1.5, a number below 1 is needed"]),
    ("betas text", r("1e-3", "1e-3\n  betas: high"), R, {},
     ['r.yaml:15: optimizer.betas: found "high" (text), a list is needed']),
    ("section scalar", r("batch:\n  global_batch_size: 8\n  micro_batch_size: 1\n  sequence_length: 64\n", "batch: 8\n"), R, {},
     ["r.yaml:9: batch: found 8, a block of keys is needed"]),
    ("date", r("runs/x", "2024-01-01\nseed: 2024-01-01"),
     R, {}, ['r.yaml:2: seed: found "2024-01-01" (text), a whole number is needed']),
    ("bool text", r("  path: text.txt", "  path: text.txt\n  packing: maybe"), R, {},
     ['r.yaml:9: data.packing: found "maybe" (text), true or false is needed']),
    ("path number", r("runs/x", "7"), R, {},
     ["r.yaml:1: output_dir: found 7, text is needed"]),
    ("null", r("steps: 10", "steps:"), R, {},
     ["r.yaml:2: steps: found null, a whole number is needed"]),
    ("duplicate", add("steps: 20\n"), R, {},
     ["r.yaml:15: steps: given twice, first in line 2; keep one"]),
    ("duplicate nested", r("  micro_batch_size: 1\n", "  micro_batch_size: 1\n  micro_batch_size: 2\n"), R, {},
     ["r.yaml:12: batch.micro_batch_size: given twice, first in line 11; keep one"]),
    ("syntax", r("steps: 10", "steps: [10"), R, {},
     ["r.yaml:3: this is not YAML: expected ',' or ']', but got ':'"]),
    ("tag", r("steps: 10", "steps: !!int ten"),
     R, {}, ["r.yaml: this is not YAML: invalid literal for int() with base 10: 'ten'"]),
    ("alias in itself", r("steps: 10", "steps: &a [*a]"),
     R, {}, ["r.yaml: this is not YAML that can be used: an alias stands inside itself"]),
    ("tab", r("  path: text", "\tpath: text"), R, {},
     ["r.yaml:8: this is not YAML: found character '\\t' that cannot start any token"]),
    ("list", {"r.yaml": "- a\n"}, R, {},
     ["r.yaml: found a list, a block of keys is needed"]),
    ("empty", {"r.yaml": ""}, R, {},
     ["r.yaml: batch: missing; add it",
      "r.yaml: data: missing; add it",
      "r.yaml: model: missing; add it",
      "r.yaml: optimizer: missing; add it",
      "r.yaml: output_dir: missing; add it",
      "r.yaml: steps: missing; add it"]),
    ("no file", {}, ["none.yaml"], {},
     ["none.yaml: cannot be read: No such file or directory (none.yaml)"]),
    ("folder", {}, ["configs"], {},
     ["configs: cannot be read: Is a directory (configs)"]),
    ("base missing", add("base: base.yaml\n"), R, {},
     ["r.yaml:15: base: no such file: base.yaml; the name is relative to r.yaml"]),
    ("base missing, nothing else", {"r.yaml": "base: bace.yaml\nsteps: two\nschedule: {decay_steps: 3}\ndata: {path: gone}\n"}, R, {},
     ["r.yaml:1: base: no such file: bace.yaml; the name is relative to r.yaml",
      'r.yaml:2: steps: found "two" (text), a whole number is needed',
      "r.yaml:4: data.path: no such file or folder: gone"]),
    ("base broken", {"base.yaml": "steps: [1\n", "r.yaml": "base: base.yaml\nseed: one\n"}, R, {},
     ["base.yaml:2: this is not YAML: expected ',' or ']', but got '<stream end>'",
      'r.yaml:2: seed: found "one" (text), a whole number is needed']),
    ("base circle", {"r.yaml": "base: b.yaml\n", "b.yaml": "base: r.yaml\n"}, R, {},
     ['b.yaml:1: base: found "r.yaml", which is based on this file; break the circle']),
    ("base number", add("base: 3\n"), R, {},
     ["r.yaml:15: base: found 3, the name of a recipe file is needed"]),
    ("base's mistake", {"sub/base.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two"), "r.yaml": "base: sub/base.yaml\nseed: one\n"}, R, {},
     ['r.yaml:2: seed: found "one" (text), a whole number is needed',
      'sub/base.yaml:2: steps: found "two" (text), a whole number is needed']),
    ("override unknown", {}, ["r.yaml", "batch.micro=2"], {},
     ["command line: batch.micro: unknown key; legal here: global_batch_size, micro_batch_size, sequence_length"]),
    ("override type", {}, ["r.yaml", "steps=two"], {},
     ['command line: steps: found "two" (text), a whole number is needed']),
    ("override syntax", {}, ["r.yaml", "steps"], {},
     ['command line: found "steps" (text); an override is written key.path=value']),
    ("override twice", {}, ["r.yaml", "seed=3", "steps=20", "seed=4", "model.attention=sdpa", "model={attention: eager}"], {},
     ["command line: model: given together with model.attention=sdpa, which it would replace; keep one",
      "command line: seed: given twice, first as seed=3; keep one"]),
    ("override twice, in a block", {}, ["r.yaml", "batch={global_batch_size: 8, sequence_length: 8}", "batch.micro_batch_size=2", "batch.global_batch_size=4"], {},
     ["command line: batch.global_batch_size: given twice, first in batch={global_batch_size: 8, sequence_length: 8}; keep one"]),
    ("override of null", {}, ["r.yaml", "model={path: m, config: null}", "model.config.model_type=gpt2"], {},
     ["command line: model.config.model_type: given twice, first in model={path: m, config: null}; keep one"]),
    ("override yaml", {}, ["r.yaml", "optimizer.betas=[0.9"], {},
     ["command line: optimizer.betas: this is not YAML: expected ',' or ']', but got '<stream end>'"]),
    ("override text", {}, ["r.yaml", "steps=*a: b"], {},
     ['command line: steps: found "*a: b" (text), a whole number is needed']),
    ("override through value", {}, ["r.yaml", "steps.more=1"], {},
     ["command line: steps.more: steps is 10, which has no keys"]),
    ("both model", r("model:", "model:\n  path: m"), R, {},
     ["r.yaml:4: model: both path and config are given, but a model has one origin; set one of them to null"]),
    ("no model", r("  config: {model_type: llama, num_hidden_layers: 4}", "  attention: eager"), R, {},
     ["r.yaml:4: model: neither path (pretrained) nor config (from scratch) is given; add one"]),
    ("no model type", r("model_type: llama, ", ""), R, {},
     ["r.yaml:5: model.config: model_type is missing; add it, for example model_type: llama"]),
    ("no such family", r("model_type: llama", "model_type: lama"), R, {},
     [f"r.yaml:5: model.config.model_type: transformers {TRANSFORMERS} has no model_type lama; did you mean llama?"]),
    ("config keys", r("num_hidden_layers: 4}", "num_hiden_layers: 4}\n  kernels: torsh"), [*R, "model.config.dtype=bfloat16"], {},
     ["r.yaml:5: model.config.num_hiden_layers: a llama has no such key; did you mean num_hidden_layers?",
      "r.yaml:6: model.kernels: found \"torsh\" (text), one of 'torch' or 'liger' is needed",
      "command line: model.config.dtype: the recipe's precision says it; remove it"]),
    ("config types", r("num_hidden_layers: 4", 'num_hidden_layers: "4", hidden_size: 8.0, rms_norm_eps: 1, attention_bias: 1'), R, {},
     ["r.yaml:5: model.config.attention_bias: found 1, true or false is needed",
      "r.yaml:5: model.config.hidden_size: found 8.0, a whole number is needed; write 8",
      'r.yaml:5: model.config.num_hidden_layers: found "4" (text), a whole number is needed',
      "r.yaml:5: model.config.rms_norm_eps: found 1, a number with a decimal point is needed; write 1.0"]),
    ("config sizes", r("llama, num_hidden_layers: 4", "gpt2, n_layer: 0, num_attention_heads: -1, vocab_size: 0"), R, {},
     ["r.yaml:5: model.config.n_layer: found 0, a number of at least 1 is needed",
      "r.yaml:5: model.config.num_attention_heads: found -1, a number of at least 1 is needed",
      "r.yaml:5: model.config.vocab_size: found 0, a number of at least 1 is needed"]),
    ("config numbers", r("num_hidden_layers: 4", "num_hidden_layers: 100000000000000000000, initializer_range: .nan, rope_parameters: {rope_theta: .nan}"), R, {},
     ["r.yaml:5: model.config.initializer_range: found NaN, a finite number is needed",
      "r.yaml:5: model.config.num_hidden_layers: found 100000000000000000000, a number of at most 9223372036854775807 is needed",
      "r.yaml:5: model.config.rope_parameters.rope_theta: found NaN, a finite number is needed"]),
    ("many steps", {}, [*R, f"steps={'9' * 30}", f"seed=0x{'f' * 4000}"], {},
     ["command line: seed: found a whole number of 16000 bits, a number of at most 2147483647 is needed",
      "command line: steps: found 999999999999999999999999999999, a number of at most 99999999 is needed"]),
    ("model type", r("model_type: llama", "model_type: 3"), R, {},
     ["r.yaml:5: model.config.model_type: found 3, text is needed, for example llama"]),
    ("positions", r("num_hidden_layers: 4", "num_hidden_layers: 4, max_position_embeddings: 63"), R, {},
     ["r.yaml:12: batch.sequence_length: found 64, but max_position_embeddings in model.config is 63; a row has to fit into it"]),
    ("positions of gpt2", r("llama, num_hidden_layers: 4", "gpt2, n_positions: 32"), R, {},
     ["r.yaml:12: batch.sequence_length: found 64, but n_positions in model.config is 32; a row has to fit into it"]),
    ("positions of a folder", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./m"), "m/config.json": '{"n_positions": 8}'}, NO_SIZE, {},
     ["r.yaml:12: batch.sequence_length: found 64, but n_positions in the model's config.json is 8; a row has to fit into it"]),
    ("model folder at home", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ~/nothing"), NO_SIZE, {},
     ["r.yaml:5: model.path: no such folder: ~/nothing"]),
    ("model folder", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./nothing"), NO_SIZE, {},
     ["r.yaml:5: model.path: no such folder: nothing"]),
    ("model empty folder", r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./configs"), NO_SIZE, {},
     ["r.yaml:5: model.path: configs holds no config.json; a Hugging Face model folder is needed"]),
    ("an adapter", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./run/model"), "run/model/adapter_config.json": "{}", "run/run.json": "{}"}, NO_SIZE, {},
     ["r.yaml:5: model.path: run/model holds no config.json; it is an adapter: python -m samecurve merge run makes one model of the two; name run/merged"]),
    ("a run", {**r("config: {model_type: llama, num_hidden_layers: 4}", "path: ./run"), "run/model/config.json": "{}"}, NO_SIZE, {},
     ["r.yaml:5: model.path: run holds no config.json; a Hugging Face model folder is needed: name run/model"]),
    ("wildcards", r("text.txt", "books/*.txt"), R, {},
     ["r.yaml:8: data.path: no such file or folder: books/*.txt; a path has no wildcards: give the folder books as the path, and data.pattern='*.txt'"]),
    ("both tok", r("512}", "512, path: t}"), R, {},
     ["r.yaml:6: tokenizer: both path and vocabulary_size (train one) are given; keep one"]),
    ("no tok", r("tokenizer: {vocabulary_size: 512}\n", ""), R, {},
     ["r.yaml: tokenizer: a model from scratch brings no tokenizer; add tokenizer.path or tokenizer.vocabulary_size"]),
    ("no data", r("  path: text.txt", "  packing: true"), R, {},
     ["r.yaml:7: data.path: missing; name a file, a folder or builtin:python-stdlib, here or as data.path=... when starting"]),
    ("data missing", r("text.txt", "texts.txt"), R, {},
     ["r.yaml:8: data.path: no such file or folder: texts.txt"]),
    ("eval path", add("evaluate: {path: nope, every_steps: 5}\n"), R, {},
     ["r.yaml:15: evaluate.path: no such file or folder: nope"]),
    ("the hub's keys of a file", {}, [*R, "data.split=test", "data.config=a", "data.revision=v1", "evaluate.split=test"], {},
     ['command line: data.config: found "a" (text), but text.txt is no data set of the hub, so nothing reads it; leave it out',
      'command line: data.revision: found "v1" (text), but text.txt is no data set of the hub, so nothing reads it; leave it out',
      'command line: data.split: found "test" (text), but text.txt is no data set of the hub, so nothing reads it; leave it out',
      'command line: evaluate.split: found "test" (text), but text.txt is no data set of the hub; name the data to measure on: evaluate.path']),
    ("the hub's keys of what is built in", {}, [*R, "data.path=builtin:python-stdlib", "data.split=test"], {},
     ['command line: data.split: found "test" (text), but builtin:python-stdlib is no data set of the hub, so nothing reads it; leave it out']),
    ("a split and a pattern", {}, [*R, "data.path=org/name", "data.pattern=*.txt", "data.split=test"], {},
     ['command line: data.split: found "test" (text), but data.pattern names the files to read, of whatever split; keep one of them']),
    ("a revision of a URL", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name@v1", "data.streaming=true", "data.revision=v2"], {},
     ['command line: data.revision: found "v2" (text), but hf://datasets/org/name@v1 is a URL; write hf://datasets/OWNER/NAME@REVISION']),
    ("the split that is trained on", {}, [*R, "data.path=org/name", "evaluate.split=train"], {},
     ['command line: evaluate.split: found "train" (text), which is what is trained on; name another split']),
    ("the split that is trained on, by its path", {}, [*R, "data.path=org/name", "evaluate.path=org/name", "evaluate.split=train"], {},
     ['command line: evaluate.split: found "train" (text), which is what is trained on; name another split']),
    ("a split beside files", {}, [*R, "data.path=org/name", "data.pattern=a*", "evaluate.split=test"], {},
     ['command line: evaluate.split: found "test" (text), but data.pattern names the files that are read, of whatever split; name the data to measure on: evaluate.path']),
    ("a split beside a file", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name/a.jsonl", "data.streaming=true", "evaluate.split=test"], {},
     ['command line: evaluate.split: found "test" (text), but data.path names the files that are read, of whatever split; name the data to measure on: evaluate.path']),
    ("another revision to measure on", {}, [*R, "data.path=org/name", "evaluate.split=test", "evaluate.revision=v1"], {},
     ['command line: evaluate.revision: v1 is evaluated on, but data.revision is main, and a split of another revision may hold rows that are trained on; set it to main']),
    ("the split that is trained on, in other words", {}, [*R, "data.path=org/name", "data.revision=main", "evaluate.path=org/name", "evaluate.split=train", "evaluate.config=default"], {},
     ['command line: evaluate.split: found "train" (text), which is what is trained on; name another split']),
    ("the split that is trained on, of a URL", {}, [*NO_SIZE, "tokenizer.path=t", "data.path=hf://datasets/org/name@main", "data.streaming=true", "evaluate.path=org/name", "evaluate.split=train"], {},
     ['command line: evaluate.split: found "train" (text), which is what is trained on; name another split']),
    ("no split to measure on", {}, [*R, "evaluate.path=org/name"], {},
     ["r.yaml: evaluate.split: missing; name the split of org/name to measure on, for example validation or test"]),
    ("a config that nothing reads", {}, [*R, "data.path=org/name", "evaluate.config=a"], {},
     ['command line: evaluate.config: found "a" (text), but only evaluate.split reads it']),
    ("a split of a mixture", {}, [*R, "data.path=null", "data.mixture=[{path: org/name, weight: 1}, {path: text.txt, weight: 1, split: test}]", "data.split=a"], {},
     ['command line: data.mixture.1.split: found "test" (text), but text.txt is no data set of the hub, so nothing reads it; leave it out',
      'command line: data.split: found "a" (text), but data.mixture is given; write it beside the path it is for']),
    ("data in output_dir", {"runs/x/mine.txt": "words"}, [*R, "data.path=runs/x/mine.txt", "evaluate.path=runs/x"], {},
     ["command line: data.path: found runs/x/mine.txt, which is in output_dir (runs/x), among the run's own files; move one of them",
      "command line: evaluate.path: found runs/x, which is in output_dir (runs/x), among the run's own files; move one of them"]),
    ("pattern out", {}, [*R, "data.pattern=../*.txt"], {},
     ['command line: data.pattern: found "../*.txt" (text), which leaves the folder; set data.path to the other one']),
    ("grouped packed", {}, [*R, "data.group_by_length=true"], {},
     ["command line: data.group_by_length: found true, but packed rows are full already; set data.packing to false"]),
    ("another task's key", {}, [*R, "data.train_on=all"], {},
     ['command line: data.train_on: found "all" (text), but only the tasks sft, distill, dpo read it and task is pretrain']),
    ("all of a pair", {}, [*R, "task=dpo", "data.train_on=all", "data.packing=false"], {},
     ["command line: data.train_on: found all, but answers are compared by their own tokens and share the prompt; use assistant or completion"]),
    ("completion of messages", {}, [*R, "task=sft", "data.train_on=completion", "data.messages_column=m"], {},
     ["command line: data.train_on: found completion, but data.messages_column names whole conversations, in which no prompt is set apart; use assistant, or name prompt_column and completion_column instead"]),
    ("pretrain's key", {}, [*R, "task=sft", "data.text_column=t"], {},
     ['command line: data.text_column: found "t" (text), but only the tasks pretrain, continue_pretrain, classify, mlm read it and task is sft']),
    ("another task's data", {}, [*R, "task=sft", "data.path=builtin:python-stdlib"], {},
     ["command line: data.path: found builtin:python-stdlib, which task sft cannot read; builtin:python-functions is the one that it can"]),
    ("columns", {}, [*R, "task=sft", "data.messages_column=m", "data.prompt_column=p"], {},
     ["command line: data.messages_column: given together with data.prompt_column; a row is one or the other, keep one of them"]),
    ("messages plain", {}, [*R, "task=sft", "data.messages_column=m", "data.chat=false"], {},
     ["command line: data.chat: found false, but messages need a template; set it to true, or name prompt_column instead"]),
    ("another task's label", {}, [*R, "data.label_column=l"], {},
     ['command line: data.label_column: found "l" (text), but only task classify reads it and task is pretrain']),
    ("one class", {}, [*R, "task=classify", "data.packing=false", "data.labels=[even]"], {},
     ["command line: data.labels: found a list, at least 2 values are needed, not 1"]),
    ("no rank, no source", {}, [*R, "profile.ranks=[]", "data.mixture=[]"], {},
     ["command line: data.mixture: found a list, at least 1 value is needed, not 0",
      "command line: profile.ranks: found a list, at least 1 value is needed, not 0"]),
    ("modules", {}, [*R, "adapter.target_modules=[1]"], {},
     ["command line: adapter.target_modules: found a list, a pattern, a list of names or all-linear is needed"]),
    ("numbers in words", {}, [*R, "optimizer.learning_rate=nan", "optimizer.epsilon=1e999", "steps=infinity"], {},
     ['command line: optimizer.epsilon: found Infinity, a finite number is needed',
      'command line: optimizer.learning_rate: found "nan" (text), a number is needed',
      'command line: steps: found "infinity" (text), a whole number is needed']),
    ("class twice", {}, [*R, "task=classify", "data.packing=false", "data.labels=[a, b, a]"], {},
     ["command line: data.labels: a is there twice; each name is one class"]),
    ("packed texts", {}, [*R, "task=mlm"], {},
     ["r.yaml:7: data.packing: found true, but a row of task mlm holds one text; set it to false"]),
    ("packed pairs", {}, [*R, "task=dpo"], {},
     ["r.yaml:7: data.packing: found true, but a row of task dpo holds two answers to one prompt; set it to false"]),
    ("pairs' keys", {}, [*R, "dpo.beta=0.5", "reward.center_rewards_coefficient=0.1", "data.chosen_column=good"], {},
     ['command line: data.chosen_column: found "good" (text), but only the tasks dpo, reward read it and task is pretrain',
      "command line: dpo.beta: found 0.5, but only task dpo reads it and task is pretrain",
      "command line: reward.center_rewards_coefficient: found 0.1, but only task reward reads it and task is pretrain"]),
    ("one column for both", {}, [*R, "task=dpo", "data.packing=false", "data.rejected_column=chosen"], {},
     ["command line: data.rejected_column: found chosen, which is data.chosen_column; name both"]),
    ("simpo", {}, [*R, "task=dpo", "data.packing=false", "dpo={loss: simpo, label_smoothing: 0.1}"], {},
     ["command line: dpo.gamma: missing; simpo needs its margin (its authors: beta 2 to 2.5, and gamma 0.1 to 0.8 times that)",
      "command line: dpo.label_smoothing: found 0.1, but only sigmoid smooths labels and dpo.loss is simpo; set it to 0"]),
    ("margin", {}, [*R, "task=dpo", "data.packing=false", "dpo.gamma=0.5"], {},
     ["command line: dpo.gamma: found 0.5, but only simpo has a margin and dpo.loss is sigmoid; set it to null"]),
    ("a single row", {}, [*R, "task=embed", "data.packing=false", "batch.global_batch_size=1"], {},
     ["command line: batch.global_batch_size: found 1, but embed learns from what tells rows apart; set it to 2 or more"]),
    ("a column twice", {}, [*R, "task=embed", "data.packing=false", "data.negative_columns=[a, positive]"], {},
     ["command line: data.negative_columns: positive is read twice"]),
    ("embed's key", {}, [*R, "embed.temperature=1"], {},
     ["command line: embed.temperature: found 1, but only task embed reads it and task is pretrain"]),
    ("no teacher", {}, [*R, "task=distill"], {},
     ["r.yaml: distill.teacher: missing; name the folder or hub name of the model to learn from"]),
    ("teacher folder", {}, [*R, "task=distill", "distill.teacher=./t", "data.path=builtin:python-functions"], {},
     ["command line: distill.teacher: no such folder: t"]),
    ("no template", {}, [*R, "task=sft", "tokenizer.chat_template=t.jinja"], {},
     ["command line: tokenizer.chat_template: no such file: t.jinja; chatml needs none"]),
    ("flash packed", r("  config: {", "  attention: flash_attention_2\n  config: {"), [*R, "batch.micro_batch_size=2"], {},
     ["r.yaml:5: model.attention: found flash_attention_2, which does not keep packed documents apart when "
      "batch.micro_batch_size is 2; set that to 1, or use sdpa, or data.packing: false"]),
    ("flash fp32", r("  config: {", "  attention: flash_attention_2\n  config: {"), [*R, "precision=fp32"], {},
     ["r.yaml:5: model.attention: found flash_attention_2, which does not compute in fp32; use sdpa, or precision: bf16"]),
    ("warmup", add("schedule:\n  warmup_steps: 10\n"), R, {},
     ["r.yaml:16: schedule.warmup_steps: found 10, but steps is 10; warm-up has to end before the run does"]),
    ("decay cosine", add("schedule:\n  decay_steps: 5\n"), R, {},
     ["r.yaml:16: schedule.decay_steps: found 5, but only wsd has a decay of its own and schedule.name is cosine"]),
    ("wsd none", add("schedule:\n  name: wsd\n"), R, {},
     ["r.yaml:15: schedule.decay_steps: missing; wsd needs the length of its final decay"]),
    ("wsd long", add("schedule:\n  name: wsd\n  warmup_steps: 5\n  decay_steps: 6\n"), R, {},
     ["r.yaml:18: schedule.decay_steps: found 6; with 5 warm-up steps that is more than the 10 steps"]),
    ("keep", add("checkpoint: {keep: 1}\n"), R, {},
     ["r.yaml:15: checkpoint.keep: found 1, a number of at least 2 is needed"]),
    ("best", add("checkpoint: {best: eval_loss, every_steps: 3}\n"), [*R, "data.validation_fraction=0.1", "evaluate.every_steps=2"], {},
     ["r.yaml:15: checkpoint.best: found eval_loss, but checkpoints are written every 3 steps and evaluate.every_steps is 2; set that to a divisor of checkpoint.every_steps, so that each has a number of its own"]),
    ("rollback", add("numerics: {rollback_ratio: 2.0}\n"), [*R, "checkpoint.every_steps=0"], {},
     ["r.yaml:15: numerics.rollback_ratio: found 2, but checkpoint.every_steps is 0, so there is nothing to go back to; set it above 0"]),
    ("resume", {}, [*R, "--resume", "gone"], {},
     ["command line: --resume: found gone, but there is no such folder; give auto, none or RUN/checkpoints/step_00000040"]),
    ("fresh", {}, [*R, "--resume", ".", "--fresh"], {},
     ["command line: --fresh: given together with --resume .; keep one of them"]),
    ("eval", add("evaluate: {every_steps: 100}\n"), R, {},
     ["r.yaml:15: evaluate.every_steps: found 100, but nothing is held out; set data.validation_fraction above 0 or evaluate.path"]),
    ("batch", r("global_batch_size: 8", "global_batch_size: 9"), [*R, "batch.micro_batch_size=2"], {},
     ["r.yaml:10: batch.global_batch_size: found 9, which is no multiple of micro_batch_size 2 x 1 data-parallel ranks; nearest global_batch_size: 8 or 10; micro_batch_size that fits: 1 or 3"]),
    ("huge micro-batch", {}, [*R, "batch.micro_batch_size=1000000000000"], {},
     ["r.yaml:10: batch.global_batch_size: found 8, which is no multiple of micro_batch_size 1000000000000 x 1 data-parallel ranks; nearest global_batch_size: 1000000000000; micro_batch_size that fits: 4 or 8"]),
    ("several", {"r.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two").replace("bf16", "int8").replace("text.txt", "gone")}, [*R, "seed=x"], {},
     ['r.yaml:2: steps: found "two" (text), a whole number is needed',
      "r.yaml:3: precision: found \"int8\" (text), one of 'fp32', 'bf16' or 'fp16' is needed",
      "r.yaml:8: data.path: no such file or folder: gone",
      'command line: seed: found "x" (text), a whole number is needed']),
]
# fmt: on


def test_splits_of_the_hub_that_may_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    mixture = "[{path: org/name, weight: 1}, {path: org/name, weight: 1, split: extra, config: b}]"
    for overrides in (
        ["data.path=org/name", "data.split=test", "data.config=a", "data.revision=v1"],
        ["data.path=org/name", "evaluate.split=validation", "evaluate.every_steps=5"],
        ["data.path=org/name", "data.config=en", "evaluate.split=train", "evaluate.config=de"],
        ["evaluate.path=org/name", "evaluate.split=test", "evaluate.revision=v1"],
        ["data.path=null", f"data.mixture={mixture}"],
        ["data.path=.", "data.split=train"],
    ):
        plan = message(tmp_path, ["r.yaml", *overrides], {})
        assert isinstance(plan, Plan), plan


@pytest.mark.parametrize(("files", "argv", "environ", "lines"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_report(files, argv, environ, lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    assert message(tmp_path, argv, environ) == (expected(lines), ConfigurationError.exit_code)


def load(tmp_path, monkeypatch, files=None, *overrides):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files or {})
    plan = message(tmp_path, ["r.yaml", *overrides], {})
    assert isinstance(plan, Plan), plan
    return plan.recipe


def test_good_recipe(tmp_path, monkeypatch):
    recipe = load(tmp_path, monkeypatch)
    assert recipe.optimizer.learning_rate == 1e-3  # plain PyYAML reads this as text
    assert recipe.model.config == {"model_type": "llama", "num_hidden_layers": 4}
    assert recipe.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(("text", "number"), [("1e-4", 1e-4), ("1E5", 1e5), ("+.5", 0.5), ("3", 3.0), ("2.", 2.0)])
def test_numbers_of_yaml_1_2(text, number, tmp_path, monkeypatch):
    assert load(tmp_path, monkeypatch, r("1e-3", text)).optimizer.learning_rate == number


def test_overrides_are_typed_by_the_schema(tmp_path, monkeypatch):
    overrides = ["output_dir=2024-01-01", "seed=4", "optimizer.betas=[0.8, 0.9]", "data.cache_dir=7"]
    overrides += ["model.config.hidden_size=8", "tokenizer.path=null", "data.text_column="]
    recipe = load(tmp_path, monkeypatch, None, *overrides)
    assert (recipe.output_dir, recipe.seed, recipe.data.cache_dir) == ("2024-01-01", 4, "7")
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.model.config["hidden_size"] == 8 and recipe.model.config["num_hidden_layers"] == 4
    assert recipe.tokenizer.path is None and recipe.data.text_column == ""


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*.md", "a: b: c", "@home", "%x", "!!int ten"])
def test_what_is_no_yaml_is_text(pattern, tmp_path, monkeypatch):
    assert load(tmp_path, monkeypatch, None, f"data.pattern={pattern}").data.pattern == pattern


def test_base_is_merged_block_by_block(tmp_path, monkeypatch):
    files = {
        "sub/base.yaml": GOOD["r.yaml"].replace("steps: 10", "steps: two"),
        "sub/middle.yaml": "base: base.yaml\nsteps: 3\nbatch: {micro_batch_size: 2}\n",
        "r.yaml": "base: sub/middle.yaml\nmodel: {config: {num_hidden_layers: 2}}\n",
    }
    recipe = load(tmp_path, monkeypatch, files)
    assert recipe.steps == 3
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (8, 2)
    assert recipe.model.config == {"model_type": "llama", "num_hidden_layers": 2}


def test_anchors_are_not_duplicates(tmp_path, monkeypatch):
    merged = r("  micro_batch_size: 1", "  <<: {micro_batch_size: 4}\n  micro_batch_size: 2")
    assert load(tmp_path, monkeypatch, merged).batch.micro_batch_size == 2


def test_bytes_that_are_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_bytes(b"steps: \xff")
    lines = ["r.yaml: cannot be read: not UTF-8 text (r.yaml)"]
    assert message(tmp_path, R, {}) == (expected(lines), 2)


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
    hint = "recipe values are written steps=100, without dashes"
    first = expected([f"command line: unrecognized arguments: --stratgy x; {hint}"])
    assert str(error.value).startswith(f"{first}\nusage: train.py [-h]")


def test_accumulation_by_hand():
    batch = Batch(global_batch_size=24, micro_batch_size=2, sequence_length=8)
    assert batch.accumulation_steps(4) == 3
    with pytest.raises(ConfigurationError, match="24 does not divide into micro_batch_size 2 x 5 data-parallel ranks"):
        batch.accumulation_steps(5)


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ["model.path=m"],
            ["model.path replaces model.config of r.yaml", "model.path replaces tokenizer.vocabulary_size of r.yaml"],
        ),
        (["model={path: m}"], ["model.path replaces tokenizer.vocabulary_size of r.yaml"]),
        (["tokenizer.path=t"], ["tokenizer.path replaces tokenizer.vocabulary_size of r.yaml"]),
        (["data.mixture=[{path: text.txt, weight: 1.0}]"], ["data.mixture replaces data.path of r.yaml"]),
        (["model.config.hidden_size=8"], []),
    ],
)
def test_what_one_gives_replaces_its_alternative(overrides, notes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    plan = message(tmp_path, ["r.yaml", *overrides], {})
    assert isinstance(plan, Plan), plan
    assert list(plan.notes) == notes
    if overrides[0] == "model.path=m":
        assert (plan.recipe.model.path, plan.recipe.model.config) == ("m", None)
        assert plan.recipe.tokenizer.vocabulary_size is None


def test_a_recipe_replaces_what_its_base_says(tmp_path, monkeypatch):
    files = {"base.yaml": GOOD["r.yaml"], "r.yaml": "base: base.yaml\nmodel: {path: m}\n"}
    recipe = load(tmp_path, monkeypatch, files, "model.config={model_type: gpt2}", "tokenizer.vocabulary_size=300")
    assert (recipe.model.path, recipe.model.config) == (None, {"model_type": "gpt2"})


def test_a_new_tokenizer_for_a_pretrained_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    for task in ("pretrain", "sft", "mlm"):
        found, code = message(
            tmp_path,
            ["r.yaml", f"task={task}", "model.path=m", "tokenizer.vocabulary_size=300", "data.packing=false"],
            {},
        )
        assert code == 2 and "tokenizer.vocabulary_size: found 300, but a new tokenizer" in found
