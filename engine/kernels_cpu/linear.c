/* Products of a few rows in bf16 with a large matrix, y = x W^T + b. engine/generation/prepacked_linears.py uses them.

   Reading W takes most of the time, so each of its rows is read from memory once, in order, and prefetched. A tile of
   16 outputs shares loaded numbers: 4 rows of x by 4 of W, and 2 by 8 and 1 by 16 for the remaining rows. An output has
   LANES partial sums over BLOCK inputs. Their total is added to the output block after block. This order is always the
   same, so no number of y depends on the number of rows or of threads. */

#include "numbers.h"
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#define TILE 16    /* outputs of a tile, and the fewest outputs of a matrix */
#define SPAN 64    /* rows of W, at most, that are multiplied with ROWS rows of x while both are in the caches */
#define ROWS 16
#define BLOCK 1024 /* inputs at a time: ROWS rows of x of this length stay in the L1 cache */
#define AHEAD 2    /* prefetch distance in tiles */
#define INLINE static inline __attribute__((always_inline))

/* Return 1, or 0 if PyTorch is faster (AMX) or the processor was not measured. */
int has_kernel(void) {
#ifdef __x86_64__
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1)) return 0; /* AMX-BF16 */
#if defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#endif
#endif
    return 0;
}

/* A `numbers` vector holds STEP inputs, in bf16 or widened to fp32. A `lanes` vector holds the LANES partial sums of an
   output. */
#if defined(__AVX512BF16__)
#define LANES 16
#define STEP 32
#elif defined(__AVX512F__)
#define LANES 16
#define STEP 16
#elif defined(__AVX2__)
#define LANES 8
#define STEP 8
#else
#define LANES 4
#define STEP 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
#if defined(__AVX512BF16__)
typedef __m512bh numbers;
#else
typedef float numbers __attribute__((vector_size(4 * LANES)));
#endif

INLINE numbers load(const bf16 *from) {
#if defined(__AVX512BF16__)
    return (numbers)_mm512_loadu_si512(from);
#else
    typedef uint16_t narrow_lanes __attribute__((vector_size(2 * LANES)));
    typedef uint32_t wide_lanes __attribute__((vector_size(4 * LANES)));
    narrow_lanes read;
    memcpy(&read, from, sizeof read);
    return (numbers)(__builtin_convertvector(read, wide_lanes) << 16);
#endif
}

/* Load the last `count` inputs of a row, followed by zeros. */
INLINE numbers load_some(const bf16 *from, long count) {
    bf16 some[STEP] = {0};
    memcpy(some, from, count * sizeof(bf16));
    return load(some);
}

INLINE lanes multiply_add(numbers x, numbers w, lanes sum) {
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, x, w);
#elif defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#else
    return sum + x * w;
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

/* Add x[r] . w[c] over `count` inputs to sums[r][c], for R rows of x and C rows of W, R * C = TILE. Prefetch the first
   `fetch` rows at `next`. */
INLINE void tile(
    const int R, const int C, const bf16 *x, long x_stride, const bf16 *w, long ins, long count, const int fetch,
    const bf16 *next, float (*sums)[SPAN]
) {
    lanes sum[TILE] = {{0}};
    long at = 0;
    for (; at + STEP <= count; at += STEP) {
        numbers row[4];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) row[r] = load(x + r * x_stride + at);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            numbers column = load(w + c * ins + at);
            if (c < fetch) __builtin_prefetch(next + c * ins + at);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) sum[r * C + c] = multiply_add(row[r], column, sum[r * C + c]);
        }
    }
    if (at < count)
        for (int c = 0; c < C; c++) {
            numbers column = load_some(w + c * ins + at, count - at);
            for (int r = 0; r < R; r++)
                sum[r * C + c] = multiply_add(load_some(x + r * x_stride + at, count - at), column, sum[r * C + c]);
        }
    float whole[TILE];
    add_lanes(sum, whole);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[r][c] += whole[r * C + c];
}

/* Define `tile` for one size as a function, which the compiler generates once. */
#define SIZE(name, R, C, fetch)                                                                                       \
    static __attribute__((noinline)) void name(                                                                       \
        const bf16 *x, long x_stride, const bf16 *w, long ins, long count, const bf16 *next, float (*sums)[SPAN]      \
    ) {                                                                                                               \
        tile(R, C, x, x_stride, w, ins, count, fetch, next, sums);                                                    \
    }
SIZE(four_rows, 4, 4, 0)
SIZE(four_rows_fetch_1, 4, 4, 1)
SIZE(four_rows_fetch_2, 4, 4, 2)
SIZE(four_rows_fetch_4, 4, 4, 4)
SIZE(two_rows, 2, 8, 0)
SIZE(two_rows_fetch_8, 2, 8, 8)
SIZE(one_row, 1, 16, 0)
SIZE(one_row_fetch_16, 1, 16, 16)

/* Add x[r] . w[c] over `count` inputs to sums[r][c], for up to ROWS rows of x and `columns` rows of W, a multiple of
   TILE. `first` is set if these rows of W were not read before. In this case the passes over a tile share the prefetch
   of a later tile, so that their computation overlaps with the read from memory. */
static void block(
    const bf16 *x, long x_stride, long rows, const bf16 *w, long ins, long columns, long count, int first,
    float (*sums)[SPAN]
) {
    long passes = rows / 4, r = 4 * passes;
    for (long c = 0; c < columns && passes; c += 4) {
        const bf16 *here = w + c * ins, *next = here + 4 * AHEAD * ins;
        for (long pass = 0; pass < passes; pass++) {
            const bf16 *from = x + 4 * pass * x_stride;
            float(*to)[SPAN] = (float(*)[SPAN])&sums[4 * pass][c];
            if (!first)
                four_rows(from, x_stride, here, ins, count, next, to);
            else if (passes == 1)
                four_rows_fetch_4(from, x_stride, here, ins, count, next, to);
            else if (passes == 2 || (passes == 3 && pass == 0))
                four_rows_fetch_2(from, x_stride, here, ins, count, next + 2 * pass * ins, to);
            else
                four_rows_fetch_1(from, x_stride, here, ins, count, next + (pass + (passes == 3)) * ins, to);
        }
    }
    first = first && !passes;
    for (long c = 0; c < columns && r + 2 <= rows; c += 8)
        (first ? two_rows_fetch_8 : two_rows)(
            x + r * x_stride, x_stride, w + c * ins, ins, count, w + (c + 8 * AHEAD) * ins, (float(*)[SPAN])&sums[r][c]
        );
    if (r + 2 <= rows) first = 0, r += 2;
    for (long c = 0; c < columns && r < rows; c += 16)
        (first ? one_row_fetch_16 : one_row)(
            x + r * x_stride, x_stride, w + c * ins, ins, count, w + (c + 16 * AHEAD) * ins, (float(*)[SPAN])&sums[r][c]
        );
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
            for (long k = 0; k < ins; k += BLOCK)
                block(
                    x + r * ins + k, ins, some, w + at * ins + k, ins, columns, ins - k < BLOCK ? ins - k : BLOCK,
                    r == 0, sums
                );
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
