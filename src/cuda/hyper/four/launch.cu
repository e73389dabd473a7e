/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - hyper-connections of many tokens of four copies in bf16: their workspace, and the kernels one
 * after another.
 *
 *   forward:  fn in two parts, sums, weights, combine
 *   backward: fn in two parts, all sums, weights and their gradients, copies; sums of runs and shares
 *
 * Few tokens do not fill the device with panels: they are hyper/launch.cu's.
 */
#include "common/sums.cuh"
#include "hyper/four/params.cuh"
#include "variants.cuh"

enum { TOKENS_LEAST = 512, SMALL_THREADS = 512 };

struct four_plan {
    four_params p;
    int64_t runs, shares; /* of tokens, which have sums of their own */
    size_t bytes;
};

static bool is_four(const hyper_args *args)
{
    return args->x.dtype == QUERN_BF16 && args->x.shape[1] == COPIES && !args->head && present(args->fn) &&
           args->x.shape[0] >= TOKENS_LEAST && args->x.shape[2] % STRIP == 0 &&
           args->x.shape[2] <= WIDTH_MOST;
}

static bool rows_are_wide(const hyper_args *args)
{
    const quern_tensor *all[] = {&args->x,   &args->f,     &args->h,   &args->out,   &args->d_h,
                                 &args->d_x, &args->d_out, &args->d_f, &args->weight};
    bool wide = true;
    for (const quern_tensor *t : all) wide = wide && (!present(*t) || rows_aligned16(*t));
    return wide;
}

static bool forward_supports(const stage_exec *exec, const hyper_args *args, char *)
{
    return is_four(args) && rows_are_wide(args) && exec->shared_bytes >= four_sums_bytes();
}

static bool backward_supports(const stage_exec *exec, const hyper_args *args, char *)
{
    return is_four(args) && rows_are_wide(args) && (present(args->d_h) || present(args->d_out)) &&
           exec->shared_bytes >= four_sums_backward_bytes() &&
           exec->shared_bytes >= four_weights_backward_bytes((int)args->iterations) &&
           exec->shared_bytes >= four_copies_backward_bytes();
}

static four_params params_of(const hyper_args *args)
{
    four_params p = {};
    static_cast<hyper_call &>(p) = hyper_call_of(args);
    p.padded = (p.tokens + TILE - 1) / TILE * TILE;
    return p;
}

static four_plan plan_of(const hyper_args *args, bool backward, void *memory)
{
    four_plan plan = {};
    four_params &p = plan.p;
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    if (!is_four(args)) return plan;
    p = params_of(args);
    const size_t tokens = (size_t)p.tokens, width = (size_t)p.width, columns = WEIGHTS,
                 fn_bytes = width * COPIES * WEIGHTS * FN_PARTS * sizeof(bf16),
                 sums = backward ? BACKWARD_SUMS : FORWARD_SUMS;
    plan.runs = (p.tokens + 63) / 64 * 2;
    plan.shares = shares_for(p.width / STRIP);
    p.fn_of_sums = (uint4 *)arena_take(&a, fn_bytes);
    p.sums = (float *)arena_take(&a, (size_t)(panels_of(p.width) * p.padded) * sums * sizeof(float));
    if (!backward) p.weights = (float *)arena_take(&a, tokens * columns * sizeof(float));
    if (backward) {
        const size_t shares = (size_t)plan.shares;
        p.fn_of_copies = (uint4 *)arena_take(&a, fn_bytes);
        p.records = (token_record *)arena_take(&a, tokens * sizeof(token_record));
        p.d_small = (double *)arena_take(&a, (size_t)plan.runs * 2 * columns * sizeof(double));
        if (present(args->d_weight)) p.d_norm_parts = (float *)arena_take(&a, shares * width * sizeof(float));
        if (present(args->d_fn))
            p.d_fn_parts = (float *)arena_take(&a, shares * columns * COPIES * width * sizeof(float));
    }
    plan.bytes = a.used + ARENA_ALIGN - 1;
    return plan;
}

static size_t forward_workspace(const stage_exec *, const hyper_args *args)
{
    return plan_of(args, false, NULL).bytes;
}

static size_t backward_workspace(const stage_exec *, const hyper_args *args)
{
    return plan_of(args, true, NULL).bytes;
}

static quern_status forward_run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const four_params p = plan_of(args, false, memory).p;
    quern_status status = four_pack(p, stream);
    if (status == QUERN_OK) status = four_sums(p, stream);
    if (status == QUERN_OK) status = four_weights(p, stream);
    return status == QUERN_OK ? four_combine(p, stream) : status;
}

/* The runs' sums of base's gradient, a block a weight, and of the scales', a block each. */
__global__ void __launch_bounds__(SMALL_THREADS)
    four_small(const double *parts, int64_t runs, float *d_base, float *d_scale)
{
    __shared__ double sums[SMALL_THREADS / 32];
    const int b = blockIdx.x, part = b - WEIGHTS;
    const int first = part < 0 ? b : WEIGHTS + (part < 2 ? part * COPIES : 2 * COPIES),
              bits = part < 0   ? 0
                     : part < 2 ? 2
                                : 4; /* of how many weights there are */
    static_assert(COPIES == 1 << 2, "as many as a scale has");
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < runs << bits; i += SMALL_THREADS)
        sum += parts[(i >> bits) * 2 * WEIGHTS + first + (i & ((1 << bits) - 1))];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < SMALL_THREADS / 32; w++) sum += sums[w];
    if (part < 0 && d_base != NULL) d_base[b] = (float)sum;
    if (part >= 0 && d_scale != NULL) d_scale[part] = (float)sum;
}

static quern_status give_sums(const four_plan &plan, const hyper_args *args, cudaStream_t stream)
{
    const four_params &p = plan.p;
    const run_shares parts[] = {{p.d_norm_parts, plan.shares, p.width, args->d_weight},
                                {p.d_fn_parts, plan.shares, (int64_t)WEIGHTS * COPIES * p.width, args->d_fn}};
    const quern_status status = sum_runs(parts, 2, false, stream);
    if (status != QUERN_OK || (!present(args->d_base) && !present(args->d_scale))) return status;
    four_small<<<WEIGHTS + 3, SMALL_THREADS, 0, stream>>>(p.d_small, plan.runs, (float *)args->d_base.data,
                                                          (float *)args->d_scale.data);
    return LAUNCHED("hyper, sums of runs");
}

static quern_status sums_backward(const stage_exec *exec, const hyper_args *args, const four_params &p)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
#ifdef QUERN_SM90
    if (hyper_sums_sm90_takes(exec, args)) return hyper_sums_sm90_run(p, stream);
#endif
    return four_sums_backward(p, stream);
}

static quern_status backward_run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const four_plan plan = plan_of(args, true, memory);
    quern_status status = four_pack(plan.p, stream);
    if (status == QUERN_OK) status = sums_backward(exec, args, plan.p);
    if (status == QUERN_OK) status = four_weights_backward(plan.p, stream);
    if (status == QUERN_OK) status = four_copies_backward(plan.p, stream);
    return status == QUERN_OK ? give_sums(plan, args, stream) : status;
}

extern const variant<hyper_args> hyper_forward_four = {"hyper_forward_four", forward_supports,
                                                       forward_workspace, forward_run};
extern const variant<hyper_args> hyper_backward_four = {"hyper_backward_four", backward_supports,
                                                        backward_workspace, backward_run};
