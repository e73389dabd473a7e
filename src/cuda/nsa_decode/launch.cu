/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which kernels take a call, and their blocks' scratch. */
#include "nsa_decode/params.cuh"
#include "variants.cuh"

using namespace nsa_decode;

static instance *tensor_of(const nsa_decode_args *args)
{
    const cache_plane &plane = args->plane[SLC];
    const int64_t dim = plane.dim > plane.dim_v ? plane.dim : plane.dim_v;
    const bool half = args->q.dtype == QUERN_F16;
    return dim <= 64    ? half ? nsa_f16_64 : nsa_bf16_64
           : dim <= 128 ? half ? nsa_f16_128 : nsa_bf16_128
           : half       ? nsa_f16_256
                        : nsa_bf16_256;
}
static instance *plain_of(const nsa_decode_args *args)
{
    return args->q.dtype == QUERN_F32    ? nsa_plain_f32
           : args->q.dtype == QUERN_BF16 ? nsa_plain_bf16
                                         : nsa_plain_f16;
}

static scratch_layout layout_of(const nsa_kernel &a, int64_t capacity)
{
    const auto four = [](int64_t n) { return (n + 3) / 4 * 4; };
    const bool selects = a.chooses(), entries = selects || a.has(CMP);
    scratch_layout at = {};
    at.width = entries ? four(mask_entries(capacity, a.block_size, a.stride)) : 0;
    at.entries = selects && !a.mean_logit ? a.group * at.width : 0;
    at.ranks = at.entries + (selects ? at.width : 0);
    at.lse = at.ranks + (selects ? four(mask_blocks(capacity, a.select_block)) : 0);
    at.gates = at.lse + four(a.group);
    at.sum = at.gates + four(3 * (int64_t)a.group);
    at.floats = at.sum + four(BRANCHES * (int64_t)a.group * a.plane[SLC].dim_v);
    return at;
}

static nsa_kernel kernel_of(const stage_exec *exec, const nsa_decode_args *args)
{
    const float log2_e = 1.44269504088896341f;
    const select_rule &rule = args->rule;
    nsa_kernel a = {};
    a.step = step_view_of(args->step, args->q.shape[1]);
    for (int i = 0; i < BRANCHES; i++) a.plane[i] = plane_view_of(args->plane[i]);
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.gates = view4_of(args->gates);
    a.w = args->w_gate.data;
    a.w_s[0] = args->w_gate.strides[0];
    a.w_s[1] = args->w_gate.strides[1];
    a.w_f32 = args->w_gate.dtype == QUERN_F32;
    a.w_wide = rows_aligned16(args->w_gate);
    a.q_wide = rows_aligned16(args->q);
    a.o_wide = rows_aligned(args->o, 4 * bytes_of(args->o.dtype));
    a.gate = (int32_t)args->gate;
    a.branches = args->branches;
    a.listed = args->listed;
    a.ungated = args->ungated;
    a.window = args->window;
    a.block_size = rule.block_size;
    a.stride = rule.stride;
    a.select_block = rule.select_block;
    a.mean_logit = rule.scorer == SELECT_MEAN_LOGIT;
    a.by_head = rule.scope == LIST_BY_HEAD;
    a.k = (int32_t)rule.k;
    a.forced_first = (int32_t)rule.forced_first;
    a.forced_local = (int32_t)rule.forced_local;
    if (rule.stride > 0) {
        a.l_over_d = (int32_t)(rule.block_size / rule.stride);
        a.s_over_d = (int32_t)(rule.select_block / rule.stride);
    }
    a.by_block = fast_div_by((uint32_t)(rule.select_block > 0 ? rule.select_block : 1));
    a.scale = rule.scale;
    a.scale2 = rule.scale * log2_e;
    a.heads = (int32_t)args->q.shape[2];
    a.group = (int32_t)(args->q.shape[2] / args->plane[SLC].blocks.shape[1]);
    a.lists = (int32_t *)args->blocks.data;
    a.counts = (int32_t *)args->block_count.data;
    for (int i = 0; i < 3; i++) {
        a.list_s[i] = args->blocks.strides[i];
        a.count_s[i] = args->block_count.strides[i];
    }
    a.at = layout_of(a, args->capacity);
    a.status = exec->status;
    return a;
}

static bool fits(const stage_exec *exec, const nsa_decode_args *args, instance *how,
                 char why[STAGE_WHY_BYTES])
{
    const nsa_kernel a = kernel_of(exec, args);
    size_t most = 0;
    if (args->rule.k > CHOSEN_MOST && a.has(SLC)) {
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld blocks: the cuda backend takes up to %d",
                 (long long)args->rule.k, CHOSEN_MOST);
        return false;
    }
    if (args->rule.k * args->rule.select_block > INT32_MAX && a.has(SLC)) {
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld blocks of %lld tokens: too many for the cuda backend",
                 (long long)args->rule.k, (long long)args->rule.select_block);
        return false;
    }
    (void)how(exec, a, {NULL, &most});
    return dims_fit(args->plane[SLC].dim, args->plane[SLC].dim_v, why) &&
           shared_fits(exec, most, "sparse attention of a step", why);
}

static bool tensor_supports(const stage_exec *exec, const nsa_decode_args *args, char why[STAGE_WHY_BYTES])
{
    char limits[STAGE_WHY_BYTES];
    (void)why;
    if (args->q.dtype == QUERN_F32) return false;
    for (int i = 0; i < BRANCHES; i++)
        if (!plane_aligned(plane_view_of(args->plane[i]), 16)) return false;
    return fits(exec, args, tensor_of(args), limits);
}
static bool plain_supports(const stage_exec *exec, const nsa_decode_args *args, char why[STAGE_WHY_BYTES])
{
    return fits(exec, args, plain_of(args), why);
}

static size_t workspace(const stage_exec *exec, const nsa_decode_args *args)
{
    const nsa_kernel a = kernel_of(exec, args);
    const int64_t tasks = a.step.total * a.plane[SLC].heads, most = blocks_at_once(exec);
    return room_for((size_t)((tasks < most ? tasks : most) * a.at.floats) * sizeof(float));
}

static quern_status run(const stage_exec *exec, const nsa_decode_args *args, instance *how, void *memory)
{
    nsa_kernel a = kernel_of(exec, args);
    if (a.step.batch == 0 || a.step.total == 0) return QUERN_OK;
    a.scratch = room_at<float>(memory);
    return how(exec, a, {(cudaStream_t)exec->stream, NULL});
}
static quern_status tensor_run(const stage_exec *exec, const nsa_decode_args *args, void *memory)
{
    return run(exec, args, tensor_of(args), memory);
}
static quern_status plain_run(const stage_exec *exec, const nsa_decode_args *args, void *memory)
{
    return run(exec, args, plain_of(args), memory);
}

extern const variant<nsa_decode_args> nsa_decode_tensor = {"nsa_decode_tensor", tensor_supports, workspace,
                                                           tensor_run};
extern const variant<nsa_decode_args> nsa_decode_plain = {"nsa_decode_plain", plain_supports, workspace,
                                                          plain_run};
