#!/bin/sh
#SBATCH --job-name=sotto-sweep
#SBATCH --cpus-per-task=4
#SBATCH --requeue
# One task of a Slurm array computes one shard of a sweep. The folder is on a file system that all nodes share:
#
#   sbatch --array=0-7 slurm.sh grid.toml results 8
#   sotto lab sweep merge grid.toml --out results
#
# A task that is submitted again computes what is missing of its shard.
set -eu
exec sotto lab sweep run "$1" --out "$2" --shard "$SLURM_ARRAY_TASK_ID/$3" --workers "${SLURM_CPUS_PER_TASK:-1}"
