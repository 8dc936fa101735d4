#!/usr/bin/env bash
# pretrain on 2 x 8 devices.
# Start it in the repository's root. More recipe values may follow:
#   sbatch scripts/slurm.sh
#
# Submit it on a file system that all nodes see, after .venv is there (scripts/quickstart.sh makes it). Five
# minutes before its time is up the job is told to stop: it saves, and the same line goes on from there. A
# preempted job has the partition's GraceTime for that; requeued by SLURM, it goes on by itself.
#SBATCH --job-name=samecurve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export PATH="$PWD/.venv/bin:$PATH"

# every node meets at the first one; the port depends on the job, so that two jobs on one node do not collide
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000))

# torchrun gives its processes 30 seconds after SIGTERM unless told otherwise; saving may take longer
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270

exec srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "$HEAD:$PORT" --rdzv_id "$SLURM_JOB_ID" \
    train.py recipes/pretrain.yaml --strategy configs/fsdp.yaml data.path=/storage/texts output_dir=/storage/runs/pretrain "$@"
