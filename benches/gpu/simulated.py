"""The step that `zero plan --simulate` predicts from `zero measure`, beside the step that `zero train` takes.

    simulated.py ZERO FOLDER MODEL ROWS LENGTH

Writes machine.toml, random tokens and metrics into FOLDER. Prints both times; their ratio is a result, not a test.
"""

import array
import json
import os
import random
import statistics
import subprocess
import sys

zero, folder, model, rows, length = sys.argv[1:]
machine, tokens, metrics = (os.path.join(folder, name) for name in ["machine.toml", "tokens.bin", "simulated.jsonl"])
STEPS, WARM_UP = 10, 5


def run(*arguments):
    return subprocess.run([zero, *arguments], check=True, capture_output=True, text=True).stdout


draws = random.Random(1)
with open(tokens, "wb") as file:
    array.array("H", (draws.randrange(256) for _ in range(STEPS * int(rows) * int(length) + 1))).tofile(file)
if os.path.exists(metrics):
    os.remove(metrics)

run("measure", "--device", "cuda", "--out", machine)
shape = ["--model", model, "--micro-batch", rows, "--seq-len", length, "--dtype", "bf16"]
run("train", *shape, "--device", "cuda", "--ranks", "1", "--stage", "2", "--data", tokens, "--steps", str(STEPS),
    "--no-checkpoint", "--metrics", metrics)
with open(metrics) as file:
    measured = statistics.median(json.loads(line)["step_ms"] for line in list(file)[WARM_UP:])
report = json.loads(run("plan", *shape, "--simulate", "--hardware", f"{machine}:1x1", "--json"))
stage = next(stage for stage in report["stages"] if stage["stage"] == 2)
simulated = stage["simulated"]["step_ms"]
print(f"{model}, {rows} x {length}: simulated {simulated:.2f} ms, measured {measured:.2f} ms ({simulated / measured - 1:+.1%})")
