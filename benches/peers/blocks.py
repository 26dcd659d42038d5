#!/usr/bin/env python3
"""Block formats beside bitsandbytes (0.50.2) and torchao (0.18.0).

    benches/peers/blocks.py write      writes zero-shard/tests/data/block_tables.json and
                                       zero-kernels/tests/data/peer_blocks.safetensors
    benches/peers/blocks.py report     prints how often the peers' codes differ from the nearest value

The data: blocks of values that are not near ties, and of ties, encoded by both; 20 steps of AdamW with 8-bit and 4-bit
moments by both. zero-kernels/tests/suite/peers.rs compares ours with it.
"""
import json
import pathlib
import sys

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from safetensors.torch import save_file
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.optim.quant_utils import (
    create_dynamic_map,
    quantize_4bit_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)
from torchao.optim.subclass_4bit import get_qmap_unsigned

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, ELEMS = 20, 4096  # torchao and bitsandbytes keep fp32 moments below 4,096 elements

TABLES = {
    "dynamic8": create_dynamic_map(True, 7, 8),
    "positive_dynamic8": create_dynamic_map(False, 7, 8),
    "dynamic4": create_dynamic_map(True, 3, 4),
    "positive_linear4": list(get_qmap_unsigned()),
    "nf4": F.get_4bit_type("nf4", "cpu").tolist(),
}


def values(name, blocks, elems):
    """Of all magnitudes; some blocks have ties with a scale of 1, one has a greatest magnitude of each sign."""
    table = torch.tensor(TABLES[name], dtype=torch.float32)
    ties = ((table[:-1].double() + table[1:].double()) / 2).float()
    signed = "positive" not in name
    x = torch.randn(blocks, elems) * 10.0 ** torch.randint(-9, 3, (blocks, 1))
    x = x * torch.rand(blocks, elems) ** 3
    x[0] = 0.0
    x[1, :] = ties[torch.arange(elems) % len(ties)]
    x[1, 0] = 1.0
    if not signed:
        return x.abs().flatten()
    x[2, 7], x[2, 9] = x[2].abs().max() * 2, -x[2].abs().max() * 2
    return x.flatten()


def torchao(name, x):
    eight = "8" in name
    scaled, scale = scale_tensor(x, 256 if eight else 128)
    quantize = quantize_8bit_with_qmap if eight else quantize_4bit_with_qmap
    return quantize(scaled, torch.tensor(TABLES[name], dtype=torch.float32)), scale


def bitsandbytes8(name, x):
    codes, state = F.quantize_blockwise(x, code=torch.tensor(TABLES[name]), blocksize=256)
    return codes, state.absmax


def nf4(x):
    packed, state = F.quantize_4bit(x, blocksize=64, quant_type="nf4")
    return packed.flatten(), state.absmax


def gradient(step):
    """As the test computes it, in fp32."""
    hashed = (torch.arange(ELEMS) * 2654435761 + step * 2654473) % 2**32
    uniform = (hashed >> 8).float() / 2**24 - 0.5
    return uniform * uniform * uniform


def steps(make):
    """The parameter after 20 steps, from the gradient of step 100 on."""
    param = torch.nn.Parameter(gradient(100) * 8)
    optimizer = make([param])
    for step in range(STEPS):
        param.grad = gradient(step)
        optimizer.step()
    return param.detach().clone()


OPTIMIZERS = {
    "fp32": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01),
    "torchao8": lambda p: AdamW8bit(p, lr=1e-2, weight_decay=0.01),
    "torchao4": lambda p: AdamW4bit(p, lr=1e-2, weight_decay=0.01),
    "bnb8": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, weight_decay=0.01),
}


def write():
    bits = {
        name: [x & 0xFFFFFFFF for x in torch.tensor(table, dtype=torch.float32).view(torch.int32).tolist()]
        for name, table in TABLES.items()
    }
    assert F.create_dynamic_map(True).tolist() == torch.tensor(TABLES["dynamic8"]).tolist()
    assert F.create_dynamic_map(False).tolist() == torch.tensor(TABLES["positive_dynamic8"]).tolist()
    lines = ",\n".join(f' "{name}": {json.dumps(table)}' for name, table in bits.items())
    (ROOT / "zero-shard/tests/data/block_tables.json").write_text("{\n" + lines + "\n}\n")

    torch.manual_seed(3)
    data = {}
    for name in TABLES:
        blocks, elems = (24, 256) if "8" in name else (32, 64) if name == "nf4" else (24, 128)
        x = values(name, blocks, elems)
        data[f"{name}.values"] = x
        if name == "nf4":
            data["nf4.bnb.codes"], data["nf4.bnb.scales"] = nf4(x)
            continue
        data[f"{name}.torchao.codes"], data[f"{name}.torchao.scales"] = torchao(name, x)
        if "8" in name:
            data[f"{name}.bnb.codes"], data[f"{name}.bnb.scales"] = bitsandbytes8(name, x)
    for name, make in OPTIMIZERS.items():
        data[f"{name}.end"] = steps(make)
    save_file({k: v.contiguous() for k, v in data.items()}, ROOT / "zero-kernels/tests/data/peer_blocks.safetensors")


def report():
    torch.manual_seed(4)
    for name, table in TABLES.items():
        if name == "nf4":
            x = torch.randn(1 << 20)
            packed, scales = nf4(x)
            codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
            peers = {"bitsandbytes": (codes, scales, 64)}
        else:
            x = torch.randn(1 << 20) if "positive" not in name else torch.rand(1 << 20) ** 2
            peers = {"torchao": (*torchao(name, x), 256 if "8" in name else 128)}
            if "8" in name:
                peers["bitsandbytes"] = (*bitsandbytes8(name, x), 256)
        qmap = torch.tensor(table, dtype=torch.float32).double()
        for peer, (codes, scales, elems) in peers.items():
            scaled = x.view(-1, elems).double() / scales.view(-1, 1).double()
            error = (scaled.flatten() - qmap[codes.long()]).abs()
            best = torch.full_like(error, 9.0)
            for value in qmap:
                best = torch.minimum(best, (scaled.flatten() - value).abs())
            worse = (error > best + 1e-6).sum().item()
            print(f"{name}, {peer}: {worse} of {len(x)} codes are not the nearest, by at most {(error - best).max():.2e}")


if __name__ == "__main__":
    {"write": write, "report": report}[sys.argv[1]]()
