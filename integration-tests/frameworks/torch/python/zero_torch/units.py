"""The units of a module: what is gathered and reduced together."""

import ctypes

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

ROOT = "(root)"


def view(at, elems, dtype):
    """A tensor over memory of the engine."""
    if elems == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (elems * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=dtype)


def set_memory(param, memory):
    """Makes `param` a view of `memory`; it stays the same object."""
    if param.is_meta:
        new = nn.Parameter(memory, param.requires_grad)
        new.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, new)
    else:
        param.data = memory


def tensors(value):
    """The tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def replaced(value, new):
    """`value` with the tensors that `new` has by their identity."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, new) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(item, new) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, new) for key, item in value.items()}
    return value


def blocks(model):
    """The names and modules in the outermost module lists: the layers of nearly every model."""
    found = []

    def walk(module, prefix):
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList):
                found.extend((f"{full}.{index}", block) for index, block in enumerate(child))
            else:
                walk(child, f"{full}.")

    walk(model, "")
    return found


class Unit:
    """A block, or the root: all that is in no block, or in several."""

    def __init__(self, name, module):
        self.name, self.module = name, module
        # (full name, parameter, first element, shape)
        self.params = []
        self.flat = None
        # Whether its parameters are whole, at stage 3.
        self.is_whole = False
        # Whether it stays so.
        self.is_held = False
        # Trained parameters, and those whose gradient has arrived in this backward.
        self.trained = 0
        self.arrived = 0
        # Whether its inputs have gradients, and whether those are computed.
        self.is_tracked = False
        self.has_passed = False

    @property
    def is_root(self):
        return self.name == ROOT


def units_of(model, names):
    """The unit of each parameter, by its full name."""
    of_param = {}
    for name, block in blocks(model):
        unit = Unit(name, block)
        for param in block.parameters():
            # One of several blocks is whole for the whole pass, with the root.
            of_param[id(param)] = None if id(param) in of_param else unit
    root = Unit(ROOT, model)
    return {name: of_param.get(id(param)) or root for name, param in names.items()}
