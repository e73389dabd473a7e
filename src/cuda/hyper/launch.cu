/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - the hyper stages: their workspace, and the kernels one after another.
 *
 *   forward:  sums of slices, weights, combine
 *   backward: the first two again, tokens, weights, copies, fn; sums of runs and shares in their order
 */
#include "common/sums.cuh"
#include "hyper/params.cuh"
#include "variants.cuh"

enum { DEPTH = 32, PACKED_WEIGHTS = 24, RUNS = 528, WARPS = 4, SHARES = 32, SHARE_TOKENS = 64 };

struct hyper_plan {
    hyper_params p;
    int64_t runs, small_runs, shares; /* of tokens: those of a block, of a warp, and of fn's gradient */
    size_t bytes;
};

static bool can_be_wide(const hyper_args *args)
{
    const quern_tensor *all[] = {&args->x,   &args->f,     &args->h,   &args->out,
                                 &args->d_h, &args->d_out, &args->d_x, &args->d_f};
    bool wide = true;
    for (const quern_tensor *t : all) wide = wide && (!present(*t) || rows_aligned16(*t));
    return wide;
}

/* fn in two bf16 parts: a call's workspace does not depend on whether x can be read so. */
static size_t packed_bytes(const hyper_args *args)
{
    const int64_t all = args->x.shape[1] * args->x.shape[2], rows = present(args->fn) ? args->fn.shape[0] : 0;
    const bool fits =
        args->x.dtype == QUERN_BF16 && args->x.shape[2] % DEPTH == 0 && rows > 0 && rows <= PACKED_WEIGHTS;
    return fits ? (size_t)(all * PACKED_WEIGHTS * 2) * sizeof(bf16) : 0;
}

static hyper_params params_of(const stage_exec *, const hyper_args *args)
{
    hyper_params p = {};
    static_cast<hyper_call &>(p) = hyper_call_of(args);
    p.dtype = args->x.dtype;
    p.wide = can_be_wide(args);
    p.head = args->head;
    p.mixes = present(args->fn);
    p.copies = (int)args->x.shape[1];
    p.weights = args->head ? p.copies : p.copies * (p.copies + 2);
    p.slices = (p.width + SLICE - 1) / SLICE;
    p.norm_wide = p.width % CHUNK == 0 && rows_aligned16(args->weight);
    return p;
}

static hyper_plan plan_of(const stage_exec *exec, const hyper_args *args, bool backward, void *memory)
{
    hyper_plan plan = {};
    hyper_params &p = plan.p;
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    p = params_of(exec, args);
    const size_t tokens = (size_t)p.tokens, weights = (size_t)p.weights;
    plan.runs = p.tokens < RUNS ? p.tokens : (int64_t)RUNS;
    plan.small_runs = (plan.runs + WARPS - 1) / WARPS * WARPS;
    plan.shares = (p.tokens + SHARE_TOKENS - 1) / SHARE_TOKENS;
    if (plan.shares > SHARES) plan.shares = SHARES;
    if (p.mixes) {
        p.sums =
            (float *)arena_take(&a, (size_t)(p.copies * p.slices) * tokens * (weights + 1) * sizeof(float));
        p.of_tokens = (float *)arena_take(&a, tokens * weights * sizeof(float));
        uint4 *const packed = (uint4 *)arena_take(&a, packed_bytes(args));
        const bool aligned = memory != NULL && rows_aligned16(args->x) && packed_bytes(args) > 0;
        p.packed = aligned ? packed : NULL;
    }
    if (backward) {
        p.norms = (float2 *)arena_take(&a, tokens * sizeof(float2));
        p.d_of_tokens = (float *)arena_take(&a, tokens * weights * sizeof(float));
    }
    if (backward && p.mixes) {
        p.d_sums = (float *)arena_take(&a, tokens * (weights + 1) * sizeof(float));
        p.d_small = (double *)arena_take(&a, (size_t)plan.small_runs * 2 * weights * sizeof(double));
    }
    if (backward && present(args->d_weight))
        p.d_norm_parts = (float *)arena_take(&a, (size_t)(plan.runs * p.width) * sizeof(float));
    if (backward && present(args->d_fn))
        p.d_fn_parts = (float *)arena_take(&a, (size_t)(plan.shares * p.weights * p.copies) *
                                                   (size_t)p.width * sizeof(float));
    plan.bytes = a.used > 0 ? a.used + ARENA_ALIGN - 1 : 0;
    return plan;
}

