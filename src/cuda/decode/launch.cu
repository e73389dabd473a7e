/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which kernels take a call, and the room for its shares. */
#include "decode/params.cuh"
#include "variants.cuh"

using namespace decode_dense;

enum { PARTS_ALIGNED = 16 };

static instance *tensor_of(const decode_args *args)
{
    const int64_t dim = args->tokens.dim > args->tokens.dim_v ? args->tokens.dim : args->tokens.dim_v;
    const bool half = args->q.dtype == QUERN_F16;
    return dim <= 64    ? half ? dense_f16_64 : dense_bf16_64
           : dim <= 128 ? half ? dense_f16_128 : dense_bf16_128
           : half       ? dense_f16_256
                        : dense_bf16_256;
}
static instance *plain_of(const decode_args *args)
{
    return args->q.dtype == QUERN_F32    ? dense_plain_f32
           : args->q.dtype == QUERN_BF16 ? dense_plain_bf16
                                         : dense_plain_f16;
}

static dense_kernel kernel_of(const stage_exec *exec, const decode_args *args)
{
    const float log2_e = 1.44269504088896341f;
    const bool windowed = args->window > 0 && args->window < args->capacity;
    dense_kernel a = {};
    a.step = step_view_of(args->step, args->q.shape[1]);
    a.plane = plane_view_of(args->tokens);
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.lse = view3_of(args->lse);
    a.sink = present(args->sink) ? (const float *)args->sink.data : NULL;
    a.window = args->window;
    a.scale2 = args->scale * log2_e;
    a.heads = (int32_t)args->q.shape[2];
    a.group = (int32_t)(args->q.shape[2] / args->tokens.blocks.shape[1]);
    /* The keys of a query, at most. Of more than these it may have fewer shares than of less. */
    const int64_t most = windowed ? args->window + 16 : args->capacity;
    a.shares = most > SHARES * (int64_t)SHARE_KEYS ? SHARES : cut_of(most).shares;
    a.by_sequence = a.step.total > a.step.batch * (int64_t)STEP_QUERIES;
    a.q_wide = rows_aligned16(args->q);
    a.o_wide = rows_aligned(args->o, 4 * bytes_of(args->o.dtype));
    a.status = exec->status;
    return a;
}

static int64_t parts_of(const dense_kernel &a)
{
    const int64_t rows = a.by_sequence ? a.step.batch * (int64_t)STEP_QUERIES : a.step.total;
    return a.shares > 1 ? rows * a.heads * a.shares : 0;
}

static bool fits(const stage_exec *exec, const decode_args *args, instance *how, char why[STAGE_WHY_BYTES])
{
    const dense_kernel a = kernel_of(exec, args);
    size_t most = 0;
    (void)how(exec, a, {NULL, &most});
    if (a.step.total * a.plane.heads * a.group * a.shares > INT32_MAX) {
        snprintf(why, STAGE_WHY_BYTES, "%lld tokens of %d heads: too many for a step on cuda",
                 (long long)a.step.total, a.heads);
        return false;
    }
    return shared_fits(exec, most, "attention of a step", why);
}

static bool tensor_supports(const stage_exec *exec, const decode_args *args, char why[STAGE_WHY_BYTES])
{
    char limits[STAGE_WHY_BYTES];
    (void)why;
    return args->q.dtype != QUERN_F32 && args->tokens.dim <= 256 && args->tokens.dim_v <= 256 &&
           plane_aligned(plane_view_of(args->tokens), 16) && fits(exec, args, tensor_of(args), limits);
}

static bool plain_supports(const stage_exec *exec, const decode_args *args, char why[STAGE_WHY_BYTES])
{
    return fits(exec, args, plain_of(args), why);
}

static size_t workspace(const stage_exec *exec, const decode_args *args)
{
    const dense_kernel a = kernel_of(exec, args);
    return room_for((size_t)parts_of(a) * (sizeof(float2) + (size_t)a.plane.dim_v * sizeof(float)));
}

static quern_status run(const stage_exec *exec, const decode_args *args, instance *how, void *memory)
{
    dense_kernel a = kernel_of(exec, args);
    if (a.step.batch == 0 || a.step.total == 0) return QUERN_OK;
    a.values = room_at<float>(memory);
    a.sums = (float2 *)(void *)(a.values + parts_of(a) * a.plane.dim_v);
    const quern_status status = how(exec, a, {(cudaStream_t)exec->stream, NULL});
    if (status != QUERN_OK || a.shares == 1) return status;
    return dense_combine(exec, a, a.step.total * a.heads, args->o.dtype);
}
static quern_status tensor_run(const stage_exec *exec, const decode_args *args, void *memory)
{
    return run(exec, args, tensor_of(args), memory);
}
static quern_status plain_run(const stage_exec *exec, const decode_args *args, void *memory)
{
    return run(exec, args, plain_of(args), memory);
}

extern const variant<decode_args> decode_tensor = {"decode_tensor", tensor_supports, workspace, tensor_run};
extern const variant<decode_args> decode_plain = {"decode_plain", plain_supports, workspace, plain_run};
