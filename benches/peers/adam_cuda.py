#!/usr/bin/env python3
"""Compares AdamW on a GPU with PyTorch's, in turn in one run.

    cargo build --release -p benches --bin adam_cuda
    python3 benches/peers/adam_cuda.py [--elems 1,16,256,512,1024] [--rounds 9]

Needs `pip install torch` and an otherwise idle GPU. `--elems` in units of 2^20 parameters. For each size and round: our
copy, update, whole step (norm, check, clip, update), whole step in a graph, and with remainders for masters; then torch's fused AdamW on fp32, and
torch's mixed pipeline (upcast the bf16 gradient, norm, clip, fused AdamW on fp32, downcast to bf16), plain and in a graph.
The ratio is the median over rounds of torch's time over ours: above 1, ours is faster.
"""
import argparse
import os
import statistics
import subprocess

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--elems", default="1,4,16,64,256,512,1024")
parser.add_argument("--rounds", type=int, default=9)
built = "target/release/adam_cuda"
parser.add_argument("--server", default=built if os.path.exists(built) else "adam_cuda")
args = parser.parse_args()

server = subprocess.Popen([args.server, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ours(kind, elems):
    server.stdin.write(f"{kind} {elems}\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise SystemExit("adam_cuda ended; its message is above")
    return float(answer)


def timed(step):
    """Milliseconds per step, over enough steps to last a tenth of a second."""
    count = 2
    while True:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        ms = start.elapsed_time(end)
        if ms >= 100:
            return ms / count
        count *= 4 if ms * 4 < 100 else 2


def peers(elems):
    master = torch.nn.Parameter(torch.rand(elems, device="cuda"))
    master.grad = torch.zeros_like(master)
    grad = (torch.rand(elems, device="cuda") * 1e-3).to(torch.bfloat16)
    param = torch.empty(elems, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.01, fused=True, capturable=True)

    def pipeline():
        master.grad.copy_(grad)
        torch.nn.utils.clip_grad_norm_([master], 1.0)
        optimizer.step()
        param.copy_(master)

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                pipeline()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pipeline()
    return {"torch fused AdamW, fp32": optimizer.step, "torch pipeline": pipeline, "torch pipeline, graph": graph.replay}


# The subject of adam_cuda to compare with each of torch's.
COMPARED = {"torch fused AdamW, fp32": "adam", "torch pipeline": "step", "torch pipeline, graph": "graph"}

# Subjects of adam_cuda, with their bytes a parameter.
BYTES = {"copy": 28, "adam": 28, "step": 30, "graph": 30, "remainder": 28}

print(torch.cuda.get_device_name(), "torch", torch.__version__)
for elems in (int(float(m) * 2**20) for m in args.elems.split(",")):
    theirs = peers(elems)
    times = {name: [] for name in [*BYTES, *theirs]}
    for _ in range(args.rounds):
        for kind in BYTES:
            times[kind].append(ours(kind, elems))
        for name, step in theirs.items():
            times[name].append(timed(step))
    print(f"{elems} parameters")
    for name, t in times.items():
        tail = ""
        if name in COMPARED:
            mine = times[COMPARED[name]]
            tail = f"; of ours ({COMPARED[name]}): {statistics.median(a / b for a, b in zip(t, mine)):.2f} x"
        elif name != "copy":
            share = statistics.median(c / a for c, a in zip(times["copy"], t))
            tail = f"; {BYTES[name]} B per parameter, {share * BYTES[name] / BYTES['copy']:.3f} of the copy"
        print(f"  {name:26} {statistics.median(t):9.4f} ms (best {min(t):9.4f}){tail}", flush=True)
    del theirs, times
    torch.cuda.empty_cache()
server.stdin.close()
server.wait()
