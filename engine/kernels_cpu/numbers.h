/* Numbers in bf16 and fp32, and functions of them that a compiler can vectorize. */

#pragma once
#include <math.h>
#include <stdint.h>

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    union { uint32_t bits; float number; } both = {.bits = (uint32_t)x << 16};
    return both.number;
}

/* Round to the nearest bf16, ties to even. NaN stays NaN. */
static inline bf16 narrow(float x) {
    union { float number; uint32_t bits; } both = {.number = x};
    uint32_t rounded = (both.bits + 0x7fff + ((both.bits >> 16) & 1)) >> 16;
    return (both.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded;
}

/* Return e^x for x <= 0, accurate to 2e-7, by the polynomial of the Cephes library (Moshier, 1992). Below -87 the
   result is e^-87. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504089f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float number; } power = {.bits = ((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.number;
}
