/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - the attention table in portable C: the reference every other level is tested against, and
 * what runs where no level fits. 4 x 4 vectors of four floats. */
#include "cpu/kernels/attention_backward_rows.h"
#include "cpu/kernels/attention_direct_f32.h"
#include "cpu/kernels/attention_rows.h"

typedef float vec __attribute__((vector_size(16)));
enum { ROWS = 4, VECTORS = 4, PANEL = 16 };

static inline vec broadcast(const float *a)
{
    return *a - (vec){0};
}
static inline vec step_f32(vec acc, vec a, vec b)
{
    return acc + a * b;
}
#define step_bf16 step_f32
#include "cpu/kernels/attention_mm.h"

const attention_kernels attention_kernels_portable = {.level = QUERN_CPU_LEVEL_PORTABLE,
                                                      .panel = PANEL,
                                                      .mm_f32 = mm_f32,
                                                      .mm_scaled_f32 = mm_scaled_f32,
                                                      .score_rows_f32 = score_rows_f32,
                                                      .add_values_f32 = add_values_f32,
                                                      ATTENTION_ROW_KERNELS,
                                                      ATTENTION_BACKWARD_ROW_KERNELS};
