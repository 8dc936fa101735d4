#!/usr/bin/env bash
# The tests that need GPUs: strategies, options and checkpoints against one process, on all GPUs of this machine, and the
# kernels of varlen, Liger and adamw_bf16. The others run on a CPU (scripts/test.sh). PYTHON=python3 takes an environment
# that is there, with pytest, instead of making .venv.
#
# The kernels that defaults depend on come first: those of varlen and Liger, then options on one GPU, then strategies. On
# a machine with a single GPU two processes share it over gloo. Each outcome is kept at once, as a line of
# runs/test_gpu.jsonl: the same command goes on where it was ended, and repeats what failed; remove the file to begin
# anew. A run ends after five minutes.
#
#   bash scripts/test_gpu.sh [pytest arguments ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

[ -n "${PYTHON:-}" ] || make_environment requirements.txt requirements-dev.txt
if [ -z "${SAMECURVE_REHEARSE_GPU_TESTS:-}" ]; then # or every test would be skipped, which looks like success
    "${PYTHON:-python}" -c "import torch; torch.zeros(1, device='cuda')"
fi
export HF_HUB_OFFLINE=1
mkdir -p runs
export SAMECURVE_TEST_LIMIT_SECONDS="${SAMECURVE_TEST_LIMIT_SECONDS:-300}"
exec "${PYTHON:-python}" -m pytest --results=runs/test_gpu.jsonl tests/unit/test_varlen.py \
    tests/unit/test_liger.py::test_loss_and_gradients_are_those_of_pytorch tests/gpu "$@"
