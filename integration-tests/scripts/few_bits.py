"""What few bits do to the loss: a table of runs that differ in the format of moments, parameters and gradients only.

    few_bits.py PROGRAM --data FILE [--steps 300] [--only NAME,...] [--out FOLDER]

A GPT-2 of 10M parameters on bytes of text, 4 ranks on 2 machines of 2, stage 3; the rate rises for 30 steps, then falls to a tenth.
The second run has the first one's batches in two micro-batches: how far runs part by the order of their sums alone. Prints the mean loss of the last 20 steps, its
difference from fp32, the measured errors of what travels beside their bounds (of the last step), and the bytes that a rank's
machine sends to others in a step."""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

PARAMS = ["--quantize-params", "int8"]
LOCO = ["--error-feedback", "--error-feedback-beta", "0.8", "--error-feedback-reset", "512"]
RUNS = {
    "fp32": [],
    "fp32, two micro-batches": ["--micro-batch", 1, "--grad-accum", 2],
    "8-bit moments": ["--moments", "8bit"],
    "4-bit moments": ["--moments", "4bit"],
    "parameters int8 (qwZ)": PARAMS,
    "gradients int8": ["--quantize-grads", "int8"],
    "gradients int4": ["--quantize-grads", "int4"],
    "gradients int4, feedback": ["--quantize-grads", "int4", "--error-feedback"],
    "gradients int4, LoCo": ["--quantize-grads", "int4", *LOCO],
    "gradients int8,int4": ["--quantize-grads", "int8,int4"],
    "gradients int8,int4, feedback": ["--quantize-grads", "int8,int4", "--error-feedback"],
    "all: 8-bit moments, qwZ, int8,int4, feedback": ["--moments", "8bit", *PARAMS, "--quantize-grads", "int8,int4", "--error-feedback"],
}
MODEL = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 320,
    "n_head": 5,
    "n_layer": 8,
    "n_positions": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


def weights(folder):
    """A folder of the model with random weights, made by the program's own initialisation of GPT-2."""
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(0)
    c, layers = MODEL["n_embd"], MODEL["n_layer"]
    shapes = {"wte.weight": (256, c), "wpe.weight": (MODEL["n_positions"], c), "ln_f.weight": (c,), "ln_f.bias": (c,)}
    for i in range(layers):
        block = {"ln_1": (c,), "ln_2": (c,), "attn.c_attn": (c, 3 * c), "attn.c_proj": (c, c), "mlp.c_fc": (c, 4 * c), "mlp.c_proj": (4 * c, c)}
        for name, shape in block.items():
            shapes[f"h.{i}.{name}.weight"] = shape
            shapes[f"h.{i}.{name}.bias"] = shape[-1:]

    def value(name, shape):
        if name.endswith("bias"):
            return numpy.zeros(shape, "float32")
        if "ln_" in name:
            return numpy.ones(shape, "float32")
        scale = 0.02 / (2 * layers) ** 0.5 if "c_proj" in name else 0.02
        return (scale * random.standard_normal(shape)).astype("float32")

    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file({name: value(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")


def run(options, model, name, flags):
    folder = Path(options.out) / name.replace(" ", "-").replace(",", "").replace(":", "").replace("(", "").replace(")", "")
    metrics = folder.with_suffix(".jsonl")
    if not metrics.exists():
        command = [options.program, "train", "--model", model, "--data", options.data, "--steps", options.steps, "--ranks", 4]
        command += ["--ranks-per-node", 2, "--stage", 3, "--seq-len", 128, "--clip", 1]
        command += ["--lr", "1e-3", "--warmup-steps", 30, "--schedule", "cosine", "--min-lr", "1e-4"]
        command += [] if "--micro-batch" in flags else ["--micro-batch", 2]
        command += ["--checkpoint", folder, "--metrics", metrics.with_suffix(".part"), *flags]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        metrics.with_suffix(".part").rename(metrics)
    return [step for step in map(json.loads, metrics.read_text().splitlines()) if "loss" in step]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", type=lambda names: names.split(";"))
    parser.add_argument("--out", default=None, help="where runs are kept, and found again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options.out = options.out or temporary
        Path(options.out).mkdir(exist_ok=True)
        model = Path(options.out) / "model"
        if not model.exists():
            model.mkdir()
            weights(model)
        print("| run | loss | to fp32 | error of parameters (bound) | error of gradients (bound) | bytes between machines |\n|---|---|---|---|---|---|")
        base = None
        for name, flags in RUNS.items():
            if options.only and name not in options.only:
                continue
            steps = run(options, model, name, flags)
            last = steps[-1]
            loss = sum(step["loss"] for step in steps[-20:]) / len(steps[-20:])
            base = base or loss
            of = lambda key: f'{last["quant_error"][key]:.4f} ({last["quant_bound"][key]:.4f})' if (last.get("quant_error") or {}).get(key) else ""
            between = last["comm_bytes"]["between"]
            print(f"| {name} | {loss:.4f} | {100 * (loss / base - 1):+.2f}% | {of('params')} | {of('grads')} | {between:,} |", flush=True)


main()
