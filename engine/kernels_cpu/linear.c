/* Products of a few rows in bf16 with a large matrix, y = x W^T + b. engine/generation/prepacked_linears.py uses them.

   Reading W takes most of the time of few rows, so each row of W is read from memory once, in order, and prefetched. A
   tile has 16 outputs: 8 rows of x by 2 of W, and 4 by 4, 2 by 8 and 1 by 16 for the remaining rows. An output has
   LANES partial sums over BLOCK inputs. Their total is added to the output block after block. This order is always the
   same, so no number of y depends on the number of rows or of threads.

   With more rows, arithmetic takes most of the time. Intel's processors multiply pairs of bf16 numbers at half the rate
   of fp32 numbers (measured: 81 and 157 GFLOP/s). Without PAIRS a word of two bf16 numbers is split into two fp32
   numbers, with one instruction each. x is split once per block of inputs. */

#include "numbers.h"
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <cpuid.h>
#include <immintrin.h>

#define TILE 16    /* outputs of a tile, and the fewest outputs of a matrix */
#define SPAN 64    /* rows of W, at most, that are multiplied with ROWS rows of x while they are in the L2 cache */
#define ROWS 16
#define AHEAD 3    /* rows of W (pairs, for 8 rows of x) between a prefetch and its use */
#define BLOCK 1024 /* inputs at a time: 8 rows of x of this length stay in the L1 cache */
#define INLINE static inline __attribute__((always_inline))

/* Return 1, or 0 if PyTorch is faster, because the processor has AMX-BF16. */
int has_kernel(void) {
    unsigned a, b, c, d;
    return !(__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1));
}

/* A `lanes` vector holds the LANES partial sums of an output, and a `words` vector holds 2 * LANES inputs in bf16. */
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define STEP (2 * LANES)
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* A `numbers` holds STEP inputs for products: pairs in bf16, or the first and the second number of each pair in fp32.
   library.py defines INTEL. */
#if defined(__AVX512BF16__) && !defined(INTEL)
#define PAIRS
typedef struct { words pairs; } numbers;
#else
typedef struct { lanes first, second; } numbers;
#endif

INLINE numbers split(words read) {
#ifdef PAIRS
    return (numbers){read};
#else
    return (numbers){(lanes)(read << 16), (lanes)(read & 0xffff0000u)};
#endif
}

INLINE numbers load(const bf16 *from) {
    words read;
    memcpy(&read, from, sizeof read);
    return split(read);
}

/* Load the last `count` inputs of a row, followed by zeros. */
INLINE numbers load_some(const bf16 *from, long count) {
    bf16 some[STEP] = {0};
    memcpy(some, from, count * sizeof(bf16));
    return load(some);
}

INLINE lanes multiply_add_lanes(lanes x, lanes w, lanes sum) {
#ifdef __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#else
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#endif
}

INLINE lanes multiply_add(numbers x, numbers w, lanes sum) {
#ifdef PAIRS
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.pairs, (__m512bh)w.pairs);
#else
    return multiply_add_lanes(x.second, w.second, multiply_add_lanes(x.first, w.first, sum));
#endif
}

/* Write the sum of the lanes of each of TILE vectors: add the upper half to the lower half until one lane is left. */
INLINE void add_lanes(const lanes *from, float *to) {
#if defined(__AVX512F__)
#define FOLD(how, a, b, low, high) _mm512_add_ps(how(a, b, low), how(a, b, high))
    __m512 v[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++)
        v[i] = FOLD(_mm512_shuffle_f32x4, (__m512)from[i], (__m512)from[i + 8], 0x44, 0xee);
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) v[i] = FOLD(_mm512_shuffle_f32x4, v[i], v[i + 4], 0x88, 0xdd);
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++) v[i] = FOLD(_mm512_shuffle_ps, v[i], v[i + 2], 0x44, 0xee);
    __m512 sums = FOLD(_mm512_shuffle_ps, v[0], v[1], 0x88, 0xdd);
    const __m512i in_order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(in_order, sums));
#else
    for (int i = 0; i < TILE; i++) {
        lanes left = from[i];
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) left[l] += left[l + half];
        to[i] = left[0];
    }
#endif
}

/* Add x[r] . w[c] over `count` inputs to sums[r][c], for R rows of x and TILE / R rows of W. x has R `numbers` per
   step. The rows of W come one after the other (in pairs, for 8 rows of x), because the processor prefetches memory
   that is read in order. What it misses is prefetched AHEAD rows or pairs before its use. */
