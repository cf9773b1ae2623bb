/* One token a row from logits (rows, vocabulary): the same function as sampling.sample, which says what it means.

   A row is read once, in blocks: the highest logit of each, and the sum of e^((z - highest) / temperature). Unfiltered
   rows then need the one block that the cumulative sum passes u in. Filtered rows are drawn in the order of the
   likelihood, yet nothing is sorted: the blocks' highest logits give a bound that all that matters lies above, what
   lies above it is gathered, and where the cumulative count or weight of that passes a value is found by histograms
   of the logits' bits, each within one bucket of the last.

   Every sum runs in one order, by blocks of the row, whatever the number of threads and rows. */

#include "numbers.h"
#include <float.h>
#include <omp.h>
#include <string.h>

enum { BLOCK = 256, BITS = 11, BUCKETS = 1 << BITS };
#define NOTHING (-INFINITY)
static const float DEPTH = 87.0f; /* weights of e^-87 and less count as nothing */

typedef struct {
    const void *logits; /* fp32, or bf16 where `narrow` */
    int narrow;
    int64_t vocabulary, blocks;
    float inverse, min_p, top_p; /* 1 / temperature */
    int64_t top_k; /* 0: all */
    float *highest, *sums; /* of each block; the sums, once `share` has been, where the likeliest token weighs 1 */
} Row;

/* What the filters have left to look at: keys in the order of the vocabulary, their places, their weights. */
typedef struct {
    int64_t count;
    int32_t *keys, *places;
    float *weights;
} Candidates;

/* The lowest key that a search wants, and the weight and number of the candidates above it. */
typedef struct {
    int32_t key;
    int64_t count;
    double weight;
} Found;

/* e^x for x <= 0. */
static inline float weight_of(float x) {
    float e = exp_of(x);
    return x < -DEPTH ? 0.0f : e;
}

/* An integer in the order of fp32 numbers; both zeros are one. */
static int32_t key_of(float z) {
    union { float number; int32_t bits; } both = {.number = z};
    int32_t bits = both.bits == INT32_MIN ? 0 : both.bits;
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static float value_of(int32_t key) {
    union { int32_t bits; float number; } both = {.bits = key ^ ((key >> 31) & 0x7fffffff)};
    return both.number;
}

/* A block of the row; nothing beyond the vocabulary. */
static void load(const Row *row, int64_t block, float *restrict z) {
    int64_t first = block * BLOCK, size = row->vocabulary - first < BLOCK ? row->vocabulary - first : BLOCK;
    if (row->narrow) {
        const bf16 *from = (const bf16 *)row->logits + first;
        if (size == BLOCK)
            for (int i = 0; i < BLOCK; i++) z[i] = widen(from[i]);
        else
            for (int i = 0; i < size; i++) z[i] = widen(from[i]);
    } else {
        memcpy(z, (const float *)row->logits + first, size * sizeof(float));
    }
    for (int64_t i = size; i < BLOCK; i++) z[i] = NOTHING;
}

/* One number of a block's: halves are put upon each other, in vectors, until few are left. */
#define FOLDED(x, a, b, put)                                                                                           \
    float half[BLOCK / 2];                                                                                             \
    for (int i = 0; i < BLOCK / 2; i++) { float a = x[i], b = x[i + BLOCK / 2]; half[i] = put; }                       \
    for (int i = 0; i < BLOCK / 4; i++) { float a = half[i], b = half[i + BLOCK / 4]; half[i] = put; }                 \
    for (int i = 0; i < BLOCK / 8; i++) { float a = half[i], b = half[i + BLOCK / 8]; half[i] = put; }                 \
    for (int i = 0; i < BLOCK / 16; i++) { float a = half[i], b = half[i + BLOCK / 16]; half[i] = put; }               \
    for (int i = 1; i < BLOCK / 16; i++) { float a = half[0], b = half[i]; half[0] = put; }                            \
    return half[0]

static float highest_of(const float *x) {
    FOLDED(x, a, b, a > b || b != b ? a : b);
}

static float sum_of(const float *x) {
    FOLDED(x, a, b, a + b);
}

/* e^((z - from) / temperature) of a block into `weights`; those below `least` are 0. Returns their sum. */
static float weigh(const float *z, float from, float inverse, float least, float *restrict weights) {
    for (int i = 0; i < BLOCK; i++) weights[i] = weight_of((z[i] - from) * inverse);
    if (least > 0)
        for (int i = 0; i < BLOCK; i++) weights[i] = weights[i] < least ? 0.0f : weights[i];
    return sum_of(weights);
}

static void measure(const Row *row, int64_t block) {
    float z[BLOCK], weights[BLOCK];
    load(row, block, z);
    float top = highest_of(z);
    row->highest[block] = top;
    row->sums[block] = weigh(z, top == NOTHING ? 0.0f : top, row->inverse, 0.0f, weights);
}

static float highest_of_row(const Row *row) {
    float top = NOTHING;
    for (int64_t b = 0; b < row->blocks; b++) top = row->highest[b] > top ? row->highest[b] : top;
    return top;
}

/* Sums by blocks become shares of one whole, which is returned: not a number where a logit is none. */
static double share(const Row *row, float top) {
    for (int64_t b = 0; b < row->blocks; b++) row->sums[b] *= weight_of((row->highest[b] - top) * row->inverse);
    double whole = 0;
    for (int64_t b = 0; b < row->blocks; b++) whole += row->sums[b];
    return whole;
}

static int64_t likeliest(const Row *row, float top) {
    float z[BLOCK];
    for (int64_t b = 0; b < row->blocks; b++) {
        if (row->highest[b] != top) continue;
        load(row, b, z);
        for (int i = 0; i < BLOCK; i++)
            if (z[i] == top) return b * BLOCK + i < row->vocabulary ? b * BLOCK + i : 0;
    }
    return 0;
}

/* Leave the tokens below min_p times the likeliest out of the sums; returns the new whole. */
static double drop_unlikely(const Row *row, float top) {
    float z[BLOCK], weights[BLOCK];
    double whole = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        row->sums[b] = 0;
        if (weight_of((row->highest[b] - top) * row->inverse) < row->min_p) continue;
        load(row, b, z);
        row->sums[b] = weigh(z, top, row->inverse, row->min_p, weights);
        whole += row->sums[b];
    }
    return whole;
}

