/* Rotary embeddings of heads, with the norm before them: rotary.py says what is computed. */

#include "rows.h"

/* x: heads of `size` numbers, found by two strides; out: the same one after the other, a token's heads together.
   cos and sin have `turned` numbers a token, those of a head that are turned; both null where nothing is. `weight` is
   null where nothing is normed. */
void turn_heads(
    const void *x, long token_stride, long head_stride, const void *weight, float eps, int kind, const void *cosines,
    const void *sines, void *out, long tokens, long heads, long size, long turned, int wide, int threads
) {
    long half = turned / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long token = 0; token < tokens; token++) {
        float here[size], scratch[size], c[turned + 1], s[turned + 1], straight[turned + 1], across[turned + 1];
        if (turned) {
            read_row(c, cosines, token * turned, turned, wide);
            read_row(s, sines, token * turned, turned, wide);
        }
        for (long head = 0; head < heads; head++) {
            read_row(here, x, token * token_stride + head * head_stride, size, wide);
            if (weight) {
                norm_row(here, scratch, size, kind, eps, weight, 0, wide);
                round_row(here, size, wide);
            }
            for (long i = 0; i < turned; i++) straight[i] = here[i] * c[i];
            for (long i = 0; i < half; i++) {
                across[i] = -here[half + i] * s[i];
                across[half + i] = here[i] * s[half + i];
            }
            round_row(straight, turned, wide);
            round_row(across, turned, wide);
            for (long i = 0; i < turned; i++) here[i] = straight[i] + across[i];
            write_row(out, (token * heads + head) * size, here, size, wide);
        }
    }
}
