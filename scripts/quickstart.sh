#!/usr/bin/env bash
# The first five minutes: makes .venv, trains a small Llama from scratch on the Python standard library, then shows what
# came out. Uses the GPUs of this machine, else two processes on the CPU. No download besides the Python packages.
#
#   bash scripts/quickstart.sh [key.path=value ...]      e.g. steps=50 seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_environment.sh

# Without a GPU two processes and the recipe as it is. With GPUs up to 8, because the recipe's global batch is 8 rows, which
# they share: a micro-batch of at most 8 rows is each one's share, so nothing is accumulated.
choose_processes() {
    local gpus
    gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    strategy=ddp num_processes=2 micro_batch_size=
    [ "$gpus" != 0 ] || return 0
    num_processes=$((gpus < 8 ? gpus : 8)) micro_batch_size=8
    [ "$num_processes" != 1 ] || strategy=single
}

make_environment requirements.txt
export HF_HUB_OFFLINE=1
choose_processes
run=runs/quickstart
for argument in "$@"; do
    case $argument in output_dir=*) run=${argument#output_dir=} ;; esac
done

set -x
python train.py recipes/quickstart.yaml --strategy "configs/$strategy.yaml" --num_processes "$num_processes" \
    ${micro_batch_size:+batch.micro_batch_size=$micro_batch_size} "$@"
python -m samecurve summary "$run"
python -m samecurve generate "$run" --temperature 0.3 --untrained --max_new_tokens 40
python -m samecurve generate "$run" --temperature 0.3
python -m samecurve report "$run"
{ set +x; } 2>/dev/null
say "the same prompt before and after: minutes teach 2 million parameters what Python looks like, not what it means"
say "the curves: $run/report.html"
cat <<'END'
== next, a model of yours on your own conversations (chats.jsonl: a line {"messages": [{"role": "user", ...}, ...]} each):
     source .venv/bin/activate
     python -m samecurve inspect recipes/lora.yaml model.path=FOLDER_OR_HUB_NAME data.path=chats.jsonl
     python train.py recipes/lora.yaml model.path=FOLDER_OR_HUB_NAME data.path=chats.jsonl
END
