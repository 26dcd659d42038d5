"""The engine on a GPU, without torch's CUDA: with-stand-ins python tests/stand_in.py

The driver's stand-in has its memory where the CPU can read it, so that a tensor can be a view of it. Losses, norms and weights of a run on it
beside one on the CPU. With Muon, whose products are in bf16 on a GPU and in fp32 on the CPU, they differ by that rounding.
"""

import ctypes
import json
import os

import torch
from zero_torch import _native
from zero_torch.units import view

# By its path: torch has loaded its own, which needs a GPU.
os.environ["ZERO_CUBLASLT"] = os.environ["LD_LIBRARY_PATH"].split(":")[0] + "/libcublasLt.so.13"
OPTIMIZER = {
    "hyper": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "bias_correction": True},
    "lr": 1.0, "schedule": {"type": "Constant"}, "max_grad_norm": 1.0, "loss_scaling": {"static": {"scale": 1.0}},
}
MUON = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "ns_steps": 5, "adjust": "original"}
UNITS = {"a": [("a.w", [7, 3]), ("a.b", [5])], "c": [("c.w", [64])]}
# The matrix is in the second group.
PARAMS = [(name, unit, shape, len(shape) - 1, False) for unit, params in UNITS.items() for name, shape in params]
# Of the square, so that the matrix has full rank: of small singular values Newton-Schulz multiplies the rounding by hundreds.
INITIAL = {name: torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32) ** 2 + len(name)) for name, _, shape, *_ in PARAMS}


def on_device(stage, gpu, muon):
    world = _native.World(60.0, None, gpu)
    # Of the stand-in. None is given back before the end, so that the order of streams does not matter.
    driver = ctypes.CDLL("libcuda.so.1") if gpu is not None else None
    kept, places = [], {}

    def allocate(_unit, size):
        if driver is None:
            tensor = torch.empty(size, dtype=torch.uint8)
            return tensor, tensor.data_ptr()
        at = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
        kept.append(at.value)
        return at, at.value

    def gather(unit, size):
        owner, places[unit] = allocate(unit, size)
        return owner, places[unit]

    def init(name, at, elems):
        view(at, elems, torch.float32).copy_(INITIAL[name])

    engine = _native.Engine(
        world, stage, "fp32", None, json.dumps({**OPTIMIZER, "muon": muon}), 2, PARAMS,
        [(0.01, 0.1, True, False), (0.01, 0.1, True, muon is not None)], init, gather, allocate, 0, 60.0,
    )
    layout = engine.units()
    results = []
    for step in range(4):
        engine.begin()
        for micro in range(2):
            for index, (unit, _, params) in reversed(list(enumerate(layout))):
                if stage == 3:
                    engine.unshard(unit)
                grads = []
                for name, start in params:
                    at, elems = (places[index] + 4 * start, INITIAL[name].numel()) if stage == 3 else engine.param(name)
                    assert driver is None or driver.cuCtxSynchronize() == 0
                    grads.append((name, view(at, elems, torch.float32) * (1 + micro) + 0.1 * step))
                if stage == 3:
                    engine.reshard(unit)
                for name, grad in grads:
                    owner, at = allocate(None, 4 * grad.numel())
                    view(at, grad.numel(), torch.float32).copy_(grad)
                    engine.grad(name, (at, grad.numel(), "fp32"), owner)
            if micro == 0:
                engine.next_micro_batch(0.0)
        results.append(engine.end(1.0 + step)[:3])
    weights = {}
    engine.for_each_param(lambda name, at, elems: weights.update({name: view(at, elems, torch.float32).clone()}))
    engine.close("the end")
    world.leave()
    return results, weights


for stage, muon in [(stage, muon) for stage in range(4) for muon in (None, MUON)]:
    within, atol = (1e-3, 4e-4) if muon else (1e-6, 1e-7)
    got, want = on_device(stage, 0, muon), on_device(stage, None, muon)
    for mine, other in zip(got[0], want[0]):
        assert mine[0] == other[0] and not mine[1] and abs(mine[2] - other[2]) < within * other[2], (mine, other)
    for name, weights in want[1].items():
        torch.testing.assert_close(got[1][name], weights, rtol=1e-6, atol=atol)
        assert not torch.equal(weights, INITIAL[name])
    print(f"ok stage {stage}{' with Muon' if muon else ''}", flush=True)
# Threads of the stand-in may outlive the interpreter.
os._exit(0)
