"""Accelerate YAML and DeepSpeed JSON: every mistake with its whole message."""

# ruff: noqa: E501 - a message stands in one piece, so that a search for it finds it

from __future__ import annotations

import pytest
from report_cases import GOOD, TORCHRUN, Plan, changed, expected, message, write

T = TORCHRUN


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


OFFLOADED = "command line: optimizer.name: found lion, but DeepSpeed updates an offloaded optimizer with its own CPU Adam, whatever it is given; use adamw, or a strategy without offload, for example configs/zero3.yaml"

# name, changed files, command line, environment, the report's lines, and the exit code where it is not 2
# fmt: off
CASES = [
    ("yaml: unknown", *acc("num_processes", "num_proceses"),
     ["configs/ddp.yaml:2: num_proceses: unknown key; did you mean num_processes?"]),
    ("yaml: nested unknown", *acc("  fsdp_version", "  fsdp_ofload_params: true\n  fsdp_version", "fsdp"),
     ["configs/fsdp.yaml:4: fsdp_config.fsdp_ofload_params: unknown key; did you mean fsdp_offload_params?"]),
    ("yaml: prefix", *acc("parallelism_config_dp_replicate_size", "dp_replicate_size", "hsdp", {**T, "WORLD_SIZE": "4"}),
     ["configs/hsdp.yaml:1: distributed_type: the file is called hsdp, but what it says is fsdp; rename it or change it",
      "configs/hsdp.yaml:7: parallelism_config.dp_replicate_size: unknown key; did you mean parallelism_config_dp_replicate_size?"]),
    ("yaml: type", *acc("num_processes: 2", "num_processes: two"),
     ['configs/ddp.yaml:2: num_processes: found "two" (text), a whole number above 0 is needed']),
    ("yaml: prefetch", *acc("  fsdp_version", "  fsdp_forward_prefetch: true\n  fsdp_backward_prefetch: NO_PREFETCH\n  fsdp_version", "fsdp"),
     ["configs/fsdp.yaml:4: fsdp_config.fsdp_forward_prefetch: found true, but only the layers of TRANSFORMER_BASED_WRAP follow one another, and fsdp_auto_wrap_policy is absent; set it to false",
      'configs/fsdp.yaml:5: fsdp_config.fsdp_backward_prefetch: found "NO_PREFETCH" (text): FSDP2 always gathers the layer before while one is differentiated (BACKWARD_PRE); remove it']),
    ("yaml: reduction", *acc("  fsdp_version", "  fsdp_reduce_dtype: fp16\n  fsdp_version", "fsdp"),
     ['configs/fsdp.yaml:4: fsdp_config.fsdp_reduce_dtype: found "fp16" (text), one of fp32, bf16 is needed']),
    ("json: reduction", *top('"communication_data_type": "fp16"'),
     ['ds_configs/zero2.json:2: communication_data_type: found "fp16" (text), but gradients need a loss scale to fit into it, and precision is "bf16" (r.yaml:3); use "fp32" or "bf16"']),
    ("yaml: bool", *acc("  fsdp_version", '  fsdp_reshard_after_forward: "yes"\n  fsdp_version', "fsdp"),
     ['configs/fsdp.yaml:4: fsdp_config.fsdp_reshard_after_forward: found "yes" (text), true or false is needed']),
    ("yaml: NO", *acc("MULTI_GPU", "NO"),
     ['configs/ddp.yaml:1: distributed_type: found false, one of "NO" (in quotes, a bare NO is false in YAML), MULTI_GPU (on CPUs too), FSDP, DEEPSPEED is needed']),
    ("yaml: MULTI_CPU", *acc("MULTI_GPU", "MULTI_CPU"),
     ['configs/ddp.yaml:1: distributed_type: found "MULTI_CPU" (text), one of "NO" (in quotes, a bare NO is false in YAML), MULTI_GPU (on CPUs too), FSDP, DEEPSPEED is needed']),
    ("yaml: no type", *acc("distributed_type: MULTI_GPU\n", ""),
     ["configs/ddp.yaml: distributed_type: missing; add NO (in quotes), MULTI_GPU, FSDP or DEEPSPEED"]),
    ("yaml: mixed", *acc("num_processes: 2", "num_processes: 2\nmixed_precision: bf16"),
     ['configs/ddp.yaml:3: mixed_precision: found "bf16" (text), but the recipe owns it: precision is "bf16" (r.yaml:3); remove it']),
    ("yaml: cpu", *acc("num_processes: 2", "num_processes: 2\nuse_cpu: true"),
     ["configs/ddp.yaml:3: use_cpu: found true, only false is possible: true silently turns FSDP and DeepSpeed off; without an accelerator the CPU is used anyway"]),
    ("yaml: dynamo", *acc("num_processes: 2", "num_processes: 2\ndynamo_config: {dynamo_backend: INDUCTOR}"),
     ['configs/ddp.yaml:3: dynamo_config.dynamo_backend: found "INDUCTOR" (text): the recipe owns torch.compile, by the key compile; remove it']),
    ("yaml: tpu", *acc("num_processes: 2", "num_processes: 2\ntpu_name: t\ntpu_use_sudo: false\ndowncast_bf16: 'no'"),
     ['configs/ddp.yaml:3: tpu_name: found "t" (text): TPUs are not supported; remove it']),
    ("yaml: dup", *acc("num_processes: 2", "num_processes: 2\nnum_processes: 3"),
     ["configs/ddp.yaml:3: num_processes: given twice, first in line 2; keep one"]),
    ("yaml: block", *acc("num_processes: 2", "num_processes: 2\ndynamo_config: 3"),
     ["configs/ddp.yaml:3: dynamo_config: found 3, a block of keys is needed"]),
    ("yaml: tp", *acc("parallelism_config:", "parallelism_config:\n  parallelism_config_tp_size: 2", "hsdp", {**T, "WORLD_SIZE": "4"}),
     ["configs/hsdp.yaml:7: parallelism_config.parallelism_config_tp_size: found 2: only data-parallel replicas and shards are supported; remove it"]),
    ("fsdp1", *acc("fsdp_version: 2", "fsdp_version: 1", "fsdp"),
     ["configs/fsdp.yaml:4: fsdp_config.fsdp_version: found 1, 2 is needed: FSDP1 clips, saves and rehearses differently"]),
    ("fsdp no version", *acc("  fsdp_version: 2\n", "", "fsdp"),
     ["configs/fsdp.yaml:3: fsdp_config.fsdp_version: missing; accelerate's default is 1; add fsdp_version: 2"]),
    ("fsdp1 key", *acc("  fsdp_version", "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_version", "fsdp"),
     ['configs/fsdp.yaml:4: fsdp_config.fsdp_sharding_strategy: found "FULL_SHARD" (text): only FSDP1 reads it, and this is FSDP2; remove it']),
    ("fsdp ckpt", *acc("  fsdp_version", "  fsdp_activation_checkpointing: true\n  fsdp_version", "fsdp"),
     ['configs/fsdp.yaml:4: fsdp_config.fsdp_activation_checkpointing: found true, but the recipe owns it: memory.activation_checkpointing is "none" (the default); remove it']),
    ("fsdp load", *acc("loading: false", "loading: true", "fsdp"),
     ["configs/fsdp.yaml:5: fsdp_config.fsdp_cpu_ram_efficient_loading: found true, only false is possible: weights are written shard by shard, no rank loads them whole"]),
    ("fsdp+ds", *acc("num_processes: 2", "num_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds_configs/zero2.json}", "fsdp"),
     ["configs/fsdp.yaml:3: deepspeed_config: only DEEPSPEED reads it, but distributed_type is FSDP (configs/fsdp.yaml:1); keep one of the two"]),
    ("ds+fsdp", *acc("num_processes: 2", "num_processes: 2\nfsdp_config: {fsdp_version: 2}", "zero2"),
     ["configs/zero2.yaml:3: fsdp_config: only FSDP reads it, but distributed_type is DEEPSPEED (configs/zero2.yaml:1); keep one of the two"]),
    ("ddp+fsdp", *acc("num_processes: 2", "num_processes: 2\nfsdp_config: {fsdp_version: 2}"),
     ["configs/ddp.yaml:3: fsdp_config: only FSDP reads it, but distributed_type is MULTI_GPU (configs/ddp.yaml:1); keep one of the two"]),
    ("json: inline", *acc("deepspeed_config:", "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 4", "zero2"),
     ["configs/zero2.yaml:4: deepspeed_config.zero_stage: found 2: the DeepSpeed JSON owns it; move it there, under zero_optimization",
      "configs/zero2.yaml:5: deepspeed_config.gradient_accumulation_steps: found 4, but the recipe owns it: batch.global_batch_size is 8 (r.yaml:10); remove it"]),
    ("json: no file", *acc("  deepspeed_config_file: ds_configs/zero2.json", "  zero3_init_flag: false", "zero2"),
     ["configs/zero2.yaml:3: deepspeed_config.deepspeed_config_file: missing; add the path of the DeepSpeed JSON"]),
    ("json: missing file", *acc("zero2.json", "zero9.json", "zero2"),
     ["configs/zero2.yaml:4: deepspeed_config.deepspeed_config_file: no such file: ds_configs/zero9.json; the name is relative to the working directory"]),
    ("4bit: sharded", {"m/config.json": "{}"}, ["r.yaml", "model={path: ./m}", "adapter={name: lora, quantization: 4bit}", "--strategy", "configs/fsdp.yaml"], T,
     ["command line: adapter.quantization: found 4bit, but 4-bit weights stay whole on every device and this strategy would shard or cast them; use configs/ddp.yaml, or null"]),
    ("yaml missing", *use("configs/zero9.yaml"),
     ["configs/zero9.yaml: cannot be read: No such file or directory (configs/zero9.yaml); did you mean configs/zero2.yaml?"]),
    ("json: unknown top", *top('"gradient_cliping": 1.0'),
     ["ds_configs/zero2.json:2: gradient_cliping: unknown key; did you mean gradient_clipping?"]),
    ("json: unknown nested", *zadd('"reduce_bucketsize": 1'),
     ["ds_configs/zero2.json:7: zero_optimization.reduce_bucketsize: unknown key; did you mean reduce_bucket_size?"]),
    ("json: unknown moved", *top('"reduce_bucket_size": 1'),
     ["ds_configs/zero2.json:2: reduce_bucket_size: unknown key; it belongs at zero_optimization.reduce_bucket_size"]),
    ("json: unknown offload", *zadd('"offload_optimizer": {"devise": "cpu"}'),
     ["ds_configs/zero2.json:7: zero_optimization.offload_optimizer.devise: unknown key; did you mean device?"]),
    ("json: type", *ds('"stage": 2', '"stage": "2"'),
     ['ds_configs/zero2.json:6: zero_optimization.stage: found "2" (text), one of 0, 1, 2, 3 is needed; remove the quotes']),
    ("json: text number", *ds("5e8", '"5e8"'),
     ['ds_configs/zero2.json:7: zero_optimization.reduce_bucket_size: found "5e8" (text), "auto" or a whole number above 0 is needed; remove the quotes']),
    ("json: syntax", *ds('"stage": 2,', '"stage": 2'),
     ["ds_configs/zero2.json:7: this is not JSON: Expecting ',' delimiter"]),
    ("json: comment", *ds('"stage": 2,', '"stage": 2, // shard'),
     ["ds_configs/zero2.json:6: this is not JSON: Expecting property name enclosed in double quotes"]),
    ("json: NaN", *ds("5e8", "NaN"),
     ["ds_configs/zero2.json: this is not JSON: NaN is not JSON"]),
    ("json: list", *use("ds_configs/zero2.json", files={"ds_configs/zero2.json": "[]"}),
     ["ds_configs/zero2.json: found a list, a block of keys is needed"]),
    ("json: dup", *zadd('"stage": 2'),
     ["ds_configs/zero2.json:7: zero_optimization.stage: given twice, first in line 6; keep one"]),
    ("json: removed", *top('"elasticity": {"enabled": true}'),
     ["ds_configs/zero2.json:2: elasticity: found a block of keys: DeepSpeed removed elastic training; the recipe's global_batch_size keeps the batch at any world size"]),
    ("json: removed zero", *zadd('"mics_shard_size": 8'),
     ["ds_configs/zero2.json:7: zero_optimization.mics_shard_size: found 8: DeepSpeed removed MiCS; zero_hpz_partition_size shards within a node"]),
    ("json: batch", *top('"train_batch_size": 16'),
     ['ds_configs/zero2.json:2: train_batch_size: found 16, but the recipe owns it: batch.global_batch_size is 8 (r.yaml:10); write "auto" or remove it']),
    ("json: micro+gas", *top('"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1'),
     ['ds_configs/zero2.json:2: gradient_accumulation_steps: found 1, but the recipe owns it: batch.global_batch_size is 8 (r.yaml:10); write "auto" or remove it',
      'ds_configs/zero2.json:2: train_micro_batch_size_per_gpu: found 4, but the recipe owns it: batch.micro_batch_size is 1 (r.yaml:11); write "auto" or remove it']),
    ("json: clip", *ds('"gradient_clipping": "auto"', '"gradient_clipping": 0.5'),
     ['ds_configs/zero2.json:2: gradient_clipping: found 0.5, but the recipe owns it: optimizer.max_grad_norm is 1.0 (the default); write "auto" or remove it']),
    ("recipe: three at once", {"ds_configs/zero3.json": '{"zero_optimization": {"stage": 3}}'}, ["r.yaml", "task=sftt", "compile=regional", "memory.gradient_sync=last_micro_batch", "--strategy", "ds_configs/zero3.json"], T,
     ["command line: compile: found regional, but ZeRO-3 gathers weights inside every layer, which leaves pieces that are compiled again and again; use off, or configs/fsdp.yaml, which gathers them around the layer",
      "command line: memory.gradient_sync: found last_micro_batch, but ZeRO-3 shares gradients out as they are made; use auto",
      "command line: task: found \"sftt\" (text), one of 'pretrain', 'continue_pretrain', 'sft', 'distill', 'dpo', 'reward', 'classify', 'mlm' or 'embed' is needed"]),
    ("recipe: offloaded lion", {"mine.json": GOOD["ds_configs/zero3_nvme.json"]}, ["r.yaml", "--strategy", "mine.json", "optimizer.name=lion"], T,
     [OFFLOADED]),
    ("recipe: flat muon", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=muon"], T,
     ["command line: optimizer.name: found muon, but it orthogonalises whole matrices, and DeepSpeed hands an optimizer parts of many weights in one flat tensor; use configs/fsdp.yaml or configs/ddp.yaml, or adamw, lion or sgd"]),
    ("recipe: bf16 masters", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=adamw_bf16"], T,
     ["command line: optimizer.name: found adamw_bf16, but DeepSpeed keeps fp32 copies of bf16 weights itself and hands those to the optimizer; use configs/fsdp.yaml or configs/ddp.yaml, or adamw"]),
    ("recipe: sharded blocks", {}, ["r.yaml", "--strategy", "configs/zero2.yaml", "optimizer.name=adamw_8bit"], T,
     ["command line: optimizer.name: found adamw_8bit, but it quantizes blocks of 256 neighbouring values, and DeepSpeed hands an optimizer parts of many weights in one flat tensor; use configs/fsdp.yaml or configs/ddp.yaml, or adamw, lion or sgd"]),
    ("recipe: offloaded adafactor", {"mine.yaml": GOOD["configs/fsdp.yaml"] + "  fsdp_offload_params: true\n"}, ["r.yaml", "--strategy", "mine.yaml", "optimizer.name=adafactor"], T,
     ["command line: optimizer.name: found adafactor, but it takes the means of each row and column of a matrix, which ranks would have to exchange from host memory; use configs/fsdp.yaml, or adamw"]),
    ("json: opt", *top('"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}'),
     ['ds_configs/zero2.json:2: optimizer: found a block of keys, but the recipe owns it: optimizer.name is "adamw" (the default); remove it',
      'ds_configs/zero2.json:2: scheduler: found a block of keys, but the recipe owns it: schedule.name is "cosine" (the default); remove it']),
    ("json: bf16 vs fp16", *ds('"bf16": {"enabled": "auto"}', '"bf16": {"enabled": true}')[:1], ["r.yaml", "precision=fp16", "--strategy", "ds_configs/zero2.json"], T,
     ['ds_configs/zero2.json:3: bf16.enabled: found true, but the recipe owns it: precision is "fp16" (command line); write "auto" or remove it']),
    ("json: both on", *use("ds_configs/zero2.json", files={"ds_configs/zero2.json": '{\n"bf16": {"enabled": true},\n"fp16": {"enabled": true},\n"zero_optimization": {"stage": 2}\n}'}),
     ['ds_configs/zero2.json:2: bf16.enabled: found true, but the recipe owns it: precision is "bf16" (r.yaml:3); write "auto" or remove it',
      "ds_configs/zero2.json:3: fp16.enabled: bf16 is on too (ds_configs/zero2.json:2), and DeepSpeed takes one of them",
      'ds_configs/zero2.json:3: fp16.enabled: found true, but the recipe owns it: precision is "bf16" (r.yaml:3); write "auto" or remove it']),
    ("json: tp", *top('"tensor_parallel": {"autotp_size": 2}'),
     ["ds_configs/zero2.json:2: tensor_parallel: found a block of keys: tensor parallelism is not supported; remove it"]),
    ("json: quantised", *zadd('"zero_quantized_weights": true'),
     ["ds_configs/zero2.json:7: zero_optimization.zero_quantized_weights: found true: quantised communication (ZeRO++) changes the training; remove it"]),
    ("json: zenflow", *zadd('"zenflow": {"topk_ratio": 0.1}'),
     ["ds_configs/zero2.json:7: zero_optimization.zenflow: found a block of keys: ZenFlow updates with stale gradients, which changes the loss curve; remove it"]),
    ("json: stage0", *ds('"stage": 2', '"stage": 0'),
     ["ds_configs/zero2.json:6: zero_optimization.stage: found 0, which shards nothing; choose configs/ddp.yaml, or a stage from 1 to 3"]),
    ("json: no stage", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {}}'}),
     ["ds_configs/mine.json:1: zero_optimization.stage: missing; add 1, 2 or 3"]),
    ("json: stage name", *ds('"stage": 2', '"stage": 1'),
     ["ds_configs/zero2.json:6: zero_optimization.stage: the file is called zero2, but what it says is zero1; rename it or change it"]),
    ("yaml name", *acc("zero2.json", "zero3_nvme.json", "zero2"),
     ["configs/zero2.yaml:4: deepspeed_config.deepspeed_config_file: the file is called zero2, but it offloads optimizer:nvme and param:cpu; rename it or change it",
      "configs/zero2.yaml:4: deepspeed_config.deepspeed_config_file: the file is called zero2, but what it says is zero3; rename it or change it"]),
    ("quiet offload", *zadd('"offload_optimizer": {"device": "cpu"}'),
     ["ds_configs/zero2.json:5: zero_optimization: the file is called zero2, but it offloads optimizer:cpu; rename it or change it"]),
    ("promised offload", *use("ds_configs/zero2_offload.json", files={"ds_configs/zero2_offload.json": GOOD["ds_configs/zero2.json"]}),
     ["ds_configs/zero2_offload.json:5: zero_optimization: the file is called zero2_offload, but it offloads nothing; rename it or change it"]),
    ("nvme name", *use("ds_configs/zero3_offload.json", files={"ds_configs/zero3_offload.json": GOOD["ds_configs/zero3_nvme.json"]}),
     ["ds_configs/zero3_offload.json:2: zero_optimization: the file is called zero3_offload, but it offloads optimizer:nvme and param:cpu; rename it or change it"]),
    ("fsdp quiet offload", *acc("  fsdp_version", "  fsdp_offload_params: true\n  fsdp_version", "fsdp"),
     ["configs/fsdp.yaml:3: fsdp_config: the file is called fsdp, but it offloads optimizer:cpu and param:cpu; rename it or change it"]),
    ("hsdp name", *acc("dp_replicate_size: 2", "dp_replicate_size: 1", "hsdp", {**T, "WORLD_SIZE": "4"}),
     ["configs/hsdp.yaml:1: distributed_type: the file is called hsdp, but what it says is fsdp; rename it or change it"]),
    ("param offload stage2", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 2,\n"offload_param": {"device": "cpu"}}}'}),
     ["ds_configs/mine.json:2: zero_optimization.offload_param: only stage 3 reads it, and zero_optimization.stage is 2; remove it"]),
    ("nvme stage2", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 2,\n"offload_optimizer": {"device": "nvme"}}}'}),
     ['ds_configs/mine.json:2: zero_optimization.offload_optimizer.device: found "nvme" (text), but stage 2 offloads to the CPU instead, without a word; write "cpu" or use stage 3',
      "ds_configs/mine.json:2: zero_optimization.offload_optimizer.nvme_path: missing; add a folder on a local disk"]),
    ("hpz", *zadd('"zero_hpz_partition_size": 2'),
     ["ds_configs/zero2.json:7: zero_optimization.zero_hpz_partition_size: only stage 3 reads it, and zero_optimization.stage is 2; remove it"]),
    ("stage3 key", *zadd('"stage3_prefetch_bucket_size": 2'),
     ["ds_configs/zero2.json:7: zero_optimization.stage3_prefetch_bucket_size: only stage 3 reads it, and zero_optimization.stage is 2; remove it"]),
    ("ratio", *use("ds_configs/mine.json", files={"ds_configs/mine.json": '{"zero_optimization": {"stage": 2,\n"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}'}),
     ["ds_configs/mine.json:2: zero_optimization.offload_optimizer.ratio: found 0.5, but only stage 3 offloads a part, and zero_optimization.stage is 2"]),
    ("act", *top('"activation_checkpointing": {"partition_activations": true}'),
     ["ds_configs/zero2.json:2: activation_checkpointing.partition_activations: found true: nothing reads it; recomputation is the recipe's memory.activation_checkpointing; remove it"]),
    ("pipeline: act", *top('"activation_checkpointing": {"cpu_checkpointing": true, "number_checkpoints": 2}', "pipeline"),
     ["ds_configs/pipeline.json:2: activation_checkpointing.cpu_checkpointing: found true: nothing reads it; recomputation is the recipe's memory.activation_checkpointing; remove it",
      "ds_configs/pipeline.json:2: activation_checkpointing.number_checkpoints: found 2: nothing reads it; recomputation is the recipe's memory.activation_checkpointing; remove it"]),
    ("pipeline: reentrant", *ds('"stages": 2,', '"stages": 2, "use_reentrant": true,', "pipeline"),
     ["ds_configs/pipeline.json:4: pipeline.use_reentrant: found true: recomputation, which is the recipe's memory.activation_checkpointing, is never reentrant; remove it"]),
    ("pipeline: partitioned", *ds('"stages": 2,', '"stages": 2, "pipe_partitioned": true, "grad_partitioned": true,', "pipeline"),
     ["ds_configs/pipeline.json:4: pipeline.grad_partitioned: found true: only tensor-parallel ranks have parts, and there are none; remove it",
      "ds_configs/pipeline.json:4: pipeline.pipe_partitioned: found true: only tensor-parallel ranks have parts, and there are none; remove it"]),
    ("pipeline: zero2", *ds('"stage": 1', '"stage": 2', "pipeline"),
     ["ds_configs/pipeline.json:2: zero_optimization.stage: found 2, but a pipeline works with stage 0 or 1 only; set it to 1"]),
    ("pipeline: many", *ds('"stages": 2', '"stages": 6', "pipeline", {**T, "WORLD_SIZE": "6"})[:2], {**T, "WORLD_SIZE": "6"},
     ["ds_configs/pipeline.json:4: pipeline.stages: found 6, but the recipe's model has 4 layers; a stage needs at least one"]),
    ("pipeline: embed", {}, ["r.yaml", "--strategy", "ds_configs/pipeline.json", "task=embed", "data.packing=false"], T,
     ["command line: task: found embed, but a pipeline cuts causal language models only; use another strategy, for example configs/fsdp.yaml"]),
    ("pipeline: distill", {}, ["r.yaml", "--strategy", "ds_configs/pipeline.json", "task=distill", "distill.teacher=t"], T,
     ["command line: task: found distill, but a pipeline has no place for a teacher; use another strategy, for example configs/fsdp.yaml"]),
    ("pipeline: none", *ds('"stages": 2,\n', "", "pipeline"),
     ["ds_configs/pipeline.json:3: pipeline.stages: missing; add how many stages the layers are cut into"]),
    ("pipeline: 0", *ds('"stages": 2', '"stages": 0', "pipeline"),
     ["ds_configs/pipeline.json:4: pipeline.stages: found 0, a whole number above 0 is needed"]),
    ("pipeline: world", *ds('"stages": 2', '"stages": 2', "pipeline", {**T, "WORLD_SIZE": "3"}),
     ["ds_configs/pipeline.json:4: pipeline.stages: 3 processes do not divide into 2 stages; start a multiple of 2"], 6),
    ("pipeline: offload", *ds('"stage": 1', '"stage": 1, "offload_optimizer": {"device": "cpu"}', "pipeline"),
     ["ds_configs/pipeline.json:2: zero_optimization: the file is called pipeline, but it offloads optimizer:cpu; rename it or change it",
      "ds_configs/pipeline.json:2: zero_optimization.offload_optimizer: a pipeline cannot offload here; remove it"]),
    ("pipeline: auto", *ds('"stage": 1', '"stage": 1, "reduce_bucket_size": "auto"', "pipeline"),
     ['ds_configs/pipeline.json:2: zero_optimization.reduce_bucket_size: found "auto", but Accelerate, which knows that word, does not prepare a pipeline; write a number']),
    ("pipeline: partition", *ds('"parameters"', '"profile"', "pipeline"),
     ['ds_configs/pipeline.json:5: pipeline.partition: found "profile" (text), "parameters", "uniform" or "type:" and a regular expression is needed']),
    ("pipeline: partition without a pattern", *ds('"parameters"', '"type:"', "pipeline"),
     ['ds_configs/pipeline.json:5: pipeline.partition: found "type:" (text), "parameters", "uniform" or "type:" and a regular expression is needed']),
    ("pipeline: partition by half a pattern", *ds('"parameters"', '"type:(decoder"', "pipeline"),
     ['ds_configs/pipeline.json:5: pipeline.partition: found "type:(decoder" (text), "parameters", "uniform" or "type:" and a regular expression is needed']),
    ("pipeline: family", *ds('"stages": 2', '"stages": 2', "pipeline")[:1], ["r.yaml", "--strategy", "ds_configs/pipeline.json", "model.config.model_type=opt"], T,
     ["ds_configs/pipeline.json:3: pipeline: it cannot cut the recipe's model, whose model_type is opt; it can cut gpt2, llama, mistral, qwen2, qwen3; use one of these or another strategy"]),
    ("pipeline: fp16 without zero", *ds('"stage": 1', '"stage": 0', "pipeline")[:1], ["r.yaml", "--strategy", "ds_configs/pipeline.json", "precision=fp16"], T,
     ['ds_configs/pipeline.json:2: zero_optimization.stage: a pipeline of stage 0, which is also the default, does not scale the loss, and precision is "fp16" (command line); set it to 1']),
    ("pipeline: bf16 without zero", *ds('"zero_optimization": {"stage": 1}', '"data_types": {"grad_accum_dtype": "fp32"}', "pipeline"),
     ['ds_configs/pipeline.json: zero_optimization.stage: a pipeline of stage 0, which is also the default, sums bf16 gradients in bf16, and data_types.grad_accum_dtype is "fp32" (text) (ds_configs/pipeline.json:2); set it to 1']),
    ("pipeline: recompute", *ds('"stages": 2,', '"stages": 2, "activation_checkpoint_interval": 1,', "pipeline"),
     ['ds_configs/pipeline.json:4: pipeline.activation_checkpoint_interval: found 1, but the recipe owns recomputation: memory.activation_checkpointing is "none" (the default); make them agree']),
    ("pipeline: seed", *ds('"stages": 2,', '"stages": 2, "seed_layers": true,', "pipeline"),
     ["ds_configs/pipeline.json:4: pipeline.seed_layers: found true: weights are seeded by name, the same under every strategy; remove it"]),
    ("hsdp on 3", *use("configs/hsdp.yaml", {**T, "WORLD_SIZE": "3"}),
     ["configs/hsdp.yaml:7: parallelism_config.parallelism_config_dp_replicate_size: found 2, but 3 processes do not make 2 replicas of 2 or more; start a multiple of 2 from 4, or use fsdp"], 6),
    ("hsdp on 2", *use("configs/hsdp.yaml", {**T, "WORLD_SIZE": "2"}),
     ["configs/hsdp.yaml:7: parallelism_config.parallelism_config_dp_replicate_size: found 2, but 2 processes do not make 2 replicas of 2 or more; start a multiple of 2 from 4, or use fsdp"], 6),
    ("hsdp shard", *acc("dp_replicate_size: 2", "dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4", "hsdp", {**T, "WORLD_SIZE": "4"}),
     ["configs/hsdp.yaml:8: parallelism_config.parallelism_config_dp_shard_size: found 4, but 4 processes in 2 replicas make 2; remove it, it is derived"], 6),
    ("world: no strategy", {}, ["r.yaml"], {**T, "WORLD_SIZE": "4"},
     ["environment: WORLD_SIZE: found 4, but no strategy is chosen, so each would train alone; pass --strategy configs/ddp.yaml"], 6),
    ("world: single", *use("configs/single.yaml", {**T, "WORLD_SIZE": "4"}),
     ["environment: WORLD_SIZE: found 4, but configs/single.yaml:1 says distributed_type: NO, which is one process; choose configs/ddp.yaml"], 6),
    ("world: python", *use("configs/zero2.yaml", {}),
     ["environment: WORLD_SIZE: plain python starts one process, but configs/zero2.yaml:2 says num_processes: 2; start it with accelerate launch --config_file configs/zero2.yaml, or torchrun --nproc_per_node 2"], 6),
    ("world: by hand", *use("configs/ddp.yaml", {"RANK": "0", "WORLD_SIZE": "4"}),
     ["environment: WORLD_SIZE: found 4, but configs/ddp.yaml:2 says num_processes: 2; make the two equal"], 6),
    ("world: bad", *use("configs/ddp.yaml", {**T, "WORLD_SIZE": "two"}),
     ['environment: WORLD_SIZE: found "two" (text), a whole number above 0 is needed; the launcher sets it'], 6),
    ("machines", *acc("num_processes: 2", "num_processes: 8\nnum_machines: 2"),
     ["environment: WORLD_SIZE: found 2, but configs/ddp.yaml:2 says num_processes: 8; start 8 in all on the 2 machines, or correct the file"], 6),
    ("batch ranks", {}, ["r.yaml", "batch.global_batch_size=6", "--strategy", "configs/ddp.yaml"], {**T, "WORLD_SIZE": "4"},
     ["command line: batch.global_batch_size: found 6, which is no multiple of micro_batch_size 1 x 4 data-parallel ranks; nearest global_batch_size: 4 or 8; micro_batch_size that fits: none"]),
    ("mixed topology+config", {}, ["r.yaml", "steps=no"], {**T, "WORLD_SIZE": "4"},
     ["command line: steps: found false, a whole number is needed",
      "environment: WORLD_SIZE: found 4, but no strategy is chosen, so each would train alone; pass --strategy configs/ddp.yaml"]),
    ("all three", {**changed("r.yaml", "steps: 10", "stepps: 10"), **changed("configs/zero2.yaml", "num_processes", "num_proceses"), **changed("ds_configs/zero2.json", '"stage": 2', '"stage": 1')}, ["r.yaml", "--strategy", "configs/zero2.yaml", "seed=-1"], T,
     ["configs/zero2.yaml:2: num_proceses: unknown key; did you mean num_processes?",
      "ds_configs/zero2.json:6: zero_optimization.stage: the file is called zero2, but what it says is zero1; rename it or change it",
      "r.yaml: steps: missing; add it",
      "r.yaml:2: stepps: unknown key; did you mean steps?",
      "command line: seed: found -1, a number of at least 0 is needed"]),
    ("pipeline: model of neither kind", changed("r.yaml", "  config: {model_type: llama, num_hidden_layers: 4}", "  attention: eager"), ["r.yaml", "--strategy", "ds_configs/pipeline.json"], T,
     ["r.yaml:4: model: neither path (pretrained) nor config (from scratch) is given; add one"]),
    ("world: python and hsdp", *use("configs/hsdp.yaml", {}),
     ["environment: WORLD_SIZE: plain python starts one process, but configs/hsdp.yaml:2 says num_processes: 4; start it with accelerate launch --config_file configs/hsdp.yaml, or torchrun --nproc_per_node 4"], 6),
    ("yaml: true is not the harmless 1", *acc("parallelism_config:", "parallelism_config:\n  parallelism_config_tp_size: true", "hsdp", {**T, "WORLD_SIZE": "4"}),
     ["configs/hsdp.yaml:7: parallelism_config.parallelism_config_tp_size: found true: only data-parallel replicas and shards are supported; remove it"]),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_report(case, tmp_path, monkeypatch):
    _, files, argv, environ, lines, *code = case
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    assert message(tmp_path, argv, environ) == (expected(lines), *(code or [2]))


