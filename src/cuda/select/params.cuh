/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the select stage hands to its kernels. */
#ifndef QUERN_CUDA_SELECT_PARAMS_CUH
#define QUERN_CUDA_SELECT_PARAMS_CUH

#include "attend/attend.cuh"
#include "common/launch.cuh"
#include "select/contest.cuh"

enum { KEYS = 64, WARPS = 8, THREADS = 32 * WARPS, MAX_HISTORY = 512, GROUP = 128, SELECT_MEAN_PART = 512 };

struct select_kernel {
    attend_kernel a;               /* rows, keys, visibility: as the compressed branch sees them */
    int32_t *idx, *count, *groups; /* idx NULL: groups only, k is 0 */
    int64_t idx_stride[3], count_stride[3], group_stride[3];
    contest_rule rule;
    int32_t c;                  /* entries of a list of groups */
    int32_t l_over_d, s_over_d; /* l / d and l' / d */
    int32_t history;            /* scores before a step that its blocks overlap, rounded up to 32 */
    int64_t select_block;
    int64_t list_rows; /* list rows of one batch view */
    bool mean_logit;
    /* mean_logit: sums of SELECT_MEAN_PART rows, [views][units][list_rows][parts][padded dim], where a kernel
     * of its own finds them */
    float *sums;
    int32_t parts;
};

/* The compressed branch as an attention call: for the shape, and for its row statistics where the caller has
 * none. */
attend_args select_branch(const select_args *args);

/* What the kernels of any GPU take, and the bytes of the branch's statistics. */
bool select_supports(const stage_exec *exec, const select_args *args, char why[STAGE_WHY_BYTES]);
size_t select_bytes(const stage_exec *exec, const select_args *args);

/* The same with the statistics, computed where the caller has none (select_bytes() of workspace). */
quern_status select_find_lse(const stage_exec *exec, const select_args *args, void *workspace,
                             attend_args *branch);

/* `l` is the branch's. */
select_kernel select_kernel_of(const select_args *args, const attend_launch &l);

/* The kernels, a file for each dtype and padded head dim; what the f32 cores score takes any. */
typedef quern_status select_part(const select_kernel &s, int64_t views, const launcher &to);
select_part select_mean_f32, select_mean_bf16, select_mean_f16, select_softmax_f32;
select_part select_softmax_bf16_64, select_softmax_bf16_128, select_softmax_bf16_256;
select_part select_softmax_f16_64, select_softmax_f16_128, select_softmax_f16_256;

#endif
