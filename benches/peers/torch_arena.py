#!/usr/bin/env python3
"""Trains a GPT-2 preset with PyTorch on one GPU on different allocators: torch's own twice, zero-alloc's arena below torch's
cache (`torch.cuda.MemPool`), and the arena for the whole process. Checks that the losses are equal, and prints memory and
time of each as JSON.

    ZERO_ALLOC_TORCH=target/release/libzero_alloc_torch.so PYTHONPATH=zero-alloc/torch/python \\
        python3 benches/peers/torch_arena.py --model gpt2-124m --batch 8 --steps 30

The sequence length changes in every step, as in the traces of `benches/traces`. Each allocator has a process of its own, with
the same seed and torch's deterministic algorithms. Losses may differ by four times as much as the two runs on torch's own
allocator do, which is nothing where all kernels are deterministic. `--device cpu` tests the script, on torch's allocator only.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

ALLOCATORS = ["torch", "torch-again", "mem-pool", "process"]


def train(args):
    """One run, in this process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.allocator in ("mem-pool", "process"):
        import zero_alloc_torch as arena
    if args.allocator == "process":
        arena.use_for_process()
    import torch

    from torch_models import PRESETS, build

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1)
    lengths = random.Random(1)
    on_gpu = args.device == "cuda"
    shape = dataclasses.replace(PRESETS[args.model], vocabulary=args.vocabulary)
    context = arena.mem_pool() if args.allocator == "mem-pool" else contextlib.nullcontext()
    times, losses = [], []
    with context:
        with torch.device(args.device):
            model = build(shape, args.seq)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(args.steps):
            length = lengths.randrange(args.seq // 8, args.seq)
            tokens = torch.randint(args.vocabulary, (args.batch, length + 1)).to(args.device)
            start = time.perf_counter()
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)

        result = {"allocator": args.allocator, "losses": losses, "step_ms": statistics.median(times[2:]) * 1e3}
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            result |= {"device": torch.cuda.get_device_name(), "device_used_bytes": total - free}
        if on_gpu and args.allocator != "process":
            live, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            result |= {"live_peak_bytes": live, "reserved_peak_bytes": reserved, "ratio": reserved / live}
        if args.allocator in ("mem-pool", "process"):
            result["arena"] = arena.statistics()
        if args.allocator == "process":
            found = result["arena"]
            live, reserved = found["peak_live_bytes"], found["peak_reserved_bytes"]
            result |= {"live_peak_bytes": live, "reserved_peak_bytes": reserved, "ratio": reserved / live}
    print(json.dumps(result))


def run(args, allocator):
    """One run, in a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--allocator", allocator]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(output.splitlines()[-1])
    print(json.dumps({key: value for key, value in result.items() if key != "losses"}), flush=True)
    return result["losses"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="only this one, in this process")
    args = parser.parse_args()
    if args.allocator:
        return train(args)

    allocators = ALLOCATORS if args.device == "cuda" else ALLOCATORS[:2]
    losses = [run(args, allocator) for allocator in allocators]
    differences = [max(abs(a - b) for a, b in zip(losses[0], other, strict=True)) for other in losses[1:]]
    limit = 4 * differences[0]
    for allocator, difference in zip(allocators[1:], differences, strict=True):
        print(f"{allocator}: losses differ from torch's by at most {difference:.3g}")
    if any(difference > limit for difference in differences[1:]):
        sys.exit(f"FAILED: more than {limit:.3g}")


if __name__ == "__main__":
    main()
