/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_launch.cuh - what the select stage hands to its kernels. */
#ifndef QUERN_CUDA_SELECT_LAUNCH_CUH
#define QUERN_CUDA_SELECT_LAUNCH_CUH

#include "any/attend/attend.cuh"
#include "stages.cuh"

enum { KEYS = 64, WARPS = 8, THREADS = 32 * WARPS, MAX_HISTORY = 512, GROUP = 128 };

struct select_kernel {
    attend_kernel a; /* rows, keys, visibility: as the compressed branch sees them */
    int32_t *idx, *count, *groups; /* idx NULL: groups only, k is 0 */
    int64_t idx_stride[3], count_stride[3], group_stride[3];
    int32_t k, c, forced_first, forced_local;
    int32_t l_over_d, s_over_d; /* l / d and l' / d */
    int32_t history;            /* scores before a step that its blocks overlap, rounded up to 32 */
    int64_t select_block;
    int64_t list_rows; /* list rows of one batch view */
    bool mean_logit;
};

quern_status select_launch_f32(const select_kernel &s, int dim, int64_t views, const launcher &to);
quern_status select_launch_bf16(const select_kernel &s, int dim, int64_t views, const launcher &to);
quern_status select_launch_f16(const select_kernel &s, int dim, int64_t views, const launcher &to);

#endif
