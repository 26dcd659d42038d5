"""Random programs beside plain PyTorch: torchrun --nproc-per-node N tests/random_programs.py FIRST COUNT [--stage S]

The law: for a module of any structure, and any loop that uses it the same way on all ranks, a step of the engine on the ranks' parts of a
batch is a step of torch's AdamW on the whole batch, where parameters without a gradient count as ones with zeros. Checked for each seed and
stage: losses of 4 steps within 1e-6, norms and the parameters at the end.

Adam divides gradients by their size, so a gradient that is zero but for rounding would move a parameter by chance: eps is 1e-3 here.
"""

import argparse
import dataclasses
import os
import random
import sys
import traceback
import typing

import torch
import torch.nn.functional as F
import zero_torch as deepspeed
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, VOCABULARY, ROWS, STEPS = 6, 4, 11, 36, 4
LR, EPS = 1e-2, 1e-3


# ---- bodies of blocks: [rows, tokens, width] to the same shape


class Linear(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5)

    def forward(self, x):
        return torch.tanh(self.lin(x))


class Mlp(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.is_in_place = rng.random() < 0.5

    def forward(self, x):
        y = self.up(x)
        return self.down(F.leaky_relu_(y) if self.is_in_place else F.gelu(y))


class Conv(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=rng.choice([1, 2]))

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Norm(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if rng.random() < 0.5 else nn.RMSNorm(WIDTH)

    def forward(self, x):
        return self.norm(x)


class Table(nn.Module):
    """An embedding by what its input is."""

    def __init__(self, rng):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x):
        return x * self.table(torch.arange(x.shape[1]) % 5)


class Attention(nn.Module):
    """Parameters used through views, among them one by transposition."""

    def __init__(self, rng):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.3)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.is_fused = rng.random() < 0.5

    def forward(self, x):
        if self.is_fused:
            q, k, v = F.linear(x, self.qkv).split(WIDTH, -1)
        else:
            q, k, v = x @ self.qkv[:WIDTH].t(), x @ self.qkv[WIDTH:2 * WIDTH].t(), F.linear(x, self.qkv[2 * WIDTH:])
        weights = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1)
        return (weights @ v) @ self.out.t()


class Scalars(nn.Module):
    """Parameters without dimensions, and of one element."""

    def __init__(self, rng):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.1]))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH), persistent=rng.random() < 0.5)

    def forward(self, x):
        return x * self.scale + self.shift * self.table


class Gated(nn.Module):
    """Some of it without gradients, or cut from them, and a part that its output does not use."""

    def __init__(self, rng):
        super().__init__()
        self.gate, self.lin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, 2) if rng.random() < 0.5 else None
        self.kind = rng.choice(["no_grad", "detach", "detached weight"])

    def forward(self, x):
        if self.spare is not None:
            self.spare(x)
        if self.kind == "no_grad":
            with torch.no_grad():
                gate = torch.sigmoid(self.gate(x))
        elif self.kind == "detach":
            gate = torch.sigmoid(self.gate(x).detach())
        else:
            gate = torch.sigmoid(F.linear(x, self.gate.weight.detach(), self.gate.bias))
        return gate * self.lin(x)


class Library(nn.Module):
    """Modules of torch that keep or read parameters in ways of their own."""

    def __init__(self, rng):
        super().__init__()
        self.kind = rng.choice(["lstm", "attention", "weight norm"])
        if self.kind == "lstm":
            self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        elif self.kind == "attention":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        else:
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        if self.kind == "lstm":
            return self.inner(x)[0]
        return self.inner(x, x, x, need_weights=False)[0] if self.kind == "attention" else self.inner(x)


class Chain(nn.Module):
    """Bodies in a list of their own."""

    def __init__(self, rng):
        super().__init__()
        self.parts = nn.ModuleList(rng.choice(SIMPLE)(rng) for _ in range(rng.randint(1, 3)))

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


SIMPLE = [Linear, Mlp, Conv, Norm, Table, Attention, Scalars, Gated, Library]
BODIES = SIMPLE + [Chain]


