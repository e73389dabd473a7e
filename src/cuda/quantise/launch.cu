/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the quantise stage: which kernels a call takes. */
#include "quantise/kernel.cuh"
#include "variants.cuh"

__global__ void quantise_globals(const __grid_constant__ quantise_params a)
{
    const int64_t i = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x;
    if (i >= a.global_count) return;
    float *to = a.global.row<float>(i);
    if (a.given.p != NULL) {
        *to = *a.given.row<const float>(i);
        return;
    }
    const bool empty =
        a.per == QUANTISE_GLOBAL_EXPERT &&
        (a.ends.end != NULL ? a.ends.end_of((int32_t)i) <= a.ends.first_of((int32_t)i) : a.expert_rows == 0);
    *to = empty ? 1.0f : global_from_largest(a.profile, __uint_as_float(a.largest[i]));
}

quern_status write_globals(const quantise_params &a, cudaStream_t stream)
{
    if (a.global_count == 0) return QUERN_OK;
    quantise_globals<<<blocks_for(a.global_count, QUANTISE_THREADS), QUANTISE_THREADS, 0, stream>>>(a);
    return LAUNCHED("quantise, globals");
}

quern_status clear_largest(const quantise_params &a, cudaStream_t stream)
{
    if (a.global_count == 0) return QUERN_OK;
    const cudaError_t code = cudaMemsetAsync(a.largest, 0, (size_t)a.global_count * sizeof(uint32_t), stream);
    return code == cudaSuccess ? QUERN_OK : cuda_report(code, "quantise, clearing");
}

/* Whether a pass over all of x finds the globals. */
static bool needs_largest(const quantise_args *args)
{
    return !present(args->given) && args->per != QUANTISE_GLOBAL_ROW;
}

static size_t quantise_any_bytes(const stage_exec *, const quantise_args *args)
{
    const int64_t globals = rows_of(args->global), parts = QUANTISE_PARTS;
    return needs_largest(args) ? room_for((size_t)(globals > parts ? globals : parts) * sizeof(uint32_t)) : 0;
}

static void describe_weight(quantise_params &a, const quantise_args *args)
{
    const quern_tensor &x = args->x;
    const int64_t pair = 2 * bytes_of(x.dtype);
    a.k = x.shape[1];
    a.columns = x.shape[2];
    a.rows = x.shape[0] * (a.k / FP4_BLOCK);
    a.expert_rows = a.k;
    a.wide = a.columns % 2 == 0 && rows_aligned(x, pair);
    for (int i = 0; i < 2; i++) {
        a.x_s[i] = x.strides[i];
        a.codes_s[i] = args->codes.strides[i];
        a.scales_s[i] = args->scales.strides[i];
    }
}

static quantise_params params_of(const quantise_args *args, void *workspace)
{
    const quern_tensor &x = args->x;
    quantise_params a = {};
    a.x = rows_view_of(x);
    a.codes = rows_view_of(args->codes);
    a.scales = rows_view_of(args->scales);
    if (present(args->given)) a.given = rows_view_of(args->given);
    if (present(args->global)) a.global = rows_view_of(args->global);
    a.per = args->per;
    a.profile = args->profile;
    a.largest = room_at<uint32_t>(workspace);
    a.global_count = present(args->global) ? rows_of(args->global) : 0;
    a.x_rows = rows_of(x);
    if (args->columns) {
        describe_weight(a, args);
        return a;
    }
    a.rows = present(args->slots) ? args->slots.shape[0] : a.x_rows;
    a.columns = columns_of(x);
    a.blocks = (a.columns + FP4_BLOCK - 1) / FP4_BLOCK;
    a.by_blocks = divider_by(a.blocks);
    a.slots = (const int32_t *)args->slots.data;
    a.slots_a_row = args->slots_a_row > 0 ? (int32_t)args->slots_a_row : 1;
    a.ends = expert_ends_of(args->offsets, a.rows);
    a.expert_rows = x.ndim == 3 ? x.shape[1] : 1;
    a.wide = rows_aligned(x, 16);
    a.wide_codes = rows_aligned(args->codes, 8);
    a.flat = a.per == QUANTISE_GLOBAL_TENSOR && a.slots == NULL && !present(args->offsets) && a.wide &&
             a.wide_codes && a.columns == a.blocks * FP4_BLOCK && rows_follow(a.x, a.columns) &&
             rows_follow(a.codes, a.blocks * 8) && rows_follow(a.scales, a.blocks);
    return a;
}

static quern_status quantise_any_run(const stage_exec *exec, const quantise_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    quantise_params a = params_of(args, workspace);
    a.status = exec->status;
    const fp4_rule rule = fp4_rule_of(args->profile, args->choice);
    a.reciprocal = rule.reciprocal;
    const bool computed = !present(args->given);
    if (!computed) {
        const quern_status status = write_globals(a, stream);
        if (status != QUERN_OK) return status;
    }
    const quern_dtype dtype = args->x.dtype;
    auto run = dtype == QUERN_F32 ? quantise_f32 : dtype == QUERN_BF16 ? quantise_bf16 : quantise_f16;
    return run(a, rule.kind, args->columns, computed, exec->multiprocessors, stream);
}

extern const variant<quantise_args> quantise_any = {"quantise_any", NULL, quantise_any_bytes,
                                                    quantise_any_run};
