#!/usr/bin/env bash
# Fine-tune on several nodes of a Slurm cluster: one task per node, which starts one rank per GPU.
#
#   sbatch examples/slurm.sh demo distributed.ep_size=8 train.micro_batch_size=8 precision=bf16
#
# The arguments are a recipe and changes to it. Change the numbers below to your cluster's. train.global_batch_size must be
# a multiple of train.micro_batch_size times the ranks, here 16. ep_size counts neighbouring ranks, so at 8 GPUs a node
# ep_size 8 keeps the experts' traffic inside a node.
#SBATCH --job-name=nemo-moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
# SIGTERM three minutes before the time is up leaves time for a step and a checkpoint; the run then exits with 0, and the same
# command submitted again goes on. After a preemption Slurm submits it itself.
#SBATCH --signal=TERM@180
#SBATCH --requeue
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun nemo-moe finetune "$@" checkpoint.resume=auto \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_node:29400"
