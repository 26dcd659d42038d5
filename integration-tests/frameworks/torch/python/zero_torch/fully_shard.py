"""For programs with a loop of their own, as FSDP2's `fully_shard`."""

from .engine import Engine
from .groups import ZeroOptimizer


def fully_shard(model, optimizer, stage=3, dtype="fp32", max_grad_norm=0.0):
    """Shards `model` in place, and returns what takes the place of `optimizer`, an Adam or AdamW of torch over its parameters.

        optimizer = zero_torch.fully_shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for rows in loader:
            model(rows).loss.backward()
            optimizer.step()

    Gradients are means over ranks, and sums over the backwards of a step. Other than with FSDP2 the engine has the gradients:
    `param.grad` stays None, `zero_grad` has nothing to do, and norms are clipped to `max_grad_norm` in `step`. `dtype` is fp32 or bf16.
    """
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"fully_shard: dtype {dtype!r}: expected fp32 or bf16; fp16 needs engine.backward, which scales the loss")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    return ShardedOptimizer(Engine(model, config, optimizer=optimizer))


class ShardedOptimizer(ZeroOptimizer):
    def __init__(self, engine):
        self.engine = engine
        super().__init__(engine.optimizer.param_groups, engine._config, engine)
        engine.optimizer = self

    def step(self, closure=None):
        """Updates by the gradients of all backwards since the last call."""
        if closure is not None:
            raise ValueError("step: this optimizer has no use for a closure")
        self.engine.step_of_backwards()

    @property
    def grad_norm(self):
        """Of the last step, before it was clipped."""
        return self.engine.get_global_grad_norm()
