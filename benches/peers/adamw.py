#!/usr/bin/env python3
"""Compares the host AdamW with torch's fused AdamW and DeepSpeedCPUAdam, step by step in turn in one run.

    cargo build --release -p benches --bin adamw_server
    python3 benches/peers/adamw.py [--elems 100000000] [--rounds 40] [--threads 2]

Needs `pip install torch deepspeed`. Each round times one step of each, so that all see the machine in the same state
(the memory bandwidth of a shared machine changes from second to second). The ratio is the median over rounds of the
peer's time over ours: above 1, ours is faster. On a shared machine, `chrt -f 20 python3 ...` (as root) keeps other
processes off the cores for the half minute, but not off the memory.
"""
import argparse
import os
import statistics
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("--elems", type=int, default=100_000_000)
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--server", default="target/release/adamw_server")
parser.add_argument("--kinds", default="fp32,bf16,bf16_all")
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(args.threads)
# A waiting thread must not occupy a core that the next timed subject needs.
os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")

import torch  # noqa: E402
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402

torch.set_num_threads(args.threads)


def timed(optimizer):
    optimizer.step()  # allocates the state, touches the pages

    def step():
        start = time.perf_counter()
        optimizer.step()
        return (time.perf_counter() - start) * 1e3

    return step


def make_param(kind):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    param = torch.nn.Parameter(torch.rand(args.elems).to(dtype))
    param.grad = (torch.rand(args.elems) * 0.1).to(dtype)
    return param


def torch_fused(kind):
    return timed(torch.optim.AdamW([make_param(kind)], lr=1e-3, weight_decay=0.01, fused=True))


def deepspeed(kind):
    return timed(DeepSpeedCPUAdam([make_param(kind)], lr=1e-3, weight_decay=0.01, adamw_mode=True,
                                  fp32_optimizer_states=kind != "bf16_all"))


server = subprocess.Popen([args.server, str(args.elems), str(args.threads)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True)


def ours(kind):
    def step():
        server.stdin.write(f"{kind} 1\n")
        server.stdin.flush()
        return float(server.stdout.readline().split()[1])

    step()
    return step


# fp32: 4 parameter written, 8 + 8 moments read and written, 4 + 4 gradient and parameter read.
bytes_per_elem = {"limit": 28, "fp32": 28, "bf16": 22, "bf16_all": 14}


def report(kind, name, times, tail):
    median = statistics.median(times)
    print(f"{kind:9} {name:17} median {median:7.2f} ms ({bytes_per_elem[kind] * args.elems / median / 1e6:5.1f} GB/s), "
          f"best {min(times):7.2f} ms; {tail}", flush=True)


limit = ours("limit")
report("limit", "memory alone", [limit() for _ in range(args.rounds)], "two streams read, one written")
for kind in args.kinds.split(","):
    steps = {"ours": ours(kind), "DeepSpeedCPUAdam": deepspeed(kind)}
    if kind != "bf16":  # torch keeps the moments in the parameter's dtype
        steps["torch fused"] = torch_fused(kind)
    times = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(step())
    for name, t in times.items():
        ratio = statistics.median(peer / mine for peer, mine in zip(t, times["ours"]))
        report(kind, name, t, f"peer/ours, median of rounds: {ratio:.2f}")
    del steps
server.stdin.close()
server.wait()
