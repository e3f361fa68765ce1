"""Fine-tune on this process, or on the ranks that torchrun starts:

torchrun --nproc-per-node 2 recipes/finetune.py demo train.max_steps=20
"""

from __future__ import annotations

import sys

from nemo_moe.cli.entry import run_finetune_rank

if __name__ == "__main__":
    sys.exit(run_finetune_rank(sys.argv[1:]))
