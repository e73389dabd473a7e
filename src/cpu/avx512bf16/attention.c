/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - the attention table for AVX-512 with BF16: the micro-kernel of AVX-512 over words of two bf16
 * values. Limit: two 512-bit bf16 dot products a cycle. */
#include "cpu/kernels/attention_across.h"
#include "cpu/kernels/attention_backward_rows.h"
#include "cpu/kernels/attention_direct.h"
#include "cpu/kernels/attention_gather.h"
#include "cpu/kernels/attention_rows.h"

#include <immintrin.h>

typedef __m512 vec;
enum { ROWS = 6, VECTORS = 4, PANEL = 64 };

static inline vec broadcast(const float *a)
{
    return _mm512_set1_ps(*a);
}
static inline vec step_f32(vec acc, vec a, vec b)
{
    return _mm512_fmadd_ps(a, b, acc);
}
static inline vec step_bf16(vec acc, vec a, vec b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#include "cpu/kernels/attention_mm.h"

static void mm_bf16(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k, const void *b,
                    int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    mm_any(true, m, n, k, a, a_row, a_k, b, ldb, NULL, c, ldc, accumulate);
}

static void mm_scaled_bf16(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k,
                           const void *b, int64_t ldb, const float *scale, float *c, int64_t ldc,
                           bool accumulate)
{
    if (scale != NULL) mm_any(true, m, n, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
}

const attention_kernels attention_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16,
                                                        .panel = PANEL,
                                                        .mm_bf16 = mm_bf16,
                                                        .mm_scaled_f32 = mm_scaled_f32,
                                                        .mm_scaled_bf16 = mm_scaled_bf16,
                                                        .mm_across_bf16 = mm_across_bf16,
                                                        .mm_weights_bf16 = mm_bf16,
                                                        .across_weights_bf16 = mm_across_bf16,
                                                        .score_rows_bf16 = score_rows_bf16,
                                                        .add_values_bf16 = add_values_bf16,
                                                        .gather_pairs_bf16 = gather_pairs_bf16,
                                                        ATTENTION_ROW_KERNELS_BF16,
                                                        ATTENTION_BACKWARD_ROW_KERNELS_BF16};
