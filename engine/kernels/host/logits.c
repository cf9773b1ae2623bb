/* Passes over fp32 logits (rows, width): logits.py says what is computed. Each row is summed by one thread, in an order
   of its own, whatever their number. */

#include "numbers.h"

enum { PART = 1024, LANES = 64 }; /* numbers that are summed in fp32; parts are in double precision */
#define LEAST (-87.0f)            /* weights below e^LEAST count as that, and no logit is told from another there */

static inline float at_least(float x) {
    return x < LEAST ? LEAST : x; /* what is not a number stays none */
}

static float highest_of(const float *z, long width) {
    float lanes[LANES], top = -INFINITY;
    long i = 0;
    for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
    for (; i + LANES <= width; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = z[i + l] > lanes[l] ? z[i + l] : lanes[l];
    for (int l = 0; l < LANES; l++) top = lanes[l] > top ? lanes[l] : top;
    for (; i < width; i++) top = z[i] > top ? z[i] : top;
    return top;
}

/* Of each row the highest logit, the sum of the weights e^(z - highest), and that of weight times (z - highest). */
void logit_sums(const float *z, long rows, long width, float *highest, float *weights, float *pulls, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const float *here = z + row * width;
        float top = highest_of(here, width);
        double weight = 0, pull = 0;
        for (long start = 0; start < width; start += PART) {
            long end = start + PART < width ? start + PART : width;
            float some = 0, pulled = 0;
            for (long i = start; i < end; i++) {
                float x = at_least(here[i] - top), e = exp_of(x);
                some += e;
                pulled += e * x;
            }
            weight += some;
            pull += pulled;
        }
        highest[row] = top;
        weights[row] = weight;
        pulls[row] = pull;
    }
}

/* The gradient of the logits into `out`; `of_entropy` may be null. A target may lie outside of the columns. */
void logit_slopes(
    const float *z, const int64_t *targets, const float *lse, const float *entropy, const float *of_logprob,
    const float *of_entropy, float *restrict out, long rows, long width, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const float *here = z + row * width;
        float *there = out + row * width, whole = lse[row], up = of_logprob[row];
        if (of_entropy) {
            float turn = of_entropy[row], pull = up + turn * entropy[row];
            for (long i = 0; i < width; i++) {
                float x = at_least(here[i] - whole);
                there[i] = -(turn * x + pull) * exp_of(x);
            }
        } else {
            for (long i = 0; i < width; i++) there[i] = -up * exp_of(here[i] - whole);
        }
        if (targets[row] >= 0 && targets[row] < width) there[targets[row]] += up;
    }
}
