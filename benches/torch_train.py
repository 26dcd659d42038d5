#!/usr/bin/env python3
"""Trains a GPT-2 with PyTorch eager on the CPU and prints its speed, to compare with `zero train`.

The model, initial weights, data and update are those of `zero train`: --write writes the weights to a Hugging Face
folder and the tokens to a file, and `zero train --model FOLDER --data FILE` starts from both. So the losses are
comparable, not only the speeds.

    python3 benches/torch_train.py --write /tmp/gpt        # config.json, model.safetensors, tokens.bin
    python3 benches/torch_train.py --steps 12              # one line of JSON

The optimizer is torch's fused AdamW, its fastest on a CPU; attention is scaled_dot_product_attention.
"""

import argparse
import json
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A pre-LN transformer block: attention, then an MLP with tanh GELU."""

    def __init__(self, width, heads, layers):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)
        for linear, std in [
            (self.c_attn, 0.02),
            (self.attn_proj, 0.02 / math.sqrt(2 * layers)),
            (self.c_fc, 0.02),
            (self.mlp_proj, 0.02 / math.sqrt(2 * layers)),
        ]:
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 with learned positions and a tied head. Its output is the mean cross entropy."""

    def __init__(self, layers, width, heads, positions, vocabulary):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.h = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def write_folder(path, model, args, tokens):
    """Writes the model in the Hugging Face layout (matrices input dimension first) and the tokens as u16."""
    from safetensors.torch import save_file

    tensors = {}
    places = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
    for name, value in model.state_dict().items():
        for here, there in places.items():
            if f".{here}." in name:
                name = name.replace(here, there)
                value = value.t() if name.endswith("weight") else value
                break
        tensors[f"transformer.{name}"] = value.contiguous()
    os.makedirs(path, exist_ok=True)
    save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_layer": args.layers,
        "n_embd": args.width,
        "n_head": args.heads,
        "n_positions": args.seq_len,
        "vocab_size": args.vocabulary,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
    tokens.to(torch.uint16).numpy().astype("<u2").tofile(os.path.join(path, "tokens.bin"))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="first steps that are not counted")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", metavar="FOLDER", help="write the model and the tokens there, and do not train")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Gpt2(args.layers, args.width, args.heads, args.seq_len, args.vocabulary)
    row_tokens = args.batch * args.seq_len
    # Skewed, so that the loss falls below that of a uniform guess.
    uniform = torch.rand(args.steps * row_tokens + 1)
    tokens = (uniform * uniform * args.vocabulary).long()
    if args.write:
        write_folder(args.write, model, args, tokens)
        return

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    speeds, losses = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        window = tokens[step * row_tokens : (step + 1) * row_tokens + 1]
        inputs = window[:-1].view(args.batch, args.seq_len)
        targets = window[1:].view(args.batch, args.seq_len)
        loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speeds.append(row_tokens / (time.perf_counter() - start))
    result = {
        "tokens_per_s": statistics.median(speeds[args.warm_up :]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
