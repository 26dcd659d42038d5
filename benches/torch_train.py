#!/usr/bin/env python3
"""Trains a GPT-2, or a Llama, with PyTorch eager on the CPU and prints its speed, to compare with `zero train`.

The model, initial weights, data and update are those of `zero train`: --write writes the weights to a Hugging Face
folder and the tokens to a file, and `zero train --model FOLDER --data FILE` starts from both. So the losses are
comparable, not only the speeds.

    python3 benches/torch_train.py --write /tmp/gpt        # config.json, model.safetensors, tokens.bin
    python3 benches/torch_train.py --steps 12              # one line of JSON

--dtype bf16 computes under torch.autocast, with parameters in fp32: `zero train --dtype bf16` has masters in fp32 beside
bf16 parameters.

The optimizer is torch's fused AdamW, its fastest on a CPU; attention is scaled_dot_product_attention. --dropout is that of
the embedding, of attention's probabilities and of both branches, as in GPT-2, and is written to config.json.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

from torch_models import PRESETS, Shape, build, write_folder


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="in place of --layers, --width, --heads and --vocabulary")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
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
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", metavar="FOLDER", help="write the model and the tokens there, and do not train")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    shape = PRESETS[args.preset] if args.preset else Shape(args.layers, args.width, args.heads, args.vocabulary)
    model = build(shape, args.seq_len, args.dropout)
    row_tokens = args.batch * args.seq_len
    # Skewed, so that the loss falls below that of a uniform guess.
    uniform = torch.rand(args.steps * row_tokens + 1)
    tokens = (uniform * uniform * shape.vocabulary).long()
    if args.write:
        write_folder(args.write, model, shape, args.seq_len, tokens, args.dropout)
        return

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    speeds, losses = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        window = tokens[step * row_tokens : (step + 1) * row_tokens + 1]
        inputs = window[:-1].view(args.batch, args.seq_len)
        targets = window[1:].view(args.batch, args.seq_len)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speeds.append(row_tokens / (time.perf_counter() - start))
    result = {
        "tokens_per_s": statistics.median(speeds[args.warm_up :]),
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