/* In the order of the vocabulary. */
static int64_t draw(const Row *row, float top, float uniform, float *logprob) {
    float z[BLOCK], weights[BLOCK];
    double whole = share(row, top);
    if (!(whole > 0)) {
        *logprob = NAN;
        return 0;
    }
    if (row->min_p > 0) whole = drop_unlikely(row, top);
    double target = uniform * whole, before = 0, passed = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (!(row->sums[b] > 0)) continue;
        block = b, before = passed;
        passed += row->sums[b];
        if (passed > target) break;
    }
    load(row, block, z);
    weigh(z, top, row->inverse, row->min_p, weights);
    int chosen = 0;
    for (int i = 0; i < BLOCK; i++) {
        if (!(weights[i] > 0)) continue;
        chosen = i; /* the last that has weight, where the last bit of the sums hides the one wanted */
        before += weights[i];
        if (before > target) break;
    }
    *logprob = (z[chosen] - top) * row->inverse - (float)log(whole);
    return block * BLOCK + chosen;
}

/* The largest key in [low, high] at which the amount of all keys as large or larger - their number, or else their
   weight - reaches the target (`beyond`: exceeds it); the least key there is, where it never does. */
static Found search(const Candidates *all, int32_t low, int32_t high, double target, int by_count, int beyond) {
    static _Thread_local int32_t counts[BUCKETS];
    static _Thread_local double weights[BUCKETS];
    Found found = {.key = high, .count = 0, .weight = 0};
    uint32_t span = (uint32_t)high - (uint32_t)low;
    int bits = 6; /* of the number of buckets: a few candidates each */
    while (bits < BITS && all->count >> (bits + 2)) bits++;
    for (;;) {
        int shift = 0;
        while (span >> shift >> bits) shift++;
        int used = (int)(span >> shift) + 1, last = 0;
        memset(counts, 0, used * sizeof *counts);
        memset(weights, 0, used * sizeof *weights);
        for (int64_t i = 0; i < all->count; i++) {
            uint32_t below = (uint32_t)high - (uint32_t)all->keys[i]; /* wraps around for keys above */
            if (below > span) continue;
            counts[below >> shift]++;
            weights[below >> shift] += all->weights[i];
        }
        for (int b = used; b--;)
            if (counts[b]) { last = b; break; }
        int bucket = 0;
        for (;; bucket++) {
            double amount = by_count ? found.count + counts[bucket] : found.weight + weights[bucket];
            if (bucket == last || (counts[bucket] && (beyond ? amount > target : amount >= target))) break;
            found.count += counts[bucket];
            found.weight += weights[bucket];
        }
        high = (int32_t)((uint32_t)high - ((uint32_t)bucket << shift));
        uint32_t left = span - ((uint32_t)bucket << shift), width = ((uint32_t)1 << shift) - 1;
        span = left < width ? left : width;
        if (span == 0 || counts[bucket] <= 1) break;
    }
    found.key = high;
    for (int64_t i = 0; span && i < all->count; i++) /* the only one of its bucket */
        if ((uint32_t)high - (uint32_t)all->keys[i] <= span) { found.key = all->keys[i]; break; }
    return found;
}

