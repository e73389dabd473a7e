/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - compression's products by weights on tensor cores: how they are divided, and how much workspace
 * each operand takes. */
#include "compress/cublaslt/params.cuh"
#include "common/gemm.cuh"

static const int64_t most_rows = 4096, budget = (int64_t)32 << 20; /* bytes of an operand or product */

static size_t padded(int64_t bytes)
{
    return ((size_t)bytes + 255) / 256 * 256;
}
static int64_t most(int64_t count, int64_t each)
{
    return count * each <= budget ? count : budget > each ? budget / each : 1;
}
static int64_t row_step(int64_t rows, int64_t each)
{
    return most(rows < most_rows ? rows : most_rows, each);
}
static int64_t greatest(int64_t x, int64_t y, int64_t z)
{
    return x > y ? (x > z ? x : z) : y > z ? y : z;
}

static gemm_plan plan_of(const compress_args *args, int side, bool backward)
{
    const quern_tensor &x = side == 0 ? args->k : args->v, &g = side == 0 ? args->d_k_cmp : args->d_v_cmp;
    const quern_tensor &y = side == 0 ? args->k_cmp : args->v_cmp,
                       &d_w = side == 0 ? args->d_w_k : args->d_w_v;
    const quern_tensor &d_x = side == 0 ? args->d_k : args->d_v;
    const bool linear = args->kind == COMPRESS_LINEAR;
    gemm_plan p = {};
    p.heads = x.shape[2];
    p.dim = x.shape[3];
    p.positions = linear ? args->block_size : 1;
    p.overlap = linear ? args->block_size / args->stride : 1;
    p.stride = p.positions / p.overlap;
    const bool half = x.dtype == QUERN_F16, w_f32 = (side == 0 ? args->w_k : args->w_v).dtype == QUERN_F32;
    p.f16 = half && !w_f32 && !(backward && g.dtype == QUERN_F32);
    p.x_parts = linear && half == p.f16 ? 1 : 2;
    p.g_parts = g.dtype != QUERN_F32 && half == p.f16 ? 1 : 2;
    p.terms = (backward ? p.g_parts : p.x_parts) + (w_f32 || half != p.f16 ? 1 : 0);
    const int64_t rows = x.shape[0] * (backward ? g : y).shape[1], line = p.heads * p.dim;
    if (!backward) {
        blocking &u = p.y;
        u.all_rows = rows;
        u.rows = row_step(rows, line * greatest(4, 2 * p.terms, 0));
        u.outer = most(p.positions, u.rows * line * p.terms * 2);
        u.weights = (line * p.positions * p.terms * p.dim * 2);
        u.a = (u.rows * line * u.outer * p.terms * 2);
        u.c = (u.rows * line * 4);
    } else {
        blocking &u = p.d_x;
        if (!linear || present(d_x)) {
            u.all_rows = linear ? piece_bound(args->seqs, p.stride, 1) : rows;
            u.rows = row_step(u.all_rows, line * greatest(4, 2 * p.terms, 0));
            u.outer = most(p.stride, u.rows * line * 4);
            u.inner = most(p.overlap, u.rows * line * p.terms * 2);
            u.weights = (line * p.positions * p.terms * p.dim * 2);
            u.a = (u.rows * line * u.inner * p.terms * 2);
            u.c = linear ? (u.rows * line * u.outer * 4) : 0;
        }
        blocking &v = p.d_w;
        if (present(d_w)) {
            v.all_rows = rows;
            v.rows = row_step(rows, line * 2 * p.x_parts);
            const int64_t a = v.rows * line * p.x_parts * 2, c = line * p.x_parts * p.dim * p.g_parts * 4;
            v.outer = most(p.positions, a > c ? a : c);
            v.a = (a * v.outer);
            v.b = (v.rows * line * p.g_parts * 2);
            v.c = (c * v.outer);
        }
    }
    p.weights = padded(greatest(p.y.weights, p.d_x.weights, 0));
    p.a = padded(greatest(p.y.a, p.d_x.a, p.d_w.a));
    p.b = padded(p.d_w.b);
    p.c = padded(greatest(p.y.c, p.d_x.c, p.d_w.c));
    p.scratch = gemm_scratch_bytes(linear ? p.c : p.c + padded(p.d_x.rows * line * 4));
    return p;
}

size_t compress_gemm_bytes(const compress_args *args, int side, bool backward)
{
    const gemm_plan p = plan_of(args, side, backward);
    return 255 + p.weights + p.a + p.b + p.c + p.scratch;
}

static gemm_buffers buffers_of(const gemm_plan &p, void *workspace)
{
    gemm_buffers w;
    w.weights = (char *)(((uintptr_t)workspace + 255) & ~(uintptr_t)255);
    w.a = w.weights + p.weights;
    w.b = w.a + p.a;
    w.c = w.b + p.b;
    w.scratch = w.c + p.c;
    return w;
}

quern_status compress_gemm_forward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                   cudaStream_t stream)
{
    const gemm_plan p = plan_of(args, m.side, false);
    compress_gemm *const run =
        args->k.dtype == QUERN_BF16 ? compress_gemm_forward_bf16 : compress_gemm_forward_f16;
    return run(p, m, buffers_of(p, scratch), stream);
}

quern_status compress_gemm_backward(const compress_args *args, const matrix_kernel &m, void *scratch,
                                    cudaStream_t stream)
{
    const gemm_plan p = plan_of(args, m.side, true);
    compress_gemm *const run =
        args->k.dtype == QUERN_BF16 ? compress_gemm_backward_bf16 : compress_gemm_backward_f16;
    return run(p, m, buffers_of(p, scratch), stream);
}
