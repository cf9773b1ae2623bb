/* Matrix products with sums in fp32: products.py describes them.

   The blocking follows Goto & van de Geijn, 2008 (Anatomy of high-performance matrix multiplication). The inner
   dimension is processed in blocks of DEPTH words. In each block all threads copy b into panels of PANEL columns. Then
   each thread copies up to BLOCK rows of a into tiles and multiplies them by all panels. ROWS x PANEL sums stay in
   registers. The copies have constant strides: with others, GCC stores the sums after each term. A word is 32 bits: one
   fp32 number, or two neighbouring bf16 numbers, which one instruction multiplies and adds to an fp32 sum. A sum adds
   its terms in their order, whatever the number of threads and the number of rows. */

#ifdef __AVX512F__
#include "tile.h"
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = 16 * ROWS,
    DEPTH = 384, /* a panel of this depth takes 96 KB and stays in the L2 cache */
};

/* A matrix with its strides between rows and between columns, in words. One stride is 1. */
struct matrix {
    const float *data;
    int64_t row, column;
};

/* The arguments of c (m, n) = a (m, k) b (k, n) + bias (n), as declared by `_Call` in products.py. */
struct call {
    struct matrix a, b;
    const float *bias; /* or NULL */
    float *c;
    int64_t c_row, m, n, k;
    int32_t pairs, threads;
};

/* Compute c (rows, PANEL) = a panel + bias; with `add`, add a panel to c. a: as `lay_out_rows` writes it. */
static void full_tile(int rows, int pairs, long depth, const float *a, const float *b, const float *bias, int add,
                      float *c, long c_row) {
    const float *start = add ? c : bias;
    const long a_row = 1, a_column = ROWS, b_row = PANEL;
    long start_row = add ? c_row : 0;
    if (pairs) {
        TILE_OF(rows, VECTORS, 1)
    } else {
        TILE_OF(rows, VECTORS, 0)
    }
}

/* Compute a tile of `width` <= PANEL columns. A narrower tile is computed as a full tile in local memory. */
static void tile_of(int rows, long width, int pairs, long depth, const float *a, const float *panel,
                    const float *bias, int add, float *c, long c_row) {
    if (width == PANEL) {
        full_tile(rows, pairs, depth, a, panel, bias, add, c, c_row);
        return;
    }
    float inside[ROWS * PANEL], ends[PANEL];
    if (bias) memcpy(ends, bias, width * sizeof(float));
    for (int r = 0; add && r < rows; r++) memcpy(inside + r * PANEL, c + r * c_row, width * sizeof(float));
    full_tile(rows, pairs, depth, a, panel, bias ? ends : 0, add, inside, PANEL);
    for (int r = 0; r < rows; r++) memcpy(c + r * c_row, inside + r * PANEL, width * sizeof(float));
}

/* Copy b (depth, width) into panel (depth, PANEL). Further columns are zeros. */
static void pack_panel(struct matrix b, long depth, long width, float *panel) {
    long c = 0;
    if (b.column == 1) {
        for (long k = 0; k < depth; k++) memcpy(panel + k * PANEL, b.data + k * b.row, width * sizeof(float));
        c = width;
    }
    for (; c + LANES <= width; c += LANES)
        for (long k = 0; k < depth; k++)
            for (long l = c; l < c + LANES; l++) panel[k * PANEL + l] = b.data[l * b.column + k];
    for (; c < PANEL; c++)
        for (long k = 0; k < depth; k++) panel[k * PANEL + c] = c < width ? b.data[c * b.column + k] : 0;
}

/* Copy a (rows, depth) into tiles of (depth, ROWS). */
static void lay_out_rows(struct matrix a, long rows, long depth, float *tiles) {
    for (long i = 0; i < rows; i += ROWS, tiles += ROWS * depth) {
        long some = rows - i < ROWS ? rows - i : ROWS;
        for (long k = 0; k < depth; k++)
            for (long r = 0; r < some; r++) tiles[k * ROWS + r] = a.data[(i + r) * a.row + k * a.column];
    }
}

static long at_most(long left, long most) { return left < most ? left : most; }

/* Multiply rows [i, i + rows) of a by all panels, over `depth` terms from `k` on. The rows are copied to `tiles`. */
static void block(const struct call *w, long i, long rows, long k, long depth, const float *panels, float *tiles) {
    struct matrix a = {w->a.data + i * w->a.row + k * w->a.column, w->a.row, w->a.column};
    lay_out_rows(a, rows, depth, tiles);
    for (long j = 0; j < w->n; j += PANEL)
        for (long r = 0; r < rows; r += ROWS)
            tile_of(at_most(rows - r, ROWS), at_most(w->n - j, PANEL), w->pairs, depth, tiles + r * depth,
                    panels + j * depth, w->bias ? w->bias + j : 0, k > 0, w->c + (i + r) * w->c_row + j, w->c_row);
}

/* Compute the product of a call. Return 0, or 1 if memory cannot be allocated. */
int product(const struct call *w) {
    long width = (w->n + PANEL - 1) / PANEL * PANEL, deepest = at_most(w->k, DEPTH);
    float *memory = aligned_alloc(64, (width + w->threads * BLOCK) * ((deepest + 15) / 16 * 16) * sizeof(float));
    if (!memory) return 1;
    /* The number of blocks is a multiple of the number of threads. Blocks are as even as tiles allow. */
    long blocks = (w->m + BLOCK * w->threads - 1) / (BLOCK * w->threads) * w->threads;
    long tall = (w->m + blocks * ROWS - 1) / (blocks * ROWS) * ROWS;
#pragma omp parallel num_threads(w->threads)
    for (long k = 0; k < w->k; k += DEPTH) {
        long depth = at_most(w->k - k, DEPTH);
#pragma omp for schedule(static)
        for (long j = 0; j < width; j += PANEL) {
            struct matrix b = {w->b.data + k * w->b.row + j * w->b.column, w->b.row, w->b.column};
            pack_panel(b, depth, at_most(w->n - j, PANEL), memory + j * depth);
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < w->m; i += tall)
            block(w, i, at_most(w->m - i, tall), k, depth, memory,
                  memory + (width + omp_get_thread_num() * BLOCK) * deepest);
    }
    free(memory);
    return 0;
}

/* Return bits: 1 for fp32, 2 for bf16. */
int supported_dtypes(void) {
#ifdef __AVX512BF16__
    return 3;
#else
    return 1;
#endif
}
#else
int supported_dtypes(void) { return 0; }
#endif
