/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cublaslt.cu - c = a b of matrices of 16 bits, by cuBLASLt: one algorithm for any number of rows, so a row
 * of c does not depend on how many there are. Limit: tensor cores. */
#include "common/gemm.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

extern const variant<gemm_args> gemm_any; /* computes what cuBLASLt refuses */

enum { SCRATCH_ALIGN = 256 };

static size_t scratch_of(const gemm_args *args)
{
    return gemm_scratch_bytes((size_t)(args->c.shape[0] * args->c.shape[1]) * sizeof(float));
}

/* Rows that overlap have no leading dimension. */
static bool reads(const quern_tensor &t)
{
    return rows_aligned(t, GEMM_ALIGN) && t.shape[1] * bytes_of(t.dtype) % GEMM_ALIGN == 0 &&
           (t.shape[0] <= 1 || t.strides[0] >= t.shape[1]);
}

static bool supports(const stage_exec *, const gemm_args *args, char *)
{
    const quern_dtype dtype = args->a.dtype;
    const bool halves = dtype == QUERN_BF16 || dtype == QUERN_F16,
               kept = args->c.dtype == QUERN_F32 || (args->c.dtype == dtype && !args->accumulate);
    return halves && args->b.dtype == dtype && kept && !present(args->live) && reads(args->a) &&
           reads(args->b) && reads(args->c) && args->c.shape[0] > 0 && args->c.shape[1] > 0 &&
           args->a.shape[0] > 0 && args->a.shape[1] > 0 && gemm_available();
}

/* A row stride that a matrix of one row need not have. */
static int64_t stride_of(const quern_tensor &t)
{
    return t.shape[0] > 1 ? t.strides[0] : t.shape[1];
}

static size_t workspace(const stage_exec *, const gemm_args *args)
{
    return scratch_of(args) + SCRATCH_ALIGN - 1;
}

static quern_status run(const stage_exec *exec, const gemm_args *args, void *memory)
{
    gemm_shape s = {};
    s.f16 = args->a.dtype == QUERN_F16;
    s.c_half = args->c.dtype != QUERN_F32;
    s.any_rows = 1;
    s.a_transposed = args->a_transposed;
    s.b_transposed = args->b_transposed;
    s.batch = 1;
    s.m = args->c.shape[0];
    s.n = args->c.shape[1];
    s.k = args->a.shape[args->a_transposed ? 0 : 1];
    s.lda = stride_of(args->a);
    s.ldb = stride_of(args->b);
    s.ldc = stride_of(args->c);
    s.scratch_bytes = (int64_t)scratch_of(args);
    void *const scratch = (void *)(((uintptr_t)memory + SCRATCH_ALIGN - 1) & ~(uintptr_t)(SCRATCH_ALIGN - 1));
    const quern_status status = gemm_run(s, args->a.data, args->b.data, args->c.data, args->accumulate,
                                         scratch, (cudaStream_t)exec->stream);
    return status == QUERN_ERR_UNSUPPORTED ? gemm_any.run(exec, args, NULL) : status;
}

extern const variant<gemm_args> gemm_cublaslt = {"gemm_cublaslt", supports, workspace, run};