# ---- blocks: ways to pass and to return


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    extra: typing.Any = None


class Pair(typing.NamedTuple):
    hidden: torch.Tensor
    extra: typing.Any


class Holder:
    """An object that only its user knows."""

    def __init__(self, hidden):
        self.hidden = hidden


PASS = {
    "positional": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"hidden": x}),
    "dict": lambda x: (({"hidden": x, "n": 1},), {}),
    "dataclass": lambda x: ((Out(x, "text"),), {}),
    "nested": lambda x: (([("name", x), None],), {}),
    "holder": lambda x: ((), {"hidden": Holder(x)}),
}
RETURN = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, y.mean()),
    "dict": lambda y: {"hidden": y, "extra": [y.sum()]},
    "dataclass": lambda y: Out(y, Out(y * 2)),
    "namedtuple": lambda y: Pair(y, 3),
    "nested": lambda y: [{"deep": (Out(y),)}],
    "holder": lambda y: Holder(y),
}


def tensor_in(value):
    """The first tensor of what a block takes or returns."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (Out, Holder)):
        return value.hidden
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, (tuple, list)) else ():
        if (found := tensor_in(item)) is not None:
            return found
    return None


class Block(nn.Module):
    def __init__(self, rng, body=None):
        super().__init__()
        self.body = body or rng.choice(BODIES)(rng)
        self.passing, self.returning = rng.choice(list(PASS)), rng.choice(list(RETURN))
        self.inside = rng.choice([None, None, None, None, True, False])
        self.changes_its_input, self.has_loss = rng.random() < 0.2, rng.random() < 0.2
        self.loss = None

    def forward(self, *args, context=None, **kwargs):
        x = tensor_in([args, kwargs])
        if self.changes_its_input:
            x.mul_(0.9)
        y = self.body(x) if self.inside is None else checkpoint(self.body, x, use_reentrant=self.inside)
        if self.has_loss:
            self.loss = y.square().mean()
        if context is not None:
            y = y + context * 0.3
        return RETURN[self.returning](y)


# ---- modules


class Call:
    """One use of a block in a forward."""

    def __init__(self, rng, block):
        self.block = block
        self.when = rng.choice([None, None, None, "even", "odd", "never", "late"])
        self.how = rng.choice(["plain"] * 6 + ["no_grad", "unused", "checkpoint", "reentrant", "part", "in place"])
        self.has_context = rng.random() < 0.2
        if self.how == "reentrant" and block.returning not in ("tensor", "tuple"):
            self.how = "checkpoint"

    def is_used(self, step):
        return {None: True, "even": step % 2 == 0, "odd": step % 2 == 1, "never": False, "late": step > 1}[self.when]

    def __call__(self, x, context):
        block = self.block
        x, residual = x * 1.0 if block.changes_its_input else x, x

        if self.how == "part":
            return residual + block.body(x)
        if self.how == "reentrant":
            return residual + tensor_in(checkpoint(block, x, use_reentrant=True))
        args, kwargs = PASS[block.passing](x)
        if self.has_context:
            kwargs["context"] = context
        if self.how == "checkpoint":
            return residual + tensor_in(checkpoint(block, *args, use_reentrant=False, **kwargs))
        if self.how == "no_grad":
            with torch.no_grad():
                return residual + tensor_in(block(*args, **kwargs))
        y = tensor_in(block(*args, **kwargs))
        if self.how == "unused":
            return residual
        return (residual * 1.0).add_(y) if self.how == "in place" else residual + y


class Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.rng = rng = random.Random(seed)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.structure = rng.choice(["list", "list", "lists", "lists in a list", "dicts in a list", "within", "sequential", "attributes"])
        blocks = self._blocks(rng)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=rng.random() < 0.5)
        self.features = self._share(rng, blocks)
        self._freeze(rng, blocks)
        self.plan = [Call(rng, block) for block in blocks]
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.plan.insert(rng.randint(0, len(self.plan)), Call(rng, rng.choice(blocks)))
        # Blocks of a checkpointed segment.
        self.segment = rng.choice([None, None, None, True, False])

    def _blocks(self, rng):
        blocks = [Block(rng) for _ in range(rng.randint(1, 5))]
        half = rng.randint(0, len(blocks))
        if self.structure == "list":
            self.blocks = nn.ModuleList(blocks)
        elif self.structure == "lists":
            self.first, self.second = nn.ModuleList(blocks[:half]), nn.ModuleList(blocks[half:])
        elif self.structure == "lists in a list":
            self.blocks = nn.ModuleList([nn.ModuleList(blocks[:half]), nn.ModuleList(blocks[half:])])
        elif self.structure == "dicts in a list":
            self.blocks = nn.ModuleList([nn.ModuleDict({f"b{n}": block}) for n, block in enumerate(blocks)])
        elif self.structure == "within":
            self.inner = nn.Module()
            self.inner.blocks = nn.ModuleList(blocks)
        elif self.structure == "sequential":
            self.blocks = nn.Sequential(*blocks)
        else:
            for n, block in enumerate(blocks):
                setattr(self, f"block{n}", block)
        return blocks

    def _share(self, rng, blocks):
        """Shares parameters, and blocks, between places."""
        features = [self.structure]
        places = {}
        for block in [*blocks, self.head, self.table]:
            for module in block.modules():
                for name, param in module.named_parameters(recurse=False):
                    places.setdefault(tuple(param.shape), []).append((module, name))
        for group in places.values():
            if len(group) > 1 and rng.random() < 0.3:
                (one, one_name), (other, other_name) = rng.sample(group, 2)
                setattr(other, other_name, getattr(one, one_name))
                features.append(f"shared {one_name}")
        if rng.random() < 0.2:
            self.again = nn.ModuleList([rng.choice(blocks)])
            features.append("shared block")
        if rng.random() < 0.15:
            self.alias = rng.choice(blocks).body
            features.append("alias of a body")
        return features

    def _freeze(self, rng, blocks):
        for block in blocks:
            if rng.random() < 0.15:
                block.requires_grad_(False)
        for param in self.parameters():
            if rng.random() < 0.1:
                param.requires_grad_(False)
        if not self.head.weight.requires_grad:
            self.head.weight.requires_grad_(True)

    def forward(self, ids, step, with_extra=False):
        self.calls += 1
        used = {id(call.block): call.block for call in self.plan}.values()
        for block in used:
            block.loss = None
        # All blocks may read the same tensor, as the layers of a decoder do.
        x = context = self.table(ids)
        plan = [call for call in self.plan if call.is_used(step)]
        if self.segment is not None:
            cut = len(plan) // 2
            x = checkpoint(self._run, plan[:cut], x, context, use_reentrant=self.segment)
            plan = plan[cut:]
        x = self._run(plan, x, context)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
        for block in used:
            if block.loss is not None:
                loss = loss + 0.1 * block.loss
        return (loss, x.square().mean()) if with_extra else {"loss": loss}

    @staticmethod
    def _run(plan, x, context):
        for call in plan:
            x = call(x, context)
        return x


class Loop:
    """How a program trains: `losses` yields what each backward is of."""

    def __init__(self, seed):
        rng = random.Random(-1 - seed)
        self.kind = rng.choice(["one", "one", "two losses", "two forwards", "two backwards", "retained"])
        self.evaluates = rng.choice([None, None, "between", "in front of backward"])
        self.micro_batches = rng.choice([1, 1, 2, 3])
        self.clip = rng.choice([0.0, 0.0, 0.5, 1e6])
        self.has_groups = rng.random() < 0.4

    def losses(self, model, ids, step):
        if self.kind == "one":
            yield model(ids, step)["loss"]
        elif self.kind == "two losses":
            loss, extra = model(ids, step=step, with_extra=True)
            yield loss + 0.1 * extra
        elif self.kind == "two forwards":
            first = model(ids, step)["loss"]
            yield first + 0.5 * model(ids.flip(1), step)["loss"]
        elif self.kind == "two backwards":
            yield model(ids, step)["loss"]
            yield 0.5 * model(ids.flip(1), step)["loss"]
        else:
            loss, extra = model(ids, step, with_extra=True)
            yield loss * 0.5
            yield loss * 0.5 + 0.1 * extra

    def groups(self, model):
        if not self.has_groups:
            return model.parameters()
        first = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        groups = [{"params": first, "weight_decay": 0.1, "lr": LR}, {"params": rest, "weight_decay": 0.0, "lr": LR * 2}]
        return [group for group in groups if group["params"]]


def program(seed):
    """A module and its loop. A graph that is kept for a second backward cannot be of reentrant checkpoints."""
    module, loop = Program(seed), Loop(seed)
    if loop.kind == "retained":
        module.segment = None if module.segment else module.segment
        for call in module.plan:
            call.how = "checkpoint" if call.how == "reentrant" else call.how
            call.block.inside = call.block.inside and None
    return module, loop


def rows_of(step):
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def reference(seed):
    model, loop = program(seed)
    groups = loop.groups(model)
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS, weight_decay=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for loss in loop.losses(model, rows_of(step), step):
            loss.backward(retain_graph=loop.kind == "retained")
            total += loss.item()
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in trained:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        norms.append(nn.utils.clip_grad_norm_(trained, loop.clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def ours(seed, stage):
    model, loop = program(seed)
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": loop.micro_batches,
        "gradient_clipping": loop.clip,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.01}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=loop.groups(model), config=config)
    size = engine.train_micro_batch_size_per_gpu()

    def evaluate(ids, step):
        with torch.no_grad():
            engine(ids, step)

    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(loop.micro_batches):
            start = (engine.global_rank * loop.micro_batches + micro) * size
            ids = rows_of(step)[start:start + size]
            for loss in loop.losses(engine, ids, step):
                if loop.evaluates == "in front of backward":
                    evaluate(ids, step)
                engine.backward(loss, retain_graph=loop.kind == "retained")
            if loop.evaluates == "between":
                evaluate(ids, step)
            engine.step()
        losses.append(engine.loss)
        norms.append(engine.get_global_grad_norm())
    state = engine.consolidated_state_dict()
    engine.destroy()
    return losses, norms, state


def differences(got, want):
    """What is wrong, as text."""
    for name, index, within in (("loss", 0, 1e-6), ("norm", 1, 1e-5)):
        for step, (ours, plain) in enumerate(zip(got[index], want[index])):
            if ours is not None and not abs(ours - plain) <= within * abs(plain):
                yield f"{name} of step {step}: {ours} instead of {plain}"
    for name, param in want[2].items():
        if not torch.allclose(got[2][name], param, rtol=1e-5, atol=2e-6):
            yield f"{name}: {(got[2][name] - param).abs().max()} apart"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--stage", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, wrong, refused = int(os.environ.get("RANK", 0)), 0, []
    for seed in range(args.first, args.first + args.count):
        try:
            want = reference(seed)
        except RuntimeError as error:
            refused.append(seed)
            if rank == 0:
                print(f"seed {seed}: PyTorch refuses it: {str(error)[:100]}", flush=True)
            continue
        module, loop = program(seed)
        for stage in range(4) if args.stage is None else [args.stage]:
            what = f"seed {seed}, stage {stage}: {module.features} {[(call.how, call.when) for call in module.plan]} {vars(loop)}"
            try:
                found = list(differences(ours(seed, stage), want))
            except Exception:
                # The ranks are no longer at the same place.
                traceback.print_exc()
                sys.exit(f"FAILED {what}")
            if found and rank == 0:
                print(f"WRONG {what}\n  " + "\n  ".join(found[:5]), flush=True)
            wrong += bool(found)
        if rank == 0:
            print(f"seed {seed} done", flush=True)
    if rank == 0:
        print(f"RESULT {args.count - len(refused)} programs, {wrong} wrong; PyTorch refuses {refused}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
