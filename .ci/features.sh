# Sourced by the steps that build the workspace's tests: `features` has the flags of the one build that they share, in step
# 30 for the first time. Parquet is always among them, as its dependencies change the features of half, below all crates;
# MPI if it is installed or can be. `mpi_missing` is empty, or says that it is missing.
mpi_missing=
features=(--features zero-comm/mpi,zero/mpi,zero/parquet)
has_mpi() {
    command -v mpirun >/dev/null && command -v mpicc >/dev/null &&
        ls /usr/lib/llvm-*/lib/libclang[.-][s0-9]* >/dev/null 2>&1
}
if ! has_mpi; then
    { apt-get update -q && apt-get install -y -q openmpi-bin libopenmpi-dev libclang-dev; } >/dev/null 2>&1 || true
    has_mpi || {
        mpi_missing="no Open MPI here, and it could not be installed (Debian: openmpi-bin libopenmpi-dev libclang-dev)"
        features=(--features zero/parquet)
    }
fi
