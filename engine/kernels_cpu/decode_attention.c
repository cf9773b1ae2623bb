/* Attention of one query token per sequence over its slots of a cache: attention.py describes the function.

A task covers at most SHARE keys of a sequence under one key head, for all query heads that read this key head. If a
sequence has several tasks, each writes the weighted sum of its values, the sum of its weights and its largest score.
`join` combines these partial results (Dao et al., 2023, "Flash-Decoding for long-context inference"). The bounds of the
tasks depend only on the sequence, so the result depends neither on the number of threads nor on the other sequences.
Neighbouring sequences with the same prompt share the tasks of its keys. A task processes their queries one after the
other, so the keys are read from memory once. */

#include <stdlib.h>
#include <string.h>
#include "numbers.h"

#define INLINE static inline __attribute__((always_inline)) /* so that arguments such as `half` are constants inside */
#define LESS(a, b) ((a) < (b) ? (a) : (b))
enum {
    SHARE = 256,  /* keys of a task, at most */
    AHEAD = 4096, /* prefetch distance in bytes: hardware prefetchers stop at the end of a page */
};

/* The arguments, as declared in attention.py. Strides are in numbers. */
struct call {
    const char *query, *new_keys, *new_values; /* one token of each row */
    char *keys, *values, *out;                 /* (slots, key_heads, capacity, *_size), (rows, heads, value_size) */
    const char *prompt_keys, *prompt_values;   /* (prompt slots, key_heads, prompt_capacity, *_size) */
    const int64_t *slots, *lengths;            /* (rows,): the row's slot, and its number of tokens with the new one */
    const int64_t *prompt_slots, *prompt_lengths; /* (rows,): the row's prompt slot, and its tokens there */
    const int64_t *firsts;                     /* (rows,): first neighbouring row with the same prompt */
    int64_t rows, heads, key_heads, capacity, prompt_capacity, key_size, value_size;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t window; /* 0: no window */
    float scale, softcap; /* softcap 0: no soft cap */
    int32_t half, threads; /* half: 1 for bf16, 0 for fp32 */
};

/* Attention to tokens [begin, end) for `rows` sequences from `row` on. The tokens are in one slot, a prompt slot if
   `of_prompt`. The task computes partial result `part` of each sequence. */
struct task { int64_t row, rows, of_prompt, begin, end, part; };

/* The tasks of a call. Row r has parts[r] partial results, from index first[r] on in `partial`. A partial result is
   (heads, value_size + 2): the largest score, the sum of the weights, and the weighted sum of the values. */
struct plan { struct task *tasks; int64_t count, *first, *parts; float *partial; };

INLINE float at(const void *numbers, int64_t place, int half) {
    return half ? widen(((const bf16 *)numbers)[place]) : ((const float *)numbers)[place];
}

/* Prefetch `bytes` bytes, AHEAD of `here`. A prefetch from unmapped memory has no effect. */
INLINE void prefetch(const void *here, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)here + AHEAD + b);
}

/* Write the products of a query with `count` <= SHARE keys. `scores` has memory for SHARE numbers. */
INLINE void products(float *scores, const void *query, const char *keys, int64_t count, int64_t size, int half) {
    for (int64_t t = 0; t < count; t++) {
        const char *key = keys + t * size * (half ? 2 : 4);
        float sum = 0;
        prefetch(key, size * (half ? 2 : 4));
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < size; d++) sum += at(query, d, half) * at(key, d, half);
        scores[t] = sum;
    }
}

/* sum += weights (count,) times values (count, size). */
INLINE void add_weighted(float *restrict sum, const float *restrict weights, const char *values, int64_t count,
                         int64_t size, int half) {
    int64_t t = 0;
    for (; t + 8 <= count; t += 8) {
        const char *v = values + t * size * (half ? 2 : 4);
        const float *w = weights + t;
        prefetch(v, 8 * size * (half ? 2 : 4));
#pragma omp simd
        for (int64_t d = 0; d < size; d++)
            sum[d] += ((w[0] * at(v, d, half) + w[1] * at(v, size + d, half))
                       + (w[2] * at(v, 2 * size + d, half) + w[3] * at(v, 3 * size + d, half)))
                    + ((w[4] * at(v, 4 * size + d, half) + w[5] * at(v, 5 * size + d, half))
                       + (w[6] * at(v, 6 * size + d, half) + w[7] * at(v, 7 * size + d, half)));
    }
    for (; t < count; t++) {
        const char *v = values + t * size * (half ? 2 : 4);
#pragma omp simd
        for (int64_t d = 0; d < size; d++) sum[d] += weights[t] * at(v, d, half);
    }
}

