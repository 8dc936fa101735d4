#!/usr/bin/env bash
# How fast training is on the GPUs of this machine: ceilings, Llama shapes of 1.2, 3 and 8 billion parameters, each option
# on and off, and transformers.Trainer on the same rows. Nothing is downloaded; all is built from the configs in
# benchmarks/gpu/. Every case is a run of its own whose result is kept in benchmarks/gpu/results.json at once, so the same
# command goes on where it was ended; benchmarks/gpu.md is the table of them. A case that fails, runs out of memory or
# takes too long is a row that says so.
#
#   bash scripts/bench_gpu.sh [--list] [--only NAME ...] [--minutes 9] [--limit 300] [--again] [--toy] [...]
#
# --toy rehearses all of it at a toy size, on a CPU where there is no GPU. PYTHON=python3 takes an environment that is
# there instead of making .venv. It needs all of requirements.txt, which an image for deep learning often lacks in part
# (pydantic with pydantic-core, typing-inspection and annotated-types; datasets with dill, multiprocess and xxhash;
# deepspeed with hjson), bitsandbytes for adamw_8bit, torchao for fp8 and liger-kernel for liger; what failed is measured
# again once other packages are there. Nothing else needs the network, and nothing needs nvcc. Model folders of the three
# shapes take 25 GB of disk below runs/bench_gpu and are written anew on each fresh machine, so give each machine one of
# them: --only llama_8b. The cases with offload take up to 60 GiB of host memory (8 bytes for each of 8 billion
# parameters).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

[ -n "${PYTHON:-}" ] || make_environment requirements.txt requirements-dev.txt
exec "${PYTHON:-python}" scripts/bench_gpu.py "$@"
