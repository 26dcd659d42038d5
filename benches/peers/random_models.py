#!/usr/bin/env python3
"""Random small models of the families that `zero` trains, against Hugging Face transformers.

    pip install torch transformers safetensors numpy
    benches/peers/random_models.py                # 50 models, seeds 0 to 49
    benches/peers/random_models.py --first 17 --count 1

For each seed a family, a shape and weights are drawn; transformers computes logits, loss and gradients in fp32, and
the example model_numbers does. Prints a line a seed with the largest differences, each as a share of the largest
element of its tensor (a gradient's: of the largest of all gradients if that is 1e-4 of it or less), and fails if logits
differ by more than 1e-5 or gradients by more than 1e-4.
"""
import argparse
import os
import random
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from safetensors.torch import load_file

transformers.utils.logging.disable_progress_bar()
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def shape(rng):
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([4, 8, 10, 16])
    # transformers wants a multiple of the heads, even where head_dim is given.
    hidden = heads * rng.choice([head_dim, 5, 12])
    return dict(
        vocab_size=rng.randint(30, 300),
        hidden_size=hidden,
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=rng.choice([17, 32, 60]),
        max_position_embeddings=rng.choice([64, 128]),
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.5,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )


def rope(rng):
    theta = rng.choice([10_000.0, 500_000.0])
    kind = rng.choice(["default", "linear", "llama3", "dynamic", "yarn", "yarn"])
    if kind == "default":
        return dict(rope_type="default", rope_theta=theta)
    if kind == "linear":
        return dict(rope_type="linear", rope_theta=theta, factor=rng.choice([2.0, 4.0]))
    if kind == "dynamic":
        return dict(rope_type="dynamic", rope_theta=theta, factor=rng.choice([2.0, 4.0]))
    if kind == "yarn":
        keys = dict(
            rope_type="yarn",
            rope_theta=theta,
            factor=rng.choice([2.0, 4.0]),
            original_max_position_embeddings=rng.choice([16, 32, 64]),
            truncate=rng.random() < 0.7,
        )
        choices = dict(attention_factor=[0.8, 1.3], beta_fast=[8.0, 32.0], beta_slow=[0.5, 2.0], mscale=[0.7, 1.0],
                       mscale_all_dim=[0.4, 1.0])
        keys.update({key: rng.choice(values) for key, values in choices.items() if rng.random() < 0.4})
        return keys
    return dict(
        rope_type="llama3",
        rope_theta=theta,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=rng.choice([16, 32]),
    )


def gpt2(rng):
    heads = rng.choice([1, 2, 3])
    return transformers.GPT2Config(
        vocab_size=rng.randint(30, 300),
        n_embd=heads * rng.choice([8, 12]),
        n_layer=rng.randint(1, 3),
        n_head=heads,
        n_positions=64,
        n_inner=rng.choice([None, 40]),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=rng.random() < 0.5,
        bos_token_id=1,
        eos_token_id=2,
    )


def configuration(rng):
    family = rng.choice(["llama", "llama", "mistral", "qwen2", "qwen3", "gpt2"])
    if family == "gpt2":
        return gpt2(rng)
    values = dict(shape(rng), rope_parameters=rope(rng))
    if family == "llama":
        values.update(attention_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.3)
        return transformers.LlamaConfig(**values)
    if family == "mistral":
        values.update(sliding_window=rng.choice([None, 3, 8, 64]))
        return transformers.MistralConfig(**values)
    if family == "qwen2":
        del values["head_dim"]
        values["hidden_size"] = values["num_attention_heads"] * rng.choice([4, 8])
        return transformers.Qwen2Config(**values)
    values.update(attention_bias=rng.random() < 0.3)
    return transformers.Qwen3Config(**values)


def compare(seed, program, work):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = configuration(rng)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = os.path.join(work, "model")
    model.save_pretrained(folder)

    rows, seq = rng.randint(1, 3), rng.randint(2, 40)
    tokens = numpy.random.default_rng(seed).integers(0, config.vocab_size, (rows, seq + 1), dtype=numpy.uint32)
    tokens.tofile(os.path.join(work, "tokens.u32"))
    tokens = torch.from_numpy(tokens.astype(numpy.int64))
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
    loss.backward()

    out = os.path.join(work, "out.safetensors")
    subprocess.run([program, folder, str(seq), os.path.join(work, "tokens.u32"), out], check=True)
    ours = load_file(out)
    grads = {name: p.grad for name, p in model.named_parameters()}
    missing = set(grads) ^ (set(ours) - {"logits", "loss"})
    if missing:
        sys.exit(f"seed {seed}: parameters of one side only: {sorted(missing)}")
    scale = max(grad.abs().max().item() for grad in grads.values())

    def error(got, want, least):
        return ((got - want).abs().max() / max(want.abs().max().item(), least)).item()

    of_logits = error(ours["logits"], logits.detach(), 1e-30)
    worst = max((error(ours[name], grad, 1e-4 * scale), name) for name, grad in grads.items())
    of_loss = abs(ours["loss"].item() - loss.item()) / loss.item()
    ok = of_logits < 1e-5 and worst[0] < 1e-4 and of_loss < 1e-5
    kind = f"{config.model_type}{' tied' if config.tie_word_embeddings else ''}"
    print(f"seed {seed:3} {kind:14} rows {rows} x {seq:2}: logits {of_logits:.1e}, loss {of_loss:.1e}, "
          f"gradients {worst[0]:.1e} ({worst[1]}){'' if ok else '  DIFFERS'}", flush=True)
    return ok


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--first", type=int, default=0)
    args.add_argument("--count", type=int, default=50)
    args.add_argument("--program", help="model_numbers, built already")
    args = args.parse_args()
    program = args.program
    if program is None:
        build = ["cargo", "build", "--release", "-p", "integration-tests", "--example", "model_numbers"]
        subprocess.run(build, check=True, cwd=ROOT)
        target = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
        program = os.path.join(target, "release", "examples", "model_numbers")
    torch.set_num_threads(1)
    bad = []
    for seed in range(args.first, args.first + args.count):
        with tempfile.TemporaryDirectory() as work:
            if not compare(seed, program, work):
                bad.append(seed)
    print(f"{args.count - len(bad)} of {args.count} models agree; transformers {transformers.__version__}, torch {torch.__version__}")
    if bad:
        sys.exit(f"seeds that differ: {bad}")


if __name__ == "__main__":
    main()
