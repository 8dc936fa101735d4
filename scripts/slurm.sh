#!/usr/bin/env bash
# pretrain on 2 x 8 devices.
# Start it in the repository's root. More recipe values may follow:
#   sbatch scripts/slurm.sh
#
# Submit it on a file system that all nodes see, after .venv is there (scripts/quickstart.sh makes it). Five
# minutes before its time is up, the job is asked to stop: it saves, returns to the queue and resumes from
# there. So does a job that is preempted, within the partition's GraceTime. A job whose node fails returns to
# the queue, too, and resumes from its last checkpoint.
#SBATCH --job-name=samecurve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export PATH="$PWD/.venv/bin:$PATH"

# one task is one rank; SLURM would bind each to as many cores as it asked for, which is one
code=0
srun --cpu-bind=none python \
    train.py recipes/pretrain.yaml --strategy configs/fsdp.yaml data.path=/storage/texts output_dir=/storage/runs/pretrain "$@" || code=$?

# 75: stopped on request, with a checkpoint
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
