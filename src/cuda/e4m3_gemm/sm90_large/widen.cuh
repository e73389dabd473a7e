/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* widen.cuh - e4m3 codes as numbers of 16 bits. */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_LARGE_WIDEN_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_LARGE_WIDEN_CUH

#include "common/device.cuh"

enum { WIDEN_EACH = 16 };

/* Rows of k codes, which begin at multiples of 16 bytes, to rows of `out_row` elements, a multiple of 16. */
struct widen_params {
    const uint8_t *codes;
    int64_t code_row, rows, k;
    void *out;
    int64_t out_row;
};
quern_status e4m3_widen_rows(const widen_params &p, quern_dtype dtype, cudaStream_t stream);

#endif
