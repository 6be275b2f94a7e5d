#!/bin/bash
#SBATCH --job-name=gradient-core
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -euo pipefail

# What torchrun would set, for a loop of yours. SLURM's own variables are enough for the main job.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

if [ $# -gt 0 ]; then # sbatch examples/slurm.sh my_loop.py ARGUMENTS
  exec srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) exec python "$@"' _ "$@"
fi
exec srun python -m core train --tp 8 --checkpoint.dir checkpoints --checkpoint.every 1000 --checkpoint.resume
