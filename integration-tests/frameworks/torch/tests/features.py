"""What programs do besides plain steps, beside plain PyTorch: torchrun --nproc-per-node N tests/features.py STAGE [NAME...]"""

import ctypes
import json
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import zero_torch as deepspeed
from programs import MODELS, ROWS, TOKENS, loss_of, loss_of_pictures, make, reference, rows_of
from safetensors.torch import load_file, save_model
from torch import nn
from zero_torch.config import Config

STAGE, ONLY = int(sys.argv[1]), sys.argv[2:]
STEPS = 5
torch.set_num_threads(1)


def config_of(**more):
    return {
        "train_batch_size": ROWS,
        # DeepSpeed's default is 1.
        "gradient_clipping": 0,
        "zero_optimization": {"stage": STAGE},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        **more,
    }


def start(model, groups=None, **more):
    config = config_of(**more)
    return deepspeed.initialize(model=model, model_parameters=groups(model) if groups else model.parameters(), config=config)[0]


def own_rows(engine, rows, micro=0):
    size = engine.train_micro_batch_size_per_gpu()
    start = (engine.global_rank * engine.gradient_accumulation_steps() + micro) * size
    return rows[start:start + size]


def train(engine, loss_of=loss_of, first=0, steps=STEPS):
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, own_rows(engine, rows_of(step), micro)))
            engine.step()
        losses.append(engine.loss)
    return losses


def close(got, want, within=1e-6):
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want))
    assert len(got) == len(want) and worst < within, f"{worst}: {got} {want}"


def same_as_plain(build, groups=None, loss_of=loss_of, **more):
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    engine = start(build(), groups, **more)
    got = train(engine, loss_of)
    want, _ = reference(plain, STEPS, groups=groups, loss_of=loss_of)
    engine.destroy()
    close(got, want)


def frozen():
    def build():
        model = make("llama")
        for name, param in model.named_parameters():
            param.requires_grad = "layers.3" in name or "layers.1.self_attn" in name or "lm_head" in name
        return model

    same_as_plain(build)


def adapters():
    class Lora(nn.Module):
        def __init__(self, base, rank=4):
            super().__init__()
            self.base = base
            base.weight.requires_grad = False
            self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
            self.b = nn.Parameter(torch.zeros(base.out_features, rank))

        def forward(self, x):
            return self.base(x) + (x @ self.a.t()) @ self.b.t()

    def build():
        model = make("llama")
        for param in model.parameters():
            param.requires_grad = False
        for block in model.model.layers:
            block.self_attn.q_proj = Lora(block.self_attn.q_proj)
        return model

    same_as_plain(build)


def unused():
    """PyTorch leaves a parameter without a gradient as it is; the engine decays it, as DeepSpeed does."""

    def build():
        model = make("gpt2")
        model.extra = nn.Linear(8, 8)
        return model

    same_as_plain(build)


def groups():
    def of(model):
        decayed = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]

    torch.manual_seed(0)
    plain = make("gpt2")
    wanted = of(plain)
    want, _ = reference(plain, STEPS, groups=lambda _: wanted)
    # The groups are read before the engine takes the memory of the parameters.
    engine = start(make("gpt2"), of)
    got = train(engine)
    engine.destroy()
    close(got, want)


def shared_by_blocks():
    def build():
        model = make("llama")
        model.model.layers[3].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    same_as_plain(build)


def two_backwards():
    def loss(model, rows):
        if isinstance(model, deepspeed.Engine):
            model.backward(loss_of(model, rows) * 0.5)
            return loss_of(model, rows) * 0.5
        return loss_of(model, rows)

    same_as_plain(lambda: make("gpt2"), loss_of=loss)


def retained_graph():
    def loss(model, rows):
        value = loss_of(model, rows)
        if isinstance(model, deepspeed.Engine):
            model.backward(value * 0.25, retain_graph=True)
            return value * 0.75
        return value

    same_as_plain(lambda: make("gpt2"), loss_of=loss)