INLINE float tanh_of(float x) {
    float e = exp_of(-2 * fabsf(x));
    return copysignf((1 - e) / (1 + e), x);
}

/* Turn `count` products into scores, in place, and return the largest score. */
INLINE float to_scores(float *scores, int64_t count, float scale, float softcap) {
    float largest = -INFINITY;
    if (softcap == 0) {
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < count; t++) {
            scores[t] *= scale;
            largest = scores[t] > largest ? scores[t] : largest;
        }
        return largest;
    }
#pragma omp simd reduction(max : largest)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = softcap * tanh_of(scores[t] * scale / softcap);
        largest = scores[t] > largest ? scores[t] : largest;
    }
    return largest;
}

/* Return the number of a row's tokens that are in its prompt slot. */
INLINE int64_t prompt_tokens(const struct call *c, int64_t row) {
    return LESS(c->prompt_lengths[row], c->lengths[row]);
}

/* Write a row's new key and value into the cache. */
INLINE void append_token(const struct call *c, int64_t row, int64_t head, int half) {
    int64_t wide = half ? 2 : 4, position = c->lengths[row] - 1 - prompt_tokens(c, row);
    int64_t place = (c->slots[row] * c->key_heads + head) * c->capacity + position;
    memcpy(c->keys + place * c->key_size * wide, c->new_keys + (row * c->key_row + head * c->key_head) * wide,
           c->key_size * wide);
    memcpy(c->values + place * c->value_size * wide,
           c->new_values + (row * c->value_row + head * c->value_head) * wide, c->value_size * wide);
}

/* Write the output of a row under one head: the weighted sum over the sum of the weights, zeros without weights. */
INLINE void write_output(const struct call *c, int64_t row, int64_t head, const float *sum, float mass, int half) {
    int64_t place = (row * c->heads + head) * c->value_size;
    float share = mass ? 1 / mass : 0;
    for (int64_t d = 0; d < c->value_size; d++) {
        if (half) ((bf16 *)c->out)[place + d] = narrow(sum[d] * share);
        else ((float *)c->out)[place + d] = sum[d] * share;
    }
}

static float *partial_of(const struct plan *p, const struct call *c, int64_t row, int64_t part, int64_t head) {
    return p->partial + ((p->first[row] + part) * c->heads + head) * (c->value_size + 2);
}

/* Run one task under one key head. */
INLINE void attend(const struct call *c, const struct plan *p, const struct task *task, int64_t key_head, int half) {
    int64_t group = c->heads / c->key_heads, wide = half ? 2 : 4;
    int64_t slot = task->of_prompt ? c->prompt_slots[task->row] : c->slots[task->row];
    int64_t capacity = task->of_prompt ? c->prompt_capacity : c->capacity;
    int64_t first = task->begin - (task->of_prompt ? 0 : prompt_tokens(c, task->row));
    int64_t base = (slot * c->key_heads + key_head) * capacity + first;
    const char *keys = (task->of_prompt ? c->prompt_keys : c->keys) + base * c->key_size * wide;
    const char *values = (task->of_prompt ? c->prompt_values : c->values) + base * c->value_size * wide;
    int64_t count = task->end - task->begin;
    for (int64_t row = task->row; row < task->row + task->rows; row++) {
        if (!task->of_prompt && task->end == c->lengths[row]) append_token(c, row, key_head, half);
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
            float weights[SHARE], sum[c->value_size], mass = 0;
            const char *query = c->query + (row * c->query_row + head * c->query_head) * wide;
            products(weights, query, keys, count, c->key_size, half);
            float largest = to_scores(weights, count, c->scale, c->softcap);
#pragma omp simd reduction(+ : mass)
            for (int64_t t = 0; t < count; t++) {
                weights[t] = exp_of(weights[t] - largest);
                mass += weights[t];
            }
            memset(sum, 0, sizeof sum);
            add_weighted(sum, weights, values, count, c->value_size, half);
            if (p->parts[row] == 1) {
                write_output(c, row, head, sum, mass, half);
                continue;
            }
            float *partial = partial_of(p, c, row, task->part, head);
            partial[0] = largest;
            partial[1] = mass;
            memcpy(partial + 2, sum, sizeof sum);
        }
    }
}

