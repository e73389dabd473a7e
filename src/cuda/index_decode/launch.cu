/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls the block indexer of a step takes, and the room for scores of blocks. */
#include "index_decode/params.cuh"
#include "variants.cuh"

using namespace index_decode;

static instance *instance_of(const index_decode_args *args)
{
    const int64_t dim = args->keys.dim;
    if (args->q.dtype == QUERN_F32) return index_f32;
    const bool half = args->q.dtype == QUERN_F16;
    return dim <= 64    ? half ? index_f16_64 : index_bf16_64
           : dim <= 128 ? half ? index_f16_128 : index_bf16_128
           : half       ? index_f16_256
                        : index_bf16_256;
}

/* The arguments of the same lists in a whole sequence. */
static block_index_kernel lists_of(const index_decode_args *args)
{
    block_index_args whole = {};
    whole.rule = args->rule;
    whole.query_offset = -1;
    whole.q = args->q;
    whole.keys.shape[2] = args->keys.blocks.shape[1]; /* heads; nothing else is read */
    whole.blocks = args->blocks;
    whole.count = args->count;
    return block_index_kernel_of(&whole);
}

static index_kernel kernel_of(const stage_exec *exec, const index_decode_args *args)
{
    index_kernel a = {};
    a.step = step_view_of(args->step, args->q.shape[1]);
    a.plane = plane_view_of(args->keys);
    a.q = view4_of(args->q);
    a.list = lists_of(args);
    a.heads = a.list.hs < ROWS ? a.list.hs : ROWS;
    a.tokens = a.heads > 0 ? ROWS / a.heads : 1;
    a.chunks = (a.list.hs + ROWS - 1) / ROWS;
    a.width = mask_blocks(args->capacity, args->rule.block_size);
    a.q_wide = rows_aligned16(args->q);
    a.wide = plane_aligned(a.plane, 16);
    a.status = exec->status;
    /* Of many tokens a sequence, fewer: they fill the machine by themselves. */
    const int64_t wanted = (args->capacity + SHARE_KEYS - 1) / SHARE_KEYS,
                  most = a.step.total > 64 * (int64_t)a.step.batch ? SHARES / 8 : SHARES;
    a.shares = (int32_t)(wanted < 1 ? 1 : wanted < most ? wanted : most);
    return a;
}

/* Rows of a slice. */
static int64_t slice_of(const index_kernel &a)
{
    const int64_t row = (int64_t)a.list.units * a.list.hs * (a.width > 0 ? a.width : 1) * 4,
                  most = row < SLICE_BYTES ? SLICE_BYTES / row : 1;
    return a.step.total < most ? a.step.total : most;
}

static bool any_supports(const stage_exec *exec, const index_decode_args *args, char why[STAGE_WHY_BYTES])
{
    const index_kernel a = kernel_of(exec, args);
    const int64_t lists = (int64_t)a.list.units * a.list.hs;
    size_t most = 0;
    if (!dims_fit(args->keys.dim, 0, why)) return false;
    if (args->capacity > INT32_MAX - 1024 || args->rule.k > INT32_MAX / 2 ||
        slice_of(a) * lists * a.chunks * a.shares > INT32_MAX) {
        snprintf(why, STAGE_WHY_BYTES,
                 "%lld tokens of %lld lists of %lld blocks over %lld keys: too many for a step on cuda",
                 (long long)a.step.total, (long long)lists, (long long)args->rule.k,
                 (long long)args->capacity);
        return false;
    }
    (void)instance_of(args)(exec, a, {NULL, &most});
    return shared_fits(exec, most, "the block indexer of a step", why);
}

static size_t workspace(const stage_exec *exec, const index_decode_args *args)
{
    const index_kernel a = kernel_of(exec, args);
    return room_for((size_t)(slice_of(a) * a.list.units * a.list.hs * a.width) * sizeof(float));
}

static quern_status run(const stage_exec *exec, const index_decode_args *args, void *memory)
{
    index_kernel a = kernel_of(exec, args);
    const int64_t slice = slice_of(a);
    quern_status status = QUERN_OK;
    if (a.step.batch == 0 || a.list.hs == 0) return QUERN_OK;
    a.scores = room_at<float>(memory);
    for (; a.first < a.step.total && status == QUERN_OK; a.first += slice) {
        const int64_t left = a.step.total - a.first;
        a.rows = left < slice ? left : slice;
        status = instance_of(args)(exec, a, {(cudaStream_t)exec->stream, NULL});
        if (status == QUERN_OK) status = index_choose(exec, a);
    }
    return status;
}

extern const variant<index_decode_args> index_decode_any = {"index_decode_any", any_supports, workspace, run};