def schedulers():
    """Each group has its own rate in each step, 0 too, as warm-ups begin. The engine steps the scheduler, as DeepSpeed does, and its checkpoints
    have it."""

    def groups_of(model):
        return [{"params": list(model.transformer.h.parameters())}, {"params": [*model.transformer.wte.parameters()], "weight_decay": 0.1}]

    def plan_of(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: n / 3, lambda n: 1 / (1 + n)])

    def start():
        torch.manual_seed(0)
        model = make("gpt2")
        return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config_of(), lr_scheduler=plan_of)

    torch.manual_seed(0)
    plain = make("gpt2")
    optimizer = torch.optim.AdamW(groups_of(plain), lr=1e-3, weight_decay=0.01)
    plan = plan_of(optimizer)
    want = []
    for step in range(STEPS):
        loss = loss_of(plain, rows_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
        want.append(loss.item())

    folder = common_folder()
    engine, _, _, scheduler = start()
    got = train(engine, steps=3)
    assert scheduler is engine.lr_scheduler and scheduler.last_epoch == 3
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, *_ = start()
    engine.load_checkpoint(folder)
    got += train(engine, first=3, steps=STEPS - 3)
    engine.destroy()
    close(got, want)


def common_folder():
    """Rank 0's, by a broadcast of torch.distributed, which a process starts once."""
    folder = [tempfile.mkdtemp()]
    if deepspeed.comm.get_world_size() > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.broadcast_object_list(folder, 0)
    return folder[0]


def generation():
    """Each rank makes as many tokens as it likes, between steps and within one."""
    engine = start(make("gpt2"), gradient_accumulation_steps=2)
    train(engine, steps=2)
    prompt = rows_of(0)[:2, :8]
    lengths = {"max_new_tokens": 3 + 4 * engine.global_rank, "do_sample": False, "pad_token_id": 0}
    engine.eval()
    made = engine.module.generate(input_ids=prompt, **lengths)
    plain = make("gpt2")
    plain.load_state_dict(engine.consolidated_state_dict())
    engine.train()

    engine.backward(loss_of(engine, own_rows(engine, rows_of(2))))
    engine.step()
    engine.eval()
    again = engine.generate(input_ids=prompt, **lengths)
    engine.train()
    engine.backward(loss_of(engine, own_rows(engine, rows_of(2), 1)))
    engine.step()
    engine.destroy()
    want = plain.eval().generate(input_ids=prompt, **lengths)
    assert torch.equal(made, want) and torch.equal(again, want), (made, want)


def gathered():
    engine = start(make("gpt2"))
    train(engine, steps=2)
    state = engine.consolidated_state_dict()
    block = engine.module.transformer.h[1]
    with deepspeed.zero.GatheredParameters(block):
        own = {f"transformer.h.1.{name}": param.clone() for name, param in block.named_parameters()}
        if STAGE == 3:
            try:
                engine.module.transformer.h[2].ln_1.weight.sum()
            except RuntimeError as error:
                assert "transformer.h.2 is released" in str(error), error
            else:
                raise AssertionError("a unit that was not asked for is whole")
    with deepspeed.zero.GatheredParameters(engine.module.lm_head.weight):
        own["lm_head.weight"] = engine.module.lm_head.weight.clone()
    assert all(torch.equal(value, state[name]) for name, value in own.items())
    # A forward within it, whose backward comes behind it.
    with deepspeed.zero.GatheredParameters(engine.module):
        loss = loss_of(engine, own_rows(engine, rows_of(2)))
    engine.backward(loss)
    engine.step()
    plain = make("gpt2")
    want, _ = reference(plain, 3)
    close([engine.loss], want[2:])
    try:
        with deepspeed.zero.GatheredParameters(block.parameters(), modifier_rank=0):
            pass
    except deepspeed.ConfigError as error:
        assert "modifier_rank" in str(error)
    else:
        raise AssertionError("modifier_rank was accepted")
    engine.destroy()


def checkpoints():
    folder = common_folder()
    engine = start(make("gpt2"))
    whole = train(engine, steps=6)
    engine.destroy()

    engine = start(make("gpt2"))
    first = train(engine, steps=3)
    engine.save_checkpoint(folder, client_state={"next": 3})
    engine.destroy()
    engine = start(make("gpt2"))
    path, state = engine.load_checkpoint(folder)
    rest = train(engine, first=state["next"], steps=3)
    engine.destroy()
    assert first + rest == whole, (first, rest, whole)


def released_parameters():
    """Outside of its block, a parameter of stage 3 has a shape and no elements; reads end with an error, and the step can go on."""

    def loss(model, rows):
        if isinstance(model, deepspeed.Engine) and STAGE == 3:
            block = model.module.transformer.h[1]
            weight = block.mlp.c_fc.weight
            assert weight.shape == (64, 256) and weight.dtype == torch.float32
            for read in (
                lambda: weight.square().sum(), lambda: torch.rand(2, 64) @ weight, lambda: weight.data.clone(), weight.tolist,
                lambda: block.state_dict()["mlp.c_fc.weight"].sum(),
            ):
                try:
                    read()
                except RuntimeError as error:
                    assert "transformer.h.1 is released" in str(error), error
                else:
                    raise AssertionError("a released parameter was read")
        return loss_of(model, rows)

    same_as_plain(lambda: make("gpt2"), loss_of=loss)


def errors_in_forward():
    def loss(model, rows):
        if isinstance(model, deepspeed.Engine):
            try:
                model(input_ids=rows, labels=rows[:, :3])
            except ValueError:
                pass
        return loss_of(model, rows)

    same_as_plain(lambda: make("gpt2"), loss_of=loss)


def without_memory():
    """Built within init(): the values of the plain program, and its random numbers behind it."""
    for kind in ("gpt2", "llama-tied", "vit"):
        torch.manual_seed(0)
        plain, want_next = MODELS[kind]().train(), torch.rand(3)
        torch.manual_seed(0)
        with deepspeed.init():
            model = MODELS[kind]().train()
        assert torch.equal(torch.rand(3), want_next) and all(param.is_meta for param in model.parameters())
        for made in (plain, model):
            next(made.children()).get_submodule("layers.1" if kind != "gpt2" else "h.1").requires_grad_(False)
        loss = loss_of_pictures if kind == "vit" else loss_of
        engine = start(model)
        got = train(engine, loss)
        engine.destroy()
        want, _ = reference(plain, STEPS, loss_of=loss)
        close(got, want)


def weights_by_name():
    """Values from safetensors, the tied one by one of its names."""
    torch.manual_seed(0)
    plain = MODELS["llama-tied"]().train()
    with tempfile.TemporaryDirectory() as folder:
        save_model(plain, f"{folder}/model.safetensors")
        with deepspeed.init(weights=folder):
            model = MODELS["llama-tied"]().train()
        engine = start(model)
    got = train(engine)
    engine.destroy()
    want, _ = reference(plain, STEPS)
    close(got, want)


def memory_of_the_start():
    """At stage 3 rank 0 needs its part of the state and a few units, never the whole model."""
    def status(name):
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    # glibc's malloc otherwise keeps what it has freed, by the order of sizes.
    ctypes.CDLL(None).mallopt(-3, 128 << 10)
    blocks, width = 32, 1024
    unit = 4 * width * width * 2
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = status("VmRSS")
    with deepspeed.init():
        model = nn.Sequential(nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width, bias=False)) for _ in range(blocks)))
    engine = start(model)
    peak = status("VmHWM") - before
    state = 4 * blocks * unit // engine.world_size if STAGE == 3 else None
    engine.destroy()
    print(f"state {state and state >> 20} MiB, model {blocks * unit >> 20}, peak {peak >> 20}", flush=True)
    assert STAGE < 3 or peak < state + blocks * unit // 2, (peak, state)


