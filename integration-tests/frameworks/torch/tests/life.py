"""What real programs do around the steps: python tests/life.py [NAME...]

Each case runs as 1 to 3 ranks; what must hold is asserted in them, or below in the case's check.
"""

import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import time
import weakref

from launch import Job


def setup():
    import torch
    import zero_torch
    from torch import nn

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, width, dropout):
            super().__init__()
            self.first, self.second, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

        def forward(self, x):
            return x + self.dropout(self.second(torch.tanh(self.first(x))))

    class Model(nn.Module):
        def __init__(self, width=32, blocks=3, dropout=0.0):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block(width, dropout) for _ in range(blocks)), nn.Linear(width, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    def start(model, stage):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}, "gradient_clipping": 0.0}
        return zero_torch.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    return torch, Model, start


def step(engine, batch):
    engine.backward(engine(batch))
    engine.step()
    return engine.loss


# ---- in the ranks


def workers(stage, method):
    torch, Model, start = setup()
    engine = start(Model(), stage)
    data = torch.utils.data.TensorDataset(torch.randn(16, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        for rows, in loader:
            step(engine, rows)
    engine.destroy()
    print("done")


def lost_parent(stage):
    """Rank 1 is killed, and a worker that it has forked lives on."""
    torch, Model, start = setup()
    engine = start(Model(), stage)
    step(engine, torch.randn(4, 32))
    if os.environ["RANK"] != "0" and os.fork() == 0:
        # The test waits for the end of the output.
        os.closerange(0, 3)
        time.sleep(600)
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        step(engine, torch.randn(4, 32))
    finally:
        print(f"waited {time.monotonic() - begun:.1f} s")


def forks(stage):
    """Children that run to the end of the interpreter; one uses the engine."""
    torch, Model, start = setup()
    model = Model()
    engine = start(model, stage)
    for uses in (False, True):
        engine(torch.randn(4, 32))
        if (child := os.fork()) == 0:
            if uses:
                step(engine, torch.randn(4, 32))
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(f"child {os.waitstatus_to_exitcode(status)}", flush=True)
        step(engine, torch.randn(4, 32))
    step(engine, torch.randn(4, 32))
    engine.destroy()
    print("done")


def interrupted(stage):
    """Rank 0 comes late; the others wait for it in a native call."""
    torch, Model, start = setup()
    engine = start(Model(), stage)
    step(engine, torch.randn(4, 32))
    print("waits", flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(6)
    step(engine, torch.randn(4, 32))


def interrupted_at_start(stage):
    torch, Model, start = setup()
    print("waits", flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(600)
    start(Model(), stage)


def two_engines(stage):
    """A policy that trains, and a reference model that evaluates."""
    torch, Model, start = setup()
    models = [Model(), Model(width=32, blocks=2)]
    plain = [Model(), Model(width=32, blocks=2)]
    for mine, other in zip(plain, models):
        mine.load_state_dict(other.state_dict())
    optimizer = torch.optim.AdamW(plain[0].parameters(), lr=1e-3, weight_decay=0.01)
    policy, reference = (start(model, stage) for model in models)
    reference.eval()
    for _ in range(4):
        # The same rows on all ranks.
        rows = torch.randn(4, 32)
        with torch.no_grad():
            of_reference = reference(rows).item()
        assert abs(of_reference - plain[1](rows).item()) < 1e-6
        loss = plain[0](rows) * of_reference
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = policy(rows)
        with torch.no_grad():
            assert reference(rows).item() == of_reference
        policy.backward(mine * of_reference)
        policy.step()
        assert abs(policy.loss - loss.item()) < 1e-6 * abs(loss.item()), (policy.loss, loss.item())
    policy.destroy()
    reference.destroy()
    print("done")


def dropped(stage):
    """`del engine` frees its memory without the collector of cycles, though the program keeps the module."""
    torch, Model, start = setup()
    gc.collect()
    gc.disable()

    def memory():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() >> 20

    used = []
    for _ in range(6):
        model = Model(width=512)
        engine = start(model, stage)
        step(engine, torch.randn(4, 512))
        of_engine = weakref.ref(engine._sharded)
        del engine
        assert of_engine() is None
        assert model.blocks[0].first.weight.numel() == 0
        used.append(memory())
    # Four more engines, each with 48 MiB at least: 6.3 million parameters with gradients and moments, halved. Threads free some late.
    assert used[-1] - used[1] < 120, used
    print("done", used)


def exits(stage, which):
    torch, Model, start = setup()
    engine = start(Model(), stage)
    step(engine, torch.randn(4, 32))
    loss = engine(torch.randn(4, 32))
    if which in ("all", os.environ["RANK"]):
        sys.exit(0)
    engine.backward(loss)
    engine.step()


def random_numbers(stage):
    torch, Model, start = setup()
    model, plain = Model(dropout=0.3), Model(dropout=0.3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    before = torch.get_rng_state()
    engine = start(model, stage)
    assert torch.equal(torch.get_rng_state(), before)
    if engine.world_size == 1:
        rows = [torch.randn(4, 32) for _ in range(3)]
        torch.manual_seed(7)
        got = [step(engine, batch) for batch in rows]
        after = torch.get_rng_state()
        torch.manual_seed(7)
        for batch, mine in zip(rows, got):
            loss = plain(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert abs(mine - loss.item()) < 1e-6 * loss.item()
        assert torch.equal(torch.get_rng_state(), after)
    engine.destroy()
    print("done")


def logs(stage):
    logging.basicConfig(level=logging.INFO)
    torch, Model, start = setup()
    engine = start(Model(), stage)
    for _ in range(3):
        step(engine, torch.randn(4, 32))
    engine.destroy()


# ---- and outside


def check(outputs, codes, expected_codes, *texts):
    text = "".join(f"\n--- rank {rank}: {code}\n{output}" for rank, (code, output) in enumerate(zip(codes, outputs)))
    assert codes == expected_codes, text
    for output, expected in zip(outputs, texts):
        for part in [expected] if isinstance(expected, str) else expected:
            assert part in output, f"no {part!r}: {text}"


def all_done(name, ranks, stage, *args):
    # Large blocks are mapped, so that what is freed is seen.
    codes, outputs, _ = Job(__file__, ranks, name, stage, *args, MALLOC_MMAP_THRESHOLD_=131072).end()
    check(outputs, codes, [0] * ranks, *["done"] * ranks)


def check_lost_parent(stage):
    codes, outputs, seconds = Job(__file__, 3, "lost_parent", stage).end()
    check(outputs, codes, [1, -9, 1], "rank 1 was lost", "", "rank 1 was lost")
    return outputs[0].split("waited ")[1].split("\n")[0]


def check_forks(stage):
    codes, outputs, _ = Job(__file__, 2, "forks", stage).end()
    texts = ["child 0", "child 1", "not to a fork of that", "done"]
    check(outputs, codes, [0, 0], texts, texts)


def check_interrupted(stage, whom):
    job = Job(__file__, 3, "interrupted", stage)
    for rank in range(3):
        job.wait_for("waits", rank)
    # Time to get into the call.
    time.sleep(2)
    for rank in whom:
        job.processes[rank].send_signal(signal.SIGINT)
    begun = time.monotonic()
    job.processes[1].wait(30)
    seconds = time.monotonic() - begun
    codes, outputs, _ = job.end()
    named = "KeyboardInterrupt"
    if whom == [1]:
        named = "rank 1 aborted: KeyboardInterrupt"
    check(outputs, codes, [-2 if rank in whom else 1 for rank in range(3)], named, "KeyboardInterrupt", named)
    return f"{seconds:.1f} s until the rank ended"


def check_interrupted_at_start():
    job = Job(__file__, 2, "interrupted_at_start", 3)
    job.wait_for("waits", 0)
    job.wait_for("waits", 1)
    time.sleep(2)
    begun = time.monotonic()
    for process in job.processes:
        process.send_signal(signal.SIGINT)
    codes, outputs, _ = job.end()
    check(outputs, codes, [-2, -2])
    return f"{time.monotonic() - begun:.1f} s"


def check_exits(stage, which):
    codes, outputs, _ = Job(__file__, 2, "exits", stage, which).end()
    others = "rank 1 aborted: it exits, or drops its engine, within a step"
    check(outputs, codes, *([[0, 0]] if which == "all" else [[1, 0], others]))


def check_logs():
    _, outputs, _ = Job(__file__, 3, "logs", 3).end()
    assert outputs[0].startswith("INFO:zero_torch:stage 3, 3 ranks, ") and outputs[0].count("\n") == 1 and outputs[1:] == ["", ""], outputs


CASES = {
    "workers by fork": lambda: all_done("workers", 2, 3, "fork"),
    "workers by spawn": lambda: all_done("workers", 2, 1, "spawn"),
    "killed, with a worker that lives": lambda: check_lost_parent(3),
    "forks": lambda: check_forks(3),
    "forks, stage 1": lambda: check_forks(1),
    "interrupt of one rank": lambda: check_interrupted(3, [1]),
    "interrupt of one rank, stage 1": lambda: check_interrupted(1, [1]),
    "interrupt of all ranks": lambda: check_interrupted(3, [0, 1, 2]),
    "interrupt at the start": check_interrupted_at_start,
    "two engines": lambda: all_done("two_engines", 2, 3),
    "two engines, stage 1": lambda: all_done("two_engines", 2, 1),
    "del engine": lambda: all_done("dropped", 2, 3),
    "del engine, stage 1": lambda: all_done("dropped", 2, 1),
    "exit of all within a step": lambda: check_exits(3, "all"),
    "exit of one within a step": lambda: check_exits(1, "1"),
    "random numbers": lambda: all_done("random_numbers", 1, 3),
    "random numbers, stage 1": lambda: all_done("random_numbers", 1, 1),
    "random numbers, 2 ranks": lambda: all_done("random_numbers", 2, 2),
    "logs": check_logs,
}


def main():
    for name, case in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            result = case()
            print(f"ok {name}{f': {result}' if result else ''}", flush=True)


def test_life():
    main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        globals()[sys.argv[2]](int(sys.argv[3]), *sys.argv[4:])
    else:
        main()
