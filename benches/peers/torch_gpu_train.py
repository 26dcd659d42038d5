#!/usr/bin/env python3
"""Trains a GPT-2 preset with PyTorch on one GPU in bf16 and prints speed and memory, to compare with `cuda_train`.

    python3 benches/peers/torch_gpu_train.py --model gpt2-124m --batch 32 --seq 1024 --mode eager   # compile, fsdp2

eager and compile keep fp32 parameters and compute in bf16 by autocast; fsdp2 shards over one rank, with bf16
parameters and gradients for compute, as on many GPUs. AdamW is fused, gradients are clipped at 1, tokens are random:
the same work as `cuda_train`'s. A step's time is measured on the host, from one read of the loss to the next.
`--device cpu` is only for testing the script.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from torch_train import Gpt2  # noqa: E402

# Layers, width, heads.
MODELS = {
    "nano": (4, 128, 4),
    "gpt2-124m": (12, 768, 12),
    "gpt2-350m": (24, 1024, 16),
    "gpt2-774m": (36, 1280, 20),
    "gpt2-1.5b": (48, 1600, 25),
}


def shard(model, device):
    """FSDP2 over one rank: one unit per block, and one for the remaining parameters."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--mode", choices=["eager", "compile", "fsdp2"], default="eager")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    torch.manual_seed(1)
    layers, width, heads = MODELS[args.model]
    with torch.device(args.device):
        model = Gpt2(layers, width, heads, args.seq, args.vocabulary)
        tokens = torch.randint(args.vocabulary, (args.steps, args.batch, args.seq + 1))
    run = model
    if args.mode == "fsdp2":
        run = shard(model, args.device)
    elif args.mode == "compile":
        run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    times, losses = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.mode != "fsdp2"):
            loss = run(tokens[step, :, :-1], tokens[step, :, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[args.warm_up :])
    result = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "model": args.model,
        "mode": args.mode,
        "step_ms": step_s * 1e3,
        "tokens_per_s": args.batch * args.seq / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "loss": losses[-1],
    }
    print(json.dumps(result))
    if args.mode == "fsdp2":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
