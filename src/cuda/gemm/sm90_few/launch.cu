/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which products Hopper's kernel for few rows takes: those by a weight [n, k], of so few rows
 * that reading it is the limit. */
#include "common/rows.cuh"
#include "gemm/sm90_few/kernel.cuh"
#include "variants.cuh"

using namespace sm90_few;

enum { ROWS_MOST = 128, SHARED_BYTES = 227 * 1024 };
static_assert(sizeof(shared) <= SHARED_BYTES, "a block fits");

/* A matrix as the copy engine is told of it. */
static quern_tensor as_rows(const quern_tensor &matrix)
{
    quern_tensor t = matrix;
    t.ndim = 4;
    t.shape[3] = matrix.shape[1];
    t.shape[1] = matrix.shape[0];
    t.shape[0] = t.shape[2] = 1;
    t.strides[1] = matrix.strides[0];
    t.strides[0] = t.strides[2] = 8;
    t.strides[3] = 1;
    return t;
}

static bool supports(const stage_exec *exec, const gemm_args *args, char *)
{
    const quern_dtype dtype = args->a.dtype;
    const quern_tensor &c = args->c;
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->b_transposed &&
           !args->accumulate && (dtype == QUERN_BF16 || dtype == QUERN_F16) && args->b.dtype == dtype &&
           (c.dtype == QUERN_F32 || c.dtype == dtype) && c.shape[0] <= ROWS_MOST && c.shape[1] % 2 == 0 &&
           c.shape[1] <= INT32_MAX / 2 && args->a.shape[1] <= INT32_MAX / 2 && rows_aligned(c, 8) &&
           rows_aligned(args->a, 16) && rows_aligned(args->b, 16) && tma_can(as_rows(args->a)) &&
           tma_can(as_rows(args->b));
}

template <typename T> static quern_status run_dtype(const stage_exec *exec, const gemm_args *args)
{
    few_params q = {};
    CUtensorMap a, b;
    q.c = args->c.data;
    q.c_row = args->c.strides[0];
    q.m = (int32_t)args->c.shape[0];
    q.n = (int32_t)args->c.shape[1];
    q.depths = (int32_t)((args->a.shape[1] + DEPTH - 1) / DEPTH);
    q.row_tiles = (q.m + ROWS - 1) / ROWS;
    q.pairs = (q.n + CLUSTER * COLUMNS - 1) / (CLUSTER * COLUMNS);
    q.half = args->c.dtype != QUERN_F32;
    quern_status status = tma_describe(&a, as_rows(args->a), 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&b, as_rows(args->b), 1, COLUMNS);
    return status == QUERN_OK ? launch<T>(exec, q, a, b) : status;
}

static quern_status run(const stage_exec *exec, const gemm_args *args, void *)
{
    return args->a.dtype == QUERN_BF16 ? run_dtype<bf16>(exec, args) : run_dtype<f16>(exec, args);
}

extern const variant<gemm_args> gemm_sm90_few = {"gemm_sm90_few", supports, NULL, run};
