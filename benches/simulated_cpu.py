#!/usr/bin/env python3
"""Step times of the trainer on this host, beside those of `zero plan --simulate`.

Measures the machine (`zero measure`), then runs of six small models and GPT-2 124M, three of each
configuration and not one after the other. A run counts by the median of its steps, and of three runs
the one with the lowest: other programs and a virtual machine's neighbours only add time. Calibrates on
CALIBRATION alone, and prints the errors of the others and whether the order of the stages is right.
Takes a quarter of an hour on two cores; nothing else may run. With `small` behind FOLDER it only tests itself: four runs of nano.

    cargo build --release -p zero --bins
    benches/simulated_cpu.py target/release/zero FOLDER
"""

import array
import json
import os
import random
import statistics
import struct
import subprocess
import sys

# Layers, width, heads, vocabulary.
MODELS = {
    "a": (6, 256, 8, 1024),
    "b": (6, 512, 8, 8192),
    "c": (12, 256, 4, 2048),
    "d": (8, 384, 6, 16384),
    "e": (4, 768, 12, 4096),
}
CALIBRATION = [
    "--model a --ranks 1 --stage 2",
    "--model b --ranks 2 --stage 3",
    "--model gpt2-124m --ranks 2 --stage 2 --seq-len 64 --micro-batch 1",
]
# Only their stages differ.
STAGES = [f"--model a --ranks 2 --stage {stage}" for stage in range(4)]
OTHERS = [
    "--model nano --ranks 1 --stage 0",
    "--model nano --ranks 2 --stage 1 --seq-len 256",
    "--model nano --ranks 4 --stage 3 --micro-batch 8",
    "--model nano --ranks 2 --stage 3 --grad-accum 4",
    "--model a --ranks 4 --stage 2 --grad-accum 2",
    "--model a --ranks 4 --stage 1 --offload cpu",
    "--model b --ranks 1 --stage 0",
    "--model b --ranks 2 --stage 0 --micro-batch 2",
    "--model b --ranks 2 --stage 1 --micro-batch 2",
    "--model b --ranks 2 --stage 3 --micro-batch 2",
    "--model b --ranks 4 --stage 3 --micro-batch 1",
    "--model b --ranks 2 --stage 3 --micro-batch 1 --grad-accum 4",
    "--model b --ranks 2 --stage 2 --offload cpu",
    "--model c --ranks 4 --stage 2 --seq-len 256 --micro-batch 1",
    "--model c --ranks 1 --stage 1 --activation-checkpointing",
    "--model d --ranks 2 --stage 3 --offload cpu --offload-params cpu --micro-batch 2",
    "--model e --ranks 1 --stage 3 --offload cpu",
    "--model gpt2-124m --ranks 4 --stage 0 --seq-len 64 --micro-batch 1",
    "--model gpt2-124m --ranks 4 --stage 3 --seq-len 64 --micro-batch 1",
]
RUNS = 3
SECONDS = 6.0
WARM_UP = 3
# Closer times are equal.
CLEAR = 0.01


