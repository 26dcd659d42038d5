#!/usr/bin/env python3
"""Host AdamW beside torch's fused AdamW and DeepSpeedCPUAdam, interleaved in one run.

    cargo build --release -p benches --bin adamw_server
    python3 benches/peers/adamw.py [--elems 100000000] [--rounds 5] [--threads 2]

Needs `pip install torch deepspeed`. Every round times each of the three for a few steps; the figure is the median of
all steps, and the ratio is the peer's over ours (above 1: ours is faster). CPU is the CPU time of all threads in a
step: on a machine that others use too it is the steadier figure.
"""
import argparse
import os
import statistics
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("--elems", type=int, default=100_000_000)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=5, help="steps of each in a round")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--server", default="target/release/adamw_server")
parser.add_argument("--kinds", default="fp32,bf16,bf16_all")
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(args.threads)
os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")  # waiting is not CPU time

import torch  # noqa: E402
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402

torch.set_num_threads(args.threads)


def cpu_ms():
    """CPU time of all threads, as the scheduler counts it."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/schedstat") as stat:
            total += int(stat.read().split()[0])
    return total / 1e6


def timed(optimizer, steps):
    """CPU milliseconds per step, then the milliseconds of each."""
    optimizer.step()  # makes the state, touches the pages
    times, cpu = [], cpu_ms()
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return [(cpu_ms() - cpu) / steps] + times


def make_param(dtype):
    param = torch.nn.Parameter(torch.rand(args.elems).to(dtype))
    param.grad = (torch.rand(args.elems) * 0.1).to(dtype)
    return param


def torch_fused(kind):
    if kind == "bf16":
        return None  # torch keeps the moments in the parameter's dtype
    param = make_param(torch.float32 if kind == "fp32" else torch.bfloat16)
    return timed(torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True), args.steps)


def deepspeed(kind):
    param = make_param(torch.float32 if kind == "fp32" else torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01, adamw_mode=True,
                                 fp32_optimizer_states=kind != "bf16_all")
    return timed(optimizer, args.steps)


server = subprocess.Popen([args.server, str(args.elems), str(args.threads)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True)


def ours(kind):
    server.stdin.write(f"{kind} {args.steps}\n")
    server.stdin.flush()
    return [float(t) for t in server.stdout.readline().split()]


bytes_per_elem = {"fp32": 28, "bf16": 22, "bf16_all": 14}
for kind in args.kinds.split(","):
    times = {"ours": [], "torch fused": [], "DeepSpeedCPUAdam": []}
    cpu = {name: [] for name in times}
    for _ in range(args.rounds):
        for name, run in (("ours", ours), ("torch fused", torch_fused), ("DeepSpeedCPUAdam", deepspeed)):
            figures = run(kind)
            if figures:
                cpu[name].append(figures[0])
                times[name] += figures[1:]
    median = {name: statistics.median(t) for name, t in times.items() if t}
    for name, t in median.items():
        rate = bytes_per_elem[kind] * args.elems / t / 1e6
        print(f"{kind:9} {name:17} median {t:7.2f} ms ({rate:5.1f} GB/s), best {min(times[name]):7.2f}, "
              f"CPU {statistics.median(cpu[name]):7.2f} ms | peer/ours: median {t / median['ours']:.2f}, "
              f"best {min(times[name]) / min(times['ours']):.2f}, "
              f"CPU {statistics.median(cpu[name]) / statistics.median(cpu['ours']):.2f}", flush=True)
server.stdin.close()
server.wait()
