/* Causal attention of the sequences of a packed row, forward and backward: attention.py describes the function.

   All sums are fp32. A unit of work is one family (a sequence and the sequences that begin with its tokens) at one key
   head. No other unit adds to the gradients of the family's keys and values. A thread copies keys and values into its
   own memory: as rows, or as panels of PANEL tokens, in which the numbers of one dimension are contiguous, or as both.
   Every product therefore reads its right operand in vectors. */

#include "numbers.h"
#include <stdlib.h>
#include <string.h>
#include "tile.h"

enum {
    BLOCK = 8 * ROWS, /* queries of a call of `attend` */
    AHEAD = 12,       /* prefetch distance in tokens */
    DEPTH = 128,      /* terms of a product at a time: DEPTH x PANEL numbers stay in the L1 cache */
};

static void tile_of(int rows, int is_full, long depth, const float *a, long a_row, long a_column, const float *b,
                    long b_row, float *c, long c_row, int add) {
    const float *start = add ? c : 0;
    long start_row = c_row;
    if (is_full) {
        TILE_OF(rows, VECTORS, 0)
    } else {
        TILE_OF(rows, 1, 0)
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
} view;

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
static void prefetch_row(const work *w, view from, long head, long token) {
    long bytes = w->wide ? 4 : 2, at = (head * from.head + (token + AHEAD) * from.token) * bytes;
    for (long d = 0; d < w->size * bytes; d += 64) __builtin_prefetch((const char *)from.data + at + d);
}

/* Copy the row of a token to fp32 memory, multiplied by `factor`. */
static void load_row(const work *w, float *to, view from, long head, long token, float factor) {
    long at = head * from.head + token * from.token;
    prefetch_row(w, from, head, token);
    if (w->wide)
        for (long d = 0; d < w->size; d++) to[d] = factor * ((const float *)from.data)[at + d];
    else
        for (long d = 0; d < w->size; d++) to[d] = factor * widen(((const bf16 *)from.data)[at + d]);
}

/* Copy fp32 numbers to the row of a token, multiplied by `factor`. */
static void store_row(const work *w, const float *from, view to, long head, long token, float factor) {
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
} workspace;

static int allocate(const work *w, workspace *r, int backward) {
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

static void copy_to_panel(const work *w, const workspace *r, float *panels, long place, const float *row) {
    float *panel = panels + place / PANEL * PANEL * r->padded + place % PANEL;
    for (long d = 0; d < w->size; d++) panel[d * PANEL] = row[d];
}

/* Copy keys and values of `length` tokens from `start` on to the positions from `place` on. */
static void load_keys(const work *w, workspace *r, view key, view value, long head, long start, long length, long place,
                      int backward) {
    for (long i = 0; i < length; i++) {
        float *row = backward ? r->key + (place + i) * r->padded : r->query;
        load_row(w, row, key, head, start + i, 1);
        copy_to_panel(w, r, r->key_panels, place + i, row);
        row = r->value + (place + i) * r->padded;
        load_row(w, row, value, head, start + i, 1);
        if (backward) copy_to_panel(w, r, r->value_panels, place + i, row);
    }
}

/* Compute out (m, keys) = a (m, size) times the panels of keys [low, high). */
static void multiply_panels(const workspace *r, long m, const float *a, const float *panels, long low, long high,
                            float *out) {
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

static range visible_keys(const work *w, long place) {
    long begin = w->window && place >= w->window ? place - w->window + 1 : 0, end = place + 1;
    return (range){begin, end, begin / LANES * LANES, (end + LANES - 1) / LANES * LANES};
}

static void fill(float *x, long from, long to, float with) {
    for (long j = from; j < to; j++) x[j] = with;
}

/* Fill the numbers of [from, to) that are outside of [begin, end). */
static void fill_outside(float *x, range s, float with) {
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
static void attend(const work *w, workspace *r, view query, view out, float *lses, long head, long token, long first,
                   long count) {
    long low = lowest(w, first), high = first + count;
    for (long i = 0; i < count; i++) load_row(w, r->query + i * r->padded, query, head, token + i, w->scale);
    multiply_panels(r, count, r->query, r->key_panels, low, high, r->scores);
    float totals[BLOCK];
    for (long i = 0; i < count; i++) {
        float *row = r->scores + i * r->keys;
        range s = visible_keys(w, first + i);
        fill_outside(row, s, -INFINITY);
        float highest = largest(row, s);
        totals[i] = exponentials(row, s, highest);
        lses[head * w->tokens + token + i] = highest + logf(totals[i]);
        fill(row, low, s.begin, 0);
        fill(row, s.end, high, 0);
    }
    product(count, r->padded, high - low, r->scores + low, r->keys, 1, r->value + low * r->padded, r->padded, r->out,
            r->padded, 0);
    for (long i = 0; i < count; i++) store_row(w, r->out + i * r->padded, out, head, token + i, 1 / totals[i]);
}

/* Compute the gradients of `count` queries of one head, and add to the gradients of their keys and values. */
static void attend_back(const work *w, workspace *r, view query, view upstream, view d_query, const float *lses,
                        long head, long token, long first, long count) {
    long low = lowest(w, first), high = first + count;
    for (long i = 0; i < count; i++) {
        load_row(w, r->query + i * r->padded, query, head, token + i, w->scale);
        load_row(w, r->upstream + i * r->padded, upstream, head, token + i, 1);
    }
    multiply_panels(r, count, r->query, r->key_panels, low, high, r->scores);
    multiply_panels(r, count, r->upstream, r->value_panels, low, high, r->slopes);
    for (long i = 0; i < count; i++) {
        float *p = r->scores + i * r->keys, *slope = r->slopes + i * r->keys;
        range s = visible_keys(w, first + i);
        exponentials(p, s, lses[head * w->tokens + token + i]);
        fill(p, low, s.begin, 0), fill(p, s.end, high > s.to ? high : s.to, 0);
        fill(slope, low, s.begin, 0), fill(slope, s.end, high > s.to ? high : s.to, 0);
        slopes_of(slope, p, s);
    }
    long keys = high - low, at = low * r->padded;
    product(keys, r->padded, count, r->scores + low, 1, r->keys, r->upstream, r->padded, r->d_value + at, r->padded, 1);
    product(keys, r->padded, count, r->slopes + low, 1, r->keys, r->query, r->padded, r->d_key + at, r->padded, 1);
    product(count, r->padded, keys, r->slopes + low, r->keys, 1, r->key + at, r->padded, r->out, r->padded, 0);
    for (long i = 0; i < count; i++) store_row(w, r->out + i * r->padded, d_query, head, token + i, w->scale);
}

/* Write the gradients of the `length` keys and values from position `place` on, and set them to zero. */
static void store_key_gradients(const work *w, workspace *r, view d_key, view d_value, long head, long start,
                                long length, long place) {
    for (long i = 0; i < length; i++) {
        store_row(w, r->d_key + (place + i) * r->padded, d_key, head, start + i, 1);
        store_row(w, r->d_value + (place + i) * r->padded, d_value, head, start + i, 1);
    }
    memset(r->d_key + place * r->padded, 0, length * r->padded * sizeof(float));
    memset(r->d_value + place * r->padded, 0, length * r->padded * sizeof(float));
}

/* The tensors of a call and, in backward, their gradients. */
typedef struct {
    view query, key, value, out, d_query, d_key, d_value;
    float *lses;
    int backward; /* if set, `out` is the gradient of the output */
} tensors;

/* Compute one family at one key head. */
static void family(const work *w, workspace *r, const tensors *t, long number, long key_head) {
    long begin = w->families[number], end = w->families[number + 1], group = w->heads / w->key_heads;
    for (long one = begin; one < end; one++) {
        const int64_t *span = w->spans + 4 * one;
        long start = span[0], length = span[1], past = span[2], first_query = span[3];
        load_keys(w, r, t->key, t->value, key_head, start, length, past, t->backward);
        if (first_query < 0) continue;
        for (long head = key_head * group; head < (key_head + 1) * group; head++)
            for (long at = 0; at < length; at += BLOCK) {
                long count = length - at < BLOCK ? length - at : BLOCK;
                if (t->backward)
                    attend_back(w, r, t->query, t->out, t->d_query, t->lses, head, first_query + at, past + at, count);
                else
                    attend(w, r, t->query, t->out, t->lses, head, first_query + at, past + at, count);
            }
        if (t->backward && one != begin) store_key_gradients(w, r, t->d_key, t->d_value, key_head, start, length, past);
    }
    const int64_t *first = w->spans + 4 * begin;
    if (t->backward) store_key_gradients(w, r, t->d_key, t->d_value, key_head, first[0], first[1], 0);
}

/* Compute attention, or its gradients if `backward`. `data` and `steps` are the addresses and the strides (head, token)
   of query, key, value, out and, in backward, d_query, d_key, d_value. Return 0, or 1 if memory cannot be allocated. */
int ragged_attention(void *const *data, const int64_t *steps, float *lses, const int64_t *spans,
                     const int64_t *families, long families_count, long longest, long heads, long key_heads,
                     long tokens, long size, long window, float scale, int wide, int backward, int threads) {
    work w = {spans, families, families_count, longest, heads, key_heads, tokens, size, window, scale, wide};
    view views[7] = {0};
    for (int i = 0; i < (backward ? 7 : 4); i++) views[i] = (view){data[i], steps[2 * i], steps[2 * i + 1]};
    tensors t = {views[0], views[1], views[2], views[3], views[4], views[5], views[6], lses, backward};
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        workspace r;
        int allocated = allocate(&w, &r, backward);
        failed = !allocated;
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < families_count * key_heads; unit++)
            if (allocated) family(&w, &r, &t, unit / key_heads, unit % key_heads);
        if (allocated) free(r.all);
    }
    return failed;
}
