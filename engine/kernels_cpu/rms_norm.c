/* Root mean square norm of rows: rms_norm.py describes it. A row is computed by one thread, in one order,
   so its numbers depend neither on the other rows nor on the number of threads. */

#include "numbers.h"

static void full_row(const float *x, const float *weight, float *y, int64_t size, float eps, float shift) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    float factor = 1 / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) y[i] = (shift + weight[i]) * (x[i] * factor);
}

/* With a shift (Gemma) the product is rounded once, otherwise (Llama) the normalized number is rounded first. */
static void half_row(const bf16 *x, const bf16 *weight, bf16 *y, int64_t size, float eps, float shift) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    float factor = 1 / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) {
        float normed = widen(x[i]) * factor;
        y[i] = narrow((shift + widen(weight[i])) * (shift ? normed : widen(narrow(normed))));
    }
}

/* Compute y (rows, size) from x (rows, size) and weight (size), all contiguous: fp32, or bf16 with `half`. */
void rms_norm(const void *x, const void *weight, void *y, int64_t rows, int64_t size, float eps, float shift, int half,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        if (half)
            half_row((const bf16 *)x + r * size, weight, (bf16 *)y + r * size, size, eps, shift);
        else
            full_row((const float *)x + r * size, weight, (float *)y + r * size, size, eps, shift);
}
