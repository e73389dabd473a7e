/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swiglu_kernels.h - the row kernels of SwiGLU and of the rows that interleave its gates and ups. They get
 * pointers and sizes; they never validate, allocate or start threads. */
#ifndef QUERN_CPU_SWIGLU_KERNELS_H
#define QUERN_CPU_SWIGLU_KERNELS_H

#include "cpu/kernels/formats/format_kernels.h"
#include "stages/swiglu.h"

typedef struct swiglu_kernels {
    quern_cpu_level level;
    /* Extracts n columns of gate (or up) from column `first` on, out of a row that interleaves both by runs
     * of q. */
    void (*part_row)(const void *x, quern_dtype dtype, int64_t first, bool up, int64_t q, int64_t n,
                     float *out);
    /* Quantises SwiGLU, an f32 h, of n columns of a row that interleaves gate and up by runs of q. Returns
     * bits below 0x7f800000 only if all gates and ups are finite. */
    uint32_t (*swiglu_quantise)(const swiglu_rule *rule, const quantise_rule *to, const void *x,
                                quern_dtype dtype, int64_t q, int64_t n, uint8_t *codes, uint8_t *scales);
    /* Writes h[i] for n gates and ups; h may be gate. */
    void (*swiglu_row)(const swiglu_rule *rule, const float *gate, const float *up, int64_t n, float *h);
    /* Replaces n gates and ups by their gradients; d is the gradient of h. */
    void (*swiglu_backward_row)(const swiglu_rule *rule, const float *d, int64_t n, float *gate, float *up);
} swiglu_kernels;

#endif
