/* Times the collectives of an MPI library on this machine; prints one line `operation ranks bytes seconds` for each.
 *
 *   mpicc -O2 mpi_collectives.c -o mpi_collectives
 *   mpirun -n 4 ./mpi_collectives BYTES...     (bytes of the whole fp32 buffer)
 *
 * The best round counts, by its slowest rank. All-gather and all-reduce are in place.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *operations[] = {"reduce_scatter", "all_gather", "all_reduce"};

static void run(int operation, float *whole, float *part, int count, int ranks) {
    if (operation == 0) {
        MPI_Reduce_scatter_block(whole, part, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (operation == 1) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, whole, count, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        MPI_Allreduce(MPI_IN_PLACE, whole, count * ranks, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int operation = 0; operation < 3; operation++) {
        for (int arg = 1; arg < argc; arg++) {
            size_t bytes = strtoull(argv[arg], NULL, 10);
            int count = (int)(bytes / sizeof(float) / ranks), repeat = 1;
            float *whole = calloc(bytes, 1), *part = calloc(bytes / ranks, 1);
            memset(whole, 0, bytes);
            memset(part, 0, bytes / ranks);
            double best = 1e9, begun = MPI_Wtime();
            for (int round = 0;; round++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double start = MPI_Wtime();
                for (int i = 0; i < repeat; i++) {
                    run(operation, whole, part, count, ranks);
                }
                double took = MPI_Wtime() - start, slowest;
                MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
                if (round > 0 && slowest / repeat < best) {
                    best = slowest / repeat;
                }
                int decision[2] = {MPI_Wtime() - begun > 0.6 && round > 3, slowest < 0.002};
                MPI_Bcast(decision, 2, MPI_INT, 0, MPI_COMM_WORLD);
                if (decision[0]) {
                    break;
                }
                repeat *= decision[1] ? 2 : 1;
            }
            if (rank == 0) {
                printf("%s %d %zu %.9f\n", operations[operation], ranks, bytes, best);
                fflush(stdout);
            }
            free(whole);
            free(part);
        }
    }
    MPI_Finalize();
    return 0;
}
