/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - the attention table for AVX-512: 6 x 4 vectors of sixteen floats, 24 accumulators of the 32
 * registers. Limit: two 512-bit FMAs a cycle. */
#include "cpu/kernels/attention_backward_rows.h"
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
#define step_bf16 step_f32
#include "cpu/kernels/attention_mm.h"

const attention_kernels attention_kernels_avx512 = {.level = QUERN_CPU_LEVEL_AVX512,
                                                    .panel = PANEL,
                                                    .mm_f32 = mm_f32,
                                                    .mm_scaled_f32 = mm_scaled_f32,
                                                    ATTENTION_ROW_KERNELS,
                                                    ATTENTION_BACKWARD_ROW_KERNELS};
