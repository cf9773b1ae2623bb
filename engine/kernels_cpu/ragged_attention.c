/* Causal attention of the sequences of a packed row, forward and backward: ragged_attention.py describes the function.

   All sums are fp32. A unit of work is one family (a sequence and the sequences that begin with its tokens) at one key
   head. No other unit adds to the gradients of the family's keys and values. A thread copies keys and values into its
   own memory: as rows, or as panels of PANEL tokens, in which the numbers of one dimension are contiguous, or as both.
   Every product therefore reads its right operand in vectors. */

#include "numbers.h"
#include <stdlib.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 };
#endif
enum {
    ROWS = 6,                 /* rows of a tile of a product: ROWS x VECTORS sums stay in registers */
    PANEL = LANES * VECTORS,  /* keys of a panel */
    BLOCK = 8 * ROWS,         /* queries of a call of `attend` */
    AHEAD = 12,               /* prefetch distance in tokens */
    DEPTH = 128,              /* terms of a product at a time: DEPTH x PANEL numbers stay in the L1 cache */
};

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Return x * row + sum, rounded once. Without intrinsics, GCC's tuning for AMD processors fuses the operations in some
   tiles and not in others, and a query's numbers would depend on its position in a block. */
static inline __attribute__((always_inline)) vector multiply_add(float x, vector row, vector sum) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)row, (__m512)sum);
#elif defined(__FMA__)
    return (vector)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)row, (__m256)sum);
#else
    return x * row + sum;
#endif
}

/* Compute one tile: c (rows, width) = a (rows, depth) b (depth, width), or += with `add`. width is vectors * LANES. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, long depth, const float *a,
                                                       long a_row, long a_step, const float *b, long b_step, float *c,
                                                       long c_row, int add) {
    vector sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = add ? *(const vector *)(c + r * c_row + v * LANES) : (vector){0};
    for (long k = 0; k < depth; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_row + k * a_step];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sums[r][v] = multiply_add(x, *(const vector *)(b + k * b_step + v * LANES), sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(vector *)(c + r * c_row + v * LANES) = sums[r][v];
}

#define TILES(vectors)                                                                     \
    switch (rows) {                                                                        \
    case 6: tile(6, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add); break;    \
    case 5: tile(5, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add); break;    \
    case 4: tile(4, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add); break;    \
    case 3: tile(3, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add); break;    \
    case 2: tile(2, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add); break;    \
    default: tile(1, vectors, depth, a, a_row, a_step, b, b_step, c, c_row, add);          \
    }

static void tile_of(int rows, int whole, long depth, const float *a, long a_row, long a_step, const float *b,
                    long b_step, float *c, long c_row, int add) {
    if (whole) {
        TILES(VECTORS)
    } else {
        TILES(1)
    }
}

/* Compute c (m, n) = a (m, depth) b (depth, n), or += with `add`. n is a multiple of LANES, `a` has any strides. */
static void product(long m, long n, long depth, const float *a, long a_row, long a_step, const float *b, long b_step,
                    float *c, long c_row, int add) {
    for (long k = 0; k < depth; k += DEPTH) {
        long deep = depth - k < DEPTH ? depth - k : DEPTH;
        for (long j = 0; j < n;) {
            int whole = n - j >= PANEL;
            for (long i = 0; i < m; i += ROWS)
                tile_of(m - i < ROWS ? (int)(m - i) : ROWS, whole, deep, a + i * a_row + k * a_step, a_row, a_step,
                        b + k * b_step + j, b_step, c + i * c_row + j, c_row, add || k);
            j += whole ? PANEL : LANES;
        }
    }
}

/* A tensor (heads, tokens, size) in bf16 or fp32, with its strides between heads and between tokens in numbers. */
typedef struct {
    void *data;
    long head, token;
} rows_of;

typedef struct {
    const int64_t *spans;    /* (sequences, 4): start, length, number of keys of the family's first sequence that
                                precede the own keys, first query (below zero: no queries) */
    const int64_t *families; /* (families + 1): where each family begins in `spans` */
    long families_count, longest;
    long heads, key_heads, tokens, size, window;
    float scale;
    int wide; /* 1 for fp32, 0 for bf16 */
} work;

