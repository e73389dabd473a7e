/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the select stage: its arguments, and the row statistics where the caller has none. The kernel
 * is select/softmax/kernel.cuh's. */
#include "select/params.cuh"
#include "variants.cuh"

#include <stdio.h>

attend_args select_branch(const select_args *args)
{
    attend_args a = {};
    a.mask = ATTEND_COMPRESSED;
    a.seqs = args->seqs;
    a.causal = args->causal;
    a.scale = args->rule.scale;
    a.block_size = args->rule.block_size;
    a.stride = args->rule.stride;
    a.visibility = args->visibility;
    a.tile = args->tile;
    a.scope = args->rule.scope;
    a.q = args->q;
    a.k = args->keys;
    a.v = args->keys;
    a.lse = args->lse;
    return a;
}

static bool needs_lse(const select_args *args)
{
    return args->rule.scorer == SELECT_PROBABILITY && !present(args->lse);
}

/* The rows of a list, at most. */
static int64_t list_rows_of(const select_args *args)
{
    return args->tile * (args->rule.scope == LIST_BY_HEAD ? 1 : args->q.shape[2] / args->keys.shape[2]);
}

/* Sums of rows that a kernel of its own finds, for mean_logit: of lists so long that their rows are most of
 * the work, and so many that another launch pays; 0 elsewhere. */
static int64_t sums_of(const select_args *args)
{
    enum { LEAST_ROWS = 256, LEAST_LISTS = 512 };
    if (args->rule.scorer != SELECT_MEAN_LOGIT || args->keys.shape[2] == 0) return 0;
    const quern_tensor &lists = present(args->blocks) ? args->blocks : args->groups;
    const int64_t rows = list_rows_of(args), all = lists.shape[0] * lists.shape[1] * lists.shape[2];
    return rows < LEAST_ROWS || all < LEAST_LISTS ? 0
                                                  : all * ((rows + SELECT_MEAN_PART - 1) / SELECT_MEAN_PART);
}

static quern_status select_launch_all(const select_args *args, const attend_args *branch, float *sums,
                                      const launcher &to);

bool select_supports(const stage_exec *exec, const select_args *args, char why[STAGE_WHY_BYTES])
{
    if (!dims_fit(args->q.shape[3], args->keys.shape[3], why)) return false;
    const int64_t span =
        args->rule.block_size / args->rule.stride + args->rule.select_block / args->rule.stride;
    if (span > MAX_HISTORY) {
        snprintf(why, STAGE_WHY_BYTES,
                 "(block_size + select_block) / stride is %lld: the cuda backend takes up to %d",
                 (long long)span, MAX_HISTORY);
        return false;
    }
    if (args->rule.k > 1024 || args->group_k > 1024) {
        snprintf(why, STAGE_WHY_BYTES,
                 "lists of %lld blocks and %lld groups: the cuda backend takes up to 1024",
                 (long long)args->rule.k, (long long)args->group_k);
        return false;
    }
    attend_args branch = select_branch(args);
    size_t most = 0;
    if (needs_lse(args) && attend_forward_variants.choose(exec, &branch, why) == NULL) return false;
    return select_launch_all(args, &branch, NULL, {NULL, &most}) == QUERN_OK &&
           shared_fits(exec, most, "select", why);
}

size_t select_bytes(const stage_exec *exec, const select_args *args)
{
    if (!needs_lse(args)) return (size_t)(sums_of(args) * (args->q.shape[3] <= 128 ? 128 : 256)) * 4 + 15;
    const attend_args branch = select_branch(args);
    return (size_t)(args->q.shape[0] * args->q.shape[1] * args->q.shape[2]) * 4 + 15 +
           attend_forward_variants.workspace(exec, &branch);
}