INLINE void tile(const int R, const numbers *x, const bf16 *w, long ins, long count, float (*sums)[SPAN]) {
    const int C = TILE / R, P = R == 8 ? 2 : 1; /* P rows of W at a time */
    lanes sum[TILE];
    for (int c = 0; c < C; c += P, w += P * ins) {
        lanes part[8 * 2] = {{0}};
        for (long at = 0; at < count; at += STEP) {
            numbers column[2];
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const bf16 *from = w + p * ins + at;
                column[p] = count - at < STEP ? load_some(from, count - at) : load(from);
                __builtin_prefetch(from + AHEAD * P * ins, 0, 2);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
                    part[r * P + p] = multiply_add(x[at / STEP * R + r], column[p], part[r * P + p]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) sum[r * C + c + p] = part[r * P + p];
    }
    float whole[TILE];
    add_lanes(sum, whole);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[r][c] += whole[r * C + c];
}

/* Define `tile` for R rows as a function, which the compiler generates once. */
#define SIZE(name, R)                                                                                                 \
    static __attribute__((noinline)) void name(                                                                       \
        const numbers *x, const bf16 *w, long ins, long count, float (*sums)[SPAN]                                    \
    ) {                                                                                                               \
        tile(R, x, w, ins, count, sums);                                                                              \
    }
SIZE(eight_rows, 8)
SIZE(four_rows, 4)
SIZE(two_rows, 2)
SIZE(one_row, 1)

/* Convert `count` inputs of R rows of x, followed by zeros, to R `numbers` per step. */
static void split_rows(const bf16 *x, long x_stride, long R, long count, numbers *to) {
    for (long at = 0; at < count; at += STEP)
        for (long r = 0; r < R; r++) {
            const bf16 *from = x + r * x_stride + at;
            *to++ = count - at < STEP ? load_some(from, count - at) : load(from);
        }
}

/* Add x[r] . w[c] over `count` inputs to sums[r][c], for up to ROWS rows of x and `columns` rows of W, a multiple of
   TILE. */
static void block(
    const bf16 *x, long x_stride, long rows, const bf16 *w, long ins, long columns, long count, float (*sums)[SPAN]
) {
    numbers inputs[8 * BLOCK / STEP];
    for (long r = 0, R; r < rows; r += R) {
        R = rows - r >= 8 ? 8 : rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        const long C = TILE / R;
        split_rows(x + r * x_stride, x_stride, R, count, inputs);
        for (long c = 0; c < columns; c += C) {
            const bf16 *here = w + c * ins;
            float(*to)[SPAN] = (float(*)[SPAN])&sums[r][c];
            (R == 8 ? eight_rows : R == 4 ? four_rows : R == 2 ? two_rows : one_row)(inputs, here, ins, count, to);
        }
    }
}

static void write(float (*sums)[SPAN], long rows, long from, long to, const bf16 *bias, bf16 *y, long outs) {
    for (long r = 0; r < rows; r++)
        for (long c = from; c < to; c++) y[r * outs + c] = narrow(bias ? sums[r][c] + widen(bias[c]) : sums[r][c]);
}

/* Compute outputs [begin, end) for all rows of x. If fewer than TILE outputs are left, the last tile begins at an
   earlier output and computes some outputs again. */
static void share(
    const bf16 *w, const bf16 *bias, long begin, long end, const bf16 *x, long rows, long ins, bf16 *y, long outs
) {
    float sums[ROWS][SPAN];
    for (long c = begin; c < end;) {
        long left = end - c, columns = left < SPAN ? (left < TILE ? TILE : left / TILE * TILE) : SPAN;
        long skip = left < TILE ? TILE - left : 0, at = c - skip;
        for (long r = 0; r < rows; r += ROWS) {
            long some = rows - r < ROWS ? rows - r : ROWS;
            memset(sums, 0, some * sizeof sums[0]);
            for (long k = 0; k < ins; k += BLOCK) {
                long count = ins - k < BLOCK ? ins - k : BLOCK;
                const bf16 *here = w + at * ins + k;
                block(x + r * ins + k, ins, some, here, ins, columns, count, sums);
            }
            write(sums, some, skip, columns, bias ? bias + at : 0, y + r * outs + at, outs);
        }
        c = at + columns;
    }
}

/* Compute y (rows, outs) from x (rows, ins), w (outs, ins) and bias (outs) or NULL. All are contiguous, and outs is at
   least TILE. Each thread computes a range of tiles. */
void linear_rows(
    const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, long rows, long ins, long outs, int threads
) {
    long tiles = (outs + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        long begin = tiles * thread / threads * TILE, end = tiles * (thread + 1) / threads * TILE;
        end = end > outs ? outs : end;
        if (begin < end) share(w, bias, begin, end, x, rows, ins, y, outs);
    }
}
#else
int has_kernel(void) { return 0; } /* not measured on other processors */
#endif
