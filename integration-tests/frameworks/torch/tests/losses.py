"""Losses beside plain PyTorch: torchrun --nproc-per-node N tests/losses.py MODEL STAGE [--micro-batches A] [--clip X] ..."""

import argparse
import json

import torch
import zero_torch as deepspeed
from programs import MODELS, ROWS, loss_of, loss_of_pictures, make, reference, rows_of

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=MODELS)
parser.add_argument("stage", type=int)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--checkpointing", choices=["reentrant", "nonreentrant"])
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
args = parser.parse_args()
# 16-bit parameters, beside PyTorch in fp32.
within = 1e-6 if args.dtype == "fp32" else 1e-3
if args.model == "vit":
    loss_of = loss_of_pictures
torch.set_num_threads(1)

config = {
    "train_batch_size": ROWS,
    "gradient_accumulation_steps": args.micro_batches,
    "gradient_clipping": args.clip,
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
}
if args.dtype != "fp32":
    config[args.dtype] = {"enabled": True}
model = make(args.model, args.checkpointing)
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

losses, norms = [], []
for step in range(args.steps):
    rows = rows_of(step)
    size = engine.train_micro_batch_size_per_gpu()
    for micro in range(args.micro_batches):
        start = (engine.global_rank * args.micro_batches + micro) * size
        loss = loss_of(engine, rows[start:start + size])
        engine.backward(loss)
        engine.step()
        if args.evaluate:
            engine.eval()
            with torch.no_grad():
                loss_of(engine, rows)
            engine.train()
    losses.append(engine.loss)
    norms.append(engine.get_global_grad_norm())

if engine.global_rank == 0:
    expected, expected_norms = reference(make(args.model), args.steps, args.clip, loss_of=loss_of)
    worst = max(abs(got - want) / abs(want) for got, want in zip(losses, expected))
    of_norms = max(abs(got - want) / abs(want) for got, want in zip(norms, expected_norms)) if norms[0] is not None else None
    print("RESULT", json.dumps({**vars(args), "ranks": engine.world_size, "worst loss": worst, "worst norm": of_norms, "last": losses[-1]}))
    assert worst < within, (losses, expected)
engine.destroy()
