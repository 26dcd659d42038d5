#!/usr/bin/env python3
"""Compares a folder of `zero train --tensorboard` with the file of --metrics, as TensorBoard reads it.

    zero train --tensorboard T --metrics M.jsonl ...
    tensorboard_scalars.py T M.jsonl

Needs the package tensorboard; without it the script says so and exits 0.
"""

import json
import struct
import sys

PLACES = {
    "train/loss": ("loss",),
    "eval/loss": ("validation", "loss"),
    "eval/perplexity": ("validation", "perplexity"),
    "train/learning_rate": ("lr",),
    "train/grad_norm": ("grad_norm",),
    "train/loss_scale": ("loss_scale",),
    "speed/step_ms": ("step_ms",),
    "speed/tokens_per_s": ("tokens_per_s",),
}


def fp32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def expected(steps, tag):
    """The steps that have a scalar, and its values."""
    if tag.startswith("memory/"):
        path = ("memory", tag.removeprefix("memory/"))
    elif tag == "speed/mfu":
        path = ("breakdown", "mfu")
    else:
        path = PLACES[tag]
    found = []
    for line in steps:
        value = line
        for key in path:
            value = (value or {}).get(key)
        if value is not None:
            found.append((line["step"], fp32(value)))
    return found


def main():
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        print("SKIPPED: the package tensorboard is not installed")
        return 0

    folder, metrics = sys.argv[1:3]
    with open(metrics) as file:
        steps = [json.loads(line) for line in file]
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    missing = set(PLACES) - set(tags)
    if not any("validation" in line for line in steps):
        missing -= {"eval/loss", "eval/perplexity"}
    failed = [f"{tag}: not in TensorBoard" for tag in missing]
    compared = 0

    for tag in tags:
        # Without --breakdown, the metrics have no utilization.
        if tag == "speed/mfu" and not any("breakdown" in line for line in steps):
            continue
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        compared += len(shown)
        if shown != expected(steps, tag):
            failed.append(f"{tag}: {shown} in TensorBoard, {expected(steps, tag)} in the metrics")

    print("\n".join(failed) or f"{len(tags)} scalars, {compared} values: equal to the metrics")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