static void attend_half(const struct call *c, const struct plan *p, const struct task *task, int64_t key_head) {
    attend(c, p, task, key_head, 1);
}

static void attend_full(const struct call *c, const struct plan *p, const struct task *task, int64_t key_head) {
    attend(c, p, task, key_head, 0);
}

/* Combine the partial results of a row under one head into one softmax, and write the output. */
static void join(const struct call *c, const struct plan *p, int64_t row, int64_t head) {
    float sum[c->value_size], largest = -INFINITY, mass = 0;
    memset(sum, 0, sizeof sum);
    for (int64_t part = 0; part < p->parts[row]; part++) {
        float other = partial_of(p, c, row, part, head)[0];
        largest = other > largest ? other : largest;
    }
    for (int64_t part = 0; part < p->parts[row]; part++) {
        const float *partial = partial_of(p, c, row, part, head);
        float weight = exp_of(partial[0] - largest);
        mass += weight * partial[1];
        for (int64_t d = 0; d < c->value_size; d++) sum[d] += weight * partial[2 + d];
    }
    write_output(c, row, head, sum, mass, c->half);
}

/* Divide tokens [begin, end) into tasks of at most SHARE tokens. */
static void add_tasks(struct plan *p, int64_t row, int64_t rows, int64_t of_prompt, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += SHARE) {
        p->tasks[p->count++] = (struct task){row, rows, of_prompt, t, LESS(t + SHARE, end), p->parts[row]};
        for (int64_t member = row; member < row + rows; member++) p->parts[member]++;
    }
}

/* Return the first token that a row attends to. */
static int64_t first_seen(const struct call *c, int64_t row) {
    return c->window && c->lengths[row] > c->window ? c->lengths[row] - c->window : 0;
}

/* Plan the tasks of all rows. Tasks of prompts come first, because they take longest. Neighbouring rows that attend to
   the same tokens of a prompt share its tasks. */
static void plan_tasks(struct plan *p, const struct call *c) {
    int64_t parts = 0;
    memset(p->parts, 0, c->rows * sizeof *p->parts);
    for (int64_t row = 0, next; row < c->rows; row = next) {
        int64_t begin = first_seen(c, row), end = prompt_tokens(c, row);
        for (next = row + 1; next < c->rows && c->firsts[next] == c->firsts[row]; next++)
            if (first_seen(c, next) != begin || prompt_tokens(c, next) != end) break;
        add_tasks(p, row, next - row, 1, begin, end);
    }
    for (int64_t row = 0; row < c->rows; row++) {
        int64_t begin = first_seen(c, row), own = prompt_tokens(c, row);
        add_tasks(p, row, 1, 0, begin > own ? begin : own, c->lengths[row]);
        p->first[row] = parts;
        parts += p->parts[row];
    }
}

/* Return an upper bound of the number of tasks and of partial results. */
static int64_t most_parts(const struct call *c) {
    int64_t most = 0;
    for (int64_t row = 0; row < c->rows; row++) most += c->lengths[row] / SHARE + 2;
    return most;
}

/* Compute the attention of a call. Return 0, or 1 if memory cannot be allocated. */
int decode_attention(const struct call *c) {
    int64_t most = most_parts(c);
    struct plan p = {.tasks = malloc(most * sizeof *p.tasks), .first = malloc(2 * c->rows * sizeof *p.first)};
    p.partial = malloc(most * c->heads * (c->value_size + 2) * sizeof(float));
    int failed = c->rows && (!p.tasks || !p.first || !p.partial);
    if (!failed) {
        p.parts = p.first + c->rows;
        plan_tasks(&p, c);
        int64_t all = p.count * c->key_heads, chunk = all / (32 * c->threads) + 1;
#pragma omp parallel num_threads(c->threads)
        {
#pragma omp for schedule(dynamic, chunk)
            for (int64_t i = 0; i < all; i++)
                (c->half ? attend_half : attend_full)(c, &p, p.tasks + i / c->key_heads, i % c->key_heads);
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < c->rows * c->heads; i++)
                if (p.parts[i / c->heads] != 1) join(c, &p, i / c->heads, i % c->heads);
        }
    }
    free(p.tasks);
    free(p.first);
    free(p.partial);
    return failed;
}