/* Prefetch the row of a later token. Rows of one head are far apart, so the hardware does not prefetch them. */
static void ask_for(const work *w, rows_of from, long head, long token) {
    long bytes = w->wide ? 4 : 2, at = (head * from.head + (token + AHEAD) * from.token) * bytes;
    for (long d = 0; d < w->size * bytes; d += 64) __builtin_prefetch((const char *)from.data + at + d);
}

/* Copy the row of a token to fp32 memory, multiplied by `factor`. */
static void take(const work *w, float *to, rows_of from, long head, long token, float factor) {
    long at = head * from.head + token * from.token;
    ask_for(w, from, head, token);
    if (w->wide)
        for (long d = 0; d < w->size; d++) to[d] = factor * ((const float *)from.data)[at + d];
    else
        for (long d = 0; d < w->size; d++) to[d] = factor * widen(((const bf16 *)from.data)[at + d]);
}

/* Copy fp32 numbers to the row of a token, multiplied by `factor`. */
static void give(const work *w, const float *from, rows_of to, long head, long token, float factor) {
    long at = head * to.head + token * to.token;
    if (w->wide)
        for (long d = 0; d < w->size; d++) ((float *)to.data)[at + d] = factor * from[d];
    else
        for (long d = 0; d < w->size; d++) ((bf16 *)to.data)[at + d] = narrow(factor * from[d]);
}

/* The memory of a thread. `padded` is the head size rounded up to LANES, `keys` the longest sequence rounded up to
   PANEL. */
typedef struct {
    long padded, keys;
    float *all, *query, *upstream, *scores, *slopes, *out, *key, *key_panels, *value, *value_panels, *d_key, *d_value;
} room;

static int make_room(const work *w, room *r, int backward) {
    r->padded = (w->size + LANES - 1) / LANES * LANES;
    r->keys = (w->longest + PANEL - 1) / PANEL * PANEL;
    long block = BLOCK * r->padded, scores = BLOCK * r->keys, whole = r->keys * r->padded;
    r->all = calloc(3 * block + 2 * scores + (backward ? 6 : 2) * whole, sizeof(float));
    if (!r->all) return 0;
    float *next = r->all;
    r->query = next, next += block;
    r->upstream = next, next += block;
    r->out = next, next += block;
    r->scores = next, next += scores;
    r->slopes = next, next += scores;
    r->key_panels = next, next += whole;
    r->value = next, next += whole;
    if (backward) {
        r->key = next, next += whole;
        r->value_panels = next, next += whole;
        r->d_key = next, next += whole;
        r->d_value = next;
    }
    return 1;
}

static void into_panel(const work *w, const room *r, float *panels, long place, const float *row) {
    float *panel = panels + place / PANEL * PANEL * r->padded + place % PANEL;
    for (long d = 0; d < w->size; d++) panel[d * PANEL] = row[d];
}

/* Copy keys and values of `length` tokens from `start` on to the positions from `place` on. */
static void take_keys(const work *w, room *r, rows_of key, rows_of value, long head, long start, long length,
                      long place, int backward) {
    for (long i = 0; i < length; i++) {
        float *row = backward ? r->key + (place + i) * r->padded : r->query;
        take(w, row, key, head, start + i, 1);
        into_panel(w, r, r->key_panels, place + i, row);
        row = r->value + (place + i) * r->padded;
        take(w, row, value, head, start + i, 1);
        if (backward) into_panel(w, r, r->value_panels, place + i, row);
    }
}

/* Compute out (m, keys) = a (m, size) times the panels of keys [low, high). */
static void by_panels(const room *r, long m, const float *a, const float *panels, long low, long high, float *out) {
    for (long j = low; j < high; j += PANEL)
        product(m, PANEL, r->padded, a, r->padded, 1, panels + j * r->padded, PANEL, out + j, r->keys, 0);
}

/* Return the first key that queries from position `first` on attend to, rounded down to the start of a panel. */
static long lowest(const work *w, long first) {
    long low = w->window && first >= w->window ? first - w->window + 1 : 0;
    return low / PANEL * PANEL;
}

