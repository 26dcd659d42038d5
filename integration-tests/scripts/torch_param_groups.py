#!/usr/bin/env python3
"""Writes zero-optim/tests/data/torch_param_groups.json: torch.optim.AdamW with parameter groups, clipping and frozen
parameters, after each of a few steps. Run it in the repository's root: integration-tests/scripts/torch_param_groups.py"""

import json
import random

import torch

LR, BETAS, DECAY, CLIP, STEPS = 1e-2, (0.9, 0.95), 0.1, 1.0, 6
# Elements of each parameter and its rules: None inherits.
PARAMS = [
    {"elems": 7, "lr_scale": 1.0, "weight_decay": None, "betas": None, "trainable": True},
    {"elems": 5, "lr_scale": 0.25, "weight_decay": 0.0, "betas": [0.8, 0.99], "trainable": True},
    {"elems": 4, "lr_scale": 1.0, "weight_decay": None, "betas": None, "trainable": False},
    {"elems": 9, "lr_scale": 1.0, "weight_decay": 0.0, "betas": None, "trainable": True},
]


def numbers(generator, count):
    # Multiples of 1/64, exact in every type.
    return [generator.randrange(-128, 129) / 64 for _ in range(count)]


def main():
    generator = random.Random(16)
    initial = [numbers(generator, p["elems"]) for p in PARAMS]
    grads = [[numbers(generator, p["elems"]) for p in PARAMS] for _ in range(STEPS)]
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in initial]
    groups = []
    for rules, tensor in zip(PARAMS, tensors):
        tensor.requires_grad_(rules["trainable"])
        if rules["trainable"]:
            group = {"params": [tensor], "lr": LR * rules["lr_scale"]}
            if rules["weight_decay"] is not None:
                group["weight_decay"] = rules["weight_decay"]
            if rules["betas"] is not None:
                group["betas"] = tuple(rules["betas"])
            groups.append(group)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    trained = [t for t in tensors if t.requires_grad]
    steps = []
    for of_step in grads:
        for tensor, grad in zip(tensors, of_step):
            tensor.grad = torch.tensor(grad) if tensor.requires_grad else None
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        steps.append({"grad_norm": norm.item(), "params": [t.tolist() for t in tensors]})
    out = {"torch": torch.__version__, "lr": LR, "betas": BETAS, "weight_decay": DECAY, "max_grad_norm": CLIP,
           "params": PARAMS, "initial": initial, "grads": grads, "steps": steps}
    with open("zero-optim/tests/data/torch_param_groups.json", "w") as file:
        json.dump(out, file)
        file.write("\n")


if __name__ == "__main__":
    main()
