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

/* Adds a product to those of a launch. */
template <int MOST> static quern_status add(few_set<MOST> &set, const gemm_args *args)
{
    few_params &q = set.q[set.count];
    q.c = args->c.data;
    q.c_row = args->c.strides[0];
    q.m = (int32_t)args->c.shape[0];
    q.n = (int32_t)args->c.shape[1];
    q.depths = (int32_t)((args->a.shape[1] + DEPTH - 1) / DEPTH);
    q.row_tiles = (q.m + ROWS - 1) / ROWS;
    q.pairs = (q.n + CLUSTER * COLUMNS - 1) / (CLUSTER * COLUMNS);
    q.first = set.tiles;
    if (present(args->live)) {
        q.live = (const int64_t *)args->live.data;
        q.live_s = args->live.strides[0];
    }
    q.half = args->c.dtype != QUERN_F32;
    q.wide = rows_aligned(args->c, 16);
    quern_status status = tma_describe(&set.a[set.count], as_rows(args->a), 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&set.b[set.count], as_rows(args->b), 1, COLUMNS);
    set.tiles += q.row_tiles * q.pairs;
    set.count++;
    return status;
}

template <int MOST>
static quern_status launch_set(const stage_exec *exec, quern_dtype dtype, const few_set<MOST> &set)
{
    if (set.tiles == 0) return QUERN_OK;
    return dtype == QUERN_BF16 ? launch<bf16>(exec, set) : launch<f16>(exec, set);
}

static quern_status run(const stage_exec *exec, const gemm_args *args, void *)
{
    few_set<1> set = {};
    const quern_status status = add(set, args);
    return status == QUERN_OK ? launch_set(exec, args->a.dtype, set) : status;
}

extern const variant<gemm_args> gemm_sm90_few = {"gemm_sm90_few", supports, NULL, run};

/* Products of which none needs another's result, as one launch; false where one of them is not taken. */
bool gemm_together(const stage_exec *exec, const gemm_args *const *list, int32_t count, quern_status *status)
{
    few_set<TOGETHER> set = {};
    char why[STAGE_WHY_BYTES];
    if (count > TOGETHER || exec->variant != NULL) return false;
    for (int32_t i = 0; i < count; i++)
        if (list[i]->a.dtype != list[0]->a.dtype || !supports(exec, list[i], why)) return false;
    const device_scope scope(exec->device_id);
    *status = cuda_report(scope.code, "choosing the device");
    for (int32_t i = 0; i < count && *status == QUERN_OK; i++) *status = add(set, list[i]);
    if (*status == QUERN_OK) *status = launch_set(exec, list[0]->a.dtype, set);
    return true;
}
