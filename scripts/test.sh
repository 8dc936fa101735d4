#!/usr/bin/env bash
# Lint and types, then unit, file and distributed tests, on this machine's CPU. Makes .venv first.
#
#   bash scripts/test.sh [--full] [--results=FILE] [pytest arguments ...]
#
# Without paths of tests, the unit, file and fault tests run beside the distributed ones and are printed after them.
# --results=FILE keeps outcomes and leaves out what passed before (tests/results.py). --full adds the long batteries
# (marker "full"), among them two hosts in network namespaces, which need root on Linux.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

arguments=(-m "not full")
chosen=()
full=
for argument in "$@"; do
    if [ "$argument" = --full ]; then
        full=1
    elif [ -e "${argument%%::*}" ]; then
        chosen+=("$argument")
    else
        arguments+=("$argument")
    fi
done
[ -z "$full" ] || arguments+=(-m "full or not full") # the last -m wins

make_environment requirements.txt requirements-dev.txt
install_packages "NVMe offload" libaio-dev
install_packages "the report in a browser" chromium
if [ -n "$full" ]; then
    install_packages "the test over two hosts" iproute2 openssh-server pdsh
    install_packages "the test under SLURM" slurm-wlm munge
fi

if [ -n "$full" ]; then
    export SAMECURVE_TRL=$PWD/.venv/trl # a reference for the tests alone; what it needs is there already
    make_environment requirements-eval.txt
    [ -d "$SAMECURVE_TRL/trl" ] || .venv/bin/python -m pip install --quiet --no-deps --target "$SAMECURVE_TRL" trl==1.16.0
    export SAMECURVE_SENTENCE_TRANSFORMERS=$PWD/.venv/sentence-transformers # likewise, with what else it needs
    packages=(sentence-transformers==6.2.0 scikit-learn scipy joblib threadpoolctl narwhals cloudpickle)
    [ -d "$SAMECURVE_SENTENCE_TRANSFORMERS/sentence_transformers" ] ||
        .venv/bin/python -m pip install --quiet --no-deps --target "$SAMECURVE_SENTENCE_TRANSFORMERS" "${packages[@]}"
    export SAMECURVE_TRACKERS=$PWD/.venv/trackers # experiment trackers, with what they need
    [ -d "$SAMECURVE_TRACKERS/wandb" ] ||
        .venv/bin/python -m pip install --quiet --target "$SAMECURVE_TRACKERS" -r requirements-trackers.txt
    export SAMECURVE_KUBERNETES=$PWD/.venv/kubernetes # published schemas of what `launch` writes
    [ -d "$SAMECURVE_KUBERNETES/kubernetes_validate" ] ||
        .venv/bin/python -m pip install --quiet --target "$SAMECURVE_KUBERNETES" kubernetes-validate==1.37.0 \
            kubeflow-trainer-api==2.3.0
    export SAMECURVE_S3=$PWD/.venv/s3 # an S3 server, and what speaks to it
    [ -d "$SAMECURVE_S3/moto" ] ||
        .venv/bin/python -m pip install --quiet --target "$SAMECURVE_S3" -c constraints.txt -r requirements-s3.txt
    export SAMECURVE_MKDOCS=$PWD/.venv/mkdocs # builds the documentation
    [ -d "$SAMECURVE_MKDOCS/mkdocs" ] ||
        .venv/bin/python -m pip install --quiet --target "$SAMECURVE_MKDOCS" -r requirements-docs.txt
fi

[ -z "$full" ] || export SAMECURVE_REHEARSE_GPU_TESTS=1
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, each of which would compile the package again
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= # GPUs have tests of their own: scripts/test_gpu.sh
say "ruff"
ruff check .
ruff format --check .
say "pyright"
pyright

say "pytest"
if [ ${#chosen[@]} != 0 ]; then
    exec pytest "${arguments[@]}" "${chosen[@]}"
fi

# Processes that wait for each other leave the cores idle half of the time, so two parts run beside each other.
beside=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$beside"' EXIT
if [ -n "$full" ]; then # DeepSpeed's operators take minutes to compile, once, and the first test waits for them
    quote='from samecurve.engines import start; start.quote_path()'
    operators='b.CPUAdamBuilder().load(); b.AsyncIOBuilder().load()'
    python -c "$quote; from deepspeed.ops import op_builder as b; $operators" >"$beside/build" 2>&1 &
fi
# A second thread would be waited for by spinning while the other part has the cores: a tenth of the speed.
OMP_NUM_THREADS=1 pytest --durations 40 "${arguments[@]}" tests/unit tests/files tests/faults >"$beside/tests" 2>&1 &
first=$! code=0 other=0
pytest --durations 60 "${arguments[@]}" tests/distributed tests/gpu || code=$?
wait "$first" || other=$?
say "pytest tests/unit tests/files tests/faults"
cat "$beside/tests"
nothing=5 # pytest's code where no test was chosen
[ "$code" != "$nothing" ] || exit "$other"
[ "$other" = "$nothing" ] || [ "$code" != 0 ] || exit "$other"
exit "$code"
