"""Models that are built without memory: `with zero_torch.init(): model = Model()`.

Tensors that are made within it are on the meta device, and what is done to them is recorded, with the states of the random numbers.
The values of a parameter are those of the plain program, bit by bit; they are computed when its unit is handed to the engine, on rank 0.
"""

import glob
import os
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from .world import ConfigError
from .units import tensors

aten = torch.ops.aten
IS_META = torch.Tensor.is_meta.__get__
FACTORIES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default, aten.rand.default,
    aten.randn.default,
}

# Those with models that no engine has taken.
_records = []


@dataclass
class Place:
    """A tensor of the record, as a part of its storage."""

    storage: int
    dtype: torch.dtype
    size: tuple
    stride: tuple
    offset: int


@dataclass
class Call:
    """A call that made or wrote the storages `out`."""

    func: object
    args: tuple
    kwargs: dict
    # The generator of its random numbers, and its state before.
    random: tuple
    out: list

    def needs(self):
        return {value.storage for value in tree_flatten((self.args, self.kwargs))[0] if isinstance(value, Place)}

    def repeat(self, memory):
        args, kwargs = tree_map_only(Place, lambda place: tensor_at(place, memory), (self.args, self.kwargs))
        if self.random:
            generator, state = self.random
            now = generator.get_state()
            generator.set_state(state)
        result = self.func(*args, **kwargs)
        if self.random:
            generator.set_state(now)
        # What it has written is there; what it has made is new.
        new = [storage for storage in self.out if storage not in memory]
        memory.update(zip(new, [tensor.untyped_storage() for tensor in tensors(result)][-len(new):] if new else []))


def tensor_at(place, memory):
    return torch.empty(0, dtype=place.dtype).set_(memory[place.storage], place.offset, place.size, place.stride)


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _is_written(func):
    return [arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments]


class LooksReal(TorchFunctionMode):
    """torch's initialisers do nothing for what `is_meta`."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == IS_META and self.record.has(args[0]):
            return False
        return func(*args, **(kwargs or {}))


class Record(TorchDispatchMode):
    def __init__(self, weights=None):
        super().__init__()
        # A storage's address is its name, which a weak reference keeps from being used again.
        self.storages, self.calls = {}, []
        self.weights = weights
        self.looks_real = LooksReal(self)

    def __enter__(self):
        _records.append(self)
        self.looks_real.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.looks_real.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES:
            if not self._is_recorded_factory(kwargs):
                return func(*args, **kwargs)
        elif not any(map(self.has, tensors((args, kwargs)))):
            return func(*args, **kwargs)

        written = [value for value, is_written in zip(args, _is_written(func)) if is_written and isinstance(value, torch.Tensor)]
        returns_tensors = any("Tensor" in str(returned.type) for returned in func._schema.returns)
        if not returns_tensors or not all(map(self.has, written)):
            # A number for Python, or a tensor with memory.
            return func(*self._real(args), **self._real(kwargs))
        return self._record(func, args, kwargs, written)

    def _is_recorded_factory(self, kwargs):
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        device = kwargs.get("device")
        return dtype.is_floating_point and (device is None or torch.device(device).type == "cpu")

    def _record(self, func, args, kwargs, written):
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            state = generator, generator.get_state()
            # The random numbers go on as without this.
            scratch = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), (args, kwargs))
            func(*scratch[0], **scratch[1])
        places = tree_map_only(torch.Tensor, self._place, (args, kwargs))
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor if self.has(tensor) else tensor.to("meta"), (args, kwargs))
        if any(arg.name == "device" for arg in func._schema.arguments):
            kwargs = {**kwargs, "device": "meta"}
        result = func(*args, **kwargs)

        made = [tensor for tensor in tensors(result) if not self.has(tensor)]
        self.storages.update((_key(tensor), StorageWeakRef(tensor.untyped_storage())) for tensor in made)
        out = [_key(tensor) for tensor in written + made]
        # A view of a storage is no call of its own.
        if out:
            self.calls.append(Call(func, *places, state, out))
        return result

    def has(self, tensor):
        return tensor.device.type == "meta" and _key(tensor) in self.storages

    def is_alive(self):
        return not all(storage.expired() for storage in self.storages.values())

    def _place(self, tensor):
        if self.has(tensor):
            return Place(_key(tensor), tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        if tensor.device.type == "meta":
            raise ConfigError("zero_torch.init(): a value on the meta device is unknown here; write parts of a parameter by fill_ or copy_")
        return tensor.detach().clone()

    def _real(self, values):
        return tree_map_only(torch.Tensor, lambda tensor: self.value(tensor) if self.has(tensor) else tensor, values)

    @torch.no_grad()
    def value(self, tensor):
        """The tensor with memory, by the calls that its storage depends on."""
        needed, calls, memory = {_key(tensor)}, [], {}
        for call in reversed(self.calls):
            if not needed.isdisjoint(call.out):
                calls.append(call)
                needed |= call.needs()
        for call in reversed(calls):
            call.repeat(memory)
        return tensor_at(self._place(tensor), memory)


class Weights:
    """The tensors of the safetensors files in a folder, by their names."""

    def __init__(self, folder):
        from safetensors import safe_open

        self.folder = folder
        files = [safe_open(path, "pt") for path in sorted(glob.glob(os.path.join(folder, "*.safetensors")))]
        self.of_name = {name: file for file in files for name in file.keys()}

    def value(self, names, param):
        name = next((name for name in names if name in self.of_name), None)
        if name is None:
            raise ConfigError(f"{self.folder}: no tensor {' or '.join(names)} in its safetensors files: names must be those of the parameters")
        value = self.of_name[name].get_tensor(name)
        if value.shape != param.shape:
            raise ConfigError(f"{self.folder}: {name} has the shape {tuple(value.shape)}, the model's has {tuple(param.shape)}")
        return value


def init(weights=None):
    """Parameters of models that are built in this context have no memory until `initialize`, which shards them as it computes them.

    With `weights`, a folder of safetensors files, their values are read there by name.
    """
    return Record(weights and Weights(weights))


def _record_of(tensor):
    for record in _records:
        if record.has(tensor):
            return record
    raise ConfigError("a parameter on the meta device was not made within zero_torch.init(): build and change the model there")


def value_of(param, model):
    """The initial values of a parameter."""
    if not param.is_meta:
        return param.detach()
    record = _record_of(param)
    if record.weights is None:
        return record.value(param.detach())
    names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is param]
    return record.weights.value(names, param)


def fill_others(model):
    """Computes what is no parameter."""
    for module in model.modules():
        for own in (vars(module), module._buffers):
            own.update((name, _record_of(value).value(value)) for name, value in own.items() if is_recorded(value))


def is_recorded(value):
    return isinstance(value, torch.Tensor) and value.is_meta


def forget():
    """Removes the records that no tensor is left of."""
    _records[:] = [record for record in _records if record.is_alive()]
