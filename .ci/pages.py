"""Runs the shell blocks of pages, line by line in the current folder, and compares what they print with the pages.

    pages.py PAGE...

A ```text block right behind a ```sh block is its output: each line is found in it, in order. There `...` is any text, and
`2.1 to 2.4` any number between the two; spaces count once. The environment says what this machine has:

    ROOT    the repository, in place of `zero/` in `cargo install`
    MPI     the folder of a program zero with MPI; mpirun's lines are named and left out without it
"""

import os
import re
import shutil
import subprocess
import sys
import time

NUMBER = r"\d+(?:\.\d+)?"
RANGE = re.compile(rf"({NUMBER}) to ({NUMBER})")


def blocks(text):
    """Yields the kind, the lines and whether it directly follows the block before, of each fenced block."""
    kind, lines, follows = None, [], False
    for line in text.splitlines():
        if not line.startswith("```"):
            if kind is not None:
                lines.append(line)
            elif line.strip():
                follows = False
        elif kind is None:
            kind, lines = line[3:].strip(), []
        else:
            yield kind, lines, follows
            kind, follows = None, True


def fits(expected, line):
    """Whether a line of output is the expected one."""
    pattern, bounds, at = "", [], 0
    expected = " ".join(expected.split())
    for found in RANGE.finditer(expected):
        pattern += re.escape(expected[at : found.start()]) + f"({NUMBER})"
        bounds.append((float(found[1]), float(found[2])))
        at = found.end()
    pattern = (pattern + re.escape(expected[at:])).replace(re.escape("..."), ".*")
    match = re.fullmatch(pattern, " ".join(line.split()))
    return bool(match) and all(low <= float(n) <= high for n, (low, high) in zip(match.groups(), bounds))


def missing(expected, output):
    """The first expected line that the output lacks behind those before it, or None."""
    lines = iter(output.splitlines())
    for line in expected:
        if line.strip() in ("", "..."):
            continue
        if not any(fits(line, found) for found in lines):
            return line
    return None


def command_of(line):
    """The command that runs a line here and its folder of programs, or the reason why it does not run."""
    path = os.environ["PATH"]
    if line.startswith("cargo install "):
        # Of the same paths as the build, so that nothing is built again, and not into the user's folder.
        return line.replace(" zero/", f" {os.environ['ROOT']}/"), path
    if line.startswith("cargo run --release -- "):
        return line.replace("cargo run --release -- ", "zero "), path
    if line.startswith("cargo test "):
        return None, "other steps run the tests"
    if "--device cuda" in line and not shutil.which("nvidia-smi"):
        return None, "no GPU here"
    if line.startswith("mpirun"):
        mpi = os.environ.get("MPI")
        return (line, f"{mpi}:{path}") if mpi else (None, "no MPI here")
    return line, path


def run(page, line):
    """Runs a line; returns its output, or None if this machine cannot."""
    command, path = command_of(line)
    if command is None:
        print(f"SKIPPED, {path}: {line}", flush=True)
        return None
    print(f"$ {line}", flush=True)
    begun = time.monotonic()
    done = subprocess.run(["bash", "-ec", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env={**os.environ, "PATH": path})
    print(done.stdout, end="")
    print(f"({time.monotonic() - begun:.0f} s)", flush=True)
    if done.returncode != 0:
        sys.exit(f"{page}: this line failed: {line}")
    return done.stdout


def check(page):
    with open(page) as file:
        text = file.read()
    output, ran = "", 0
    for kind, lines, follows in blocks(text):
        if kind == "sh":
            output = ""
            for line in lines:
                if line.strip() and not line.startswith("#"):
                    output += run(page, line) or ""
                    ran += 1
        elif kind == "text" and follows and ran:
            line = missing(lines, output)
            if line is not None:
                sys.exit(f"{page}: its commands did not print this line (or not in this order): {line}")
    if ran == 0:
        sys.exit(f"{page} has no commands")


# The comparison can fail.
assert fits("step 20: loss 3.1 to 3.6, ...", "step 20:  loss 3.25, 9 tokens/s")
assert not fits("step 20: loss 3.1 to 3.6, ...", "step 20: loss 3.7, 9 tokens/s")
assert missing(["b", "a"], "a\nb\n") == "a" and missing(["a", "...", "b"], "a\nx\nb\n") is None
for page in sys.argv[1:]:
    check(page)