/* A logit that no token below can be kept under, by what the blocks tell. */
static float bound_of(const Row *row, float top, double whole, Candidates *room) {
    float t = 1 / row->inverse, bound = top - DEPTH * t > -FLT_MAX ? top - DEPTH * t : -FLT_MAX;
    if (row->top_k) { /* as many blocks as tokens are wanted have one above */
        if (row->top_k <= row->blocks) {
            room->count = row->blocks;
            for (int64_t b = 0; b < row->blocks; b++) room->keys[b] = key_of(row->highest[b]), room->weights[b] = 0;
            float highest = value_of(search(room, INT32_MIN, key_of(top), (double)row->top_k, 1, 0).key);
            bound = highest > bound ? highest : bound;
        }
        return bound;
    }
    /* All below it together weigh less than what top-p leaves out; a little room is for rounding. */
    float left_out = top + t * (float)(log((1.0 - row->top_p) * whole / (double)row->vocabulary) - 0.01);
    bound = left_out > bound ? left_out : bound;
    if (row->min_p > 0) {
        float unlikely = top + t * (logf(row->min_p) - 0.01f);
        bound = unlikely > bound ? unlikely : bound;
    }
    return bound;
}

static void gather(const Row *row, float top, float bound, Candidates *into) {
    float z[BLOCK];
    int64_t n = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (!(row->highest[b] >= bound)) continue;
        load(row, b, z);
        for (int i = 0; i < BLOCK; i += 16) {
            int any = 0;
            for (int j = i; j < i + 16; j++) any |= z[j] >= bound;
            for (int j = i; any && j < i + 16; j++) {
                into->keys[n] = key_of(z[j]);
                into->places[n] = (int32_t)(b * BLOCK + j);
                n += z[j] >= bound;
            }
        }
    }
    into->count = n;
    for (int64_t i = 0; i < n; i++) into->weights[i] = weight_of((value_of(into->keys[i]) - top) * row->inverse);
}

