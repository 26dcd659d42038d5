# Sourced by the steps that compile CUDA kernels. If ZERO_NVRTC is not set, installs NVRTC into target/cuda-tools with
# pip (58 MB) and sets ZERO_NVRTC; if that fails, skips the step. NVRTC needs no GPU.
if [ -z "${ZERO_NVRTC:-}" ]; then
    tools=${CARGO_TARGET_DIR:-target}/cuda-tools
    find_nvrtc() { find "$tools" -name 'libnvrtc.so.1[2-9]' -print -quit 2>/dev/null; }
    if [ -z "$(find_nvrtc)" ]; then
        command -v python3 >/dev/null || skip "no ZERO_NVRTC, and no python3 to fetch NVRTC with"
        # At most the newest version that the kernels were checked with: a later compiler may spill registers.
        python3 -m pip install --quiet --disable-pip-version-check --target "$tools" 'nvidia-cuda-nvrtc<=13.5.37' ||
            skip "no ZERO_NVRTC, and pip cannot fetch nvidia-cuda-nvrtc"
    fi
    ZERO_NVRTC=$(realpath "$(find_nvrtc)")
fi
export ZERO_NVRTC ZERO_REQUIRE_NVRTC=1
