/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scales.h - the scales of e4m3 weights. */
#ifndef QUERN_CPU_E4M3_SCALES_H
#define QUERN_CPU_E4M3_SCALES_H

#include "backend.h"
#include "cpu/kernels/formats/e8m0.h"

static inline float e4m3_scale_at(const quern_tensor *t, int64_t row, int64_t column)
{
    const int64_t at = row * t->strides[0] + column * t->strides[1];
    if (t->dtype == QUERN_F32) return ((const float *)t->data)[at];
    return e8m0_value(((const uint8_t *)t->data)[at]);
}

/* Refuses scales that are no numbers, and those with which a weight exceeds f32. */
quern_status e4m3_check_scales(const stage_exec *exec, const e4m3_gemm_args *args);

#endif
