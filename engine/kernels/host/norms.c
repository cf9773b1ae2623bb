/* Norms of rows, with the sums before them: norms.py says what is computed. */

#include "rows.h"

/* Rows of `size` numbers one after the other. x + y + z is rounded at each plus and kept in `sum`; y and z may be
   null, and `sum` where both are. */
void norm_rows(
    const void *x, const void *y, const void *z, void *sum, const void *weight, const void *bias, void *out, long rows,
    long size, float eps, int kind, int wide, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        float here[size], scratch[size];
        long at = row * size;
        read_row(here, x, at, size, wide);
        if (y) {
            read_row(scratch, y, at, size, wide);
            add_row(here, scratch, size);
            round_row(here, size, wide);
        }
        if (z) {
            read_row(scratch, z, at, size, wide);
            add_row(here, scratch, size);
            round_row(here, size, wide);
        }
        if (y || z) write_row(sum, at, here, size, wide);
        norm_row(here, scratch, size, kind, eps, weight, bias, wide);
        write_row(out, at, here, size, wide);
    }
}