static bool takes(const stage_exec *exec, const hyper_args *args, size_t rows, char why[STAGE_WHY_BYTES])
{
    const size_t bytes = rows * (size_t)(args->x.shape[2] + CHUNK) * sizeof(float);
    return shared_fits(exec, bytes, "hyper-connections", why);
}

static bool forward_supports(const stage_exec *exec, const hyper_args *args, char why[STAGE_WHY_BYTES])
{
    return takes(exec, args, 1, why);
}

static bool backward_supports(const stage_exec *exec, const hyper_args *args, char why[STAGE_WHY_BYTES])
{
    return takes(exec, args, 2, why);
}

static size_t forward_workspace(const stage_exec *exec, const hyper_args *args)
{
    return plan_of(exec, args, false, NULL).bytes;
}

static size_t backward_workspace(const stage_exec *exec, const hyper_args *args)
{
    return plan_of(exec, args, true, NULL).bytes;
}

static quern_status weigh(const hyper_params &p, cudaStream_t stream)
{
    if (!p.mixes) return QUERN_OK;
    const quern_status status = hyper_dots(p, stream);
    return status == QUERN_OK ? hyper_weights(p, stream) : status;
}

static quern_status forward_run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const hyper_params p = plan_of(exec, args, false, memory).p;
    if (p.tokens == 0) return QUERN_OK;
    const quern_status status = weigh(p, stream);
    return status == QUERN_OK ? hyper_combine(p, stream) : status;
}

/* The runs' sums of base's gradient and of the scales': a warp a weight. */
__global__ void hyper_small(const double *parts, int64_t runs, int weights, int copies, float *d_base,
                            float *d_scale)
{
    __shared__ double means[WEIGHTS_MOST];
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < 2 * weights; i += blockDim.x / 32) {
        double sum = 0.0;
        for (int64_t r = lane; r < runs; r += 32) sum += parts[r * 2 * weights + i];
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane == 0 && i < weights && d_base != NULL) d_base[i] = (float)sum;
        if (lane == 0 && i >= weights) means[i - weights] = sum;
    }
    __syncthreads();
    const int part = threadIdx.x;
    if (d_scale == NULL || part > part_of(copies, weights - 1)) return;
    double sum = 0.0;
    for (int j = 0; j < weights; j++)
        if (part_of(copies, j) == part) sum += means[j];
    d_scale[part] = (float)sum;
}

static quern_status give_sums(const hyper_plan &plan, const hyper_args *args, cudaStream_t stream)
{
    const hyper_params &p = plan.p;
    quern_status status = sum_runs(p.d_norm_parts, plan.runs, p.width, args->d_weight, false, stream);
    if (status == QUERN_OK)
        status = sum_runs(p.d_fn_parts, plan.shares, (int64_t)p.weights * p.copies * p.width, args->d_fn,
                          false, stream);
    if (status != QUERN_OK || (!present(args->d_base) && !present(args->d_scale))) return status;
    hyper_small<<<1, 1024, 0, stream>>>(p.d_small, p.tokens > 0 ? plan.small_runs : 0, p.weights, p.copies,
                                        (float *)args->d_base.data, (float *)args->d_scale.data);
    return LAUNCHED("hyper, sums of runs");
}

static quern_status backward_run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const hyper_plan plan = plan_of(exec, args, true, memory);
    const hyper_params &p = plan.p;
    if (p.tokens == 0) return give_sums(plan, args, stream);
    quern_status status = weigh(p, stream);
    if (status == QUERN_OK) status = hyper_tokens_backward(p, plan.runs, stream);
    if (status == QUERN_OK && p.mixes) status = hyper_weights_backward(p, plan.small_runs, stream);
    if (status == QUERN_OK) status = hyper_copies_backward(p, stream);
    if (status == QUERN_OK && present(args->d_fn)) status = hyper_fn_backward(p, plan.shares, stream);
    return status == QUERN_OK ? give_sums(plan, args, stream) : status;
}

extern const variant<hyper_args> hyper_forward_any = {"hyper_forward_any", forward_supports,
                                                      forward_workspace, forward_run};
extern const variant<hyper_args> hyper_backward_any = {"hyper_backward_any", backward_supports,
                                                       backward_workspace, backward_run};
