"""DeepSpeed's engine on zero_optim::framework."""

import json
import math
import os
from contextlib import contextmanager

import torch
from torch import nn

from .comm import init_distributed
from .config import Config, ConfigError
from .groups import Groups, ZeroOptimizer, ZeroScheduler
from .sharded import Sharded
from .world import LIMIT, log, world


class Engine(nn.Module):
    def __init__(self, model, config, model_parameters=None, optimizer=None, lr_scheduler=None):
        super().__init__()
        ranks = world()
        self.global_rank, self.world_size = ranks.rank, ranks.world_size
        self._config = config = Config(config, self.world_size)
        # As given, as with DeepSpeed; `module.config` is the model's.
        self.config = config.given
        if optimizer is not None:
            config.take_optimizer(optimizer)
            model_parameters = optimizer.param_groups
        if lr_scheduler is not None:
            config.scheduler = None
        names = dict(model.named_parameters())
        self._groups = groups = Groups(model_parameters, names, config, model)
        self._sharded = Sharded(ranks, model, names, groups, config, LIMIT + 300)
        self.module = model
        self.optimizer = ZeroOptimizer([{**group, "params": list(group["params"])} for group in groups.given], config, self)
        # As with DeepSpeed, the engine steps that of the program, too.
        is_made_by = callable(lr_scheduler) and not hasattr(lr_scheduler, "step")
        self.lr_scheduler = lr_scheduler(self.optimizer) if is_made_by else lr_scheduler
        if config.scheduler:
            self.lr_scheduler = ZeroScheduler(self, groups)
        self.micro_steps, self.global_steps, self.skipped_steps, self.training_dataloader = 0, 0, 0, None
        # The loss and the number of the micro-batch, and what the program has set of them.
        self._loss, self._micro_batch, self._is_boundary, self._is_in_no_sync = None, 0, None, False
        self._outcome = None
        elems = sum(math.prod(shape) for shape in self._sharded.shapes().values())
        log.info("stage %d, %d ranks, %d parameters, %s", config.stage, self.world_size, elems, config.dtype)
        # The rules of groups that the engine has.
        self._rules = [rules[:2] for rules in groups.settings[:-1]]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Adds the gradients of `loss`, divided by the micro-batches of a step unless `scale_wrt_gas` is False."""
        if not self._sharded.is_open:
            raise RuntimeError("engine.backward before a forward with gradients of this step")
        self._sharded.before_backward()
        # The engine below divides by the micro-batches.
        factor = 1 if scale_wrt_gas else self._config.micro_batches
        scale = self._sharded.native.loss_scale * factor
        (loss * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
        self._sharded.after_backward()
        loss_of_step = factor * loss.detach().double()
        self._loss = loss_of_step if self._loss is None else self._loss + loss_of_step
        return loss

    def step(self, lr_kwargs=None):
        if self._loss is None:
            raise RuntimeError("engine.step before engine.backward")
        if self._is_in_no_sync:
            raise RuntimeError("engine.step within engine.no_sync")
        self.micro_steps += 1
        if not self.is_gradient_accumulation_boundary():
            self._next_micro_batch()
            return
        # A step of fewer micro-batches is divided by their number in the configuration, too, as with DeepSpeed.
        while self._micro_batch + 1 < self._config.micro_batches:
            self._next_micro_batch()
            self._sharded.skip_micro_batch()
        loss, self._loss, self._micro_batch = self._loss.item(), None, 0
        self._set_rules()
        self._outcome = self._sharded.end(loss)
        self.global_steps += 1
        self.skipped_steps += self._outcome[1]
        if self.lr_scheduler is not None and not self._outcome[1]:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def step_of_backwards(self):
        """Ends a step whose backwards the program has called by itself; its loss is unknown."""
        if not self._sharded.is_open:
            raise RuntimeError("step before a backward")
        self._loss = torch.tensor(math.nan)
        self.step()

    def _next_micro_batch(self):
        # One more than the configuration has adds to the last.
        if self._micro_batch + 1 < self._config.micro_batches:
            # The losses of all micro-batches are read once, as that is a wait on a GPU.
            self._sharded.next_micro_batch(0.0)
            self._micro_batch += 1

    @contextmanager
    def no_sync(self):
        """Backwards in this context add up; `step` comes behind it. Stages 0 and 1 only, as with DeepSpeed."""
        if self._sharded.stage > 1:
            raise RuntimeError(f"engine.no_sync at stage {self._sharded.stage}: gradients are sharded; use gradient_accumulation_steps")
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = False

    def _set_rules(self):
        """Takes up what a scheduler or the program has set; the schedule of the configuration sets the rates by itself."""
        rules = [self._groups.rules(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        if isinstance(self.lr_scheduler, ZeroScheduler):
            rules = [(factor, decay) for (factor, _), (_, decay) in zip(self._rules, rules)]
        if rules != self._rules:
            self._sharded.native.set_groups(rules)
            self._rules = rules

    def is_gradient_accumulation_boundary(self):
        if self._is_boundary is not None:
            return self._is_boundary
        return self._micro_batch + 1 == self._config.micro_batches

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Whether the next `step` updates, whatever the number of micro-batches; all ranks set the same."""
        self._is_boundary = is_boundary

    def set_train_batch_size(self, train_batch_size):
        """The rows of the next steps: more or fewer micro-batches of the same size."""
        self._sharded.between_steps("set_train_batch_size")
        rows = self._config.micro_batch_size * self.world_size
        if train_batch_size < rows or train_batch_size % rows:
            raise ValueError(f"train_batch_size {train_batch_size}: expected a multiple of {rows}, the rows of a micro-batch on all ranks")
        self._sharded.native.set_micro_batches(train_batch_size // rows)
        self._config.batch_size, self._config.micro_batches = train_batch_size, train_batch_size // rows

    def train_batch_size(self):
        return self._config.batch_size

    def train_micro_batch_size_per_gpu(self):
        return self._config.micro_batch_size

    def gradient_accumulation_steps(self):
        return self._config.micro_batches

    def zero_optimization_stage(self):
        return self._sharded.stage

    def get_global_grad_norm(self):
        return self._outcome and self._outcome[2]

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def gradient_clipping(self):
        return self._config.clip

    def bfloat16_enabled(self):
        return self._config.dtype == "bf16"

    def fp16_enabled(self):
        return self._config.dtype == "fp16"

    @property
    def loss_scale(self):
        return self._sharded.native.loss_scale

    @property
    def device(self):
        return self._sharded.device

    @property
    def local_rank(self):
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def global_samples(self):
        return self.global_steps * self._config.batch_size

    @property
    def dp_world_size(self):
        return self.world_size

    def was_step_applied(self):
        return self._outcome is not None and not self._outcome[1]

    def zero_grad(self, set_to_none=True):
        """Nothing: the engine takes gradients as they are computed."""

    @property
    def loss(self):
        """The mean loss of the last step, over ranks and micro-batches."""
        return self._outcome and self._outcome[0]

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        self._sharded.between_steps("save_checkpoint")
        rates = [group["lr"] for group in self.optimizer.param_groups]
        scheduler = self.lr_scheduler and self.lr_scheduler.state_dict()
        state = {"client": client_state or {}, "tag": tag, "rates": rates, "scheduler": scheduler, "micro_steps": self.micro_steps}
        # With that of transformers, `zero` exports the checkpoint and trains on from it.
        config = getattr(self.module, "config", None)
        config = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else "null"
        self._sharded.native.save(str(save_dir), json.dumps(state), config)
        return True

    def load_checkpoint(self, load_dir, tag=None, **_options):
        """Loads the newest checkpoint in `load_dir`; without the folder that is (None, None)."""
        self._sharded.between_steps("load_checkpoint")
        if not os.path.isdir(load_dir):
            log.warning("load_checkpoint: there is no folder %s", load_dir)
            return None, None
        state, self.global_steps = self._sharded.native.resume(str(load_dir))
        state = json.loads(state) or {"client": {}, "rates": []}
        self.micro_steps = self.global_steps * self._config.micro_batches
        for group, lr in zip(self.optimizer.param_groups, state["rates"]):
            group["lr"] = lr
        if self.lr_scheduler is not None and state.get("scheduler") is not None:
            self.lr_scheduler.load_state_dict(state["scheduler"])
        return str(load_dir), state["client"]

    def consolidated_state_dict(self, dtype=torch.float32):
        """The whole parameters, and the buffers, on every rank."""
        self._sharded.between_steps("consolidated_state_dict")
        return self._sharded.state_dict(dtype)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """As accelerate saves it."""
        return self.consolidated_state_dict(self._dtype_16bit())

    def zero_gather_16bit_weights_on_model_save(self):
        return True

    def _dtype_16bit(self):
        return self._sharded.dtype if self._sharded.dtype != torch.float32 else torch.bfloat16

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin"):
        state = self.consolidated_state_dict(self._dtype_16bit())
        if self.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        return True

    save_fp16_model = save_16bit_model

    def destroy(self):
        """Ends the run on this rank."""
        self._sharded.close()


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
    if dist_init_required is not False:
        init_distributed()
    engine = Engine(model, config, model_parameters, optimizer, lr_scheduler)
    if training_data is not None:
        sampler = torch.utils.data.DistributedSampler(training_data, engine.world_size, engine.global_rank)
        engine.training_dataloader = torch.utils.data.DataLoader(
            training_data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate_fn
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
