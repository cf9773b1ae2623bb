/* Rows of numbers, widened to be computed with and rounded where PyTorch's operators round.

A row is read into a scratch of floats, which stays in the first cache; `wide` says whether numbers in memory are fp32,
else they are bf16. */

#pragma once
#include "numbers.h"
#include <string.h>

#define MOST 16384 /* numbers of a row: 64 KiB of scratch on a thread's stack */

enum norm { RMS, RMS_ONE, LAYER };

static inline void read_row(float *restrict to, const void *from, long at, long n, int wide) {
    if (wide)
        memcpy(to, (const float *)from + at, n * sizeof(float));
    else
        for (long i = 0; i < n; i++) to[i] = widen(((const bf16 *)from)[at + i]);
}

static inline void write_row(void *to, long at, const float *restrict from, long n, int wide) {
    if (wide)
        memcpy((float *)to + at, from, n * sizeof(float));
    else
        for (long i = 0; i < n; i++) ((bf16 *)to)[at + i] = narrow(from[i]);
}

/* Round as a write to memory and a read would. */
static inline void round_row(float *x, long n, int wide) {
    if (!wide)
        for (long i = 0; i < n; i++) x[i] = widen(narrow(x[i]));
}

static inline void add_row(float *restrict x, const float *restrict y, long n) {
    for (long i = 0; i < n; i++) x[i] += y[i];
}

/* Norm a row in place; what is left to round is what a write rounds. RMS rounds before the weight (Llama), RMS_ONE
   multiplies by one plus the weight (Gemma), LAYER takes the mean off and has a bias. `scratch` holds n numbers. */
static inline void norm_row(
    float *restrict x, float *restrict scratch, long n, int kind, float eps, const void *weight, const void *bias, int wide
) {
    float sum = 0, squares = 0;
    if (kind == LAYER) {
        for (long i = 0; i < n; i++) sum += x[i];
        float mean = sum / n;
        for (long i = 0; i < n; i++) x[i] -= mean;
    }
    for (long i = 0; i < n; i++) squares += x[i] * x[i];
    float scale = 1.0f / sqrtf(squares / n + eps);
    for (long i = 0; i < n; i++) x[i] *= scale;
    if (kind == RMS) round_row(x, n, wide);
    read_row(scratch, weight, 0, n, wide);
    if (kind == RMS_ONE)
        for (long i = 0; i < n; i++) x[i] *= 1.0f + scratch[i];
    else
        for (long i = 0; i < n; i++) x[i] *= scratch[i];
    if (kind == LAYER) {
        read_row(scratch, bias, 0, n, wide);
        add_row(x, scratch, n);
    }
}
