#!/usr/bin/env bash
# The first five minutes: makes .venv, trains a small Llama from scratch on the Python standard library, then shows what
# came out. Uses the GPUs of this machine, else two processes on the CPU. No download besides the Python packages.
#
#   bash scripts/quickstart.sh [key.path=value ...]      e.g. steps=50 seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

# How many processes, and under which strategy. 1, 2 or 4, which divide the recipe's global batch.
choose_processes() {
    local gpus
    gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    num_processes=1
    while [ $((num_processes * 2)) -le "$gpus" ] && [ "$num_processes" -lt 4 ]; do num_processes=$((num_processes * 2)); done
    strategy=ddp
    if [ "$gpus" = 1 ]; then strategy=single; elif [ "$gpus" = 0 ]; then num_processes=2; fi
}

make_environment requirements.txt
export HF_HUB_OFFLINE=1
choose_processes
run=runs/quickstart
for argument in "$@"; do
    case $argument in output_dir=*) run=${argument#output_dir=} ;; esac
done

set -x
# port 0: any free one
accelerate launch --config_file "configs/$strategy.yaml" --num_processes "$num_processes" --main_process_port 0 \
    train.py recipes/quickstart.yaml "$@"
python -m samecurve summary "$run"
python -m samecurve generate "$run"
{ set +x; } 2>/dev/null
say "to type the commands above yourself, first: source .venv/bin/activate"
