"""Muon beside torch.optim.Muon, at all stages: torchrun --nproc-per-node N tests/muon.py

torch makes the products of Newton-Schulz in bf16, and this engine on cores in fp32. So it is compared with torch's rule with products in fp32; the
rule with torch's own differs by the rounding of bf16, 2^-9 of what is in an update.
"""

import tempfile

import torch
import torch.distributed as dist
import zero_torch as deepspeed
from programs import ROWS, loss_of, make, rows_of
from torch import nn
from torch.optim import _muon

STEPS, MICRO_BATCHES = 15, 2
LR, MUON_LR, DECAY = 3e-3, 0.02, 0.1
torch.set_num_threads(1)


def orthogonalised(update, coefficients, steps, eps):
    """As torch's, in fp32."""
    a, b, c = coefficients
    x = update.T if update.size(0) > update.size(1) else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.size(0) > update.size(1) else x


OF_TORCH, SCALE_OF_TORCH = _muon._zeropower_via_newtonschulz, _muon._adjust_lr


def plain(kind, products):
    """Losses of torch.optim.Muon for the matrices of blocks, and AdamW."""
    model = make(kind)
    hidden = [param for name, param in model.named_parameters() if is_hidden(name, param)]
    others = [param for name, param in model.named_parameters() if not is_hidden(name, param)]
    _muon._zeropower_via_newtonschulz = products
    # The outputs of a Conv1D are its second dimension.
    swapped = (lambda lr, adjust, shape: SCALE_OF_TORCH(lr, adjust, shape[::-1])) if kind == "gpt2" else SCALE_OF_TORCH
    _muon._adjust_lr = swapped
    optimizers = [
        torch.optim.Muon(hidden, lr=MUON_LR, weight_decay=DECAY), torch.optim.AdamW(others, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-10)
    ]
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rows_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def is_hidden(name, param):
    return param.dim() == 2 and (".h." in name or ".layers." in name)


def start(kind, stage, tag=None, groups=None, **more):
    model = make(kind)
    if tag:
        tag(model)
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": {"lr": LR, "muon_lr": MUON_LR, "weight_decay": DECAY}},
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=groups(model) if groups else model.parameters(), config=config)[0]


def train(engine, steps=range(STEPS)):
    losses = []
    size = engine.train_micro_batch_size_per_gpu()
    for step in steps:
        for micro in range(MICRO_BATCHES):
            first = (engine.global_rank * MICRO_BATCHES + micro) * size
            engine.backward(loss_of(engine, rows_of(step)[first:first + size]))
            engine.step()
        losses.append(engine.loss)
    return losses


def difference(got, want):
    assert len(got) == len(want)
    return max(abs(a - b) / abs(b) for a, b in zip(got, want))


def losses_of_the_rule():
    for kind in ("llama", "gpt2"):
        want = plain(kind, orthogonalised)
        in_bf16 = plain(kind, OF_TORCH)
        assert want[-1] < 0.95 * want[0], want
        for stage in range(4):
            engine = start(kind, stage)
            of_muon, of_adam = engine.optimizer.param_groups
            assert (of_muon["use_muon"], of_muon["lr"], of_adam["use_muon"], of_adam["lr"]) == (True, MUON_LR, False, LR)
            got = train(engine)
            engine.destroy()
            exact, rounded = difference(got, want), difference(got, in_bf16)
            if engine.global_rank == 0:
                print(f"{kind} at stage {stage}: {exact:.1e}, beside products in bf16 {rounded:.1e}", flush=True)
            assert exact < 1e-6 and rounded < 2e-3, (kind, stage, got, want)


def groups_of_the_program():
    """Groups of the program are halved; their rates and decays are their own, and may change."""
    def tag(model):
        model.model.layers[0].mlp.up_proj.weight.use_muon = False

    def groups(model):
        decayed = [param for param in model.parameters() if param.dim() > 1]
        return [{"params": decayed, "lr": 2e-3}, {"params": [param for param in model.parameters() if param.dim() == 1], "weight_decay": 0.0}]

    want = None
    for stage in range(4):
        engine = start("llama", stage, tag, groups)
        found = engine.optimizer.param_groups
        names = [(group["name"], group["lr"], group["weight_decay"]) for group in found]
        assert names == [
            ("group0-muon-params", 2e-3, DECAY), ("group0-adam-params", 2e-3, DECAY), ("group1-adam-params", LR, 0.0)
        ], names
        # 7 matrices of each of 4 blocks, but one; the embedding, the head and that one.
        assert [len(group["params"]) for group in found] == [27, 3, 9], found
        got = train(engine, range(3))
        found[0]["lr"], found[0]["weight_decay"] = 5e-3, 0.5
        got += train(engine, range(3, 6))
        engine.destroy()
        want = want or got
        assert difference(got, want) < 1e-6, (stage, got, want)


def schedule():
    """Muon follows the schedule with its own rate: the same as a program that sets the rates of both groups."""
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, rates, want = start("llama", 3, scheduler=warm_up), [], []
    for step in range(6):
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        want += train(engine, [step])
    engine.destroy()
    assert rates[2] != rates[3] and rates[-1] == [MUON_LR, LR], rates
    assert all(abs(of_muon * LR - of_adam * MUON_LR) < 1e-12 for of_muon, of_adam in rates), rates

    engine, got = start("llama", 3), []
    for step in range(6):
        for group, rate in zip(engine.optimizer.param_groups, rates[step]):
            group["lr"] = rate
        got += train(engine, [step])
    engine.destroy()
    assert difference(got, want) < 1e-6, (got, want)


def checkpoints():
    """Saved at stage 3, resumed there and at stage 1."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    engine = start("llama", 3)
    want = train(engine, range(6))
    engine.destroy()
    engine = start("llama", 3)
    first = train(engine, range(3))
    engine.save_checkpoint(folder[0])
    engine.destroy()
    for stage in (3, 1):
        engine = start("llama", stage)
        engine.load_checkpoint(folder[0])
        got = first + train(engine, range(3, 6))
        engine.destroy()
        assert got == want if stage == 3 else difference(got, want) < 1e-6, (stage, got, want)


def refusals():
    def tagged(name, value=True):
        return lambda model: setattr(model.get_parameter(name), "use_muon", value)

    def none(model):
        for param in model.parameters():
            param.use_muon = False

    def group_of_all(model):
        return [{"params": list(model.parameters()), "use_muon": True}]

    for refused, text in [
        (lambda: start("gpt2", 3, tagged("transformer.wte.weight")), "transformer.wte.weight is an embedding or the head"),
        (lambda: start("llama", 3, tagged("lm_head.weight")), "lm_head.weight is an embedding or the head"),
        (lambda: start("llama", 3, tagged("model.norm.weight")), "model.norm.weight has the shape (64,)"),
        (lambda: start("llama", 3, groups=group_of_all), "model.embed_tokens.weight is an embedding"),
        (lambda: start("llama", 3, none), "Muon\" would update nothing"),
        (lambda: start("llama", 3, groups=lambda model: [{"params": list(model.parameters()), "momentum": 0.5}]), "momentum 0.5"),
        (lambda: deepspeed.initialize(
            model=(model := make("llama")), model_parameters=group_of_all(model), config={"train_batch_size": ROWS}), "has use_muon"),
    ]:
        try:
            refused()
        except deepspeed.ConfigError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


for test in (losses_of_the_rule, groups_of_the_program, schedule, checkpoints, refusals):
    test()
    print(f"ok {test.__name__}", flush=True)
