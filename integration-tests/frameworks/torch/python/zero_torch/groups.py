"""Parameter groups, and the optimizer and scheduler that programs see of them."""

import weakref

import torch

from .muon import halves
from .world import ConfigError


class Groups:
    """`given` as torch has them; `settings` of each as (factor of the learning rate, weight decay, trained, by Muon); `of_name`: of each
    parameter.

    Factors are of the schedule's rate; without a schedule that is 1, and they are the rates. The last group has the frozen parameters.
    """

    def __init__(self, model_parameters, names, config, model):
        of_id = {id(param): name for name, param in names.items()}
        given = list(names.values()) if model_parameters is None else list(model_parameters)
        if not given or not isinstance(given[0], dict):
            given = [{"params": given}]
        if config.muon:
            given = halves(given, model, names, config)
        elif any(group.get("use_muon") for group in given):
            raise ConfigError('a group has use_muon, but the optimizer is Adam: set optimizer.type to "Muon" in the configuration')
        self.given, self._base = given, config.base_lr
        if self._base == 0 and any(group.get("lr") for group in given):
            raise ConfigError("a group has its own lr, but that of the optimizer is 0: with a scheduler, a group's lr is a factor of it")
        group_of = {}
        for number, group in enumerate(given):
            for param in group["params"]:
                name = of_id.get(id(param))
                if name is None:
                    raise ConfigError("model_parameters has a tensor that is no parameter of the model")
                group_of[name] = number
        self.settings = [
            (*self.rules(group.get("lr", config.lr), group.get("weight_decay", config.weight_decay)), True, bool(group.get("use_muon")))
            for group in given
        ]
        self._frozen = len(given)
        self.settings.append((1.0, None, False, False))
        self.of_name = {
            name: group_of.get(name, self._frozen) if param.requires_grad else self._frozen for name, param in names.items()
        }
        if all(group == self._frozen for group in self.of_name.values()):
            raise ConfigError("no parameter is trained: requires_grad is False for all that model_parameters has")

    def rules(self, lr, weight_decay):
        """The engine's for a group of torch's."""
        return lr / self._base if self._base else 1.0, weight_decay

    def is_trained(self, name):
        return self.of_name[name] != self._frozen


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer for schedulers and callbacks: the rates and decays of its groups are those of the next step."""

    def __init__(self, groups, config, engine):
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._engine = weakref.ref(engine)

    @property
    def loss_scale(self):
        return self._engine().loss_scale

    cur_scale = loss_scale

    def step(self, closure=None):
        raise RuntimeError("call engine.step(), which ends micro-batches, too")

    def zero_grad(self, set_to_none=True):
        """Nothing: the engine takes gradients as they are computed."""


class ZeroScheduler:
    """The schedule of the configuration, which the engine follows by itself: the groups show the rates of the next step."""

    def __init__(self, engine, groups):
        self._engine = weakref.ref(engine)
        self._factors = [factor for factor, _, is_trained, _ in groups.settings if is_trained]
        self.step()

    def step(self, *args, **kwargs):
        engine = self._engine()
        rate = engine._sharded.native.next_lr
        for group, factor in zip(engine.optimizer.param_groups, self._factors):
            group["lr"] = factor * rate

    def get_lr(self):
        return [group["lr"] for group in self._engine().optimizer.param_groups]

    get_last_lr = get_lr

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Checkpoints of the engine have the position."""
        self.step()
