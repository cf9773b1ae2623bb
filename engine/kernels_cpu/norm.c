/* RMS norm of rows in bf16 (Zhang and Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * w. As in transformers, the first
   factor is rounded to bf16 before the product. engine/generation/prepacked_linears.py uses it. */

#include "numbers.h"

#define MIN_NUMBERS 32768 /* fewer numbers take less time than waking threads */

/* x, y: (rows, size), contiguous. w: (size). */
void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > MIN_NUMBERS)
    for (long r = 0; r < rows; r++) {
        const bf16 *from = x + r * size;
        bf16 *to = y + r * size;
        float sum = 0;
        for (long i = 0; i < size; i++) sum += widen(from[i]) * widen(from[i]);
        const float scale = 1 / sqrtf(sum / size + eps);
        for (long i = 0; i < size; i++) to[i] = narrow(widen(narrow(widen(from[i]) * scale)) * widen(w[i]));
    }
}
