"""A module under ZeRO: its parameters are the engine's, its gradients go there as they are computed.

Stages 0 to 2: parameters are views of the engine's memory.

Stage 3: a unit has one flat tensor, whose storage is empty while the unit is not whole. Parameters are views of it all the time, and
torch refuses reads while it is empty. Hooks of modules make a unit whole before forward and before backward, and release it behind both. Views that
autograd has saved see the values again, since they share the storage.

A use is one call of a block in forward. Its backward begins when one of its outputs has a gradient, and has passed when its inputs have theirs. A
unit is released in backward when all trained parameters have their gradients and no use is between the two: frozen parameters are read until then.
"""

import ctypes
import functools
import weakref
from contextlib import contextmanager

import torch

from . import _native
from .init import fill_others, forget, value_of
from .muon import inputs_first
from .units import DTYPES, NAMES, ROOT, replaced, set_memory, tensors, units_of, view
from .world import device_of_rank, end, stream

_all = weakref.WeakSet()


def sharded_of(param):
    """The sharded module that has `param`, if any."""
    return next((sharded for sharded in _all if sharded.has(param)), None)


CLOSED = "the engine of this parameter is closed; read values before, by engine.consolidated_state_dict or a checkpoint"


def refuse(storage, message):
    """Accesses to the storage, by any view of it, are errors with `message`: a released one would be a null pointer."""
    # torch before 2.15 has no such check.
    if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def admit(storage):
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)


def empty(unit):
    storage = unit.flat.untyped_storage()
    admit(storage)
    storage.resize_(0)
    refuse(
        storage,
        f"a parameter of {unit.name} is released: at stage 3 it has no elements outside of the forward and backward of the block and its "
        "modules; call the module, or make the weight an attribute of the module that reads it, or read engine.consolidated_state_dict()",
    )


class Filled:
    """The memory of a unit that is whole, until the engine drops this."""

    def __init__(self, unit):
        self._unit = unit

    def __del__(self):
        empty(self._unit)


def close(native, handles, params):
    """Ends the run, and takes hooks and memory back."""
    for handle in handles:
        handle.remove()
    for param in params:
        refuse(param.untyped_storage(), CLOSED)
        param.data = torch.empty(0, dtype=param.dtype)
    end(native)


