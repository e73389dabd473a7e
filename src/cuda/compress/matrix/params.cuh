/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the products of compression with weights share, f32 multiply-adds
 * (launch.cu) and tensor cores through cuBLASLt (compress/cublaslt/launch.cu), and the kernels of a dtype. */
#ifndef QUERN_CUDA_COMPRESS_MATRIX_PARAMS_CUH
#define QUERN_CUDA_COMPRESS_MATRIX_PARAMS_CUH

#include "compress/params.cuh"

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

/* The kernels of a dtype, compiled in a file of its own: means and their spreading
 * (compress/mean/kernel.cuh), and f32 multiply-adds (kernel.cuh). */
struct compress_parts {
    quern_status (*means)(const compress_kernel &a, int64_t rows, int chunks, cudaStream_t stream);
    quern_status (*spread)(const compress_kernel &a, int64_t pieces, int chunks, cudaStream_t stream);
    quern_status (*multiply)(const matrix_kernel &m, cudaStream_t stream);
    quern_status (*sum_pe)(const matrix_kernel &m, cudaStream_t stream);
    quern_status (*sum_g)(const matrix_kernel &m, cudaStream_t stream);
    quern_status (*d_pe)(const matrix_kernel &m, cudaStream_t stream);
    quern_status (*d_mean)(const matrix_kernel &m, cudaStream_t stream);
    quern_status (*d_x)(const matrix_kernel &m, const stage_seqs &seqs, cudaStream_t stream);
    quern_status (*d_w)(const matrix_kernel &m, int splits, cudaStream_t stream);
};
extern const compress_parts compress_f32, compress_bf16, compress_f16;

static inline const compress_parts &compress_parts_of(quern_dtype dtype)
{
    return dtype == QUERN_F32 ? compress_f32 : dtype == QUERN_BF16 ? compress_bf16 : compress_f16;
}

/* The matrix work of a projection of the mean, or of `linear`; `cublaslt`: by compress/cublaslt/launch.cu.
 * Bytes of scratch, and the two directions; `a` has the workspace's means in place. */
size_t compress_matrix_bytes(const compress_args *args, int side, bool backward, bool cublaslt);
quern_status compress_matrix_forward(const compress_args *args, const compress_kernel &a, int side,
                                     bool cublaslt, float *scratch, cudaStream_t stream);
quern_status compress_matrix_backward(const compress_args *args, const compress_kernel &a, int side,
                                      bool cublaslt, float *scratch, cudaStream_t stream);

/* For inputs of 16 bits, where there is a cuBLASLt (gemm_available()). */
size_t compress_gemm_bytes(const compress_args *args, int side, bool backward);
/* y = X W (+ total), to the compressed rows; scratch as compress_gemm_bytes() says. */
quern_status compress_gemm_forward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                   cudaStream_t stream);
/* d_mean or d_x, and d_w (+ pe (x) total). */
quern_status compress_gemm_backward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                    cudaStream_t stream);

#endif
