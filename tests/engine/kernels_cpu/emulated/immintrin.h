/* The AVX-512 operations of engine/kernels_cpu/tile.h without their instructions: each number of a vector in turn, with
   the same roundings. test_products.py compiles products.c with this header on machines without AVX-512. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef uint16_t __m512bh __attribute__((vector_size(64), may_alias));

static inline __m512 _mm512_set1_ps(float x) {
    __m512 all;
    for (int i = 0; i < 16; i++) all[i] = x;
    return all;
}

static inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 sum) {
    for (int i = 0; i < 16; i++) sum[i] = fmaf(a[i], b[i], sum[i]);
    return sum;
}

static inline float of_bf16(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Add two products of bf16 numbers to each sum, the one with the odd index first (Intel's manual, VDPBF16PS). */
static inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    for (int i = 0; i < 16; i++) {
        float odd = fmaf(of_bf16(a[2 * i + 1]), of_bf16(b[2 * i + 1]), sum[i]);
        sum[i] = fmaf(of_bf16(a[2 * i]), of_bf16(b[2 * i]), odd);
    }
    return sum;
}
