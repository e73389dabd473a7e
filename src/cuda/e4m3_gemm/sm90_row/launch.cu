/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls of one row Hopper's product for them takes. */
#include "e4m3_gemm/sm90_row/kernel.cuh"
#include "variants.cuh"

#include <algorithm>

using namespace sm90_e4m3_row;

enum { FEW = 32, MANY = 128 }; /* pieces of W that a block has at most */

static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    return exec->compute == 90 && exec->shared_bytes >= sizeof(shared<MANY>) && !args->round &&
           args->a.shape[0] == 1 && tiles_take(args) && args->codes.shape[1] <= MANY * RUN &&
           tiles_take_rows(args);
}

template <typename T, int PIECES>
static quern_status launch(const stage_exec *exec, const product_params &q, const CUtensorMap &w)
{
    return launch_cluster((cudaStream_t)exec->stream, e4m3_gemm_sm90_row<T, PIECES>,
                          dim3((unsigned)(q.panels * q.p.groups)), ROW_THREADS, sizeof(shared<PIECES>),
                          "e4m3_gemm", 1, true, q, w);
}

template <typename T>
static quern_status launch_runs(const stage_exec *exec, const product_params &q, const CUtensorMap &w)
{
    return q.runs <= FEW ? launch<T, FEW>(exec, q, w) : launch<T, MANY>(exec, q, w);
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *)
{
    product_params q = product_of(exec, args, 1);
    CUtensorMap w;
    const int64_t panels = (q.p.out + ROWS - 1) / ROWS, at_once = 2 * (int64_t)exec->multiprocessors;
    q.tall = (int32_t)std::min(std::max((int64_t)FEW / q.runs, (int64_t)1),
                               (panels * q.p.groups + at_once - 1) / at_once);
    q.panels = (panels + q.tall - 1) / q.tall;
    const quern_status status =
        describe_bytes(&w, args->codes.data, args->codes.shape[0], args->codes.shape[1], q.p.code_row, ROWS);
    if (status != QUERN_OK) return status;
    return args->a.dtype == QUERN_BF16 ? launch_runs<bf16>(exec, q, w) : launch_runs<f16>(exec, q, w);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_row = {"e4m3_gemm_sm90_row", supports, NULL, run};