def write_model(folder, layers, width, heads, vocab):
    """A GPT-2 in Hugging Face's form, with some weights."""
    os.makedirs(folder, exist_ok=True)
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocab,
        "n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    }
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    draws = random.Random(0)
    noise = array.array("f", (draws.gauss(0, 0.02) for _ in range(4099)))
    tensors = {}

    def weight(name, *shape):
        elems = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f")
        while len(values) < elems:
            values.extend(noise[draws.randrange(999):])
        tensors[name] = (shape, values[:elems])

    def constant(name, elems, value=0.0):
        tensors[name] = ((elems,), array.array("f", [value]) * elems)

    def norm(name):
        constant(f"{name}.weight", width, 1.0)
        constant(f"{name}.bias", width)

    weight("wte.weight", vocab, width)
    weight("wpe.weight", 1024, width)
    for layer in range(layers):
        block = f"h.{layer}"
        norm(f"{block}.ln_1")
        norm(f"{block}.ln_2")
        for name, rows, columns in [
            ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width),
        ]:
            weight(f"{block}.{name}.weight", rows, columns)
            constant(f"{block}.{name}.bias", columns)
    norm("ln_f")

    header, offset = {}, 0
    for name, (shape, values) in tensors.items():
        end = offset + 4 * len(values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            values.tofile(file)


def write_tokens(path, count):
    """Random bytes as a file of tokens."""
    draws = random.Random(1)
    with open(path, "wb") as file:
        array.array("H", (draws.randrange(256) for _ in range(count))).tofile(file)


def median_ms(path):
    with open(path) as file:
        steps = [json.loads(line)["step_ms"] for line in file]
    return statistics.median(steps[WARM_UP:])


def order_of_stages(configurations, measured, predicted):
    """How many pairs of stages of the same run are ordered right, of those that differ clearly."""
    groups = {}
    for configuration, times in zip(configurations, zip(measured, predicted)):
        words = configuration.split()
        at = words.index("--stage")
        rest = " ".join(words[:at] + words[at + 2 :])
        groups.setdefault(rest, []).append(times)
    pairs = [
        (a, b) for group in groups.values() for i, a in enumerate(group) for b in group[:i]
        if abs(a[0] / b[0] - 1) > CLEAR
    ]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return f"stages: {right} of {len(pairs)} pairs that differ by more than {CLEAR:.0%} are ordered right"


def main():
    zero, folder = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    os.makedirs(folder, exist_ok=True)
    small = sys.argv[3:] == ["small"]
    for name, shape in [] if small else MODELS.items():
        write_model(f"{folder}/{name}", *shape)
    write_tokens(f"{folder}/tokens.bin", 1_000_000)
    machine = f"{folder}/machine.toml"
    subprocess.run([zero, "measure", "--device", "cpu", "--out", machine], check=True)

    calibration = ["--model nano --ranks 1 --stage 2"] if small else CALIBRATION
    others = [f"--model nano --ranks 2 --stage {stage}" for stage in (0, 2, 3)] if small else STAGES + OTHERS
    configurations = calibration + others
    measured = {configuration: [] for configuration in configurations}
    for run in range(1 if small else RUNS):
        for number, configuration in enumerate(configurations):
            steps = 12
            if measured[configuration]:
                steps = WARM_UP + max(7, min(200, int(SECONDS / (measured[configuration][0][0] / 1e3))))
            metrics = f"{folder}/{number:02}-{run}.jsonl"
            if os.path.exists(metrics):
                os.remove(metrics)
            flags = configuration.split()
            if flags[1] in MODELS:
                flags[1] = f"{folder}/{flags[1]}"
            command = [
                zero, "train", "--device", "cpu", "--data", f"{folder}/tokens.bin", "--no-checkpoint",
                "--steps", str(steps), "--metrics", metrics, *flags,
            ]
            subprocess.run(command, check=True, capture_output=True, cwd=folder)
            measured[configuration].append((median_ms(metrics), metrics))
    quietest = [min(measured[configuration]) for configuration in configurations]

    files = [path for _, path in quietest]
    calibrated = len(calibration)
    command = [
        zero, "plan", "--hardware", f"{machine}:4x1",
        "--calibrate", *files[:calibrated], "--predict", *files[calibrated:],
    ]
    table = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True).stdout
    print(table)
    # The first line has the names of the columns.
    predicted = [float(line.split()[1]) for line in table.splitlines()[1 : len(files) - calibrated + 1]]
    times = [ms for ms, _ in quietest[calibrated:]]
    print(order_of_stages(configurations[calibrated:], times, predicted))
    print("measured ms of all runs:")
    for configuration in configurations:
        print("  ", ", ".join(f"{ms:.1f}" for ms, _ in measured[configuration]), configuration)


if __name__ == "__main__":
    main()