def peft():
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    def build():
        return get_peft_model(make("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.0))

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = build()
    engine = start(model)
    got = train(engine)
    state = get_peft_model_state_dict(model, engine.consolidated_state_dict())
    with deepspeed.zero.GatheredParameters(list(model.parameters())), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(f"{folder}/adapter_model.safetensors")
    engine.destroy()
    want, _ = reference(plain, STEPS)
    close(got, want)
    wanted = get_peft_model_state_dict(plain)
    assert state.keys() == wanted.keys() == saved.keys()
    assert all(torch.allclose(state[name], wanted[name], atol=1e-6) and torch.equal(state[name], saved[name]) for name in wanted)


def compiled(backend="aot_eager"):
    """Blocks compiled by themselves, and the module as a whole."""

    def by_blocks():
        model = make("llama")
        for block in model.model.layers:
            block.compile(backend=backend)
        return model

    def whole():
        model = make("gpt2")
        model.compile(backend=backend)
        return model

    same_as_plain(by_blocks)
    same_as_plain(whole)

    # One compiled engine at a time: what is compiled for another may be taken for it, and reads what is released then.
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine = start(make("gpt2"))
    engine.compile(backend=backend)
    got = train(engine)
    engine.destroy()
    close(got, reference(make("gpt2"), STEPS)[0])


def accumulation():
    """DeepSpeed's ways to end a step early: a boundary set by hand, backwards without steps, no_sync, another batch size."""
    def backward(engine, step, micro):
        rows = rows_of(step).view(engine.world_size, 2, -1, TOKENS)
        engine.backward(loss_of(engine, rows[engine.global_rank, micro]))

    engine = start(make("gpt2"), gradient_accumulation_steps=2)
    got = train(engine, steps=1)
    # One of two micro-batches: half of its gradient, and of its loss.
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 1, 0)
    engine.step()
    got.append(engine.loss)
    # Three backwards and one step: their sum, divided by two.
    for micro, is_boundary in ((0, False), (1, False), (0, True)):
        engine.set_gradient_accumulation_boundary(is_boundary)
        backward(engine, 2, micro)
    engine.step()
    got.append(engine.loss)
    engine.set_gradient_accumulation_boundary(None)
    # Without the division by the micro-batches.
    for micro in range(2):
        engine.backward(loss_of(engine, own_rows(engine, rows_of(3), micro)) / 2, scale_wrt_gas=False)
        engine.step()
    got.append(engine.loss)
    try:
        with engine.no_sync():
            backward(engine, 4, 0)
            engine.step()
    except RuntimeError as error:
        assert "no_sync" in str(error), error
    else:
        raise AssertionError("a step within no_sync was accepted")
    if STAGE > 1:
        backward(engine, 4, 0)
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 4, 1)
    engine.step()
    got.append(engine.loss)
    engine.set_gradient_accumulation_boundary(None)
    engine.set_train_batch_size(ROWS * 2)
    assert engine.gradient_accumulation_steps() == 4
    for _ in range(4):
        backward(engine, 5, 0)
        engine.step()
    got.append(engine.loss)
    engine.destroy()

    def of_micro(model, step, micro):
        return loss_of(model, rows_of(step).view(engine.world_size, 2, -1, TOKENS)[:, micro].flatten(0, 1))

    plain = make("gpt2")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    want = []
    for losses in (
        lambda: loss_of(plain, rows_of(0)), lambda: of_micro(plain, 1, 0) / 2,
        lambda: of_micro(plain, 2, 0) + of_micro(plain, 2, 1) / 2, lambda: loss_of(plain, rows_of(3)), lambda: loss_of(plain, rows_of(4)),
        lambda: of_micro(plain, 5, 0),
    ):
        loss = losses()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    close(got, want, 2e-6)