/* In falling likelihood, ties in the order of the vocabulary. `room` is for the vocabulary and a token. */
static int64_t draw_filtered(const Row *row, float top, float uniform, float *logprob, Candidates *room) {
    double whole = share(row, top);
    if (!(whole > 0)) {
        *logprob = NAN;
        return 0;
    }
    gather(row, top, bound_of(row, top, whole, room), room);
    const Candidates *all = room;
    int32_t low = key_of(top), high = low;
    double kept = 0;
    for (int64_t i = 0; i < all->count; i++) {
        low = all->keys[i] < low ? all->keys[i] : low;
        kept += all->weights[i];
    }
    int64_t ties = INT64_MAX; /* so many of the lowest key are kept */
    if (row->top_k && all->count > row->top_k) {
        Found edge = search(all, low, high, (double)row->top_k, 1, 0);
        low = edge.key, ties = row->top_k - edge.count;
        kept = edge.weight + (double)ties * weight_of((value_of(low) - top) * row->inverse);
    }
    if (row->top_p < 1) {
        double target = row->top_p * (row->top_k ? kept : whole); /* the bound left some of the whole out */
        Found edge = search(all, low, high, target, 0, 0);
        double one = weight_of((value_of(edge.key) - top) * row->inverse);
        double wanted = one > 0 ? ceil((target - edge.weight) / one) : 1;
        int64_t most = edge.key == low ? ties : INT64_MAX, same = 0;
        for (int64_t i = 0; i < all->count; i++) same += all->keys[i] == edge.key;
        low = edge.key, ties = same < most ? same : most;
        ties = wanted < 1 ? 1 : wanted < (double)ties ? (int64_t)wanted : ties;
        kept = edge.weight + (double)ties * one;
    }
    if (row->min_p > 0 && weight_of((value_of(low) - top) * row->inverse) < row->min_p) {
        low = high, kept = 0, ties = INT64_MAX;
        for (int64_t i = 0; i < all->count; i++) {
            if (all->weights[i] < row->min_p) continue;
            kept += all->weights[i];
            low = all->keys[i] < low ? all->keys[i] : low;
        }
    }
    double target = uniform * kept;
    Found at = search(all, low, high, target, 0, 1);
    float z = value_of(at.key);
    double one = weight_of((z - top) * row->inverse), wanted = one > 0 ? floor((target - at.weight) / one) : 0;
    int64_t last = (at.key == low ? ties : INT64_MAX) - 1, rank = 0, token = 0;
    for (int64_t i = 0; i < all->count; i++) {
        if (all->keys[i] != at.key) continue;
        token = all->places[i];
        if (rank == last || rank >= wanted) break;
        rank++;
    }
    *logprob = (z - top) * row->inverse - (float)log(kept);
    return token;
}

/* uniforms, tokens, logprobs: (rows,). stats: (2, rows, blocks). candidates: (threads, 3, vocabulary + 1), read only
   where top_k > 0 or top_p < 1. temperature 0 takes the likeliest token. */
void sample(const void *logits, int narrow, int64_t rows, int64_t vocabulary, int64_t stride, const float *uniforms,
            float temperature, int64_t top_k, float top_p, float min_p, int64_t *tokens, float *logprobs, float *stats,
            int32_t *candidates, int threads) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK, size = vocabulary + 1;
    int greedy = temperature == 0, filtered = !greedy && (top_k > 0 || top_p < 1);
    Row any = {
        .narrow = narrow, .vocabulary = vocabulary, .blocks = blocks, .inverse = greedy ? 1 : 1 / temperature,
        .min_p = greedy ? 0 : min_p, .top_p = top_p, .top_k = top_k < vocabulary ? top_k : 0,
    };
#define ROW(r)                                                                                                         \
    Row row = any;                                                                                                     \
    row.logits = (const char *)logits + (r) * stride * (narrow ? 2 : 4);                                               \
    row.highest = stats + (r) * blocks, row.sums = stats + (rows + (r)) * blocks
#pragma omp parallel num_threads(threads)
    {
        if (rows < threads) { /* several measure one row */
#pragma omp for schedule(static)
            for (int64_t item = 0; item < rows * blocks; item++) {
                ROW(item / blocks);
                measure(&row, item % blocks);
            }
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            ROW(r);
            if (rows >= threads)
                for (int64_t b = 0; b < blocks; b++) measure(&row, b);
            float top = highest_of_row(&row);
            if (greedy) {
                tokens[r] = likeliest(&row, top);
                logprobs[r] = (float)-log(share(&row, top));
            } else if (filtered) {
                int32_t *mine = candidates + omp_get_thread_num() * 3 * size;
                Candidates room = {0, mine, mine + size, (float *)(mine + 2 * size)};
                tokens[r] = draw_filtered(&row, top, uniforms[r], &logprobs[r], &room);
            } else {
                tokens[r] = draw(&row, top, uniforms[r], &logprobs[r]);
            }
        }
    }
}
