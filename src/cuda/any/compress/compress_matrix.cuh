/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress_matrix.cuh - what the two ways to multiply by compression's weights share: f32 multiply-adds
 * (compress_matrix.cu, which chooses) and tensor cores through cuBLASLt (compress_gemm.cu). */
#ifndef QUERN_CUDA_COMPRESS_MATRIX_CUH
#define QUERN_CUDA_COMPRESS_MATRIX_CUH

#include "any/compress/compress.cuh"

enum { SPLITS = 32, LEVEL = 256 };

struct matrix_kernel {
    compress_kernel a;
    int side, positions; /* P */
    const void *w, *pe;
    int64_t ws[2], ps[2];
    bool w_f32, pe_f32, w_vec; /* w_vec: rows of w can be read 16 bytes at a time */
    float *d_w, *d_pe, *part;  /* part: SPLITS shares of a sum */
    float *total;              /* products by cuBLASLt: [heads][dim], pe W or S */
    int64_t dws[2], dps[2], views;
};

template <typename T> __device__ __forceinline__ float value_at(const void *p, bool f32, int64_t at)
{
    return f32 ? ((const float *)p)[at] : to_float<T>(((const T *)p)[at]);
}

/* Where row `r` of all batch views starts in X's view, or -1 where it is no entry. */
__device__ __forceinline__ int64_t token_of(const matrix_kernel &m, int64_t r, int h)
{
    const compress_side &s = m.a.side[m.side];
    if (r >= m.views * m.a.rows) return -1;
    sequence seq;
    int64_t entry;
    if (!entry_at(m.a, r / m.a.rows, r % m.a.rows, &seq, &entry)) return -1;
    return seq.view_b * s.x.s[0] + (seq.q0 + entry * m.a.d) * s.x.s[1] + h * s.x.s[2];
}

/* Inputs of 16 bits, and a cuBLASLt: what the other functions need. */
bool compress_gemm_takes(const compress_args *args, int side);
size_t compress_gemm_bytes(const compress_args *args, int side, bool backward);

/* y = X W (+ total), to the compressed rows; scratch as compress_gemm_bytes() says. */
quern_status compress_gemm_forward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                   cudaStream_t stream);
/* d_mean or d_x, and d_w (+ pe (x) total). */
quern_status compress_gemm_backward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                    cudaStream_t stream);

#endif
