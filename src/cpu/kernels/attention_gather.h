/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_gather.h - rows of bf16 from anywhere as both operands of attention whose heads share their keys:
 * a copy of each row, and pairs of rows. A row is read once for both. Lines of later rows are requested at
 * the same time, since no prefetcher follows a list. Limit: L2, which takes twice what is read.
 */
#ifndef QUERN_CPU_ATTENTION_GATHER_H
#define QUERN_CPU_ATTENTION_GATHER_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

enum { GATHER_AHEAD = 8, GATHER_COLUMNS = 2 * LANES };

/* Two rows and their words. Words past dim, up to the end of its panel, become 0. */
INLINE void gather_two(const uint16_t *even, const uint16_t *odd, const char *later, const char *later_odd,
                       int64_t dim, uint16_t *to, uint16_t *to_odd, int32_t panel, uint32_t *pairs,
                       int64_t panel_stride)
{
    static const uint16_t words[GATHER_COLUMNS] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                   37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                   11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_loadu_si512(words), high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    for (int64_t c0 = 0; c0 < dim; c0 += panel, pairs += panel_stride) {
        for (int64_t i = 0; i < panel; i += GATHER_COLUMNS) {
            const int64_t c = c0 + i, left = dim - c;
            const __mmask32 kept = left >= GATHER_COLUMNS ? ~(__mmask32)0
                                   : left > 0             ? ((__mmask32)1 << left) - 1
                                                          : 0;
            const __m512i e = _mm512_maskz_loadu_epi16(kept, even + c),
                          o = _mm512_maskz_loadu_epi16(kept, odd + c);
            __builtin_prefetch(later + 2 * c);
            __builtin_prefetch(later_odd + 2 * c);
            _mm512_mask_storeu_epi16(to + c, kept, e);
            _mm512_mask_storeu_epi16(to_odd + c, kept, o);
            _mm512_storeu_si512(pairs + i, _mm512_permutex2var_epi16(e, low, o));
            _mm512_storeu_si512(pairs + i + LANES, _mm512_permutex2var_epi16(e, high, o));
        }
    }
}

static void gather_pairs_bf16(const void *const *rows, int64_t n, int64_t dim, uint16_t *to, int64_t ldd,
                              int32_t panel, uint32_t *pairs, int64_t panel_stride)
{
    const uint16_t zero[MAX_DIM] = {0};
    uint16_t none[MAX_DIM]; /* the copy of a row that there is not */
    for (int64_t r = 0; r < n; r += 2, to += 2 * ldd, pairs += panel) {
        const int64_t last = n - 1, later = r + GATHER_AHEAD < last ? r + GATHER_AHEAD : last,
                      later_odd = later < last ? later + 1 : last;
        const bool two = r < last;
        gather_two(rows[r], two ? rows[r + 1] : zero, rows[later], rows[later_odd], dim, to,
                   two ? to + ldd : none, panel, pairs, panel_stride);
    }
}

#endif