def test_what_accelerate_config_writes_is_accepted(tmp_path, monkeypatch):
    """Its file as of accelerate 1.15, without mixed_precision, which the recipe owns."""
    monkeypatch.chdir(tmp_path)
    lines = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config: {}
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
    write(tmp_path, {"configs/mine.yaml": lines})
    assert isinstance(message(tmp_path, ["r.yaml", "--strategy", "configs/mine.yaml"], T), Plan)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"stages": 2,', '"stages": 2, "use_reentrant": false, "pipe_partitioned": false, "grad_partitioned": false,'),
        ('{"stage": 1}', '{"stage": 1}, "activation_checkpointing": {"profile": false, "number_checkpoints": null}'),
    ],
)
def test_what_a_pipeline_switches_off_is_accepted(old, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, argv, environ = ds(old, new, "pipeline")
    write(tmp_path, files)
    assert isinstance(message(tmp_path, argv, environ), Plan)


@pytest.mark.parametrize("partition", ["uniform", "type:decoder", "type:^Dec.*r$"])
def test_partition_methods_of_deepspeed_are_accepted(partition, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, argv, environ = ds("parameters", partition, "pipeline")
    write(tmp_path, files)
    assert message(tmp_path, argv, environ).strategy.deepspeed["pipeline"]["partition"] == partition


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", None)])
def test_a_pipeline_without_zero_that_can_run_is_accepted(precision, accumulation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    types = f', "data_types": {{"grad_accum_dtype": "{accumulation}"}}' if accumulation else ""
    files, argv, environ = ds('{"stage": 1}', '{"stage": 0}' + types, "pipeline")
    write(tmp_path, files)
    assert isinstance(message(tmp_path, [*argv, f"precision={precision}"], environ), Plan)


def test_at_least_fifty_cases():
    from test_config import CASES as RECIPES

    names = [case[0] for case in (*CASES, *RECIPES)]
    assert len(set(names)) == len(names) >= 50
