#!/usr/bin/env bash
# A SLURM job: one task per node, which starts one process per GPU with torchrun. Submit it from the repository's root,
# on a file system that all nodes see, after .venv is there (scripts/quickstart.sh makes it).
#
#   sbatch --nodes 2 scripts/slurm.sh recipes/pretrain.yaml --strategy configs/zero3.yaml data.path=/data/books
#
# Five minutes before its time is up the job is told to stop: it saves, and the same line goes on from there. A preempted
# job has the partition's GraceTime for that; requeued by SLURM, it goes on by itself.
#SBATCH --job-name=samecurve
#SBATCH --nodes=1
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
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# torchrun gives its processes 30 seconds after SIGTERM unless it is told otherwise; saving a large model takes longer
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270

exec srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_backend c10d --rdzv_endpoint "$head_node:$port" --rdzv_id "$SLURM_JOB_ID" train.py "$@"
