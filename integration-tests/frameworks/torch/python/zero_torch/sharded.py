"""A module under ZeRO: its parameters are the engine's, its gradients go there as they are computed.

Stages 0 to 2: parameters are views of the engine's memory.

Stage 3: a unit has one flat tensor, whose storage is empty while the unit is not whole. Hooks of modules make it whole before forward and
before backward, and release it behind both. Views that autograd has saved see the values again, since they share the storage.
"""

import ctypes
import functools
import weakref
from contextlib import contextmanager

import torch

from . import _native
from .init import fill_others, forget, value_of
from .units import DTYPES, NAMES, ROOT, replaced, set_memory, tensors, units_of, view


_all = weakref.WeakSet()


def sharded_of(param):
    """The sharded module that has `param`, if any."""
    return next((sharded for sharded in _all if sharded.has(param)), None)


class AfterBackward(torch.autograd.Function):
    """Around the inputs of a block: its backward runs when the gradients of all inputs are computed."""

    @staticmethod
    def forward(ctx, sharded, unit, *inputs):
        ctx.sharded, ctx.unit = sharded, unit
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.has_passed = True
        ctx.sharded._release_if_done(ctx.unit)
        return None, None, *grads


class Sharded:
    """The parameters of `module`; `names` has each once, by its full name."""

    def __init__(self, world, module, names, groups, config, limit):
        self.module, self.stage, self.dtype = module, config.stage, DTYPES[config.dtype]
        self.trained = [(name, param) for name, param in names.items() if groups.is_trained(name)]
        self._unit_of = units_of(module, names)
        self._unit_of_id = {id(param): self._unit_of[name] for name, param in names.items()}
        self._units = {unit.name: unit for unit in self._unit_of.values()}
        params = [(name, self._unit_of[name].name, list(param.shape), groups.of_name[name]) for name, param in names.items()]

        def init(name, at, elems):
            values = value_of(names[name], module).to("cpu", torch.float32).contiguous()
            ctypes.memmove(at, values.data_ptr(), 4 * elems)

        # The engine calls back while it exists; it must not keep this.
        this = weakref.ref(self)
        self.native = _native.Engine(
            world, config.stage, config.dtype, config.reduce_dtype, config.optimizer_json(), config.micro_batches, params, groups.settings,
            init, lambda unit, size: this()._take(unit, size), lambda unit: this() and this()._give(unit), limit,
        )
        # Also at the end of the interpreter.
        self._finalizer = weakref.finalize(self, self.native.close)

        fill_others(module)
        self._lay_out(names)
        forget()
        for buffer in module.buffers():
            if buffer.is_floating_point() and self.dtype != torch.float32:
                buffer.data = buffer.data.to(self.dtype)
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
            unit.trained = sum(name in trained for name, _ in places)
            for name, start in places:
                param = names[name]
                unit.params.append((name, param, start, param.shape))
            if self.stage < 3:
                for name, param, _, shape in unit.params:
                    at, length = self.native.param(name)
                    set_memory(param, view(at, length, self.dtype).view(shape))
                continue
            unit.flat = torch.empty(elems, dtype=self.dtype)
            unit.flat.untyped_storage().resize_(0)
            for _, param, _, _ in unit.params:
                set_memory(param, torch.empty(0, dtype=self.dtype))

    def _take(self, index, size):
        storage = self._by_index[index].flat.untyped_storage()
        storage.resize_(size)
        return storage.data_ptr()

    def _give(self, index):
        self._by_index[index].flat.untyped_storage().resize_(0)

    def _gather(self, unit):
        if self.stage < 3 or unit.is_whole:
            return
        self.native.unshard(unit.name)
        unit.is_whole = True
        for _, param, start, shape in unit.params:
            param.data = unit.flat[start:start + shape.numel()].view(shape)

    def _release(self, unit):
        if not unit.is_whole or unit.is_held:
            return
        unit.is_whole = False
        for _, param, _, _ in unit.params:
            param.data = torch.empty(0, dtype=self.dtype)
        self.native.reshard(unit.name)

    def _release_if_done(self, unit):
        # A frozen parameter may be read after the last gradient of the unit's own.
        is_read = unit.has_passed if unit.is_tracked else unit.trained == len(unit.params)
        if unit.arrived >= unit.trained and is_read and not unit.is_root:
            self._release(unit)

    def has(self, param):
        return id(param) in self._unit_of_id

    # ---- hooks

    def _add_hooks(self):
        for name, param in self.trained:
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._take_grad(name, param))
        self.module.register_forward_pre_hook(lambda module, args: self._before_root(), prepend=True)
        self.module.register_forward_hook(lambda module, args, out: self._after_root(out), always_call=True)
        if self.stage < 3:
            return
        for unit in self._units.values():
            if unit.is_root:
                continue
            unit.module.register_forward_pre_hook(
                lambda module, args, kwargs, unit=unit: self._before_block(unit, args, kwargs), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(lambda module, args, out, unit=unit: self._after_block(unit, out), always_call=True)

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
        for tensor in tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._at_backward())

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

    def _before_block(self, unit, args, kwargs):
        self._gather(unit)
        if not torch.is_grad_enabled():
            return None
        found = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        unit.is_tracked, unit.has_passed = bool(found), False
        if not found:
            return None
        new = dict(zip(map(id, found), AfterBackward.apply(self, unit, *found)))
        return replaced(args, new), replaced(kwargs, new)

    def _after_block(self, unit, out):
        if torch._C._current_graph_task_id() != -1:
            # The forward of a checkpointed block within backward, which follows.
            return
        if torch.is_grad_enabled():
            for tensor in tensors(out):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, unit=unit: self._gather(unit))
        self._release(unit)

    def _take_grad(self, name, param):
        grad, param.grad = param.grad, None
        grad = grad.contiguous()
        self.native.grad(name, (grad.data_ptr(), grad.numel(), NAMES[grad.dtype]), grad)
        self._arrived.add(name)
        if self.stage == 3:
            unit = self._unit_of[name]
            unit.arrived += 1
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
            unit.arrived, unit.is_tracked, unit.has_passed = 0, False, False
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

    def state_dict(self, dtype):
        """The whole parameters, and the buffers, on every rank."""
        shapes = {name: shape for unit in self._units.values() for name, _, _, shape in unit.params}
        state = {}

        def take(name, at, elems):
            state[name] = view(at, elems, torch.float32).view(shapes[name]).to(dtype, copy=True)

        self.native.for_each_param(take)
        state.update((name, buffer.clone()) for name, buffer in self.module.named_buffers())
        # Tied parameters have one name of several.
        first = {id(param): name for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            state.setdefault(name, state[first[id(param)]])
        return state
