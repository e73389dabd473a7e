/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - the attention table for AVX2 and FMA: 6 x 2 vectors of eight floats, 12 accumulators of the
 * 16 registers. Limit: two 256-bit FMAs a cycle. */
#include "cpu/kernels/attention_backward_rows.h"
#include "cpu/kernels/attention_direct_f32.h"
#include "cpu/kernels/attention_rows.h"

#include <immintrin.h>

typedef __m256 vec;
enum { ROWS = 6, VECTORS = 2, PANEL = 16 };

static inline vec broadcast(const float *a)
{
    return _mm256_broadcast_ss(a);
}
static inline vec step_f32(vec acc, vec a, vec b)
{
    return _mm256_fmadd_ps(a, b, acc);
}
#define step_bf16 step_f32
#include "cpu/kernels/attention_mm.h"

const attention_kernels attention_kernels_avx2 = {.level = QUERN_CPU_LEVEL_AVX2,
                                                  .panel = PANEL,
                                                  .mm_f32 = mm_f32,
                                                  .mm_scaled_f32 = mm_scaled_f32,
                                                  .score_rows_f32 = score_rows_f32,
                                                  .add_values_f32 = add_values_f32,
                                                  ATTENTION_ROW_KERNELS,
                                                  ATTENTION_BACKWARD_ROW_KERNELS};
