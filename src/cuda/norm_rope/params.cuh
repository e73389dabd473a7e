/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the arguments of the kernels between a projection and the core. */
#ifndef QUERN_CUDA_NORM_ROPE_PARAMS_CUH
#define QUERN_CUDA_NORM_ROPE_PARAMS_CUH

#include "common/chunk.cuh"
#include "common/entry.cuh"
#include "common/launch.cuh"

struct row_view {
    view4 v;
    quern_dtype dtype;
    bool wide; /* rows can be read 16 bytes at a time */
};

static inline row_view row_view_of(const quern_tensor &t)
{
    return {view4_of(t), t.dtype, rows_aligned16(t)};
}

struct norm_rope_kernel {
    row_view x, out, d_out, d_x;
    int64_t rows, tokens; /* rows of heads; tokens of a sequence */
    int heads, width, rotated;
    bool norm, inverse;
    float eps;
    any_floats weight, angles;
    int64_t angle_row, angle_rows, position_row;
    const int32_t *positions;
    float *parts; /* [runs, width]: shares of d_weight, or NULL */
    int64_t run_rows;
    int lanes; /* of a row */
    int32_t *status;
};

#endif
