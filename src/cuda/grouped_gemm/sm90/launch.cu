/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's grouped product takes, and the width of its products. */
#include "grouped_gemm/sm90/shared.cuh"
#include "variants.cuh"

using namespace sm90_gemm;

namespace sm90_gemm
{
#define INSTANCES(T)                                                                                         \
    template <> quern_status launch<T, 8>(const stage_exec *, const gemm_params &, const CUtensorMap &);     \
    template <> quern_status launch<T, 16>(const stage_exec *, const gemm_params &, const CUtensorMap &);    \
    template <> quern_status launch<T, 32>(const stage_exec *, const gemm_params &, const CUtensorMap &);    \
    template <> quern_status launch<T, 64>(const stage_exec *, const gemm_params &, const CUtensorMap &);    \
    template <> quern_status launch<T, 128>(const stage_exec *, const gemm_params &, const CUtensorMap &);   \
    template <> quern_status launch<T, 256>(const stage_exec *, const gemm_params &, const CUtensorMap &);   \
    template <>                                                                                              \
    quern_status launch_rows<T, 18>(const stage_exec *, const gemm_params &, const CUtensorMap &);           \
    template <> quern_status launch_rows<T, 20>(const stage_exec *, const gemm_params &, const CUtensorMap &);
INSTANCES(bf16)
#ifndef QUERN_CUDA_ONE_DTYPE
INSTANCES(f16)
#endif
} // namespace sm90_gemm

enum { ALIGNMENT = 16, SHARED_BYTES = 227 * 1024, WIDEST = 256 };

static bool grouped_gemm_sm90_supports(const stage_exec *exec, const grouped_gemm_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    static_assert(sizeof(shared<256>) <= SHARED_BYTES && sizeof(shared<128>) <= SHARED_BYTES &&
                      sizeof(shared<64>) <= SHARED_BYTES && sizeof(shared<32>) <= SHARED_BYTES &&
                      2 * sizeof(shared<16>) <= SHARED_BYTES && 2 * sizeof(shared<8>) <= SHARED_BYTES,
                  "blocks fit");
    return !args->fp8 && exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->k > 0 &&
           (!present(args->b_repacked) || rows_aligned(args->b_repacked, 16)) && gemm_takes(args, limits);
}

/* The narrowest products that hold an expert's tokens, were they equally loaded. */
static int width_of(const grouped_gemm_args *args)
{
    const int64_t experts = present(args->offsets) ? args->offsets.shape[0] : 1;
    int width = 8;
    while (width < WIDEST && width * experts < args->tokens) width *= 2;
    return width;
}

/* The columns, by eights, of tiles whose rows are tokens, where those end sooner than pairs of panels, were
 * experts equally loaded: by the clocks of the busiest multiprocessor; else 0. */
static int eights_of(const stage_exec *exec, const grouped_gemm_args *args, int width)
{
    /* Of half a pair's unit: a product of n tokens takes n / 2 clocks, and 12 for its operand in registers.
     * Of a unit of rows: what shared memory takes, measured. */
    enum { HALF = 4 * (128 + 12), ROWS = 340, ROWS_EIGHT = 60 };
    if (width < WIDEST || !present(args->b_repacked)) return 0;
    const int64_t experts = present(args->offsets) ? max(args->offsets.shape[0], (int64_t)1) : 1,
                  rows = (args->tokens + experts - 1) / experts, panels = (args->n + UNIT - 1) / UNIT,
                  blocks = exec->multiprocessors, down = (rows + WIDEST - 1) / WIDEST * experts,
                  pairs = panels / 2 * down;
    /* Halves: of whole pairs alone, and of all panels. */
    const int64_t whole = (pairs + blocks - 1) / blocks * 2, all = (panels * down + blocks - 1) / blocks;
    int64_t least = (whole > all ? whole : all) * HALF;
    int found = 0;
    for (int eights = 18; eights <= 20; eights += 2) {
        const int64_t tiles = (args->n + 8 * eights - 1) / (8 * eights) * down,
                      clocks = (tiles + blocks - 1) / blocks * (ROWS + ROWS_EIGHT * eights);
        if (clocks < least) {
            least = clocks;
            found = eights;
        }
    }
    return found;
}

/* A as the copy engine sees it. */
static quern_tensor a_of(const grouped_gemm_args *args, const gemm_plan &plan)
{
    quern_tensor t = {};
    t.data = (void *)plan.p.a;
    t.dtype = plan.f16_product ? QUERN_F16 : QUERN_BF16;
    t.ndim = 4;
    t.shape[0] = t.shape[2] = 1;
    t.shape[1] = args->tokens;
    t.shape[3] = plan.ready ? plan.p.a_stride : args->k;
    t.strides[0] = t.strides[1] = t.strides[2] = plan.p.a_stride;
    t.strides[3] = 1;
    return t;
}

template <typename T>
static quern_status run(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a, int width,
                        int eights)
{
    if (eights == 18) return launch_rows<T, 18>(exec, p, a);
    if (eights == 20) return launch_rows<T, 20>(exec, p, a);
    if (width == 8) return launch<T, 8>(exec, p, a);
    if (width == 16) return launch<T, 16>(exec, p, a);
    if (width == 32) return launch<T, 32>(exec, p, a);
    if (width == 64) return launch<T, 64>(exec, p, a);
    return width == 128 ? launch<T, 128>(exec, p, a) : launch<T, 256>(exec, p, a);
}

static size_t grouped_gemm_sm90_bytes(const stage_exec *exec, const grouped_gemm_args *args)
{
    return gemm_plan_of(exec, args, ALIGNMENT, NULL).bytes;
}

static quern_status grouped_gemm_sm90_run(const stage_exec *exec, const grouped_gemm_args *args,
                                          void *workspace)
{
    const gemm_plan plan = gemm_plan_of(exec, args, ALIGNMENT, workspace);
    const int width = width_of(args);
    const int eights = eights_of(exec, args, width);
    CUtensorMap a;
    if (args->tokens == 0 || args->n == 0) return QUERN_OK;
    quern_status status = gemm_ready(exec, args, plan);
    if (status == QUERN_OK) status = tma_describe(&a, a_of(args, plan), 1, width);
    if (status == QUERN_OK)
        status = plan.f16_product ? run<f16>(exec, plan.p, a, width, eights)
                                  : run<bf16>(exec, plan.p, a, width, eights);
    return status == QUERN_OK ? gemm_finish(exec, args, plan) : status;
}

extern const variant<grouped_gemm_args> grouped_gemm_sm90 = {"grouped_gemm_sm90", grouped_gemm_sm90_supports,
                                                             grouped_gemm_sm90_bytes, grouped_gemm_sm90_run};