/* The keys [begin, end) that one query attends to, and the multiples of LANES [from, to) around them. */
typedef struct {
    long begin, end, from, to;
} range;

static range seen(const work *w, long place) {
    long begin = w->window && place >= w->window ? place - w->window + 1 : 0, end = place + 1;
    return (range){begin, end, begin / LANES * LANES, (end + LANES - 1) / LANES * LANES};
}

static void fill(float *x, long from, long to, float with) {
    for (long j = from; j < to; j++) x[j] = with;
}

/* Fill the numbers of [from, to) that are outside of [begin, end). */
static void beside(float *x, range s, float with) {
    fill(x, s.from, s.begin, with);
    fill(x, s.end, s.to, with);
}

static float largest(const float *x, range s) {
    float lanes[LANES], found = -INFINITY;
    for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
    for (long j = s.from; j < s.to; j += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
    for (int l = 0; l < LANES; l++) found = lanes[l] > found ? lanes[l] : found;
    return found;
}

/* Replace each x by e^(x - from), at most 1, and return the sum. */
static float exponentials(float *x, range s, float from) {
    float sums[LANES] = {0}, sum = 0;
    for (long j = s.from; j < s.to; j += LANES)
        for (int l = 0; l < LANES; l++) {
            float below = x[j + l] - from;
            sums[l] += x[j + l] = exp_of(below > 0 ? 0 : below);
        }
    for (int l = 0; l < LANES; l++) sum += sums[l];
    return sum;
}

/* Turn the gradient of p into the gradient of the scores: slope = p (slope - sum of p slope). */
static void slopes_of(float *slope, const float *p, range s) {
    float sums[LANES] = {0}, mean = 0;
    for (long j = s.from; j < s.to; j += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += p[j + l] * slope[j + l];
    for (int l = 0; l < LANES; l++) mean += sums[l];
    for (long j = s.from; j < s.to; j += LANES)
        for (int l = 0; l < LANES; l++) slope[j + l] = p[j + l] * (slope[j + l] - mean);
}

/* Compute the outputs and log-sum-exps of `count` queries of one head. `first` is the position of the first query. */
static void attend(const work *w, room *r, rows_of query, rows_of out, float *lses, long head, long token, long first,
                   long count) {
    long low = lowest(w, first), high = first + count;
    for (long i = 0; i < count; i++) take(w, r->query + i * r->padded, query, head, token + i, w->scale);
    by_panels(r, count, r->query, r->key_panels, low, high, r->scores);
    float totals[BLOCK];
    for (long i = 0; i < count; i++) {
        float *row = r->scores + i * r->keys;
        range s = seen(w, first + i);
        beside(row, s, -INFINITY);
        float highest = largest(row, s);
        totals[i] = exponentials(row, s, highest);
        lses[head * w->tokens + token + i] = highest + logf(totals[i]);
        fill(row, low, s.begin, 0);
        fill(row, s.end, high, 0);
    }
    product(count, r->padded, high - low, r->scores + low, r->keys, 1, r->value + low * r->padded, r->padded, r->out,
            r->padded, 0);
    for (long i = 0; i < count; i++) give(w, r->out + i * r->padded, out, head, token + i, 1 / totals[i]);
}

/* Compute the gradients of `count` queries of one head, and add to the gradients of their keys and values. */
static void attend_back(const work *w, room *r, rows_of query, rows_of upstream, rows_of d_query, const float *lses,
                        long head, long token, long first, long count) {
    long low = lowest(w, first), high = first + count;
    for (long i = 0; i < count; i++) {
        take(w, r->query + i * r->padded, query, head, token + i, w->scale);
        take(w, r->upstream + i * r->padded, upstream, head, token + i, 1);
    }
    by_panels(r, count, r->query, r->key_panels, low, high, r->scores);
    by_panels(r, count, r->upstream, r->value_panels, low, high, r->slopes);
    for (long i = 0; i < count; i++) {
        float *p = r->scores + i * r->keys, *slope = r->slopes + i * r->keys;
        range s = seen(w, first + i);
        exponentials(p, s, lses[head * w->tokens + token + i]);
        fill(p, low, s.begin, 0), fill(p, s.end, high > s.to ? high : s.to, 0);
        fill(slope, low, s.begin, 0), fill(slope, s.end, high > s.to ? high : s.to, 0);
        slopes_of(slope, p, s);
    }
    long keys = high - low, at = low * r->padded;
    product(keys, r->padded, count, r->scores + low, 1, r->keys, r->upstream, r->padded, r->d_value + at, r->padded, 1);
    product(keys, r->padded, count, r->slopes + low, 1, r->keys, r->query, r->padded, r->d_key + at, r->padded, 1);
    product(count, r->padded, keys, r->slopes + low, r->keys, 1, r->key + at, r->padded, r->out, r->padded, 0);
    for (long i = 0; i < count; i++) give(w, r->out + i * r->padded, d_query, head, token + i, w->scale);
}

/* Write the gradients of the `length` keys and values from position `place` on, and set them to zero. */
static void give_keys(const work *w, room *r, rows_of d_key, rows_of d_value, long head, long start, long length,
                      long place) {
    for (long i = 0; i < length; i++) {
        give(w, r->d_key + (place + i) * r->padded, d_key, head, start + i, 1);
        give(w, r->d_value + (place + i) * r->padded, d_value, head, start + i, 1);
    }
    memset(r->d_key + place * r->padded, 0, length * r->padded * sizeof(float));
    memset(r->d_value + place * r->padded, 0, length * r->padded * sizeof(float));
}

/* The tensors of a call and, in backward, their gradients. */
typedef struct {
    rows_of query, key, value, out, d_query, d_key, d_value;
    float *lses;
    int backward; /* if set, `out` is the gradient of the output */
} tensors;

/* Compute one family at one key head. */
static void family(const work *w, room *r, const tensors *t, long number, long key_head) {
    long begin = w->families[number], end = w->families[number + 1], group = w->heads / w->key_heads;
    for (long one = begin; one < end; one++) {
        const int64_t *span = w->spans + 4 * one;
        long start = span[0], length = span[1], past = span[2], asks = span[3];
        take_keys(w, r, t->key, t->value, key_head, start, length, past, t->backward);
        if (asks < 0) continue;
        for (long head = key_head * group; head < (key_head + 1) * group; head++)
            for (long at = 0; at < length; at += BLOCK) {
                long count = length - at < BLOCK ? length - at : BLOCK;
                if (t->backward)
                    attend_back(w, r, t->query, t->out, t->d_query, t->lses, head, asks + at, past + at, count);
                else
                    attend(w, r, t->query, t->out, t->lses, head, asks + at, past + at, count);
            }
        if (t->backward && one != begin) give_keys(w, r, t->d_key, t->d_value, key_head, start, length, past);
    }
    const int64_t *first = w->spans + 4 * begin;
    if (t->backward) give_keys(w, r, t->d_key, t->d_value, key_head, first[0], first[1], 0);
}

/* Compute attention, or its gradients if `backward`. `data` and `steps` are the addresses and the strides (head, token)
   of query, key, value, out and, in backward, d_query, d_key, d_value. Return 0, or 1 if memory cannot be allocated. */
int ragged_attention(void *const *data, const int64_t *steps, float *lses, const int64_t *spans,
                     const int64_t *families, long families_count, long longest, long heads, long key_heads,
                     long tokens, long size, long window, float scale, int wide, int backward, int threads) {
    work w = {spans, families, families_count, longest, heads, key_heads, tokens, size, window, scale, wide};
    rows_of given[7] = {0};
    for (int i = 0; i < (backward ? 7 : 4); i++) given[i] = (rows_of){data[i], steps[2 * i], steps[2 * i + 1]};
    tensors t = {given[0], given[1], given[2], given[3], given[4], given[5], given[6], lses, backward};
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        room r;
        int made = make_room(&w, &r, backward);
        failed = !made;
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < families_count * key_heads; unit++)
            if (made) family(&w, &r, &t, unit / key_heads, unit % key_heads);
        if (made) free(r.all);
    }
    return failed;
}
