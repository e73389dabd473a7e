/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.cuh - products of matrices of 16-bit elements with f32 sums, by cuBLASLt, which is loaded at first
 * use. */
#ifndef QUERN_CUDA_GEMM_CUH
#define QUERN_CUDA_GEMM_CUH

#include "common/device.cuh"

enum { GEMM_ALIGN = 16 }; /* bytes: of every pointer, and of every stride but those of 1 */

/* C[m][n] (f32, or the operands' dtype) = A[m][k] B[k][n], `batch` times; row after row, rows ld elements
 * apart. A transposed operand stands as A[k][m], B[n][k]. Only 64-bit numbers, so that shapes are compared as
 * bytes. */
struct gemm_shape {
    int64_t f16; /* 1: f16, 0: bf16 */
    int64_t c_half;   /* 1: C in the operands' dtype */
    int64_t any_rows; /* 1: one algorithm for all m that it takes, whose sums have no shares, so that a row's
                       * bits do not depend on m */
    int64_t a_transposed, b_transposed;
    int64_t batch, m, n, k;
    int64_t lda, ldb, ldc, a_stride, b_stride, c_stride;
    int64_t scratch_bytes; /* of what gemm_run gets as scratch */
};

/* Whether there is a cuBLASLt: the answer is the same for the process's life. */
bool gemm_available();

/* Scratch that is worth having for a C of so many bytes. */
size_t gemm_scratch_bytes(size_t c_bytes);

/* On the current device. `add`: to what C holds. */
quern_status gemm_run(const gemm_shape &shape, const void *a, const void *b, void *c, bool add, void *scratch,
                      cudaStream_t stream);

#endif
