"""Accelerate YAML and DeepSpeed JSON: every mistake with what its message must say, and one report as a whole."""

# ruff: noqa: E501 - one problem, one line

from __future__ import annotations

import pytest
from report_cases import BLOCK, GOOD, INTEGER, NUMBER, TORCHRUN, Plan, changed, check_report, message, write

from samecurve.specs.environment import dated

T = TORCHRUN
DEEPSPEED, TORCH = dated("deepspeed"), dated("torch")


def acc(old, new, name="ddp", environ=T):
    """One change in an Accelerate YAML that torchrun's two processes are given."""
    path = f"configs/{name}.yaml"
    return changed(path, old, new), ["r.yaml", "--strategy", path], environ


def ds(old, new, name="zero2", environ=T):
    """One change in a bare DeepSpeed JSON."""
    path = f"ds_configs/{name}.json"
    return changed(path, old, new), ["r.yaml", "--strategy", path], environ


def top(text, name="zero2"):
    return ds('{\n  "', "{\n  " + text + ',\n  "', name)


def zadd(text):
    return ds('"stage": 2,', '"stage": 2,\n    ' + text + ",")


def use(path, environ=T, files=None):
    return files or {}, ["r.yaml", "--strategy", path], environ


TP = "distributed_type: MULTI_GPU\nnum_processes: 2\nparallelism_config:\n  parallelism_config_tp_size: 2\n"
FSDP_TP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
# ranks 0 and 1 form the first group
parallelism_config:
  parallelism_config_tp_size: 2
"""
FSDP_ULYSSES = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
parallelism_config:
  parallelism_config_sp_size: 2
"""

FSDP_EP = FSDP_ULYSSES.replace("_sp_size", "_ep_size")


def ep(old, new):
    """One change in the recipe, under expert parallelism."""
    path = "configs/fsdp_ep.yaml"
    return {path: FSDP_EP, **changed("r.yaml", old, new)}, ["r.yaml", "--strategy", path], T


def ep_file(old, new, name="fsdp_ep", environ=T):
    """One change in an Accelerate YAML that spreads experts."""
    path = f"configs/{name}.yaml"
    return {path: FSDP_EP.replace(old, new)}, ["r.yaml", "--strategy", path], environ


def tp(old, new):
    """One change in the recipe, under tensor parallelism."""
    return {"configs/tp.yaml": TP, **changed("r.yaml", old, new)}, ["r.yaml", "--strategy", "configs/tp.yaml"], T


def cp(old, new, name="fsdp_ulysses", environ=T):
    """One change in an Accelerate YAML that cuts sequences."""
    path = f"configs/{name}.yaml"
    return {path: FSDP_ULYSSES.replace(old, new)}, ["r.yaml", "--strategy", path], environ


PP = """\
distributed_type: MULTI_GPU
num_processes: 2
parallelism_config:
  parallelism_config_pp_size: 2
  parallelism_config_pp_schedule: 1F1B
"""


def pp(old, new, environ=T):
    """One change in the file of a pipeline schedule."""
    files = {"configs/pipeline_1f1b.yaml": PP.replace(old, new)}
    return files, ["r.yaml", "--strategy", "configs/pipeline_1f1b.yaml"], environ


PP_TP = PP.replace("  parallelism_config_pp_size", "  parallelism_config_tp_size: 2\n  parallelism_config_pp_size")
PP_FSDP_TP = FSDP_TP + "  parallelism_config_pp_size: 2\n  parallelism_config_pp_schedule: 1F1B\n"
FSDP_TP_CP = FSDP_TP + "  parallelism_config_cp_size: 2\n"
FOUR, EIGHT = ({**T, "WORLD_SIZE": count} for count in ("4", "8"))
HPZ = '{"zero_optimization": {"stage": 3,\n"zero_hpz_partition_size": 2}}'


def cut_pp(old, new, environ=FOUR, changed_recipe=None):
    """One change in the file of a pipeline whose stages are cut, or in its recipe."""
    files = {"configs/pp_tp.yaml": PP_TP.replace("num_processes: 2\n", "").replace(old, new)}
    return files | (changed_recipe or {}), ["r.yaml", "--strategy", "configs/pp_tp.yaml"], environ


