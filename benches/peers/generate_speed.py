#!/usr/bin/env python3
"""The bytes of weights that `zero generate` reads a second, beside what a copy moves, in turn.

    pip install torch safetensors
    benches/peers/generate_speed.py FOLDER [--zero target/release/zero] [--rounds 5] [--tokens 60]

FOLDER is a Hugging Face folder whose weights exceed the caches. A token's forward reads every weight once, so its rate
is bounded by that of memory; a copy by torch on the same number of threads reads and writes. Prints each round and the
ratio of the medians, for fp32 and bf16 weights, and the rate of a prompt's tokens.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import torch

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def copy_rate():
    source = torch.ones(1 << 28)
    target = torch.empty_like(source)
    target.copy_(source)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * 4 * source.numel() / (time.perf_counter() - start))
    return best


def generate(zero, folder, dtype, tokens, prompt):
    ids = ",".join(str(i % 900 + 100) for i in range(prompt))
    command = [zero, "generate", "--model", folder, "--token-ids", ids, "--tokens", str(tokens), "--dtype", dtype,
               "--temperature", "5", "--seed", "1", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("folder")
    args.add_argument("--zero", default=os.path.join(ROOT, "target", "release", "zero"))
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--tokens", type=int, default=60)
    args = args.parse_args()
    torch.set_num_threads(os.cpu_count())
    for dtype in ("fp32", "bf16"):
        copies, ours, prompts = [], [], []
        for round in range(args.rounds):
            copies.append(copy_rate())
            got = generate(args.zero, args.folder, dtype, args.tokens, 8)
            ours.append(got["tokens_per_s"] * got["weight_bytes_per_token"])
            long = generate(args.zero, args.folder, dtype, 1, 512)
            prompts.append(512 / long["prompt_s"])
            print(f"{dtype} round {round}: {got['tokens_per_s']:.1f} tokens/s, {ours[-1] / 1e9:.1f} GB/s of weights; "
                  f"copy {copies[-1] / 1e9:.1f} GB/s; prompt {prompts[-1]:.0f} tokens/s", flush=True)
        ratio = statistics.median(ours) / statistics.median(copies)
        print(f"{dtype}: {ratio:.2f} of a copy's bytes, prompt {statistics.median(prompts):.0f} tokens/s")


if __name__ == "__main__":
    main()
