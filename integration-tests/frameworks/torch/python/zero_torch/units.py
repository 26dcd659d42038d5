"""The units of a module: what is gathered and reduced together."""

import ctypes
import dataclasses

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

ROOT = "(root)"


class OnGpu:
    """Memory of a GPU, as torch.as_tensor takes it."""

    def __init__(self, at, size):
        self.__cuda_array_interface__ = {"data": (at, False), "shape": (size,), "typestr": "|u1", "version": 3, "stream": None}


def view(at, elems, dtype, device=torch.device("cpu")):
    """A tensor over memory of the engine."""
    size = elems * dtype.itemsize
    if elems == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(OnGpu(at, size), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=dtype)


def set_memory(param, memory):
    """Makes `param` a view of `memory`; it stays the same object."""
    if param.is_meta:
        new = nn.Parameter(memory, param.requires_grad)
        new.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, new)
    else:
        param.data = memory


def tensors(value, in_objects=True):
    """The tensors in arguments or results, also, unless not wished for, in the attributes of an object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item, in_objects)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item, in_objects)
    elif in_objects and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        # Objects in objects are followed in dataclasses only: others may have the whole program.
        yield from tensors(list(vars(value).values()), dataclasses.is_dataclass(value))


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
    """The modules in the outermost module lists by their names: the layers of nearly every model. A list or a dict has no forward, so that its
    elements are blocks."""
    found, seen = {}, set()

    def walk(module, prefix, is_in_list):
        for name, child in module.named_children():
            is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict) if is_in_list else nn.ModuleList)
            if is_container or not is_in_list:
                walk(child, f"{prefix}{name}.", is_in_list or is_container)
            elif id(child) not in seen:
                found[f"{prefix}{name}"] = child
                seen.add(id(child))

    walk(model, "", False)
    return found


class Unit:
    """A block, or the root: all that is in no block, or in several."""

    def __init__(self, name, module):
        self.name, self.module = name, module
        # Its parameters by their full names.
        self.params = {}
        self.flat = None
        # Whether its parameters are whole, at stage 3, whether they stay so, and the module whose forward made them so.
        self.is_whole, self.is_held, self.caller = False, False, None
        # Names of the trained parameters, and of those whose gradient has arrived since the last use began its backward.
        self.trained, self.arrived = set(), set()
        # Uses whose backward has begun, but has not passed their inputs.
        self.active = set()

    @property
    def is_root(self):
        return self.name == ROOT


def units_of(model, names):
    """The unit of each parameter, by its full name."""
    of_param, in_blocks = {}, set()
    for name, block in blocks(model).items():
        unit = Unit(name, block)
        in_blocks.update(map(id, block.modules()))
        for param in block.parameters():
            # One of several blocks is whole for the whole pass, with the root.
            of_param[id(param)] = None if id(param) in of_param else unit
    for module in model.modules():
        if id(module) not in in_blocks:
            of_param.update((id(param), None) for param in module.parameters(recurse=False))
    root = Unit(ROOT, model)
    return {name: of_param.get(id(param)) or root for name, param in names.items()}
