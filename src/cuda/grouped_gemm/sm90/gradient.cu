/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gradient.cu - the gradient of A on Hopper: the grouped product of d_c by transposed weights. d_c in bf16
 * with one global an expert is read as it is; else backward.cu writes its parts to the workspace first. */
#include "grouped_gemm/backward/params.cuh"
#include "grouped_gemm/sm90/shared.cuh"
#include "variants.cuh"

using namespace sm90_gemm;

namespace sm90_gemm
{
template <> quern_status launch_gradient<64>(const stage_exec *, const gemm_params &, const CUtensorMap &);
template <> quern_status launch_gradient<128>(const stage_exec *, const gemm_params &, const CUtensorMap &);
template <> quern_status launch_gradient<256>(const stage_exec *, const gemm_params &, const CUtensorMap &);
} // namespace sm90_gemm

enum { ALIGNMENT = 16 };

static bool grouped_gemm_backward_sm90_supports(const stage_exec *exec, const grouped_gemm_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    return exec->compute == 90 && exec->shared_bytes >= sizeof(shared<256>) && args->n > 0 && args->k > 0 &&
           (!present(args->b_repacked) || rows_aligned(args->b_repacked, ALIGNMENT)) &&
           gradient_takes(args, limits);
}

static gemm_params product_of(const stage_exec *exec, const grouped_gemm_args *args, const backward_params &a,
                              bool ready)
{
    gemm_params p = gradient_terms(exec, args, a);
    p.transposed = true;
    p.units = a.b.panels;
    p.panels = a.b.units;
    p.width = a.b.k;
    p.parts = ready ? a.parts : 1;
    p.a = ready ? a.d : a.d_c;
    p.a_stride = ready ? a.stride : a.d_c_stride;
    p.b_global = a.b_global;
    p.b_global_expert = a.b_global_expert;
    p.b_parts = a.b_parts;
    p.run = a.run;
    p.b_larger = true;
    p.c = a.d_a;
    p.c_dtype = a.d_a_dtype;
    p.c_stride = a.d_a_stride;
    p.c_wide = rows_aligned(args->d_a, ALIGNMENT);
    return p;
}

/* d_c as the copy engine sees it. */
static quern_tensor gradient_view(const grouped_gemm_args *args, const gemm_params &p, bool ready)
{
    quern_tensor t = {};
    t.data = (void *)p.a;
    t.dtype = QUERN_BF16;
    t.ndim = 4;
    t.shape[0] = t.shape[2] = 1;
    t.shape[1] = args->tokens;
    t.shape[3] = ready ? p.a_stride : args->n;
    t.strides[0] = t.strides[1] = t.strides[2] = p.a_stride;
    t.strides[3] = 1;
    return t;
}

static quern_status grouped_gemm_backward_sm90_run(const stage_exec *exec, const grouped_gemm_args *args,
                                                   void *workspace)
{
    const backward_params a = backward_params_of(args, workspace);
    const bool ready = a.parts > 1 || !rows_aligned(args->d_c, ALIGNMENT);
    const int64_t experts = present(args->offsets) ? args->offsets.shape[0] : 1;
    const int width = args->tokens <= 64 * experts ? 64 : args->tokens <= 128 * experts ? 128 : 256;
    CUtensorMap d;
    if (args->tokens == 0) return QUERN_OK;
    const gemm_params p = product_of(exec, args, a, ready);
    quern_status status = ready ? gradient_ready(exec, a) : QUERN_OK;
    if (status == QUERN_OK) status = tma_describe(&d, gradient_view(args, p, ready), 1, width);
    if (status != QUERN_OK) return status;
    return width == 64    ? launch_gradient<64>(exec, p, d)
           : width == 128 ? launch_gradient<128>(exec, p, d)
                          : launch_gradient<256>(exec, p, d);
}

extern const variant<grouped_gemm_args> grouped_gemm_backward_sm90 = {
    "grouped_gemm_backward_sm90", grouped_gemm_backward_sm90_supports, gradient_bytes,
    grouped_gemm_backward_sm90_run};
