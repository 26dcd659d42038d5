"""maturin's build, but for one thing: the wheel has the program `zero` among its scripts."""

import os
import shutil
import subprocess

import maturin
from maturin import (  # noqa: F401
    build_editable, build_sdist, get_requires_for_build_editable, get_requires_for_build_sdist, get_requires_for_build_wheel,
    prepare_metadata_for_build_editable, prepare_metadata_for_build_wheel,
)

# The folder of this name, which maturin packs: that of the module.
DATA = "zero_torch._native.data"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # pip builds in place: this folder is the working directory.
    target = os.path.abspath("target/program")
    build = ["cargo", "build", "--locked", "--release", "-p", "zero", "--bin", "zero", "--target-dir", target]
    subprocess.run(build, cwd="../../..", check=True, env={**os.environ, "CARGO_PROFILE_RELEASE_STRIP": "true"})
    try:
        os.makedirs(f"{DATA}/scripts", exist_ok=True)
        shutil.copy2(f"{target}/release/zero", f"{DATA}/scripts/")
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(DATA)
