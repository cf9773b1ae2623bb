/* Attention of one query token a sequence over its slot of a cache: decode_attention.py says what is computed. */

#include "numbers.h"
