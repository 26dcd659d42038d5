"""What all ranks see when one fails: python tests/failures.py [NAME...]

Each case runs with 3 ranks at stages 1 and 3. Rank 1 does something wrong; all ranks must end, and the others must name it and the cause.
"""

import faulthandler
import os
import signal
import sys

from launch import Job, run

RANKS, AT_FAULT = 3, 1


def rank_main(case, stage):
    import torch
    import zero_torch
    from torch import nn

    faulthandler.enable()
    rank = int(os.environ["RANK"])
    is_at_fault = rank == AT_FAULT
    torch.manual_seed(0)
    torch.set_num_threads(1)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("backward went wrong")

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.kept = None

        def forward(self, x):
            if case == "view" and self.kept is None:
                self.kept = self.first.weight.view(-1)
            return x + self.second(torch.tanh(self.first(x)))

    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.blocks = nn.ModuleList(Block(width) for _ in range(3))
            self.head = nn.Linear(width, 1)
            self.fails = None

        def forward(self, x):
            for block in self.blocks[:2]:
                x = block(x)
            if self.fails == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fails == "forward":
                raise ValueError("forward went wrong")
            if self.fails == "exit":
                sys.exit(3)
            if self.fails == "backward":
                x = Fails.apply(x)
            x = self.head(self.blocks[2](x))
            if self.fails == "hook":
                x.register_hook(lambda grad: 1 / 0)
            return x.square().mean()

    width = 48 if case == "model" and is_at_fault else 32
    model = Model(width)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    engine, _, _, _ = zero_torch.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch):
        engine.backward(engine(batch))
        engine.step()

    def batch(rows=4):
        return torch.randn(rows, width)

    def read_view():
        kept = model.blocks[0].kept.detach()
        uses = [torch.sum, torch.clone, repr, torch.Tensor.zero_, torch.Tensor.numpy, torch.Tensor.tolist, lambda kept: kept.view(1, -1) @ kept]
        for use in uses:
            try:
                use(kept)
            except RuntimeError as error:
                print(f"view: {error}")
            else:
                print("view: no error")

    step(batch())
    print(f"loss {engine.loss}", flush=True)
    if not is_at_fault:
        step(batch())
        if case not in ("rows", "parameter", "view"):
            step(batch())
    elif case == "rows":
        step(batch(rows=7))
    elif case == "shape":
        step(torch.randn(4, width + 1))
    elif case == "save":
        engine(batch())
        engine.save_checkpoint("/nonexistent/never")
    elif case == "ends":
        # With a step less than the others.
        step(batch())
    elif case == "parameter":
        try:
            model.blocks[0].first(batch())
        except RuntimeError as error:
            print(f"parameter: {error}")
        step(batch())
    elif case == "view":
        read_view()
        step(batch())
    else:
        model.fails = case
        step(batch())
    print(f"done {engine.loss}")
    engine.destroy()
    if case == "view":
        read_view()


# The case, and what the others print.
ABORTED = "rank 1 aborted: "
CASES = {
    "killed": ["rank 1 was lost"],
    "forward": [ABORTED + "ValueError: forward went wrong"],
    "backward": [ABORTED + "ValueError: backward went wrong"],
    "hook": [ABORTED + "ZeroDivisionError: division by zero"],
    "exit": [ABORTED + "it exits"],
    "shape": [ABORTED + "RuntimeError: ", "shapes cannot be multiplied (4x33"],
    "model": ["rank 1 has other settings than rank 0: shape of blocks.0.first.weight"],
    "save": [ABORTED + "RuntimeError: engine.save_checkpoint within a step"],
    "ends": ["rank 1 left"],
    "rows": None,
    "parameter": None,
    "view": None,
}
OWN_CODES = {"killed": -9, "exit": 3, "ends": 0}


def check(case, stage):
    expected = CASES[case]
    codes, outputs, seconds = Job(__file__, RANKS, case, stage).end()
    text = "".join(f"\n--- rank {rank}: {code}\n{output}" for rank, (code, output) in enumerate(zip(codes, outputs)))
    for rank, (code, output) in enumerate(zip(codes, outputs)):
        if expected is None:
            assert code == 0 and "done" in output, text
        elif rank == AT_FAULT:
            assert code == OWN_CODES.get(case, 1), text
        else:
            # An error, and not the end of the interpreter.
            assert code == 1 and all(part in output for part in expected), text

    own = outputs[AT_FAULT]
    if case == "parameter" and stage == 3:
        assert "parameter: blocks.0 is called outside of the model's forward" in own, text
    if case == "view":
        # Within the run, and after it: memory of the engine is gone at all stages.
        assert own.count("view: ") == 14 and own.count("view: no error") == (7 if stage == 1 else 0), text
        assert ("a parameter of blocks." in own and "is released" in own) == (stage == 3), text
    return seconds


def main():
    chosen = sys.argv[1:] or CASES
    for case in chosen:
        for stage in (1, 3):
            print(f"ok {case}, stage {stage}: all ranks ended {check(case, stage):.1f} s after the start", flush=True)


def test_failures():
    main()


if __name__ == "__main__":
    run(rank_main, main)
