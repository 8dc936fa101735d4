#!/usr/bin/env bash
# Lint, then unit, file and distributed tests, on this machine's CPU. Makes .venv first.
#
#   bash scripts/test.sh [--full] [--shard 2/4] [pytest arguments ...]
#
# --shard 2/4 runs the second of four parts, whole files each. --full adds the long batteries (marker "full"), among
# them two hosts in network namespaces, which need root on Linux.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

arguments=(-m "not full")
full=
for argument in "$@"; do
    if [ "$argument" = --full ]; then full=1; else arguments+=("$argument"); fi
done
[ -z "$full" ] || arguments+=(-m "full or not full") # the last -m wins

make_environment requirements.txt requirements-dev.txt
install_packages "NVMe offload" libaio-dev
[ -z "$full" ] || install_packages "the test over two hosts" iproute2 openssh-server pdsh

if [ -n "$full" ]; then
    export SAMECURVE_TRL=$PWD/.venv/trl # a reference for the tests alone; what it needs is there already
    make_environment requirements-eval.txt
    [ -d "$SAMECURVE_TRL/trl" ] || .venv/bin/python -m pip install --quiet --no-deps --target "$SAMECURVE_TRL" trl==1.16.0
    export SAMECURVE_SENTENCE_TRANSFORMERS=$PWD/.venv/sentence-transformers # likewise, with what else it needs
    packages=(sentence-transformers==6.2.0 scikit-learn scipy joblib threadpoolctl narwhals cloudpickle)
    [ -d "$SAMECURVE_SENTENCE_TRANSFORMERS/sentence_transformers" ] ||
        .venv/bin/python -m pip install --quiet --no-deps --target "$SAMECURVE_SENTENCE_TRANSFORMERS" "${packages[@]}"
    export SAMECURVE_MKDOCS=$PWD/.venv/mkdocs # builds the documentation
    [ -d "$SAMECURVE_MKDOCS/mkdocs" ] ||
        .venv/bin/python -m pip install --quiet --target "$SAMECURVE_MKDOCS" -r requirements-docs.txt
fi

export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= # GPUs have tests of their own: scripts/test_gpu.sh
say "ruff"
ruff check .
ruff format --check .
say "pytest"
exec pytest "${arguments[@]}"
