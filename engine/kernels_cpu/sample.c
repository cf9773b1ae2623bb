/* One token per row from logits (rows, vocabulary): engine/kernels/sample.py describes the function.

   A thread converts a row to fp32 once, with the weights e^(z - top). Nothing is sorted: top-k, top-p and the sampled
   token each need the largest logit v for which the tokens with z >= v reach a target, by number or by weight. `search`
   finds v by bisection between logits that occur in the row. Each step of the bisection reads only the tokens near the
   top, which `shorten` selects. Equal logits are ordered as in the vocabulary.

   One thread computes a row, in blocks, always in the same order. A token therefore does not depend on other rows. */

#include "numbers.h"
#include <omp.h>

enum { BLOCK = 256 };
static const float DEPTH = 87.0f; /* weights of e^-87 and less count as 0 */

/* A row: logits times 1 / temperature, their weights, and, after `shorten`, their tokens. `size` is a multiple of
   BLOCK. Numbers after the last logit are -inf. */
typedef struct {
    float *z, *weights;
    int32_t *tokens;
    int64_t size;
    float top;
} row_of;

typedef struct {
    float temperature, top_p, min_p;
    int64_t top_k; /* 0: off */
} options;

/* Weight, number and smallest logit of the tokens with z >= threshold, and the largest logit of the other tokens. */
typedef struct {
    double weight;
    int64_t count;
    float smallest, largest;
} above;

static float weight_of(float x) {
    float e = exp_of(x);
    return x < -DEPTH ? 0.0f : e;
}

/* Evaluate a threshold in [low, high]. */
static above from(const row_of *row, float threshold, float low, float high) {
    double total = 0;
    int64_t number = 0;
    float smallest = high, largest = low;
    for (int64_t b = 0; b < row->size; b += BLOCK) {
        const float *z = row->z + b, *w = row->weights + b;
        float weight = 0;
        int32_t count = 0;
#pragma omp simd reduction(+ : weight, count) reduction(min : smallest) reduction(max : largest)
        for (int i = 0; i < BLOCK; i++) {
            int reaches = z[i] >= threshold;
            float over = reaches ? z[i] : INFINITY, under = reaches ? -INFINITY : z[i];
            weight += reaches ? w[i] : 0.0f;
            count += reaches;
            smallest = over < smallest ? over : smallest;
            largest = under > largest ? under : largest;
        }
        total += weight;
        number += count;
    }
    return (above){total, number, smallest, largest};
}

enum target { COUNT, WEIGHT, EXCEEDED_WEIGHT };

/* Return the largest logit v in [low, top] for which the tokens with z >= v reach (EXCEEDED_WEIGHT: exceed) the target;
   `low` if there is none. Writes the weight and the number of the tokens with z > v. */
static float search(const row_of *row, float low, double target, enum target kind, double *weight, int64_t *count) {
    float high = row->top;
    *weight = 0, *count = 0;
    while (low < high) {
        float middle = low + 0.5f * (high - low);
        if (!(middle > low && middle <= high)) middle = high; /* neighbouring floats */
        above here = from(row, middle, low, high);
        int reaches = kind == COUNT ? here.count >= target
                    : kind == WEIGHT ? here.weight >= target
                                     : here.weight > target;
        if (reaches) low = here.smallest;
        else high = here.largest, *weight = here.weight, *count = here.count;
    }
    return low;
}

/* Return the position of the n-th token (from 0) whose logit is `value`; of the last such token if there are fewer. */
static int64_t nth(const row_of *row, float value, double n) {
    int64_t at = 0, rank = 0;
    for (int64_t i = 0; i < row->size && rank <= n; i++)
        if (row->z[i] == value) at = i, rank++;
    return at;
}

/* Remove tokens far below the top, as long as the others reach the targets of top-k or else top-p. */
static void shorten(row_of *row, const options *o, double total) {
    float low = row->top;
    int reaches = 0;
    for (float depth = 4; depth < DEPTH && !reaches; depth *= 2) {
        low = row->top - depth;
        above here = from(row, low, low, row->top);
        reaches = o->top_k ? here.count >= o->top_k : here.weight >= o->top_p * total;
    }
    if (!reaches) low = row->top - DEPTH;
    int64_t size = 0;
    for (int64_t i = 0; i < row->size; i++) {
        float z = row->z[i], weight = row->weights[i];
        row->z[size] = z, row->weights[size] = weight, row->tokens[size] = (int32_t)i;
        size += z >= low;
    }
    for (row->size = (size + BLOCK - 1) / BLOCK * BLOCK; size < row->size; size++)
        row->z[size] = -INFINITY, row->weights[size] = 0;
}

/* Return the first token at which the cumulative weight of the tokens with z >= low exceeds the target. If rounding
   leaves the sum of all weights below the target, return the last token that has a weight. Only the token's block is
   read one by one. */
