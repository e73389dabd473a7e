/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - NSA's three branches, their selection and gate, of a step's tokens over pages, in one kernel.
 *
 * A block takes one query and one key/value head after another: it attends the entries and keeps their
 * scores, chooses blocks by them, attends these and the window, keeps each branch's O, times its gate, and
 * adds them at the end. Scores, ranks and sums stand in workspace of the block's own, which stays in L2. So
 * a query has the same bits in every batch. Limit: the read rate on Nc + k l' + W rows; of few queries, what
 * a block can read.
 */
#ifndef QUERN_CUDA_NSA_DECODE_PARAMS_CUH
#define QUERN_CUDA_NSA_DECODE_PARAMS_CUH

#include "decode/walk.cuh"

namespace nsa_decode
{

enum { CMP, SLC, WIN, BRANCHES, CHOSEN_MOST = 1024, RANKS_MOST = 1024 };

/* In floats, of one block. */
struct scratch_layout {
    int64_t scores, width; /* [group][width]: of entries; then what an entry counts, and ranks of blocks */
    int64_t entries, ranks, lse, gates, sum, floats;
};

struct nsa_kernel {
    step_view step;
    plane_view plane[BRANCHES];
    view4 q, o, gates;
    const void *w;
    int64_t w_s[2];
    bool w_f32, w_wide, q_wide, o_wide;
    bool listed, ungated; /* lists are read; O is the sum of the branches */
    int32_t gate;         /* gate_kind */
    uint32_t branches;
    int64_t window, block_size, stride, select_block;
    bool mean_logit, by_head;
    int32_t k, forced_first, forced_local;
    int32_t l_over_d, s_over_d;
    fast_div by_block;
    float scale, scale2;
    int32_t heads, group;
    int32_t *lists, *counts;
    int64_t list_s[3], count_s[3];
    float *scratch;
    scratch_layout at;
    int32_t *status;

    __host__ __device__ __forceinline__ bool has(int branch) const { return (branches >> branch & 1) != 0; }
    /* Whether entries are scored to choose blocks. */
    __host__ __device__ __forceinline__ bool chooses() const { return has(SLC) && !listed; }
};

typedef quern_status instance(const stage_exec *exec, const nsa_kernel &a, const launcher &to);
instance nsa_bf16_64, nsa_bf16_128, nsa_bf16_256, nsa_f16_64, nsa_f16_128, nsa_f16_256;
instance nsa_plain_f32, nsa_plain_bf16, nsa_plain_f16;

/* Blocks that run at the same time, each with its scratch. */
static inline int64_t blocks_at_once(const stage_exec *exec)
{
    return 2 * (int64_t)exec->multiprocessors;
}

} // namespace nsa_decode

#endif
