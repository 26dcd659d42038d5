#!/usr/bin/env python3
"""Three steps of torch.optim.Muon, with the products of Newton-Schulz in fp32 instead of bfloat16.

    OMP_NUM_THREADS=1 benches/peers/muon.py      writes zero-kernels/tests/data/torch_muon.safetensors

zero-kernels/tests/suite/orthogonalise.rs compares ours with it.
"""
import inspect
import pathlib

import torch
import torch.optim._muon as muon
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3

source = inspect.getsource(muon._zeropower_via_newtonschulz)
assert source.count("torch.bfloat16") == 1
exec(source.replace("torch.bfloat16", "torch.float32"), muon.__dict__)

CASES = {
    "wide": ((12, 20), dict(lr=0.02, adjust_lr_fn="match_rms_adamw")),
    "tall": ((24, 10), dict(lr=0.05, momentum=0.4, weight_decay=0.0, ns_steps=3)),
    "square": ((16, 16), dict(lr=0.02, nesterov=False, weight_decay=0.3)),
}

torch.manual_seed(47)
tensors = {}
for name, (shape, settings) in CASES.items():
    param = torch.nn.Parameter(torch.randn(shape) / 4)
    optimizer = torch.optim.Muon([param], **settings)
    tensors[f"{name}.param0"] = param.detach().clone()
    for step in range(STEPS):
        param.grad = torch.randn(shape)
        tensors[f"{name}.grad{step}"] = param.grad.clone()
        optimizer.step()
        tensors[f"{name}.param{step + 1}"] = param.detach().clone()
    tensors[f"{name}.momentum"] = optimizer.state[param]["momentum_buffer"].clone()
save_file(tensors, ROOT / "zero-kernels/tests/data/torch_muon.safetensors")
