/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's grouped product of e4m3 operands takes. */
#include "grouped_gemm/sm90_fp8/kernel.cuh"
#include "variants.cuh"

using namespace sm90_fp8;

enum { ALIGNMENT = 16, SHARED_BYTES = 227 * 1024 };

static bool grouped_gemm_sm90_fp8_supports(const stage_exec *exec, const grouped_gemm_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    static_assert(sizeof(shared<1, 1>) <= SHARED_BYTES && sizeof(shared<2, 1>) <= SHARED_BYTES &&
                      sizeof(shared<2, 2>) <= SHARED_BYTES,
                  "blocks fit");
    return args->fp8 && exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->k > 0 &&
           gemm_takes(args, limits);
}

static size_t grouped_gemm_sm90_fp8_bytes(const stage_exec *exec, const grouped_gemm_args *args)
{
    return args->fp8 ? gemm_plan_of(exec, args, ALIGNMENT, NULL).bytes : 0;
}

/* A's bytes as the copy engine sees them: pairs. */
static quern_tensor a_of(const grouped_gemm_args *args, const gemm_plan &plan)
{
    quern_tensor t = {};
    t.data = (void *)plan.p.a;
    t.dtype = QUERN_BF16;
    t.ndim = 4;
    t.shape[0] = t.shape[2] = 1;
    t.shape[1] = args->tokens;
    t.shape[3] = plan.p.a_stride / 2;
    t.strides[0] = t.strides[1] = t.strides[2] = plan.p.a_stride / 2;
    t.strides[3] = 1;
    return t;
}

/* Whether two blocks share weights, of `rows` tokens an expert: that takes nine tenths of the time, but tiles
 * of twice the tokens. */
static bool shares_weights(int64_t rows)
{
    const int64_t tiles = (rows + 2 * PART - 1) / (2 * PART);
    return (tiles + 1) / 2 * 2 * 9 <= tiles * 10;
}

template <int PARTS, int SHARE>
static quern_status run(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan,
                        bool bulk)
{
    CUtensorMap a;
    const quern_status status = tma_describe(&a, a_of(args, plan), 1, form<PARTS, SHARE>::TOKENS);
    if (status != QUERN_OK) return status;
    return launch_cluster((cudaStream_t)exec->stream, grouped_gemm_sm90_fp8<PARTS, SHARE>,
                          dim3((unsigned)exec->multiprocessors / SHARE * SHARE), form<PARTS, SHARE>::THREADS,
                          sizeof(shared<PARTS, SHARE>), "grouped_gemm", SHARE, true, fp8_params_of(plan), a,
                          bulk);
}

static quern_status grouped_gemm_sm90_fp8_run(const stage_exec *exec, const grouped_gemm_args *args,
                                              void *workspace)
{
    const gemm_plan plan = gemm_plan_of(exec, args, ALIGNMENT, workspace);
    const bool bulk = present(args->b_repacked) && rows_aligned(args->b_repacked, 16);
    const int64_t experts = present(args->offsets) ? args->offsets.shape[0] : 1,
                  rows = experts > 0 ? (args->tokens + experts - 1) / experts : 0;
    if (args->tokens == 0 || args->n == 0) return QUERN_OK;
    quern_status status = fp8_ready(exec, args, plan, true);
    if (status == QUERN_OK)
        status = !bulk || rows <= PART    ? run<1, 1>(exec, args, plan, bulk)
                 : !shares_weights(rows) ? run<2, 1>(exec, args, plan, bulk)
                                         : run<2, 2>(exec, args, plan, bulk);
    return status == QUERN_OK ? gemm_finish(exec, args, plan) : status;
}

extern const variant<grouped_gemm_args> grouped_gemm_sm90_fp8 = {
    "grouped_gemm_sm90_fp8", grouped_gemm_sm90_fp8_supports, grouped_gemm_sm90_fp8_bytes,
    grouped_gemm_sm90_fp8_run};
