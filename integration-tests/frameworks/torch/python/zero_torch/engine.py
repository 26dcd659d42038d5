"""DeepSpeed's engine on zero_optim::framework.

Stages 0 to 2: parameters are views of the engine's memory; a hook hands over each gradient.

Stage 3: a unit has one flat tensor, whose storage is empty while the unit is not whole. Hooks of modules make it whole before forward and
before backward, and release it behind both. Views that autograd has saved see the values again, since they share the storage.
"""

import ctypes
import json
import os
import weakref

import torch
from torch import nn

from . import _native
from .config import Config, ConfigError
from .units import DTYPES, NAMES, ROOT, replaced, tensors, units_of, view

# Of a wait for another rank, in seconds.
LIMIT = 600.0

_world = None


def world():
    """The ranks of the job, which this process joins once."""
    global _world
    if _world is None:
        _world = _native.World(LIMIT)
    return _world


class AfterBackward(torch.autograd.Function):
    """Around the inputs of a block: its backward runs when the gradients of all inputs are computed."""

    @staticmethod
    def forward(ctx, engine, unit, *inputs):
        ctx.engine, ctx.unit = engine, unit
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.has_passed = True
        ctx.engine._release_if_done(ctx.unit)
        return None, None, *grads


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer for schedulers and callbacks: the learning rate of its first group is that of the next step."""

    def __init__(self, engine, groups):
        super().__init__(groups, {"lr": engine._config.lr, "weight_decay": engine._config.weight_decay})
        self._engine = weakref.ref(engine)

    def step(self, closure=None):
        raise RuntimeError("call engine.step(), which ends micro-batches, too")

    def zero_grad(self, set_to_none=True):
        """Nothing: the engine takes gradients as they are computed."""


class ZeroScheduler:
    """The schedule of the configuration, which the engine follows by itself."""

    def __init__(self, engine):
        self._engine = weakref.ref(engine)

    def step(self, *args, **kwargs):
        """Nothing: the engine's steps count."""

    def get_last_lr(self):
        return self._engine().get_lr()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Nothing: checkpoints of the engine have the position."""


def group_settings(model_parameters, names, config):
    """The groups, as (factor of the learning rate, weight decay, trained), and the group of each name."""
    of_id = {id(param): name for name, param in names.items()}
    given = list(names.values()) if model_parameters is None else list(model_parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups, group_of = [], {}
    for group in given:
        lr = group.get("lr", config.lr)
        if lr != config.lr and config.lr == 0:
            raise ConfigError("a group has its own lr, but that of the optimizer is 0: a group's lr is a factor of it")
        groups.append((lr / config.lr if config.lr else 1.0, group.get("weight_decay"), True))
        for param in group["params"]:
            name = of_id.get(id(param))
            if name is None:
                raise ConfigError("model_parameters has a tensor that is no parameter of the model")
            group_of[name] = len(groups) - 1
    groups.append((1.0, None, False))
    frozen = len(groups) - 1
    of_name = {name: group_of.get(name, frozen) if param.requires_grad else frozen for name, param in names.items()}
    return given, groups, of_name


class Engine(nn.Module):
    def __init__(self, model, config, model_parameters=None, optimizer=None):
        super().__init__()
        self._world = world()
        self.global_rank, self.world_size = self._world.rank, self._world.world_size
        self._config = config = Config(config, self.world_size)
        if optimizer is not None:
            config.take_optimizer(optimizer)
            model_parameters = optimizer.param_groups
        self._dtype = DTYPES[config.dtype]
        self._stage = config.stage

        names = dict(model.named_parameters())
        given, groups, group_of = group_settings(model_parameters, names, config)
        frozen = len(groups) - 1
        self._trained = [(name, param) for name, param in names.items() if group_of[name] != frozen]
        if not self._trained:
            raise ConfigError("no parameter is trained: requires_grad is False for all that model_parameters has")
        self._unit_of = units_of(model, names)
        self._units = {unit.name: unit for unit in self._unit_of.values()}
        params = [(name, self._unit_of[name].name, list(param.shape), group_of[name]) for name, param in names.items()]

        def init(name, at, elems):
            values = names[name].detach().to("cpu", torch.float32).contiguous()
            ctypes.memmove(at, values.data_ptr(), 4 * elems)

        # The engine calls back while it exists; it must not keep itself.
        this = weakref.ref(self)
        self._native = _native.Engine(
            self._world, config.stage, config.dtype, config.reduce_dtype, config.optimizer_json(), config.micro_batches, params, groups,
            init, lambda unit, size: this()._take(unit, size), lambda unit: this() and this()._give(unit), LIMIT + 300,
        )
        # Also at the end of the interpreter.
        self._finalizer = weakref.finalize(self, self._native.close)

        self._lay_out(names, frozen, group_of)
        for buffer in model.buffers():
            if buffer.is_floating_point() and self._dtype != torch.float32:
                buffer.data = buffer.data.to(self._dtype)
        self.module = model
        self._add_hooks()
        self.optimizer = ZeroOptimizer(self, [{**group, "params": list(group["params"])} for group in given])
        self.lr_scheduler = ZeroScheduler(self) if config.scheduler else None
        self.micro_steps, self.global_steps, self.skipped_steps = 0, 0, 0
        self._loss, self._outcome = None, None
        # The open step; whether a forward without gradients has opened it; the gradients that it has.
        self._is_open, self._is_evaluation, self._arrived = False, False, set()
        # The learning rate that the engine has.
        self._lr = config.lr

    # ---- memory

    def _lay_out(self, names, frozen, group_of):
        """Makes the parameters views of the engine's memory, or of their unit's flat tensor."""
        self._by_index = []
        for unit_name, elems, places in self._native.units():
            unit = self._units[unit_name]
            self._by_index.append(unit)
            unit.trained = sum(group_of[name] != frozen for name, _ in places)
            for name, start in places:
                param = names[name]
                unit.params.append((name, param, start, param.shape))
            if self._stage < 3:
                for name, param, _, shape in unit.params:
                    at, length = self._native.param(name)
                    param.data = view(at, length, self._dtype).view(shape)
                continue
            unit.flat = torch.empty(elems, dtype=self._dtype)
            unit.flat.untyped_storage().resize_(0)
            for _, param, _, _ in unit.params:
                param.data = torch.empty(0, dtype=self._dtype)

    def _take(self, index, size):
        storage = self._by_index[index].flat.untyped_storage()
        storage.resize_(size)
        return storage.data_ptr()

    def _give(self, index):
        self._by_index[index].flat.untyped_storage().resize_(0)

    def _gather(self, unit):
        if self._stage < 3 or unit.is_whole:
            return
        self._native.unshard(unit.name)
        unit.is_whole = True
        for _, param, start, shape in unit.params:
            param.data = unit.flat[start:start + shape.numel()].view(shape)

    def _release(self, unit):
        if not unit.is_whole:
            return
        unit.is_whole = False
        for _, param, _, _ in unit.params:
            param.data = torch.empty(0, dtype=self._dtype)
        self._native.reshard(unit.name)

    def _release_if_done(self, unit):
        # A frozen parameter may be read after the last gradient of the unit's own.
        is_read = unit.has_passed if unit.is_tracked else unit.trained == len(unit.params)
        if unit.arrived >= unit.trained and is_read and not unit.is_root:
            self._release(unit)

    # ---- hooks

    def _add_hooks(self):
        for name, param in self._trained:
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._take_grad(name, param))
        self.module.register_forward_pre_hook(lambda module, args: self._before_root(), prepend=True)
        self.module.register_forward_hook(lambda module, args, out: self._after_root(), always_call=True)
        if self._stage < 3:
            return
        for unit in self._units.values():
            if unit.is_root:
                continue
            unit.module.register_forward_pre_hook(
                lambda module, args, kwargs, unit=unit: self._before_block(unit, args, kwargs), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(lambda module, args, out, unit=unit: self._after_block(unit, out), always_call=True)

    def _before_root(self):
        if not self._is_open:
            self._native.begin()
            self._is_open = True
            self._is_evaluation = not torch.is_grad_enabled()
        elif torch.is_grad_enabled():
            self._is_evaluation = False
        if ROOT in self._units:
            self._gather(self._units[ROOT])

    def _after_root(self):
        if torch.is_grad_enabled():
            return
        for unit in self._units.values():
            self._release(unit)
        if self._is_evaluation:
            self._end_evaluation()

    def _end_evaluation(self):
        self._is_open, self._is_evaluation = False, False
        self._native.end_without_update()

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
        self._native.grad(name, (grad.data_ptr(), grad.numel(), NAMES[grad.dtype]), grad)
        self._arrived.add(name)
        if self._stage == 3:
            unit = self._unit_of[name]
            unit.arrived += 1
            self._release_if_done(unit)

    # ---- DeepSpeed's calls

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        if not self._is_open:
            raise RuntimeError("engine.backward before a forward with gradients of this step")
        if self._stage == 3 and ROOT in self._units:
            self._gather(self._units[ROOT])
        scale = self._native.loss_scale
        (loss * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
        for name, _ in self._trained:
            if name not in self._arrived:
                self._native.unused(name)
        for unit in self._units.values():
            unit.arrived, unit.is_tracked, unit.has_passed = 0, False, False
            self._release(unit)
        self._loss = (self._loss or 0.0) + loss.item()
        return loss

    def step(self, lr_kwargs=None):
        if self._loss is None:
            raise RuntimeError("engine.step before engine.backward")
        loss, self._loss = self._loss, None
        self._arrived.clear()
        if not self.is_gradient_accumulation_boundary():
            self._native.next_micro_batch(loss)
            self.micro_steps += 1
            return
        self._set_lr()
        self._is_open = False
        self._outcome = self._native.end(loss)
        self.micro_steps += 1
        self.global_steps += 1
        self.skipped_steps += self._outcome[1]

    def _set_lr(self):
        """Takes up what a scheduler has set."""
        lr = self.optimizer.param_groups[0]["lr"]
        if self.lr_scheduler is None and lr != self._lr:
            self._native.set_lr(lr)
            self._lr = lr

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self._config.micro_batches == 0

    def train_batch_size(self):
        return self._config.batch_size

    def train_micro_batch_size_per_gpu(self):
        return self._config.micro_batch_size

    def gradient_accumulation_steps(self):
        return self._config.micro_batches

    def zero_optimization_stage(self):
        return self._stage

    def get_global_grad_norm(self):
        return self._outcome and self._outcome[2]

    def get_lr(self):
        if self.lr_scheduler is not None:
            return [self._outcome[3] if self._outcome else self._config.lr]
        return [group["lr"] for group in self.optimizer.param_groups]

    def zero_grad(self, set_to_none=True):
        """Nothing: the engine takes gradients as they are computed."""

    @property
    def loss(self):
        """The mean loss of the last step, over ranks and micro-batches."""
        return self._outcome and self._outcome[0]

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        self._between_steps("save_checkpoint")
        state = {"client": client_state or {}, "tag": tag, "lr": self._lr, "micro_steps": self.micro_steps}
        self._native.save(str(save_dir), json.dumps(state))
        return True

    def load_checkpoint(self, load_dir, tag=None, **_options):
        self._between_steps("load_checkpoint")
        state, self.global_steps = self._native.resume(str(load_dir))
        state = json.loads(state) or {"client": {}, "lr": self._lr}
        self.micro_steps = self.global_steps * self._config.micro_batches
        if self.lr_scheduler is None and self._lr:
            ratio = state["lr"] / self._lr
            for group in self.optimizer.param_groups:
                group["lr"] *= ratio
            self._set_lr()
        return str(load_dir), state["client"]

    def _between_steps(self, call):
        if self._is_open:
            raise RuntimeError(f"engine.{call} within a step: call it behind engine.step at a boundary of gradient accumulation")

    def consolidated_state_dict(self, dtype=torch.float32):
        """The whole parameters, and the buffers, on every rank."""
        self._between_steps("consolidated_state_dict")
        shapes = {name: shape for unit in self._units.values() for name, _, _, shape in unit.params}
        state = {}

        def take(name, at, elems):
            state[name] = view(at, elems, torch.float32).view(shapes[name]).to(dtype, copy=True)

        self._native.for_each_param(take)
        state.update((name, buffer.clone()) for name, buffer in self.module.named_buffers())
        # Tied parameters have one name of several.
        first = {id(param): name for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            state.setdefault(name, state[first[id(param)]])
        return state

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin"):
        dtype = self._dtype if self._dtype != torch.float32 else torch.bfloat16
        state = self.consolidated_state_dict(dtype)
        if self.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        return True

    def destroy(self):
        """Ends the run on this rank."""
        self._native.close()


def initialize(
    args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, distributed_port=None, mpu=None,
    dist_init_required=None, collate_fn=None, config=None, mesh_param=None, config_params=None,
):
    """The engine, the optimizer, the loader of `training_data` and the scheduler, in DeepSpeed's order."""
    if model is None:
        raise ConfigError("initialize: model is missing")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("initialize: this engine shards over all ranks; leave mpu and mesh_param out")
    config = config or config_params or getattr(args, "deepspeed_config", None)
    engine = Engine(model, config, model_parameters, optimizer)
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(engine.optimizer)
    loader = None
    if training_data is not None:
        sampler = torch.utils.data.DistributedSampler(training_data, engine.world_size, engine.global_rank)
        loader = torch.utils.data.DataLoader(
            training_data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate_fn
        )
    return engine, engine.optimizer, loader, lr_scheduler or engine.lr_scheduler
