/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what kernel.cuh's kernels, three branches and their gate in one pass, are called with. */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_PARAMS_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_PARAMS_CUH

#include "select/contest.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"

/* Three branches and their gate (kernel.cuh): the compressed, the selected one by a list of at most
 * SM90_GATED_LIST blocks, and the window, all with the second one's rows and units. */
enum { SM90_BRANCHES = 3, SM90_FIRST_BRANCH = 2, SM90_GATED_LIST = 64 };

/* Lists of few rows (sm90_few/kernel.cuh): those of a piece, and words of their masks of blocks. */
enum { SM90_MASKS = 32, SM90_MASK_WORDS = 4 };

/* Lists that the kernel makes, by probability where they are of few rows, else by mean logits; else it takes
 * branch[1]'s. */
struct sm90_choice {
    bool here;
    float scale;
    contest_rule rule;
    int32_t *blocks, *count; /* where they are written; NULL: nowhere */
    int64_t stride[3], count_stride[3];
    int64_t rows; /* list rows of a view */
};

/* find_contest() without divisions, of the list whose tile begins with query q0. */
__device__ __forceinline__ contest contest_of(const sm90_choice &c, const attend_kernel &listed, int nq,
                                              int q0)
{
    const int last = listed.causal && q0 + listed.tile < nq ? q0 + listed.tile : nq;
    contest x = {last > 0 ? (int)quotient((uint32_t)last - 1, listed.by_block) + 1 : 0, 0, 0, 0, 0};
    x.f0 = c.rule.forced_first < x.candidates ? c.rule.forced_first : x.candidates;
    if (listed.causal && c.rule.forced_local > 0) {
        const int local = (int)quotient((uint32_t)q0, listed.by_block) - (c.rule.forced_local - 1),
                  first = local > x.f0 ? local : x.f0;
        x.g1 = x.candidates;
        x.g0 = first < x.g1 ? first : x.g1;
    }
    const int left = c.rule.k - (x.f0 + (x.g1 - x.g0));
    x.size = left > 0 ? left : 0;
    return x;
}

/* The keys of a branch that a query q sees, as far as they do not depend on its sequence: the first one is
 * q + before, its keys begin in q + after tokens, one each `stride` tokens. */
struct sm90_seen {
    int32_t before, after;
    fast_div stride;
    bool from_end; /* queries are the last positions: both are counted from key nk - nq */
};

struct sm90_gated {
    attend_kernel branch[SM90_BRANCHES]; /* their o: none */
    sm90_seen seen[SM90_BRANCHES];
    sm90_choice choice;
    work_divisions by;
    fast_div by_mask; /* rows of a mask */
    view4 o, gates;   /* gates: f32, of a row three; written unless they are given */
    int32_t gate;     /* gate_kind */
    const void *w;
    int64_t w_stride[2];
    bool w_f32, w_vec;
    bool behind; /* launched behind a kernel of this call (launch_behind) */
    bool pairs;  /* launched as clusters of two blocks, of which the first `helped` share a piece */
    int32_t helped;
};
typedef quern_status sm90_attend_gated(const attend_gate_args *args, const sm90_gated &a,
                                       const sm90_device &device, void *workspace, cudaStream_t stream);
sm90_attend_gated sm90_gated_bf16_64, sm90_gated_bf16_128, sm90_gated_f16_64, sm90_gated_f16_128;
sm90_attend_gated sm90_gated_few_bf16_64, sm90_gated_few_bf16_128;
sm90_attend_gated sm90_gated_few_f16_64, sm90_gated_few_f16_128;

#endif
