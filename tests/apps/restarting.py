"""A job in which one rank fails in every attempt before `last_attempt`, after an all-reduce."""

import os
from datetime import timedelta

import either
import rank_records
import torch
import torch.distributed as dist
from omegaconf import DictConfig


@either.main(version_base=None)
def main(cfg: DictConfig) -> int:
    """Look for the key of the attempt before, leave one, reduce, record, and fail or return."""
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"attempt {attempt} rank {rank}")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    found = [n for n in range(attempt) if store.check([f"left in attempt {n}"])]
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    store.set(f"left in attempt {attempt}", "here")
    rank_records.write("task", port=address[1], total=total.item(), found=found)
    dist.barrier()
    if attempt < cfg.last_attempt:
        if rank == attempt % 2:
            raise RuntimeError(f"asked to fail in attempt {attempt}")
        dist.all_reduce(total)  # with a rank that does not come
    dist.destroy_process_group()
    return attempt


if __name__ == "__main__":
    main()
