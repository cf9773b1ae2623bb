/* One step of Adam or AdamW: adam.py says what is computed.

Compiled exact, and each number in the same operations: what becomes of it does not depend on where it lies, nor on how
threads share the work. Memory is what a step waits for. */

#include "numbers.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline)) /* so that the kinds are constants inside */
#define LESS(a, b) ((a) < (b) ? (a) : (b))
enum { BLOCK = 32 }; /* bf16 of a cache line */

#ifdef __FP_FAST_FMAF
#define FMA(a, b, c) fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

/* Mirrored by adam.py. */
struct call {
    float *parameter, *mean, *square;
    const void *gradient;
    bf16 *target; /* or NULL */
    int64_t count;
    float scale;         /* of the gradient */
    float kept, coupled; /* of the parameter: what decay leaves, what it adds to the gradient */
    float mean_share, mean_of_new; /* mean_of_new: 1 where the mean is reckoned from the gradient's side */
    float square_kept, square_share, root, eps, rate;
    int32_t half, threads; /* half: the gradient is bf16, else fp32 */
};

INLINE void step(const struct call how, int64_t from, int64_t count, bf16 *target, int half) {
    float *restrict parameters = how.parameter + from, *restrict means = how.mean + from;
    float *restrict squares = how.square + from;
    const float *restrict full = (const float *)how.gradient + from;
    const bf16 *restrict halves = (const bf16 *)how.gradient + from;
    for (int64_t i = 0; i < count; i++) {
        float parameter = parameters[i] * how.kept;
        float gradient = FMA(parameter, how.coupled, (half ? widen(halves[i]) : full[i]) * how.scale);
        float mean = FMA(how.mean_share, gradient - means[i], how.mean_of_new ? gradient : means[i]);
        float square = FMA(how.square_share * gradient, gradient, squares[i] * how.square_kept);
        parameter += how.rate * mean / (sqrtf(square) / how.root + how.eps);
        means[i] = mean;
        squares[i] = square;
        parameters[i] = parameter;
        if (target) target[i] = narrow(parameter);
    }
}

/* A line of the target, whole, so that it need not be read before it is written. */
INLINE void write_line(bf16 *restrict target, const bf16 *restrict line) {
#ifdef __SSE2__
    for (int i = 0; i < BLOCK; i += 8) _mm_stream_si128((__m128i *)(target + i), *(const __m128i *)(line + i));
#else
    for (int i = 0; i < BLOCK; i++) target[i] = line[i];
#endif
}

INLINE void step_part(const struct call how, int64_t from, int64_t stop, int half) {
    if (!how.target) {
        step(how, from, stop - from, 0, half);
        return;
    }
    int64_t before = -((intptr_t)(how.target + from) / (int64_t)sizeof(bf16)) & (BLOCK - 1); /* to the next line */
    int64_t first = LESS(from + before, stop), last = first + (stop - first) / BLOCK * BLOCK;
    step(how, from, first - from, how.target + from, half);
    for (int64_t at = first; at < last; at += BLOCK) {
        bf16 line[BLOCK] __attribute__((aligned(64)));
        step(how, at, BLOCK, line, half);
        write_line(how.target + at, line);
    }
    step(how, last, stop - last, how.target + last, half);
#ifdef __SSE2__
    _mm_sfence();
#endif
}

void adam(const struct call *given) {
    const struct call how = *given;
    int64_t size = (how.count / how.threads + BLOCK) & -BLOCK;
#pragma omp parallel for num_threads(how.threads) schedule(static)
    for (int64_t share = 0; share < how.threads; share++) {
        int64_t from = LESS(share * size, how.count), stop = LESS(from + size, how.count);
        if (how.half)
            step_part(how, from, stop, 1);
        else
            step_part(how, from, stop, 0);
    }
}