def arguments():
    """What programs for DeepSpeed call around the engine."""
    import argparse

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config_of(), file)
        file.flush()
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", file.name])
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=file.name):
            model = make("gpt2")
        engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    assert not engine.bfloat16_enabled() and not engine.fp16_enabled() and engine.zero_optimization_stage() == STAGE
    assert engine.device.type == "cpu" and engine.local_rank == engine.global_rank == deepspeed.comm.get_rank()
    assert len(list(engine.parameters())) == len(list(model.parameters())) and engine.module is model
    assert deepspeed.__version__ and engine.gradient_clipping() == 0.0 and engine.config == config_of()
    train(engine, steps=1)
    assert engine.was_step_applied() and engine.loss_scale == 1.0
    engine.destroy()


def own_loop():
    """loss.backward(), twice a step, with a scheduler of torch and an evaluation between the two."""
    torch.manual_seed(0)
    model = make("llama-tied")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer = deepspeed.fully_shard(model, adamw, stage=STAGE, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(0)
    plain = make("llama-tied")
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler_of_plain = torch.optim.lr_scheduler.StepLR(of_plain, 2, 0.5)
    for step in range(STEPS):
        own = rows_of(step).view(optimizer.engine.world_size, 2, -1, TOKENS)[optimizer.engine.global_rank]
        for rows in own:
            (loss_of(model, rows) / 2).backward()
            with torch.no_grad():
                got = loss_of(model, rows_of(step)).item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss = loss_of(plain, rows_of(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
        of_plain.step()
        of_plain.zero_grad()
        scheduler_of_plain.step()
        close([got, optimizer.grad_norm], [loss.item(), norm], 2e-6)
    optimizer.engine.destroy()


def wrong_settings():
    """The messages of `zero train --config`, and what this engine does not have."""
    for config, text in [
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size 7 is not micro-batch 2 x accumulation any x"),
        ({"gradient_clipping": 0}, "train_batch_size is missing: set it, or train_micro_batch_size_per_gpu"),
        (config_of(zero_optimization={"stage": 4}), 'zero_optimization.stage is 4; expected 0, 1, 2, 3 or "auto"'),
        (config_of(zero_optimization={"stag": 1}), "unknown key zero_optimization.stag, which DeepSpeed rejects, too"),
        (config_of(tensorboard={"enabled": True}), "zero_torch does not have tensorboard: set enabled to false"),
        (config_of(wandb={"enabled": True}), "zero_torch does not have wandb: set enabled to false"),
        (config_of(zero_optimization={"offload_param": {"device": "cpu"}}), "does not have zero_optimization.offload_param: remove it"),
        (config_of(sequence_parallel_size=2), "does not have sequence_parallel_size: remove it"),
        (config_of(param_groups=[]), "does not have param_groups: pass groups as model_parameters"),
        (config_of(autotuning={"enabled": True}), "does not have autotuning"),
        ({"train_batch_size": "auto"}, 'train_batch_size is "auto", which a trainer around the engine replaces: set a value'),
        (config_of(optimizer={"type": "Lion"}), 'optimizer.type "Lion" is not supported'),
        (config_of(bf16={"enabled": True}, fp16={"enabled": True}), "fp16.enabled and bf16.enabled conflict"),
        (config_of(seed=torch.float32), "not JSON serializable"),
        ([], "expected a file or a dict"),
    ]:
        try:
            deepspeed.initialize(model=make("gpt2"), config=config)
        except deepspeed.ConfigError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{config} was accepted")


def settings():
    """DeepSpeed's defaults; a file with comments; what is ignored."""
    config = Config({"train_batch_size": ROWS, "optimizer": {"type": "AdamW"}}, 2)
    sizes = config.batch_size, config.micro_batch_size, config.micro_batches
    assert sizes == (ROWS, ROWS // 2, 1) and config.stage == 0 and config.dtype == "fp32"
    assert (config.clip, config.lr, config.betas, config.eps, config.weight_decay) == (1.0, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert config.decoupled and config.bias_correction and config.scheduler is None and config.reduce_dtype is None
    assert Config(config_of(optimizer={"type": "Adam", "params": {"adam_w_mode": False}}), 1).decoupled is False

    text = """{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, // 2 ranks
        "fp16": {"enabled": true, "initial_scale_power": 8}, "communication_data_type": "fp32",
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "flops_profiler": {"enabled": true}, "seed": 1,
    }"""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ds_config.json")
        with open(path, "w") as file:
            file.write(text)
        config = Config(path, 2)
        assert config.batch_size == 16 and config.dtype == "fp16" and config.reduce_dtype == "fp32"
        assert config.warnings == ["flops_profiler is ignored", "unknown key seed is ignored"], config.warnings
        made = json.loads(config.optimizer_json())
        assert made["schedule"]["type"] == "WarmupLR" and made["loss_scaling"]["dynamic"]["initial_scale_power"] == 8
        with open(path, "a") as file:
            file.write("}")
        try:
            Config(path, 2)
        except deepspeed.ConfigError as error:
            assert str(error).startswith(f"{path}: not a JSON object: trailing characters"), error
        else:
            raise AssertionError("a file with a brace too many was accepted")


FEATURES = [
    frozen, adapters, unused, groups, shared_by_blocks, two_backwards, retained_graph, schedulers, generation, gathered, checkpoints,
    released_parameters, errors_in_forward, without_memory, weights_by_name, memory_of_the_start, peft, compiled, accumulation, arguments,
    own_loop, wrong_settings, settings,
]
failed = []
for feature in FEATURES:
    if ONLY and feature.__name__ not in ONLY:
        continue
    try:
        feature()
        print(f"ok {feature.__name__}", flush=True)
    except Exception:
        traceback.print_exc()
        failed.append(feature.__name__)
        break
sys.exit(f"failed: {failed}" if failed else 0)