# name, changed files, command line, environment, the report's rows (see report_cases.py), and the exit code where it is
# not 2
# fmt: off
CASES = [
    ("yaml: unknown", *acc("num_processes", "num_proceses"),
     [("configs/ddp.yaml:2", "num_proceses", "unknown key", "num_processes")]),
    ("yaml: nested unknown", *acc("  fsdp_version", "  fsdp_ofload_params: true\n  fsdp_version", "fsdp"),
     [("configs/fsdp.yaml:4", "fsdp_config.fsdp_ofload_params", "unknown key", "fsdp_offload_params")]),
    ("yaml: prefix", *acc("parallelism_config_dp_replicate_size", "dp_replicate_size", "hsdp", {**T, "WORLD_SIZE": "4"}),
     [("configs/hsdp.yaml:7", "parallelism_config.dp_replicate_size", "unknown key", "parallelism_config_dp_replicate_size")]),
    ("yaml: type", *acc("num_processes: 2", "num_processes: two"),
     [("configs/ddp.yaml:2", "num_processes", "two", INTEGER, "above 0")]),
    ("yaml: reduction", *acc("  fsdp_version", "  fsdp_reduce_dtype: fp16\n  fsdp_version", "fsdp"),
     [("configs/fsdp.yaml:4", "fsdp_config.fsdp_reduce_dtype", "fp16", "fp32, bf16")]),
    ("json: reduction", *top('"communication_data_type": "fp16"'),
     [("ds_configs/zero2.json:2", "communication_data_type", "fp16", "precision", '"bf16"', "r.yaml:3", '"fp32" or "bf16"')]),
    ("yaml: bool", *acc("  fsdp_version", '  fsdp_reshard_after_forward: "yes"\n  fsdp_version', "fsdp"),
     [("configs/fsdp.yaml:4", "fsdp_config.fsdp_reshard_after_forward", "yes", "true or false")]),
    ("yaml: another type", *acc("MULTI_GPU", "MULTI_XPU"),
     [("configs/ddp.yaml:1", "distributed_type", "MULTI_XPU", "NO", "MULTI_GPU", "FSDP", "DEEPSPEED")]),
    ("yaml: no type", *acc("distributed_type: MULTI_GPU\n", ""),
     [("configs/ddp.yaml", "distributed_type", "missing", "NO", "MULTI_GPU", "FSDP", "DEEPSPEED")]),
    ("yaml: cpu", *acc("num_processes: 2", "num_processes: 2\nuse_cpu: true", "fsdp"),
     [("configs/fsdp.yaml:3", "use_cpu", "true", "false", "CUDA_VISIBLE_DEVICES=")]),
    ("yaml: dynamo", *acc("num_processes: 2", "num_processes: 2\ndynamo_config: {dynamo_backend: AOT_EAGER, dynamo_mode: max-autotune}"),
     [("configs/ddp.yaml:3", "dynamo_config.dynamo_backend", "AOT_EAGER", "NO or INDUCTOR"),
      ("configs/ddp.yaml:3", "dynamo_config.dynamo_mode", "max-autotune", "default", "remove")]),
    ("yaml: ignored modules", *acc("fsdp_version: 2", "fsdp_version: 2\n  fsdp_ignored_modules: .*norm", "fsdp"),
     [("configs/fsdp.yaml:5", "fsdp_config.fsdp_ignored_modules", "norm", "summed over the ranks", "remove")]),
    ("yaml: dup", *acc("num_processes: 2", "num_processes: 2\nnum_processes: 3"),
     [("configs/ddp.yaml:3", "num_processes", "line 2", "keep one")]),
    ("yaml: block", *acc("num_processes: 2", "num_processes: 2\ndynamo_config: 3"),
     [("configs/ddp.yaml:3", "dynamo_config", "3", BLOCK)]),
    ("yaml: tp", *acc("parallelism_config:", "parallelism_config:\n  parallelism_config_tp_size: 2", "hsdp", {**T, "WORLD_SIZE": "4"}),
     [("configs/hsdp.yaml:8", "parallelism_config.parallelism_config_dp_replicate_size", "2", "compared", "remove")]),
    ("ulysses and cp", *cp("sp_size: 2", "sp_size: 2\n  parallelism_config_cp_size: 2"),
     [("configs/fsdp_ulysses.yaml:7", "parallelism_config.parallelism_config_cp_size", "2", "remove one")]),
    ("context parallelism of another backend", *cp("sp_size: 2", "sp_size: 2\n  parallelism_config_cp_backend: other"),
     [("configs/fsdp_ulysses.yaml:7", "parallelism_config.parallelism_config_cp_backend", "other", f"context_parallel of {TORCH}", "masks between packed", "remove")]),
    ("cp ring", *cp("sp_size: 2", "cp_size: 2\n  parallelism_config_cp_comm_strategy: ring", name="fsdp_cp"),
     [("configs/fsdp_cp.yaml:7", "parallelism_config.parallelism_config_cp_comm_strategy", "ring", "allgather, alltoall")]),
    ("ulysses ring", *cp("sp_size: 2", "sp_size: 2\n  parallelism_config_cp_comm_strategy: alltoall"),
     [("configs/fsdp_ulysses.yaml:7", "parallelism_config.parallelism_config_cp_comm_strategy", "alltoall", "parallelism_config_cp_size is above 1", "remove")]),
    ("ulysses in ddp", *use("configs/tp.yaml", T, {"configs/tp.yaml": TP + "  parallelism_config_sp_size: 2\n"}),
     [("configs/tp.yaml:5", "parallelism_config.parallelism_config_sp_size", "FSDP", "MULTI_GPU", "fsdp_ulysses.yaml")]),
    ("ulysses offload", *cp("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true", name="fsdp_ulysses_offload"),
     [("configs/fsdp_ulysses_offload.yaml:4", "fsdp_config.fsdp_offload_params", "true", "compared", "false")]),
    ("ulysses on 3", *cp("", "", environ={**T, "WORLD_SIZE": "3"}),
     [("configs/fsdp_ulysses.yaml:6", "parallelism_config.parallelism_config_sp_size", "2", "3 processes", "start a multiple of 2", "set it to 3")], 6),
    ("ulysses shards", *cp("sp_size: 2", "sp_size: 2\n  parallelism_config_dp_shard_size: 4", environ={**T, "WORLD_SIZE": "4"}),
     [("configs/fsdp_ulysses.yaml:7", "parallelism_config.parallelism_config_dp_shard_size", "4", "make 2 shards", "context-parallel", "remove")], 6),
    ("ep on 3", *ep_file("", "", environ={**T, "WORLD_SIZE": "3"}),
     [("configs/fsdp_ep.yaml:6", "parallelism_config.parallelism_config_ep_size", "2", "3 processes", "multiple of 2", "set it to 3")], 6),
    ("ep is 0", *ep_file("ep_size: 2", "ep_size: 0", name="experts"),
     [("configs/experts.yaml:6", "parallelism_config.parallelism_config_ep_size", "0", "an integer above 0")]),
    ("ep in ddp", *use("configs/tp.yaml", T, {"configs/tp.yaml": TP + "  parallelism_config_ep_size: 2\n"}),
     [("configs/tp.yaml:5", "parallelism_config.parallelism_config_ep_size", "FSDP", "MULTI_GPU", "fsdp_ep.yaml")]),
    ("ep offload", *ep_file("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true", name="fsdp_ep_offload"),
     [("configs/fsdp_ep_offload.yaml:4", "fsdp_config.fsdp_offload_params", "true", "compared", "false")]),
    ("ep and cp", *ep_file("ep_size: 2", "ep_size: 2\n  parallelism_config_cp_size: 2", name="fsdp_ep_cp", environ={**T, "WORLD_SIZE": "4"}),
     [("configs/fsdp_ep_cp.yaml:7", "parallelism_config.parallelism_config_cp_size", "2", "compared", "remove one")]),
    ("ep and tp on 2", *ep_file("ep_size: 2", "ep_size: 2\n  parallelism_config_tp_size: 2", name="fsdp_ep_tp"),
     [("configs/fsdp_ep_tp.yaml:6", "parallelism_config.parallelism_config_ep_size", "2", "2 processes", "groups of 2 tensor-parallel", "multiple of 4")], 6),
    ("ep, tp: sequence", *ep_file("ep_size: 2", "ep_size: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_tp_sequence_parallel: true", name="fsdp_ep_tp", environ={**T, "WORLD_SIZE": "4"}),
     [("configs/fsdp_ep_tp.yaml:8", "parallelism_config.parallelism_config_tp_sequence_parallel", "true", "compared", "remove one")]),
    ("ep and pp", *pp("MULTI_GPU\nnum_processes: 2\nparallelism_config:\n", "FSDP\nfsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false}\nparallelism_config:\n  parallelism_config_ep_size: 2\n"),
     [("configs/pipeline_1f1b.yaml:4", "parallelism_config.parallelism_config_ep_size", "2", "compared", "remove")]),
    ("ep: compile", *ep("steps: 10", "steps: 10\ncompile: regional"),
     [("r.yaml:3", "compile", "regional", f"all_to_all_single of {TORCH}", "off")]),
    ("ep: precision", *ep("precision: bf16", "precision: fp16"),
     [("r.yaml:3", "precision", "fp16", "once too often", "fp32 or bf16")]),
    ("ep: fp8", *ep("steps: 10", "steps: 10\nfp8: tensorwise"),
     [("r.yaml:3", "fp8", "tensorwise", "torchao", "off")]),
    ("ep: kernels", *ep("num_hidden_layers: 4}", "num_hidden_layers: 4}\n  kernels: liger"),
     [("r.yaml:6", "model.kernels", "liger", "compared", "torch")]),
    ("ep: gradient_sync", *ep("steps: 10", "steps: 10\nmemory: {activation_checkpointing: full, gradient_sync: last_micro_batch}"),
     [("r.yaml:3", "memory.gradient_sync", "last_micro_batch", "compared", "auto")]),
    ("ep: offloaded activations", *ep("steps: 10", "steps: 10\nmemory: {activation_checkpointing: offload}"),
     [("r.yaml:3", "memory.activation_checkpointing", "offload", "compared", "none, full or selective")]),
    ("tp shards", *use("configs/tp.yaml", T, {"configs/tp.yaml": TP + "  parallelism_config_dp_shard_size: 1\n"}),
     [("configs/tp.yaml:5", "parallelism_config.parallelism_config_dp_shard_size", "FSDP", "MULTI_GPU", "remove", "fsdp_tp.yaml")]),
    ("tp offload", *use("configs/fsdp_tp_offload.yaml", {**T, "WORLD_SIZE": "4"}, {"configs/fsdp_tp_offload.yaml": FSDP_TP.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true")}),
     [("configs/fsdp_tp_offload.yaml:4", "fsdp_config.fsdp_offload_params", "true", "compared", "false")]),
    ("tp: gradient_sync", *tp("steps: 10", "steps: 10\nmemory: {activation_checkpointing: full, gradient_sync: last_micro_batch}"),
     [("r.yaml:3", "memory.gradient_sync", "last_micro_batch", "compared", "auto")]),
    ("tp: precision", *tp("precision: bf16", "precision: fp16"),
     [("r.yaml:3", "precision", "fp16", "loss scale", "fp32 or bf16")]),
    ("tp: fp8", *tp("steps: 10", "steps: 10\nfp8: tensorwise"),
     [("r.yaml:3", "fp8", "tensorwise", "torchao", "off")]),
    ("tp: kernels", *tp("num_hidden_layers: 4}", "num_hidden_layers: 4}\n  kernels: liger"),
     [("r.yaml:6", "model.kernels", "liger", "whole weights", "torch")]),
    ("tp: loss", *tp("steps: 10", "steps: 10\nloss: {implementation: liger}"),
     [("r.yaml:3", "loss.implementation", "liger", "whole output head", "chunked")]),
    ("tp on 4", *use("configs/tp.yaml", {**T, "WORLD_SIZE": "4"}, {"configs/tp.yaml": TP}),
     [("configs/tp.yaml:4", "parallelism_config.parallelism_config_tp_size", "2", "4 processes", "start 2", "set it to 4", "fsdp_tp.yaml")], 6),
    ("pp on 3", *pp("num_processes: 2\n", "", {**T, "WORLD_SIZE": "3"}),
     [("configs/pipeline_1f1b.yaml:3", "parallelism_config.parallelism_config_pp_size", "2", "3 processes", "multiple of 2", "set it to 3")], 6),
    ("pp: hsdp", *pp("MULTI_GPU\nnum_processes: 2\nparallelism_config:\n", "FSDP\nfsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false}\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"),
     [("configs/pipeline_1f1b.yaml:4", "parallelism_config.parallelism_config_dp_replicate_size", "2", "compared", "remove", "shards take all")]),
    ("pp: fsdp's keys", *pp("MULTI_GPU\n", "FSDP\nfsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false, fsdp_reduce_dtype: bf16}\n"),
     [("configs/pipeline_1f1b.yaml:2", "fsdp_config.fsdp_reduce_dtype", "once per step", "compared", "remove")]),
    ("pp schedule", *pp("1F1B", "2F2B"),
     [("configs/pipeline_1f1b.yaml:5", "parallelism_config.parallelism_config_pp_schedule", "2F2B", "GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV")]),
    ("pp without schedule", *pp("  parallelism_config_pp_schedule: 1F1B\n", ""),
     [("configs/pipeline_1f1b.yaml:3", "parallelism_config.parallelism_config_pp_schedule", "missing", "set it to one of")]),
    ("pp and tp on 8", *cut_pp("", "", EIGHT),
     [("configs/pp_tp.yaml:3", "parallelism_config.parallelism_config_tp_size", "2", "8 processes", "2 stages of 2", "start 4", "pp_fsdp_tp.yaml")], 6),
    ("pp and tp: schedule", *cut_pp("1F1B", "ZBVZeroBubble"),
     [("configs/pp_tp.yaml:5", "parallelism_config.parallelism_config_pp_schedule", "ZBVZeroBubble", "parallelism_config_tp_size", "compared", "GPipe or 1F1B or Interleaved1F1B")]),
    ("pp and tp: sequence", *cut_pp("_tp_size: 2\n", "_tp_size: 2\n  parallelism_config_tp_sequence_parallel: true\n"),
     [("configs/pp_tp.yaml:4", "parallelism_config.parallelism_config_tp_sequence_parallel", "true", "parts of the sequence", "false")]),
    ("pp and fsdp and tp on 6", *use("configs/pp_fsdp_tp.yaml", {**T, "WORLD_SIZE": "6"}, {"configs/pp_fsdp_tp.yaml": PP_FSDP_TP}),
     [("configs/pp_fsdp_tp.yaml:7", "parallelism_config.parallelism_config_tp_size", "2", "6 processes", "2 stages of a multiple of 2", "multiple of 4")], 6),
    ("pp and fsdp and cp", *use("configs/pp_fsdp_tp.yaml", EIGHT, {"configs/pp_fsdp_tp.yaml": PP_FSDP_TP + "  parallelism_config_cp_size: 2\n"}),
     [("configs/pp_fsdp_tp.yaml:10", "parallelism_config.parallelism_config_cp_size", "2", "compared", "PyTorch's pipeline", "remove")]),
    ("tp and cp on 6", *use("configs/fsdp_tp_cp.yaml", {**T, "WORLD_SIZE": "6"}, {"configs/fsdp_tp_cp.yaml": FSDP_TP_CP}),
     [("configs/fsdp_tp_cp.yaml:8", "parallelism_config.parallelism_config_cp_size", "2", "6 processes", "groups of 2", "multiple of 4")], 6),
    ("tp and cp: sequence", *use("configs/fsdp_tp_cp.yaml", FOUR, {"configs/fsdp_tp_cp.yaml": FSDP_TP_CP + "  parallelism_config_tp_sequence_parallel: true\n"}),
     [("configs/fsdp_tp_cp.yaml:9", "parallelism_config.parallelism_config_tp_sequence_parallel", "true", "two ways", "compared", "false")]),
    ("hpz on 2", *use("ds_configs/zero3_hpz.json", T, {"ds_configs/zero3_hpz.json": HPZ}),
     [("ds_configs/zero3_hpz.json:2", "zero_optimization.zero_hpz_partition_size", "2", "2 processes", "several groups", "from 4 on", "zero3.yaml")], 6),
    ("hpz on 6 by 4", *use("ds_configs/zero3_hpz.json", {**T, "WORLD_SIZE": "6"}, {"ds_configs/zero3_hpz.json": HPZ.replace("2}}", "4}}")}),
     [("ds_configs/zero3_hpz.json:2", "zero_optimization.zero_hpz_partition_size", "4", "6 processes", "multiple of 4 from 8 on")], 6),
    ("hpz: offload", *use("ds_configs/mine.json", FOUR, {"ds_configs/mine.json": HPZ.replace("}}", ',\n"offload_param": {"device": "cpu"}}}')}),
     [("ds_configs/mine.json:2", "zero_optimization.zero_hpz_partition_size", "2", "offloaded weights", "offload_param")]),
    ("fsdp_tp on 3", *use("configs/fsdp_tp.yaml", {**T, "WORLD_SIZE": "3"}, {"configs/fsdp_tp.yaml": FSDP_TP}),
     [("configs/fsdp_tp.yaml:7", "parallelism_config.parallelism_config_tp_size", "2", "3 processes", "start a multiple of 2", "set it to 3")], 6),
    ("fsdp_tp shards", *use("configs/fsdp_tp.yaml", {**T, "WORLD_SIZE": "4"}, {"configs/fsdp_tp.yaml": FSDP_TP + "  parallelism_config_dp_shard_size: 4\n"}),
     [("configs/fsdp_tp.yaml:8", "parallelism_config.parallelism_config_dp_shard_size", "4", "make 2 shards", "remove")], 6),
    ("fsdp+ds", *acc("num_processes: 2", "num_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds_configs/zero2.json}", "fsdp"),
     [("configs/fsdp.yaml:3", "deepspeed_config", "DEEPSPEED", "distributed_type", "FSDP", "configs/fsdp.yaml:1", "remove")]),
    ("ds+fsdp", *acc("num_processes: 2", "num_processes: 2\nfsdp_config: {fsdp_version: 2}", "zero2"),
     [("configs/zero2.yaml:3", "fsdp_config", "FSDP", "distributed_type", "DEEPSPEED", "configs/zero2.yaml:1", "remove")]),
    ("ddp+fsdp", *acc("num_processes: 2", "num_processes: 2\nfsdp_config: {fsdp_version: 2}"),
     [("configs/ddp.yaml:3", "fsdp_config", "FSDP", "distributed_type", "MULTI_GPU", "configs/ddp.yaml:1", "remove")]),
    ("json: missing file", *acc("zero2.json", "zero9.json", "zero2"),
     [("configs/zero2.yaml:4", "deepspeed_config.deepspeed_config_file", "no such file", "ds_configs/zero9.json", "working directory")]),
    ("yaml missing", *use("configs/zero9.yaml"),
     [("configs/zero9.yaml", "", "No such file or directory", "(configs/zero9.yaml)", "configs/zero3.yaml")]),
    ("json: unknown nested", *zadd('"reduce_bucketsize": 1'),
     [("ds_configs/zero2.json:7", "zero_optimization.reduce_bucketsize", "unknown key", "reduce_bucket_size")]),
    ("json: unknown moved", *top('"reduce_bucket_size": 1'),
     [("ds_configs/zero2.json:2", "reduce_bucket_size", "unknown key", "zero_optimization.reduce_bucket_size")]),
    ("json: unknown offload", *zadd('"offload_optimizer": {"devise": "cpu"}'),
     [("ds_configs/zero2.json:7", "zero_optimization.offload_optimizer.devise", "unknown key", "device")]),
    ("json: prescale", *top('"prescale_gradients": true'),
     [("ds_configs/zero2.json:2", "prescale_gradients", "true", DEEPSPEED, "stage 2", "reduce-scatter", "zero_optimization.reduce_scatter to false")]),
    ("json: predivide", *top('"gradient_predivide_factor": 2.0'),
     [("ds_configs/zero2.json:2", "gradient_predivide_factor", "2", DEEPSPEED, "reduce-scatter", "zero_optimization.reduce_scatter to false")]),
    ("json: predivide zero3", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"gradient_predivide_factor": 2,\n"zero_optimization": {"stage": 3, "reduce_scatter": false}}'}),
     [("ds_configs/mine.json:1", "gradient_predivide_factor", "2", "stage 3", "the number of ranks", "remove it")]),
    ("json: granularity", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 3,\n"stage3_module_granularity_threshold": 100000}}'}),
     [("ds_configs/mine.json:2", "zero_optimization.stage3_module_granularity_threshold", "100000", "backward pass", DEEPSPEED, "leaf_module")]),
    ("json: syntax", *ds('"stage": 2,', '"stage": 2'),
     [("ds_configs/zero2.json:7", "", "invalid JSON", "Expecting ',' delimiter")]),
    ("json: comment", *ds('"stage": 2,', '"stage": 2, // shard'),
     [("ds_configs/zero2.json:6", "", "invalid JSON", "Expecting property name enclosed in double quotes")]),
    ("json: NaN", *ds("5e8", "NaN"),
     [("ds_configs/zero2.json", "", "invalid JSON", "NaN")]),
    ("json: list", *use("ds_configs/zero2.json", files={"ds_configs/zero2.json": "[]"}),
     [("ds_configs/zero2.json", "", "a list", BLOCK)]),
    ("json: dup", *zadd('"stage": 2'),
     [("ds_configs/zero2.json:7", "zero_optimization.stage", "line 6", "keep one")]),
    ("json: removed", *top('"elasticity": {"enabled": true}'),
     [("ds_configs/zero2.json:2", "elasticity", BLOCK, "elastic training", "global_batch_size")]),
    ("json: removed zero", *zadd('"mics_shard_size": 8'),
     [("ds_configs/zero2.json:7", "zero_optimization.mics_shard_size", "8", f"{DEEPSPEED} has removed MiCS", "zero_hpz_partition_size")]),
    ("json: batch", *top('"train_batch_size": 16'),
     [("ds_configs/zero2.json:2", "train_batch_size", "16", "batch.global_batch_size", "8", "r.yaml:10", '"auto"', "remove")]),
    ("json: micro+gas", *top('"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1'),
     [("ds_configs/zero2.json:2", "gradient_accumulation_steps", "1", "batch.global_batch_size", "8", "r.yaml:10", '"auto"', "remove"),
      ("ds_configs/zero2.json:2", "train_micro_batch_size_per_gpu", "4", "batch.micro_batch_size", "1", "r.yaml:11", '"auto"', "remove")]),
    ("recipe: three at once", {"ds_configs/zero3.json": '{"zero_optimization": {"stage": 3}}'}, ["r.yaml", "task=sftt", "compile=regional", "memory.gradient_sync=last_micro_batch", "--strategy", "ds_configs/zero3.json"], T,
     [("command line", "compile", "regional", "ZeRO-3", "off", "configs/fsdp.yaml"),
      ("command line", "memory.gradient_sync", "last_micro_batch", "ZeRO-3", "auto"),
      ("command line", "task", "sftt", "'pretrain', 'continue_pretrain', 'sft', 'distill', 'dpo', 'reward', 'classify', 'token_classify', 'process_reward', 'mlm' or 'embed'")]),
    ("recipe: offloaded lion", {"mine.json": GOOD["ds_configs/zero3_nvme.json"]}, ["r.yaml", "--strategy", "mine.json", "optimizer.name=lion"], T,
     [("command line", "optimizer.name", "lion", "CPU Adam", "adamw", "configs/zero3.yaml")]),
    ("recipe: flat muon", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=muon"], T,
     [("command line", "optimizer.name", "muon", "configs/fsdp.yaml", "configs/ddp.yaml", "adamw", "lion", "sgd")]),
    ("recipe: bf16 masters", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=adamw_bf16"], T,
     [("command line", "optimizer.name", "adamw_bf16", "configs/fsdp.yaml", "configs/ddp.yaml", "adamw")]),
    ("recipe: sharded blocks", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=adamw_8bit"], T,
     [("command line", "optimizer.name", "adamw_8bit", "256", "configs/fsdp.yaml", "configs/ddp.yaml", "adamw", "lion", "sgd")]),
    ("recipe: offloaded adafactor", {"mine.yaml": GOOD["configs/fsdp.yaml"] + "  fsdp_offload_params: true\n"}, ["r.yaml", "--strategy", "mine.yaml", "optimizer.name=adafactor"], T,
     [("command line", "optimizer.name", "adafactor", "configs/fsdp.yaml", "adamw")]),
    ("json: bf16 vs fp16", *ds('"bf16": {"enabled": "auto"}', '"bf16": {"enabled": true}')[:1], ["r.yaml", "precision=fp16", "--strategy", "ds_configs/zero2.json"], T,
     [("ds_configs/zero2.json:3", "bf16.enabled", "true", "precision", '"fp16"', "command line", '"auto"', "remove")]),
    ("json: both on", *use("ds_configs/zero2.json", files={"ds_configs/zero2.json": '{\n"bf16": {"enabled": true},\n"fp16": {"enabled": true},\n"zero_optimization": {"stage": 2}\n}'}),
     [("ds_configs/zero2.json:3", "fp16.enabled", "true", "bf16.enabled", "ds_configs/zero2.json:2", "agree")]),
    ("json: tp", *top('"tensor_parallel": {"autotp_size": 2}'),
     [("ds_configs/zero2.json:2", "tensor_parallel", BLOCK, f"AutoTP of {DEEPSPEED}", "DTensors", "configs/fsdp_tp.yaml")]),
    ("json: experts", *top('"expert_parallel": {"enabled": true}'),
     [("ds_configs/zero2.json:2", "expert_parallel", BLOCK, f"{DEEPSPEED} replaces", "router losses", "configs/fsdp_ep.yaml")]),
    ("json: sequence", *top('"sequence_parallel_size": 2'),
     [("ds_configs/zero2.json:2", "sequence_parallel_size", "2", f"Ulysses of {DEEPSPEED}", "masks", "configs/fsdp_ulysses.yaml")]),
    ("json: quantised", *zadd('"zero_quantized_weights": true'),
     [("ds_configs/zero2.json:7", "zero_optimization.zero_quantized_weights", "true", f"ZeRO++ of {DEEPSPEED}", "remove")]),
    ("json: zenflow", *zadd('"zenflow": {"topk_ratio": 0.1}'),
     [("ds_configs/zero2.json:7", "zero_optimization.zenflow", BLOCK, "ZenFlow", "remove")]),
    ("nvme stage2", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 2,\n"offload_optimizer": {"device": "nvme"}}}'}),
     [("ds_configs/mine.json:2", "zero_optimization.offload_optimizer.device", "nvme", "stage 2", '"cpu"', "stage 3"),
      ("ds_configs/mine.json:2", "zero_optimization.offload_optimizer.nvme_path", "missing", "local disk")]),
    ("ratio", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 2,\n"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}'}),
     [("ds_configs/mine.json:2", "zero_optimization.offload_optimizer.ratio", "0.5", "second optimizer", "remove")]),
    ("pipeline: reentrant", *ds('"stages": 2,', '"stages": 2, "use_reentrant": true,', "pipeline"),
     [("ds_configs/pipeline.json:4", "pipeline.use_reentrant", "true", "reentrant", "memory.activation_checkpointing", "remove")]),
    ("pipeline: partitioned", *ds('"stages": 2,', '"stages": 2, "pipe_partitioned": true, "grad_partitioned": true,', "pipeline"),
     [("ds_configs/pipeline.json:4", "pipeline.grad_partitioned", "true", "tensor-parallel", "remove"),
      ("ds_configs/pipeline.json:4", "pipeline.pipe_partitioned", "true", f"the pipeline of {DEEPSPEED}", "tensor-parallel ranks only", "remove")]),
    ("pipeline: zero2", *ds('"stage": 1', '"stage": 2', "pipeline"),
     [("ds_configs/pipeline.json:2", "zero_optimization.stage", "2", "0 or 1", "set it to 1")]),
    ("pipeline: many", *ds('"stages": 2', '"stages": 6', "pipeline", {**T, "WORLD_SIZE": "6"})[:2], {**T, "WORLD_SIZE": "6"},
     [("ds_configs/pipeline.json:4", "pipeline.stages", "6", "4", "at most 4")]),
    ("pipeline: none", *ds('"stages": 2,\n', "", "pipeline"),
     [("ds_configs/pipeline.json:3", "pipeline.stages", "missing", "number of stages")]),
    ("pipeline: 0", *ds('"stages": 2', '"stages": 0', "pipeline"),
     [("ds_configs/pipeline.json:4", "pipeline.stages", "0", INTEGER, "above 0")]),
    ("pipeline: world", *ds('"stages": 2', '"stages": 2', "pipeline", {**T, "WORLD_SIZE": "3"}),
     [("ds_configs/pipeline.json:4", "pipeline.stages", "3 processes", "2 stages", "multiple of 2")], 6),
    ("pipeline: offload", *ds('"stage": 1', '"stage": 1, "offload_optimizer": {"device": "cpu"}', "pipeline"),
     [("ds_configs/pipeline.json:2", "zero_optimization.offload_optimizer", "pipeline", "remove")]),
    ("pipeline: auto", *ds('"stage": 1', '"stage": 1, "reduce_bucket_size": "auto"', "pipeline"),
     [("ds_configs/pipeline.json:2", "zero_optimization.reduce_bucket_size", '"auto"', NUMBER)]),
    ("pipeline: partition", *ds('"parameters"', '"profile"', "pipeline"),
     [("ds_configs/pipeline.json:5", "pipeline.partition", "profile", '"parameters"', '"uniform"', '"type:"')]),
    ("pipeline: partition without a pattern", *ds('"parameters"', '"type:"', "pipeline"),
     [("ds_configs/pipeline.json:5", "pipeline.partition", "type:", '"parameters"', '"uniform"', '"type:"')]),
    ("pipeline: partition by half a pattern", *ds('"parameters"', '"type:(decoder"', "pipeline"),
     [("ds_configs/pipeline.json:5", "pipeline.partition", "type:(decoder", '"parameters"', '"uniform"', '"type:"')]),
    ("pipeline: family", *ds('"stages": 2', '"stages": 2', "pipeline")[:1], ["r.yaml", "--strategy", "ds_configs/pipeline.json", "model.config.model_type=opt"], T,
     [("ds_configs/pipeline.json:3", "pipeline", "opt", "gpt2, llama, mistral, qwen2, qwen3", "another strategy")]),
    ("pipeline: fp16 without zero", *ds('"stage": 1', '"stage": 0', "pipeline")[:1], ["r.yaml", "--strategy", "ds_configs/pipeline.json", "precision=fp16"], T,
     [("ds_configs/pipeline.json:2", "zero_optimization.stage", "0", "precision", '"fp16"', "command line", "set it to 1")]),
    ("pipeline: bf16 without zero", *ds('"zero_optimization": {"stage": 1}', '"data_types": {"grad_accum_dtype": "fp32"}', "pipeline"),
     [("ds_configs/pipeline.json", "zero_optimization.stage", "0", "bf16", "data_types.grad_accum_dtype", "fp32", "ds_configs/pipeline.json:2", "set it to 1")]),
    ("pipeline: recompute", *ds('"stages": 2,', '"stages": 2, "activation_checkpoint_interval": 1,', "pipeline"),
     [("ds_configs/pipeline.json:4", "pipeline.activation_checkpoint_interval", "1", "memory.activation_checkpointing", '"none"', "the default", "remove")]),
    ("pipeline: seed", *ds('"stages": 2,', '"stages": 2, "seed_layers": true,', "pipeline"),
     [("ds_configs/pipeline.json:4", "pipeline.seed_layers", "true", "seeded", "remove")]),
    ("hsdp on 3", *use("configs/hsdp.yaml", {**T, "WORLD_SIZE": "3"}),
     [("configs/hsdp.yaml:7", "parallelism_config.parallelism_config_dp_replicate_size", "2", "3 processes", "2 replicas", "start 4", "multiple of 2", "fsdp")], 6),
    ("hsdp on 2", *use("configs/hsdp.yaml", {**T, "WORLD_SIZE": "2"}),
     [("configs/hsdp.yaml:7", "parallelism_config.parallelism_config_dp_replicate_size", "2", "2 processes", "2 replicas", "start 4", "multiple of 2", "fsdp")], 6),
    ("hsdp shard", *acc("dp_replicate_size: 2", "dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4", "hsdp", {**T, "WORLD_SIZE": "4"}),
     [("configs/hsdp.yaml:8", "parallelism_config.parallelism_config_dp_shard_size", "4", "4 processes", "2 replicas", "remove")], 6),
    ("world: no strategy", {}, ["r.yaml"], {**T, "WORLD_SIZE": "4"},
     [("environment", "WORLD_SIZE", "4", "--strategy configs/ddp.yaml")], 6),
    ("world: single", *use("configs/single.yaml", {**T, "WORLD_SIZE": "4"}),
     [("environment", "WORLD_SIZE", "4", "configs/single.yaml:1", "distributed_type: NO", "configs/ddp.yaml")], 6),
    ("world: python", *use("configs/zero2.yaml", {}),
     [("environment", "WORLD_SIZE", "configs/zero2.yaml:2", "num_processes: 2", "accelerate launch --config_file configs/zero2.yaml", "--num_processes 2")], 6),
    ("world: by hand", *use("configs/ddp.yaml", {"RANK": "0", "WORLD_SIZE": "4"}),
     [("environment", "WORLD_SIZE", "4", "configs/ddp.yaml:2", "num_processes: 2", "equal")], 6),
    ("world: bad", *use("configs/ddp.yaml", {**T, "WORLD_SIZE": "two"}),
     [("environment", "WORLD_SIZE", "two", INTEGER, "above 0", "launcher")], 6),
    ("machines", *acc("num_processes: 2", "num_processes: 8\nnum_machines: 2"),
     [("environment", "WORLD_SIZE", "2", "configs/ddp.yaml:2", "num_processes: 8", "start 8", "2 machines")], 6),
    ("mixed topology+config", {}, ["r.yaml", "steps=no"], {**T, "WORLD_SIZE": "4"},
     [("command line", "steps", "false", INTEGER),
      ("environment", "WORLD_SIZE", "4", "--strategy configs/ddp.yaml")]),
    ("all three", {**changed("r.yaml", "output_dir: runs/x\nsteps: 10", "stepps: 10"), **changed("configs/zero2.yaml", "num_processes", "num_proceses"), **changed("ds_configs/zero2.json", '"stage": 2', '"stage": 1')}, ["r.yaml", "--strategy", "configs/zero2.yaml", "seed=-1"], T,
     [("configs/zero2.yaml:2", "num_proceses", "unknown key", "num_processes"),
      ("r.yaml", "output_dir", "missing", "add"),
      ("r.yaml:1", "stepps", "unknown key", "steps"),
      ("command line", "seed", "-1", "at least 0")]),
    ("pipeline: model of neither kind", changed("r.yaml", "  config: {model_type: llama, num_hidden_layers: 4}", "  attention: eager"), ["r.yaml", "--strategy", "ds_configs/pipeline.json"], T,
     [("r.yaml:4", "model", "path", "config", "add")]),
    ("world: python and hsdp", *use("configs/hsdp.yaml", {}),
     [("environment", "WORLD_SIZE", "configs/hsdp.yaml:2", "num_processes: 4", "accelerate launch --config_file configs/hsdp.yaml", "--num_processes 4")], 6),
    ("yaml: true is not the harmless 1", *acc("parallelism_config:", "parallelism_config:\n  parallelism_config_tp_size: true", "hsdp", {**T, "WORLD_SIZE": "4"}),
     [("configs/hsdp.yaml:7", "parallelism_config.parallelism_config_tp_size", "true", "integer above 0")]),
]
# fmt: on


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_report(case, folder):
    _, files, argv, environ, rows, *code = case
    write(folder, files)
    report, found_code = message(folder, argv, environ)
    check_report(report, rows)
    assert [found_code] == (code or [2])


