"""Ranks of several machines, over torch.distributed: python tests/transport.py

Two runs of torchrun are the machines. Losses have the bits of shared memory, and a failure ends the ranks of both by name.
"""

import os
import signal
import subprocess
import sys

from launch import Job, LIMIT, free_port, run

STEPS = 4


def rank_main(case, stage):
    import torch
    import zero_torch
    from programs import ROWS, loss_of, make, rows_of

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = make("gpt2")
    config = {"train_batch_size": ROWS, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    engine, _, _, _ = zero_torch.initialize(model=model, model_parameters=model.parameters(), config=config)
    # The module is imported when it is used.
    print("over torch.distributed" if "zero_torch.transport" in sys.modules else "over shared memory")
    size = engine.train_micro_batch_size_per_gpu()
    for step in range(STEPS):
        loss = loss_of(engine, rows_of(step)[rank * size:(rank + 1) * size])
        if step == 2 and rank == 1:
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "raises":
                raise ValueError("on purpose")
        engine.backward(loss)
        engine.step()
        print(f"loss {engine.loss!r} norm {engine.get_global_grad_norm()!r}", flush=True)
    engine.destroy()


def losses(output):
    return [line for line in output.splitlines() if line.startswith("loss ")]


def same_bits(stage):
    runs = {}
    for kind in ("processes", "torch"):
        codes, outputs, _ = Job(__file__, 2, "plain", stage, ZERO_TORCH_TRANSPORT=kind).end()
        assert codes == [0, 0], outputs
        runs[kind] = [losses(output) for output in outputs]
        assert ("over torch.distributed" in outputs[0]) == (kind == "torch"), outputs
    assert len(runs["torch"][0]) == STEPS and runs["torch"] == runs["processes"], runs


def on_two_machines(case, stage):
    """Returns the codes of two runs of torchrun with two ranks each, and what each rank printed."""
    port = str(free_port())
    command = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("ZERO_TORCH_TRANSPORT", None)
    machines = [
        subprocess.Popen(
            [sys.executable, *command, "--node-rank", str(node), __file__, "--rank", case, str(stage)], text=True, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [machine.communicate(timeout=2 * LIMIT)[0] for machine in machines]
    finally:
        for machine in machines:
            Job.kill(machine)
    return [machine.returncode for machine in machines], outputs


def two_machines(stage):
    codes, outputs = on_two_machines("plain", stage)
    text = "\n---\n".join(outputs)
    assert codes == [0, 0], text
    assert all(output.count("over torch.distributed") == 2 for output in outputs), text
    together = [losses(output) for output in outputs]
    assert sorted(together[0]) == sorted(together[1]) and len(together[0]) == 2 * STEPS, text
    # The same sums, in the order of ranks, as over shared memory.
    _, alone, _ = Job(__file__, 4, "plain", stage).end()
    assert sorted(2 * losses(alone[0])) == sorted(together[0]), text


def failures(case, cause):
    codes, outputs = on_two_machines(case, 3)
    text = "\n---\n".join(outputs)
    # The other machine's ranks have the error, whatever torchrun does to those of this one.
    assert codes == [1, 1] and outputs[1].count(cause) >= 1, text


def main():
    for stage in (1, 3):
        same_bits(stage)
        print(f"ok 2 ranks, stage {stage}: the losses and norms of shared memory, bit for bit", flush=True)
    two_machines(3)
    print("ok 2 machines with 2 ranks each, stage 3", flush=True)
    failures("killed", "rank 1 was lost")
    print("ok a rank that is killed, 2 machines", flush=True)
    failures("raises", "rank 1 aborted: ValueError: on purpose")
    print("ok a rank that raises, 2 machines", flush=True)


def test_transport():
    main()


if __name__ == "__main__":
    run(rank_main, main)
