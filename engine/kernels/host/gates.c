/* Activations, and their products with what they gate: gates.py says what is computed. */

#include "rows.h"

enum activation { SILU, GELU_TANH, GELU_NEW };

/* e^-|x|, from which logistic function and tangent follow without overflow. */
static inline float decay(float x) { return exp_of(-__builtin_fabsf(x)); }

static inline float logistic(float x) {
    float e = decay(x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

static inline float tangent(float x) {
    float e = decay(2 * x);
    return __builtin_copysignf((1 - e) / (1 + e), x);
}

/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) by single operators, as GPT-2 spells it: each of them rounds. */
static inline void gelu_by_steps(float *restrict x, float *restrict y, long n, int wide) {
    for (long i = 0; i < n; i++) y[i] = x[i] * x[i];
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) y[i] *= x[i];
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) y[i] *= 0.044715f;
    round_row(y, n, wide);
    add_row(y, x, n);
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) y[i] *= 0.7978845608028654f;
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) y[i] = tangent(y[i]);
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) y[i] += 1.0f;
    round_row(y, n, wide);
    for (long i = 0; i < n; i++) x[i] *= 0.5f;
    round_row(x, n, wide);
    for (long i = 0; i < n; i++) x[i] *= y[i];
}

/* gate, up: rows of `size` numbers, found by a stride each; out: one after the other. `up` may be null. */
void gate_rows(
    const void *gate, long gate_stride, const void *up, long up_stride, void *out, long rows, long size, int kind,
    int wide, int threads
) {
    long piece = 512, pieces = (size + piece - 1) / piece;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        for (long part = 0; part < pieces; part++) {
            float x[512], y[512];
            long at = part * piece, n = at + piece < size ? piece : size - at;
            read_row(x, gate, row * gate_stride + at, n, wide);
            if (kind == SILU) {
                for (long i = 0; i < n; i++) x[i] *= logistic(x[i]);
            } else if (kind == GELU_TANH) {
                for (long i = 0; i < n; i++) {
                    float inner = 0.7978845608028654f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
                    x[i] *= logistic(2 * inner); /* (1 + tanh y) / 2 */
                }
            } else {
                gelu_by_steps(x, y, n, wide);
            }
            if (up) {
                round_row(x, n, wide);
                read_row(y, up, row * up_stride + at, n, wide);
                for (long i = 0; i < n; i++) x[i] *= y[i];
            }
            write_row(out, row * size + at, x, n, wide);
        }
    }
}
