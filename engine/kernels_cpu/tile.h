/* Tiles of matrix products in fp32, whose sums stay in registers. products.c and ragged_attention.c divide their
   matrices into tiles. */

#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 };
#endif
enum {
    ROWS = 6,                 /* rows of a tile: ROWS x VECTORS sums, VECTORS of b and one of a fill the registers */
    PANEL = LANES * VECTORS,  /* columns of a tile */
};
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Return x * row + sum, rounded once. Without intrinsics, GCC's tuning for AMD processors fuses the operations in some
   tiles and not in others, and a number would depend on its position in a block. `pairs`: x and each lane of `row` are
   two bf16 numbers; the sum of both products is added. */
INLINE vector multiply_add(float x, vector row, vector sum, const int pairs) {
#ifdef __AVX512BF16__
    if (pairs) return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)row);
#endif
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)row, (__m512)sum);
#elif defined(__FMA__)
    return (vector)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)row, (__m256)sum);
#else
    return x * row + sum;
#endif
}

/* Compute c (rows, vectors * LANES) = a (rows, depth) b (depth, vectors * LANES) + start. `start` is NULL for zeros; its
   rows are `start_row` numbers apart, 0 for a vector. */
INLINE void tile(const int rows, const int vectors, const int pairs, long depth, const float *a, long a_row,
                 long a_column, const float *b, long b_row, const float *start, long start_row, float *c, long c_row) {
    vector sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = start ? *(const vector *)(start + r * start_row + v * LANES) : (vector){0};
    for (long k = 0; k < depth; k++) {
        vector y[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) y[v] = *(const vector *)(b + k * b_row + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_row + k * a_column];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[r][v] = multiply_add(x, y[v], sums[r][v], pairs);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(vector *)(c + r * c_row + v * LANES) = sums[r][v];
}

#define TILE(rows, vectors, pairs) \
    tile(rows, vectors, pairs, depth, a, a_row, a_column, b, b_row, start, start_row, c, c_row)
/* Compute a tile of 1 to ROWS `rows`, with the arguments of `tile` in variables of these names. */
#define TILE_OF(rows, vectors, pairs)               \
    switch (rows) {                                 \
    case 6: TILE(6, vectors, pairs); break;         \
    case 5: TILE(5, vectors, pairs); break;         \
    case 4: TILE(4, vectors, pairs); break;         \
    case 3: TILE(3, vectors, pairs); break;         \
    case 2: TILE(2, vectors, pairs); break;         \
    default: TILE(1, vectors, pairs);               \
    }
