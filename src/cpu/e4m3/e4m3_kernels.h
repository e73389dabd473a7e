/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e4m3_kernels.h - the tile kernels of products with e4m3 weights. They get pointers and sizes; they never
 * validate, allocate or start threads. */
#ifndef QUERN_CPU_E4M3_KERNELS_H
#define QUERN_CPU_E4M3_KERNELS_H

#include <quern/quern.h>

/* Rows of codes, `stride` bytes apart, of which `depth` codes each become rows of a panel. */
typedef struct e4m3_rows {
    const uint8_t *codes;
    int64_t stride, rows, depth;
    int64_t ahead; /* bytes from here to what is read later, which is prefetched into L2; 0: nothing is */
    bool cold;     /* row_bf16, row_f32: these have not been prefetched */
} e4m3_rows;

enum { ROW_F32_COLUMNS = 32 };

typedef struct e4m3_kernels {
    quern_cpu_level level;
    /* to[k][j] = the value of code k of row j, for all k and for j < panel, a multiple of 16; 0 past the last
     * row. */
    void (*panel_f32)(const e4m3_rows *rows, int32_t panel, float *to);
    /* The same in words of two bf16 values, k and k + 1; 0 past an odd depth. NULL where the level has no
     * bf16 dot product. */
    void (*panel_bf16)(const e4m3_rows *rows, int32_t panel, uint32_t *to);
    /* A row's product with 64 columns. Each run of `run` codes of row j, a multiple of 4 unless there is but
     * one, is multiplied by as many of the `depth` bf16 values at `a` and by scales[run][j]; c[j] is their
     * sum, with `accumulate` added to what it was. The bits are those of panel_bf16 and mm_scaled_bf16 run by
     * run. `ahead` of the rows: bytes to as many that are read next, which are prefetched row after row. NULL
     * as above. */
    void (*row_bf16)(const e4m3_rows *rows, int64_t run, const uint32_t *a, const float *scales, float *c,
                     bool accumulate);
    /* The same with ROW_F32_COLUMNS columns, f32 values at `a`, and runs of a multiple of 16 unless there is
     * but one: the bits of panel_f32 and mm_scaled_f32. */
    void (*row_f32)(const e4m3_rows *rows, int64_t run, const float *a, const float *scales, float *c,
                    bool accumulate);
} e4m3_kernels;

#endif
