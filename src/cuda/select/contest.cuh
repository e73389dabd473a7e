/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* contest.cuh - what a list of blocks chooses from, what is forced into it, and the order of scores. */
#ifndef QUERN_CUDA_SELECT_CONTEST_CUH
#define QUERN_CUDA_SELECT_CONTEST_CUH

#include "stages/mask.h"
#include "stages/select.h"

#include <math.h>

/* Larger is better; 0 is reserved for an empty slot. */
__device__ __forceinline__ uint32_t order_of(float x)
{
    if (isnan(x)) return 1;
    const uint32_t u = __float_as_uint(x == 0.0f ? 0.0f : x);
    return (u & 0x80000000u ? ~u : u | 0x80000000u);
}

/* The same order for x >= +0 or NaN, which -1 stands for. */
__device__ __forceinline__ uint32_t order_of_sum(float x)
{
    return __float_as_uint(fmaxf(x, -1.0f)) ^ 0x80000000u;
}

__device__ __forceinline__ int64_t q_end_of(int64_t first, int64_t tile, int64_t nq)
{
    return first + tile < nq ? first + tile : nq;
}

/* As select_rule, of which kernels need no more; k is 0 where no list of blocks is made. */
struct contest_rule {
    int32_t k, forced_first, forced_local;
};

static inline contest_rule contest_rule_of(const select_rule &r)
{
    return {(int32_t)r.k, (int32_t)r.forced_first, (int32_t)r.forced_local};
}

/* What a list chooses from: blocks [0, candidates) but for the forced ones, [0, f0) and [g0, g1); `size` of
 * them. */
struct contest {
    int candidates, f0, g0, g1, size;
};

/* That of the list of the tile whose first query is q0. S has a, select_block and rule,
 * as select_kernel. */
template <typename S> __device__ __forceinline__ contest find_contest(const S &s, int64_t nq, int64_t q0)
{
    contest x;
    x.candidates = (int)mask_blocks_seen(s.a.causal != 0, nq, q_end_of(q0, s.a.tile, nq) - 1, s.select_block);
    x.f0 = s.rule.forced_first < x.candidates ? s.rule.forced_first : x.candidates, x.g0 = 0, x.g1 = 0;
    if (s.a.causal && s.rule.forced_local > 0) {
        x.g1 = x.candidates;
        x.g0 = (int)(q0 / s.select_block) - (s.rule.forced_local - 1);
        if (x.g0 < x.f0) x.g0 = x.f0;
        if (x.g0 > x.g1) x.g0 = x.g1;
    }
    const int left = s.rule.k - (x.f0 + (x.g1 - x.g0));
    x.size = left > 0 ? left : 0;
    return x;
}

#endif