WHOLE = """\
4 problems in the configuration
  configs/zero2.yaml:2: num_proceses: unknown key; did you mean num_processes?
  r.yaml: output_dir: missing; add it
  r.yaml:1: stepps: unknown key; did you mean steps?
  command line: seed: found -1, expected a number of at least 0"""


def test_the_whole_report_of_three_files_and_the_command_line(folder):
    """The only one that is compared word by word."""
    _, files, argv, environ, _ = next(case for case in CASES if case[0] == "all three")
    write(folder, files)
    assert message(folder, argv, environ) == (WHOLE, 2)


ZERO_0 = '{"stage": 0}'


@pytest.mark.parametrize(
    ("old", "new", "precision"),
    [
        (
            '"stages": 2,',
            '"stages": 2, "use_reentrant": false, "pipe_partitioned": false, "grad_partitioned": false,',
            "bf16",
        ),
        (
            '{"stage": 1}',
            '{"stage": 1}, "activation_checkpointing": {"profile": false, "number_checkpoints": null}',
            "bf16",
        ),
        ('{"stage": 1}', ZERO_0, "bf16"),
        ('{"stage": 1}', ZERO_0 + ', "data_types": {"grad_accum_dtype": "bf16"}', "bf16"),
        ('{"stage": 1}', ZERO_0 + ', "data_types": {"grad_accum_dtype": "fp32"}', "fp32"),
    ],
)
def test_what_a_pipeline_takes(old, new, precision, folder):
    files, argv, environ = ds(old, new, "pipeline")
    write(folder, files)
    assert isinstance(message(folder, [*argv, f"precision={precision}"], environ), Plan)


@pytest.mark.parametrize("partition", ["uniform", "type:decoder", "type:^Dec.*r$"])
def test_partition_methods_of_deepspeed_are_accepted(partition, folder):
    files, argv, environ = ds("parameters", partition, "pipeline")
    write(folder, files)
    assert message(folder, argv, environ).strategy.deepspeed["pipeline"]["partition"] == partition


def test_at_least_fifty_cases():
    from test_config import CASES as RECIPES

    names = [case[0] for case in (*CASES, *RECIPES)]
    assert len(set(names)) == len(names) >= 50