quern_status select_find_lse(const stage_exec *exec, const select_args *args, void *workspace,
                             attend_args *branch)
{
    *branch = select_branch(args);
    if (!needs_lse(args)) return QUERN_OK;
    const int64_t n = args->q.shape[1], h = args->q.shape[2];
    branch->lse = {(void *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15),
                   QUERN_F32,
                   QUERN_CUDA,
                   args->q.device_id,
                   3,
                   {args->q.shape[0], h, n},
                   {h * n, n, 1}};
    return attend_forward_variants.run(exec, branch, (float *)branch->lse.data + args->q.shape[0] * h * n);
}

static quern_status select_run(const stage_exec *exec, const select_args *args, void *workspace)
{
    attend_args branch;
    const quern_status status = select_find_lse(exec, args, workspace, &branch);
    float *const sums = sums_of(args) > 0 ? (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15) : NULL;
    return status != QUERN_OK ? status
                              : select_launch_all(args, &branch, sums, {(cudaStream_t)exec->stream, NULL});
}

select_kernel select_kernel_of(const select_args *args, const attend_launch &l)
{
    select_kernel s = {};
    s.a = l.kernel;
    const bool by_head = args->rule.scope == LIST_BY_HEAD;
    s.a.hs = by_head ? 1 : s.a.group;
    s.a.units = by_head ? s.a.heads : s.a.kv_heads;
    s.a.by_hs = fast_div_by((uint32_t)(s.a.hs > 0 ? s.a.hs : 1));
    s.idx = (int32_t *)args->blocks.data;
    s.count = (int32_t *)args->count.data;
    const quern_tensor &lists =
        present(args->blocks) ? args->blocks : args->groups; /* blocks that were handed in are absent */
    s.list_rows = lists.shape[2];
    for (int i = 0; i < 3; i++) {
        s.idx_stride[i] = args->blocks.strides[i];
        s.count_stride[i] = args->count.strides[i];
    }
    s.rule = contest_rule_of(args->rule);
    if (!present(args->blocks)) s.rule.k = 0;
    if (present(args->groups)) {
        s.c = (int32_t)args->group_k;
        s.groups = (int32_t *)args->groups.data;
        for (int i = 0; i < 3; i++) s.group_stride[i] = args->groups.strides[i];
    }
    s.l_over_d = (int32_t)(args->rule.block_size / args->rule.stride);
    s.s_over_d = (int32_t)(args->rule.select_block / args->rule.stride);
    s.history = s.l_over_d + s.s_over_d > 2 ? (s.l_over_d + s.s_over_d - 2 + 31) / 32 * 32 : 0;
    s.select_block = args->rule.select_block;
    s.mean_logit = args->rule.scorer == SELECT_MEAN_LOGIT;
    return s;
}

static quern_status select_launch_all(const select_args *args, const attend_args *branch, float *sums,
                                      const launcher &to)
{
    const attend_launch l = attend_launch_of(branch);
    select_kernel s = select_kernel_of(args, l);
    s.sums = sums;
    s.parts = (int32_t)((list_rows_of(args) + SELECT_MEAN_PART - 1) / SELECT_MEAN_PART);
    static select_part *const mean[] = {select_mean_f32, select_mean_bf16, select_mean_f16};
    static select_part *const softmax[2][3] = {
        {select_softmax_bf16_64, select_softmax_bf16_128, select_softmax_bf16_256},
        {select_softmax_f16_64, select_softmax_f16_128, select_softmax_f16_256}};
    const int dtype = l.dtype == QUERN_F32    ? 0
                      : l.dtype == QUERN_BF16 ? 1
                                              : 2,
              dim = l.dim == 64    ? 0
                    : l.dim == 128 ? 1
                                   : 2;
    select_part *const part = s.mean_logit ? mean[dtype]
                              : dtype == 0 ? select_softmax_f32
                                           : softmax[dtype - 1][dim];
    return part(s, present(args->blocks) ? args->blocks.shape[0] : args->groups.shape[0], to);
}

extern const variant<select_args> select_any = {"select_any", select_supports, select_bytes, select_run};
