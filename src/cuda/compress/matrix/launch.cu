/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the products of compression with weights: by f32 multiply-adds
 * (kernel.cuh) or, for inputs of 16 bits, on tensor cores (compress/cublaslt/launch.cu). */
#include "compress/matrix/params.cuh"

__global__ void matrix_sum_d_w(const __grid_constant__ matrix_kernel m)
{
    const int dim = m.a.side[m.side].dim;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, count = (int64_t)m.a.heads * dim * dim;
    if (i >= count) return;
    float sum = 0.0f;
    for (int s = 0; s < SPLITS; s++) sum += m.part[s * count + i];
    m.d_w[i / dim / dim * m.dws[0] + i / dim % dim * m.dws[1] + i % dim] = sum;
}

__global__ void matrix_total(const __grid_constant__ matrix_kernel m)
{
    const int h = blockIdx.x, e = threadIdx.x, dim = m.a.side[m.side].dim;
    if (e >= dim) return;
    float sum = 0.0f;
    for (int s = 0; s < SPLITS; s++) sum += m.part[((int64_t)s * m.a.heads + h) * dim + e];
    m.total[h * dim + e] = sum;
}

static matrix_kernel matrix_of(const compress_args *args, const compress_kernel &a, int side, float *part)
{
    matrix_kernel m = {};
    const quern_tensor &w = side == 0 ? args->w_k : args->w_v, &pe = side == 0 ? args->pe_k : args->pe_v;
    const quern_tensor &d_w = side == 0 ? args->d_w_k : args->d_w_v,
                       &d_pe = side == 0 ? args->d_pe_k : args->d_pe_v;
    m.a = a;
    m.side = side;
    m.part = part;
    m.views = args->k.shape[0];
    m.positions = args->kind == COMPRESS_LINEAR ? (int)args->block_size : 1;
    m.total = part == NULL ? NULL : part + SPLITS * (size_t)a.heads * (size_t)a.side[side].dim;
    m.w = w.data;
    m.w_f32 = w.dtype == QUERN_F32;
    m.w_vec = rows_aligned16(w);
    m.ws[0] = w.strides[0];
    m.ws[1] = w.strides[1];
    if (present(pe)) {
        m.pe = pe.data;
        m.pe_f32 = pe.dtype == QUERN_F32;
        m.ps[0] = pe.strides[0];
        m.ps[1] = pe.strides[1];
    }
    if (present(d_w)) {
        m.d_w = (float *)d_w.data;
        m.dws[0] = d_w.strides[0];
        m.dws[1] = d_w.strides[1];
    }
    if (present(d_pe)) {
        m.d_pe = (float *)d_pe.data;
        m.dps[0] = d_pe.strides[0];
        m.dps[1] = d_pe.strides[1];
    }
    return m;
}

/* Floats before compress/cublaslt/launch.cu's scratch: the shares, and their total. */
static size_t sum_floats(const matrix_kernel &m)
{
    return (SPLITS + 1) * (size_t)m.a.heads * (size_t)m.a.side[m.side].dim;
}

size_t compress_matrix_bytes(const compress_args *args, int side, bool backward, bool cublaslt)
{
    const quern_tensor &x = side == 0 ? args->k : args->v;
    const size_t heads = (size_t)x.shape[2], dim = (size_t)x.shape[3];
    const bool d_w = present(side == 0 ? args->d_w_k : args->d_w_v),
               d_pe = present(side == 0 ? args->d_pe_k : args->d_pe_v);
    if (cublaslt) return (SPLITS + 1) * heads * dim * 4 + compress_gemm_bytes(args, side, backward);
    if (!backward) return 0;
    if (args->kind == COMPRESS_LINEAR) return d_pe ? SPLITS * heads * dim * 4 : 0;
    return d_w ? SPLITS * heads * dim * dim * 4 : 0;
}

static void start_total(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_total<<<(unsigned)m.a.heads, (unsigned)(m.a.side[m.side].dim + 31) / 32 * 32, 0, stream>>>(m);
}

quern_status compress_matrix_forward(const compress_args *args, const compress_kernel &a, int side,
                                     bool cublaslt, float *scratch, cudaStream_t stream)
{
    const matrix_kernel m = matrix_of(args, a, side, scratch);
    const compress_parts &parts = compress_parts_of(args->k.dtype);
    quern_status status = QUERN_OK;
    if (m.views * m.a.rows == 0 || m.a.heads == 0) return QUERN_OK;
    if (!cublaslt) return parts.multiply(m, stream);
    if (m.pe != NULL) {
        status = parts.sum_pe(m, stream);
        if (status != QUERN_OK) return status;
        start_total(m, stream);
        status = LAUNCHED("compress by weights, encodings");
    }
    return status != QUERN_OK ? status : compress_gemm_forward(args, m, m.part + sum_floats(m), stream);
}

/* The gradients by f32 multiply-adds. */
static quern_status backward(const compress_args *args, const matrix_kernel &m, cudaStream_t stream)
{
    const compress_side &s = m.a.side[m.side];
    const compress_parts &parts = compress_parts_of(args->k.dtype);
    const bool linear = args->kind == COMPRESS_LINEAR;
    quern_status status = QUERN_OK;
    if (!linear && m.views * m.a.rows > 0) status = parts.d_mean(m, stream);
    if (status == QUERN_OK && linear && s.d_x.p != NULL) status = parts.d_x(m, args->seqs, stream);
    if (status != QUERN_OK || m.d_w == NULL) return status;
    status = parts.d_w(m, linear ? 1 : SPLITS, stream);
    if (status != QUERN_OK || linear) return status;
    const int64_t count = (int64_t)m.a.heads * s.dim * s.dim;
    matrix_sum_d_w<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(m);
    return LAUNCHED("compress backward by weights");
}

quern_status compress_matrix_backward(const compress_args *args, const compress_kernel &a, int side,
                                      bool cublaslt, float *scratch, cudaStream_t stream)
{
    const matrix_kernel m = matrix_of(args, a, side, scratch);
    const compress_parts &parts = compress_parts_of(args->k.dtype);
    const bool total = cublaslt && m.d_w != NULL && m.pe != NULL;
    quern_status status = QUERN_OK;
    if (m.a.heads == 0) return QUERN_OK;
    if (m.d_pe != NULL || total) status = parts.sum_g(m, stream);
    if (status == QUERN_OK && m.d_pe != NULL) status = parts.d_pe(m, stream);
    if (status != QUERN_OK || !cublaslt) return status != QUERN_OK ? status : backward(args, m, stream);
    if (total) {
        start_total(m, stream);
        status = LAUNCHED("compress backward by weights, encodings");
    }
    return status != QUERN_OK ? status : compress_gemm_backward(args, m, m.part + sum_floats(m), stream);
}