static int64_t in_vocabulary_order(const row_of *row, float low, double target) {
    int64_t block = 0, token = 0;
    double passed = 0, before = 0;
    for (int64_t b = 0; b < row->size && passed <= target; b += BLOCK) {
        const float *z = row->z + b, *w = row->weights + b;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < BLOCK; i++) sum += z[i] >= low ? w[i] : 0.0f;
        if (!(sum > 0)) continue;
        block = b, before = passed;
        passed += sum;
    }
    for (int64_t i = block; i < block + BLOCK && before <= target; i++) {
        if (!(row->z[i] >= low && row->weights[i] > 0)) continue;
        token = i;
        before += row->weights[i];
    }
    return token;
}

static int64_t sample_ranked(row_of *row, const options *o, float uniform, float *logprob) {
    float low = row->top - DEPTH;
    above all = from(row, low, low, row->top);
    shorten(row, o, all.weight);
    double kept = all.weight, weight; /* of the remaining tokens: z > low, and the first `ties` with z = low */
    int64_t ties = all.count, count;
    low = from(row, low, low, row->top).smallest;
    if (o->top_k && all.count > o->top_k) {
        low = search(row, low, (double)o->top_k, COUNT, &weight, &count);
        ties = o->top_k - count;
        kept = weight + (double)ties * weight_of(low - row->top);
    }
    if (o->top_p < 1) {
        double target = o->top_p * kept;
        float edge = search(row, low, target, WEIGHT, &weight, &count);
        double one = weight_of(edge - row->top), needed = one > 0 ? ceil((target - weight) / one) : 1;
        int64_t most = edge == low ? ties : from(row, edge, edge, edge).count - count;
        ties = needed < 1 ? 1 : needed < (double)most ? (int64_t)needed : most;
        low = edge;
        kept = weight + (double)ties * one;
    }
    if (o->min_p > 0 && row->top + logf(o->min_p) > low) {
        all = from(row, row->top + logf(o->min_p), low, row->top);
        low = all.smallest, ties = all.count, kept = all.weight;
    }
    double target = uniform * kept;
    float value = search(row, low, target, EXCEEDED_WEIGHT, &weight, &count);
    double one = weight_of(value - row->top), n = one > 0 ? floor((target - weight) / one) : 0;
    double last = (double)(value == low ? ties : row->size) - 1;
    *logprob = value - row->top - (float)log(kept);
    return row->tokens[nth(row, value, n < 0 ? 0 : n < last ? n : last)];
}

static int64_t sample_row(row_of *row, const options *o, float uniform, float *logprob) {
    int greedy = o->temperature == 0;
    if (!greedy && (o->top_k > 0 || o->top_p < 1)) return sample_ranked(row, o, uniform, logprob);
    float low = row->top - DEPTH;
    if (!greedy && o->min_p > 0 && row->top + logf(o->min_p) > low) low = row->top + logf(o->min_p);
    double kept = from(row, low, low, row->top).weight;
    int64_t token = greedy ? nth(row, row->top, 0) : in_vocabulary_order(row, low, uniform * kept);
    *logprob = row->z[token] - row->top - (float)log(kept);
    return token;
}

/* Read a row into `room` (3, size). Return whether no logit is NaN and the largest is finite. */
static int read_row(row_of *row, const void *logits, int narrow, int64_t vocabulary, float inverse, float *room) {
    float *restrict z = room, *restrict weights = room + row->size, top = -INFINITY;
    int nans = 0;
    if (narrow)
        for (int64_t i = 0; i < vocabulary; i++) z[i] = widen(((const bf16 *)logits)[i]) * inverse;
    else
        for (int64_t i = 0; i < vocabulary; i++) z[i] = ((const float *)logits)[i] * inverse;
    for (int64_t i = vocabulary; i < row->size; i++) z[i] = -INFINITY;
#pragma omp simd reduction(max : top) reduction(| : nans)
    for (int64_t i = 0; i < row->size; i++) {
        top = z[i] > top ? z[i] : top;
        nans |= z[i] != z[i];
    }
    for (int64_t i = 0; i < row->size; i++) weights[i] = weight_of(z[i] - top);
    row->z = z, row->weights = weights, row->tokens = (int32_t *)(room + 2 * row->size), row->top = top;
    return !nans && top < INFINITY && top > -INFINITY;
}

/* Sample one token per row. uniforms, tokens, logprobs: (rows,). room: (threads, 3, vocabulary rounded up to BLOCK).
   temperature 0 selects the most probable token. */
void sample(const void *logits, int narrow, int64_t rows, int64_t vocabulary, int64_t stride, const float *uniforms,
            float temperature, int64_t top_k, float top_p, float min_p, int64_t *tokens, float *logprobs, float *room,
            int threads) {
    int64_t size = (vocabulary + BLOCK - 1) / BLOCK * BLOCK;
    options o = {temperature, top_p, min_p, top_k};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        row_of row = {.size = size};
        const char *from_here = (const char *)logits + r * stride * (narrow ? 2 : 4);
        float inverse = temperature == 0 ? 1 : 1 / temperature;
        if (read_row(&row, from_here, narrow, vocabulary, inverse, room + omp_get_thread_num() * 3 * size))
            tokens[r] = sample_row(&row, &o, uniforms[r], logprobs + r);
        else
            tokens[r] = 0, logprobs[r] = NAN;
    }
}
