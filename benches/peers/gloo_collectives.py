"""Times PyTorch's gloo collectives on this machine; prints one line `operation ranks bytes seconds` for each.

usage: gloo_collectives.py BYTES...   (bytes of the whole fp32 buffer)
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def one(op, rank, n, whole, part):
    if op == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole)
    elif op == "all_gather":
        dist.all_gather_into_tensor(whole, part)
    else:
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)


def rank_main(rank, n, port, sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=n)
    for op in ("reduce_scatter", "all_gather", "all_reduce"):
        for size in sizes:
            whole = torch.zeros(size // 4)
            part = torch.zeros(size // 4 // n)
            try:
                one(op, rank, n, whole, part)
            except Exception as e:
                if rank == 0:
                    print(f"{op}: {e}", file=sys.stderr)
                break
            best, repeat, begun = float("inf"), 1, time.perf_counter()
            while True:
                dist.barrier()
                at = time.perf_counter()
                for _ in range(repeat):
                    one(op, rank, n, whole, part)
                took = time.perf_counter() - at
                best = min(best, took / repeat)
                flag = torch.tensor([float(time.perf_counter() - begun > 0.6), float(took < 0.002)])
                dist.broadcast(flag, 0)
                if flag[0] > 0:
                    break
                if flag[1] > 0:
                    repeat *= 2
            slowest = torch.tensor([best])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(op, n, size, slowest.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sizes = [int(a) for a in sys.argv[1:]]
    for i, n in enumerate((2, 4)):
        mp.spawn(rank_main, (n, 29611 + i, sizes), nprocs=n)