class Sharded:
    """The parameters of `module`; `names` has each once, by its full name."""

    def __init__(self, world, module, names, groups, config, limit):
        self.module, self.stage, self.dtype = module, config.stage, DTYPES[config.dtype]
        self.trained = [(name, param) for name, param in names.items() if groups.is_trained(name)]
        self._unit_of = units_of(module, names)
        self._unit_of_id = {id(param): self._unit_of[name] for name, param in names.items()}
        self._units = {unit.name: unit for unit in self._unit_of.values()}
        transposed = inputs_first(module)
        params = [
            (name, self._unit_of[name].name, list(param.shape), groups.of_name[name], id(param) in transposed) for name, param in names.items()
        ]

        def init(name, at, elems):
            values = value_of(names[name], module).to("cpu", torch.float32).contiguous()
            ctypes.memmove(at, values.data_ptr(), 4 * elems)

        self.device = device = device_of_rank()
        handle = stream().cuda_stream if device.type == "cuda" else 0

        def allocate(_unit, size):
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
            return tensor, tensor.data_ptr()

        # The engine calls back while it exists; it must not keep this.
        this = weakref.ref(self)
        self.native = _native.Engine(
            world, config.stage, config.dtype, config.reduce_dtype, config.optimizer_json(), config.micro_batches, params, groups.settings,
            init, lambda unit, size: this()._take(unit, size), allocate, handle, limit,
        )
        # What `close` undoes.
        self._handles = []
        # Also at the end of the interpreter.
        self.close = weakref.finalize(self, close, self.native, self._handles, list(names.values()))

        fill_others(module)
        self._lay_out(names)
        forget()
        for buffer in module.buffers():
            dtype = self.dtype if buffer.is_floating_point() and self.dtype != torch.float32 else buffer.dtype
            buffer.data = buffer.data.to(device, dtype)
        self._add_hooks()
        if hasattr(module, "generate"):
            self._hold_while_generating()
        _all.add(self)
        # Whether a step is open; whether a forward without gradients has opened it; the gradients that it has.
        self.is_open, self._is_evaluation, self._arrived = False, False, set()
        self._is_in_backward = False

    # ---- memory

    def _lay_out(self, names):
        """Makes the parameters views of the engine's memory, or of their unit's flat tensor."""
        self._by_index = []
        trained = {name for name, _ in self.trained}
        for unit_name, elems, places in self.native.units():
            unit = self._units[unit_name]
            self._by_index.append(unit)
            unit.params = {name: names[name] for name, _ in places}
            unit.trained = trained & set(unit.params)
            if self.stage < 3:
                for name, param in unit.params.items():
                    at, length = self.native.param(name)
                    set_memory(param, view(at, length, self.dtype, self.device).view(param.shape))
                continue
            unit.flat = torch.empty(elems, dtype=self.dtype, device=self.device)
            for name, start in places:
                param = names[name]
                set_memory(param, unit.flat[start:start + param.numel()].view(param.shape))
            empty(unit)

    def _take(self, index, size):
        unit = self._by_index[index]
        storage = unit.flat.untyped_storage()
        admit(storage)
        storage.resize_(size)
        return Filled(unit), storage.data_ptr()

    def _gather(self, unit):
        if self.stage < 3 or unit.is_whole:
            return
        if not self.is_open:
            raise RuntimeError(
                f"{unit.name} is called outside of the model's forward: at stage 3 call engine(...), or read it within "
                "zero_torch.zero.GatheredParameters"
            )
        self.native.unshard(unit.name)
        unit.is_whole = True

    def _release(self, unit):
        if not unit.is_whole or unit.is_held:
            return
        unit.is_whole = False
        self.native.reshard(unit.name)

    def _release_if_done(self, unit):
        if unit.arrived == unit.trained and not unit.active and not unit.is_root:
            self._release(unit)

    def has(self, param):
        return id(param) in self._unit_of_id

    # ---- hooks

    def _add_hooks(self):
        # Hooks do not keep this.
        self, handles = weakref.proxy(self), self._handles
        for name, param in self.trained:
            handles.append(param.register_post_accumulate_grad_hook(lambda param, name=name: self._take_grad(name, param)))
        handles.append(self.module.register_forward_pre_hook(lambda module, args: self._before_root(), prepend=True))
        handles.append(self.module.register_forward_hook(lambda module, args, out: self._after_root(out), always_call=True))
        if self.stage < 3:
            return
        for unit in self._units.values():
            if unit.is_root:
                continue
            own = {id(param) for param in unit.params.values()}
            for module in unit.module.modules():
                # Programs may call a part of a block without the block.
                if module is unit.module or any(id(param) in own for param in module.parameters()):
                    handles.append(module.register_forward_pre_hook(
                        lambda module, args, kwargs, unit=unit: self._before_module(unit, module, args, kwargs), prepend=True, with_kwargs=True
                    ))
                    handles.append(module.register_forward_hook(
                        lambda module, args, out, unit=unit: self._after_module(unit, module, out), always_call=True
                    ))

    def _open(self, is_evaluation):
        if not self.is_open:
            self.native.begin()
            self.is_open = True
            self._is_evaluation = is_evaluation
        self._is_evaluation &= is_evaluation

    def _close(self):
        """Releases all units, and ends a step that had no forward with gradients."""
        for unit in self._units.values():
            self._release(unit)
        if self._is_evaluation and not self._holds():
            self.is_open, self._is_evaluation = False, False
            self.native.end_without_update()

    def _holds(self):
        return any(unit.is_held for unit in self._units.values())

    @contextmanager
    def whole(self, params=None):
        """The units of `params`, or all, stay whole in this context, which all ranks enter and leave together.

        Forwards without gradients are free within it when it holds all: ranks may run different numbers of them.
        """
        units = list(self._units.values()) if params is None else {self._unit_of_id[id(param)] for param in params}
        units = [unit for unit in self._units.values() if unit in units and not unit.is_held]
        self._open(is_evaluation=True)
        for unit in units:
            self._gather(unit)
            unit.is_held = True
        try:
            yield
        finally:
            for unit in units:
                unit.is_held = False
            self._close()

    def _before_root(self):
        self._open(is_evaluation=not torch.is_grad_enabled())
        if ROOT in self._units:
            self._gather(self._units[ROOT])

    def _after_root(self, out):
        if not torch.is_grad_enabled():
            self._close()
            return
        this = weakref.proxy(self)
        for tensor in tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: this._at_backward())

    def _at_backward(self):
        """Begins a backward that the program calls by itself, and ends it behind its last gradient."""
        if not self._is_in_backward:
            self.before_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)

    def _hold_while_generating(self):
        generate = self.module.generate

        @functools.wraps(generate)
        def held(*args, **kwargs):
            with self.whole():
                return generate(*args, **kwargs)

        self.module.generate = held

    def _before_module(self, unit, module, args, kwargs):
        if unit.caller is not None or (unit.is_whole and module is not unit.module):
            return None
        unit.caller = module
        self._gather(unit)
        if not torch.is_grad_enabled():
            return None
        unit.use = use = object()
        found = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        around = [tensor for tensor in tensors((args, kwargs), in_objects=False) if tensor.requires_grad]
        if not found and len(unit.trained) == len(unit.params):
            # The gradients of its parameters are all that its backward computes.
            unit.use = None
        if module is not unit.module or len(around) < len(found) or not found:
            # When this use has passed is not known: its unit is whole until the end of backward.
            return None

        # Graphs, which are freed late, do not keep this.
        this = weakref.proxy(self)

        def passed():
            unit.active.discard(use)
            this._release_if_done(unit)

        # Views have gradients of this use alone. The block may change them in place as it might change what it was called with.
        new = {id(tensor): tensor.view_as(tensor) for tensor in around}
        torch.autograd.graph.register_multi_grad_hook(tuple(new.values()), lambda grads: passed())
        return replaced(args, new), replaced(kwargs, new)

    def _after_module(self, unit, module, out):
        if unit.caller is not module:
            return
        unit.caller = None
        if torch.is_grad_enabled():
            # A module may also leave an output in an attribute, such as an auxiliary loss.
            kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
            this = weakref.proxy(self)
            for tensor in (*tensors(out), *kept):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, use=unit.use: this._before_use(unit, use))
        # In backward this is the forward of a checkpointed block, whose own backward follows.
        if torch._C._current_graph_task_id() == -1:
            self._release(unit)

    def _before_use(self, unit, use):
        """Backward comes to an output of a use."""
        self._gather(unit)
        unit.arrived.clear()
        if use is not None:
            unit.active.add(use)

    def _take_grad(self, name, param):
        grad, param.grad = param.grad, None
        grad = grad.contiguous()
        self.native.grad(name, (grad.data_ptr(), grad.numel(), NAMES[grad.dtype]), grad)
        self._arrived.add(name)
        if self.stage == 3:
            unit = self._unit_of[name]
            unit.arrived.add(name)
            self._release_if_done(unit)

    # ---- steps

    def before_backward(self):
        self._is_in_backward = True
        if self.stage == 3 and ROOT in self._units:
            self._gather(self._units[ROOT])

    def after_backward(self):
        self._is_in_backward = False
        self.skip_micro_batch()
        for unit in self._units.values():
            unit.caller = None
            unit.arrived.clear()
            unit.active.clear()
            self._release(unit)

    def skip_micro_batch(self):
        """Parameters without a gradient in this micro-batch have none so far."""
        for name, _ in self.trained:
            if name not in self._arrived:
                self.native.unused(name)

    def next_micro_batch(self, loss):
        self._arrived.clear()
        self.native.next_micro_batch(loss)

    def end(self, loss):
        """Updates; returns the mean loss, whether the update was skipped, the gradients' norm, the learning rate."""
        if self._holds():
            raise RuntimeError("engine.step within GatheredParameters: leave that context before")
        self._arrived.clear()
        self.is_open = False
        return self.native.end(loss)

    def between_steps(self, call):
        if self.is_open:
            raise RuntimeError(f"engine.{call} within a step: call it behind engine.step at a boundary of gradient accumulation")

    def shapes(self):
        return {name: param.shape for unit in self._units.values() for name, param in unit.params.items()}

    def state_dict(self, dtype):
        """The whole parameters, and the buffers, on every rank."""
        shapes, state = self.shapes(), {}

        def take(name, at, elems):
            state[name] = view(at, elems, torch.float32).view(shapes[name]).to(dtype, copy=True)

        self.native.for_each_param(take)
        state.update((name, buffer.clone()) for name, buffer in self.module.named_buffers())
        # Tied parameters have one name of several.
        first = {id(param): name for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            state.setdefault(name, state[first[id(param)]])
        return state
