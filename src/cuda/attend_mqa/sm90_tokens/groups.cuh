/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* groups.cuh - tokens that follow one another and share a tile: what each sees, and what they see together.
 * Rows and entries are numbered within dim 0 of their views. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_TOKENS_GROUPS_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_TOKENS_GROUPS_CUH

#include "attend_mqa/params.cuh"

namespace sm90_mqa_tokens
{

enum { ROWS = 64, TOKENS_MOST = 8, HEADS_MOST = ROWS / 2, ENTRY_BITS = 24 };

/* What a token sees: raw rows [raw, raw_end) and entries [entry, entry_end), or those of its list. */
struct token_range {
    int32_t position, raw, raw_end, entry, entry_end;
};
struct token_group {
    int32_t sequence, row, tokens; /* in dims 0 and 1 of q */
    int32_t raw0, raw;             /* all tokens' raw rows */
    int32_t entry0, entries;       /* all tokens' entries; of lists, how many the list of all has */
    int32_t aligned;
    token_range of[TOKENS_MOST];
};

struct tokens_kernel {
    mqa_kernel a;
    mqa_planner plan;
    token_group *groups;
    uint32_t
        *lists; /* [groups][list_row], or NULL: an entry, and above it a bit for each token that chose it */
    int64_t list_row;
    int32_t items, a_sequence; /* groups; of a sequence */
    int32_t tokens, head_bits; /* of a group; log2 of a token's rows */
};

/* The tokens that see a raw row, or an entry that no list names. */
__device__ __forceinline__ uint32_t tokens_that_see(const token_group &g, bool raw, int row)
{
    uint32_t see = 0;
#pragma unroll 1
    for (int t = 0; t < TOKENS_MOST; t++) {
        const int first = raw ? g.of[t].raw : g.of[t].entry, end = raw ? g.of[t].raw_end : g.of[t].entry_end;
        see |= (uint32_t)(row >= first && row < end) << t;
    }
    return see;
}

/* Launches the plan of the groups. */
quern_status plan_groups(const stage_exec *exec, const tokens_kernel &k);

typedef quern_status instance(const stage_exec *exec, const tokens_kernel &k);
instance tokens_bf16, tokens_f16;

} // namespace sm90_mqa_tokens

#endif
