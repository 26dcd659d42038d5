#!/usr/bin/env python3
"""Trains a preset with PyTorch on one GPU in bf16 and prints speed and memory, to compare with `cuda_train`.

    python3 benches/peers/torch_gpu_train.py --model gpt2-124m --batch 32 --seq 1024 --mode eager   # compile, fsdp2
    python3 benches/peers/torch_gpu_train.py --model gpt2-1.5b --batch 8 --zero target/release/zero

eager and compile keep fp32 parameters and compute in bf16 by autocast; fsdp2 shards over one rank, with bf16
parameters and gradients for compute, as on many GPUs. AdamW is fused, gradients are clipped at 1, tokens are random:
the same work as `cuda_train`'s. A step's time is measured on the host, from one read of the loss to the next.

With --zero, `zero train` first trains the same weights, which bf16 holds exactly, on the same tokens. The losses of
all steps are printed side by side; the script fails if any two differ by more than --limit.

`--device cpu` and `--zero-device cpu` are only for testing the script.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from torch_models import PRESETS, build, write_folder  # noqa: E402

LR, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0


def shard(model, device):
    """FSDP2 over one rank: one unit per block, and one for the remaining parameters."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.layers if hasattr(model, "layers") else model.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def initial(args):
    """The model with weights that bf16 holds exactly, and the tokens: a function of the arguments."""
    torch.manual_seed(1)
    with torch.device(args.device):
        model = build(PRESETS[args.model], args.seq)
        tokens = torch.randint(PRESETS[args.model].vocabulary, (args.steps * args.batch * args.seq + 1,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, tokens


def train_ours(args, folder):
    """Trains with `zero train`; returns the metrics of its steps."""
    model, tokens = initial(args)
    data = write_folder(folder, model.bfloat16(), PRESETS[args.model], args.seq, tokens)
    del model, tokens
    if args.device == "cuda":
        torch.cuda.empty_cache()
    metrics = os.path.join(folder, "metrics.jsonl")
    command = [
        args.zero, "train", "--model", folder, "--data", data, "--device", args.zero_device, "--ranks", "1",
        "--stage", "2", "--dtype", "bf16", "--micro-batch", str(args.batch), "--grad-accum", "1",
        "--seq-len", str(args.seq), "--steps", str(args.steps), "--lr", str(LR), "--weight-decay", str(WEIGHT_DECAY),
        "--clip", str(CLIP), "--no-checkpoint", "--metrics", metrics,
    ]
    # Its libraries are not PyTorch's.
    environment = dict(os.environ)
    environment["LD_LIBRARY_PATH"] = environment.get("ZERO_LIBRARIES", environment.get("LD_LIBRARY_PATH", ""))
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    with open(metrics) as file:
        return [json.loads(line) for line in file]


def compare(ours, theirs, limit):
    """Prints the losses of both; returns whether they agree."""
    print("step     zero    torch  difference")
    worst = 0.0
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        worst = max(worst, abs(a - b) / b)
        print(f"{step:4} {a:8.4f} {b:8.4f}  {abs(a - b) / b:.1e}")
    print(f"the losses differ by at most {worst:.1e} (limit {limit:.0e})")
    return worst <= limit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--mode", choices=["eager", "compile", "fsdp2"], default="eager")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--zero", help="the program zero, for losses side by side")
    parser.add_argument("--zero-device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=1e-2)
    args = parser.parse_args()
    ours = None
    if args.zero:
        with tempfile.TemporaryDirectory() as folder:
            ours = train_ours(args, folder)

    model, tokens = initial(args)
    run = model
    if args.mode == "fsdp2":
        run = shard(model, args.device)
    elif args.mode == "compile":
        run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    times, losses = [], []
    rows = args.batch * args.seq
    for step in range(args.steps):
        start = time.perf_counter()
        window = tokens[step * rows : (step + 1) * rows + 1]
        with torch.autocast(args.device, torch.bfloat16, enabled=args.mode != "fsdp2"):
            loss = run(window[:-1].view(args.batch, args.seq), window[1:].view(args.batch, args.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
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
        "tokens_per_s": rows / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "loss": losses[-1],
    }
    if ours:
        result["zero_tokens_per_s"] = statistics.median(step["tokens_per_s"] for step in ours[args.warm_up :])
    print(json.dumps(result))
    if args.mode == "fsdp2":
        torch.distributed.destroy_process_group()
    if ours and not compare([step["loss"] for step in ours], losses, args.limit):
        sys.exit("the losses differ: the two did not train the same model")


if __name__ == "__main__":
    main()
