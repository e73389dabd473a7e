/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.cuh - the attention kernels for Hopper (sm_90a): one function for each dtype and pair of padded head
 * dims. */
#ifndef QUERN_CUDA_ATTEND_SM90_ATTEND_CUH
#define QUERN_CUDA_ATTEND_SM90_ATTEND_CUH

#include "attend/any.cuh"
#include "hopper/wgmma.cuh"

struct sm90_device {
    int multiprocessors;
};

enum { SM90_LINE = 128 }; /* bytes of a line of L2, where parts of a workspace begin */

static inline size_t sm90_whole_lines(size_t bytes)
{
    return (bytes + SM90_LINE - 1) & ~(size_t)(SM90_LINE - 1);
}

/* The padded head dim of kernels that take up to 128. */
static inline int sm90_padded_dim(const attend_args *args)
{
    return args->q.shape[3] > 64 || args->v.shape[3] > 64 ? 128 : 64;
}

enum { SM90_COUNT_BYTES = 7 }; /* of workspace, at any address, for a counter of pieces */

/* A counter in `workspace` that starts at 0 when the kernels after it do; none where every block has one
 * piece. */
quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace,
                                  cudaStream_t stream, int32_t **counter);

/* What other variants ask, too. */
bool attend_forward_sm90_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
bool attend_forward_sm90_tokens_supports(const stage_exec *exec, const attend_args *args,
                                         char why[STAGE_WHY_BYTES]);

typedef quern_status sm90_attend(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                 void *workspace, cudaStream_t stream);
sm90_attend sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256;
sm90_attend sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256;

/* Lists that belong to few rows, of at most SM90_TOKEN_LIST entries: the forward (sm90_tokens/kernel.cuh), dQ
 * (sm90_tokens_dq/kernel.cuh); dK and dV of lists of one token (sm90_tokens_dkv/kernel.cuh). */
sm90_attend sm90_tokens_bf16_64, sm90_tokens_bf16_128, sm90_tokens_bf16_192;
sm90_attend sm90_tokens_f16_64, sm90_tokens_f16_128, sm90_tokens_f16_192;
sm90_attend sm90_tokens_rows_bf16_64, sm90_tokens_rows_bf16_128;
sm90_attend sm90_tokens_rows_f16_64, sm90_tokens_rows_f16_128;
enum { SM90_TOKEN_LIST = 64 };
typedef quern_status sm90_attend_tokens_keys(const attend_args *args, const attend_launch &l,
                                             cudaStream_t stream);
sm90_attend_tokens_keys sm90_tokens_keys_bf16_64, sm90_tokens_keys_bf16_128;
sm90_attend_tokens_keys sm90_tokens_keys_f16_64, sm90_tokens_keys_f16_128;

/* Room for lists in the backward: `heads` key/value heads and `rows` list rows at a time, `per` blocks of
 * threads a list; bytes of the clean lists, the shares and the sums. */
struct sm90_lists_room {
    int64_t heads, rows, all_rows, per;
    size_t clean, shares, sums;
};
sm90_lists_room sm90_lists_room_of(const attend_args *args, int64_t most_heads);

/* The backward: dQ, and dK and dV or their shares, of `pieces` pieces of sm90_backward_keys(args) keys (of
 * lists 0); the bytes of its workspace. */
struct sm90_backward_call {
    sm90_device device;
    void *workspace;
};
size_t sm90_attend_backward_bytes(const attend_args *args);
/* Whether dQ's sums stay in proportion to dQ: each of many short sequences has tiles of its own. */
bool sm90_sums_fit(const attend_args *args);
int sm90_backward_keys(const attend_args *args);
quern_status sm90_attend_backward(const attend_args *args, const attend_launch &l, int64_t pieces,
                                  const sm90_backward_call &call, cudaStream_t stream);

enum { SM90_BACKWARD_ROWS = 64 }; /* queries of a tile of dQ */

/* Lists of blocks in the backward: a block of threads owns 128 slots of one list, whose keys are those that
 * the list names, and writes the list's share of their gradients in attend_kernel's `part`. */
struct sm90_lists {
    const int32_t *clean; /* [units][rows of all views][k], ascending, -1 behind; NULL: keys are a range */
    int32_t view_rows, all_rows; /* list rows of a view, of all */
    int32_t row0, rows;          /* those of this launch */
    int32_t per;                 /* blocks of threads of a list */
    int32_t box;                 /* keys of a bulk copy; 0: all of a block's */
};

/* What the blocks of a backward's launch share. */
struct sm90_backward_plan {
    int32_t pieces;        /* of keys, of each key/value head */
    int32_t kv0, kv_heads; /* the key/value heads of this launch */
    int32_t tiles;         /* counters of a query head */
    int32_t wave;          /* blocks that start at once; every second wave walks its tiles from the first */
    bool head_first;       /* a head's tiles one after another, not a tile's heads */
    int32_t *taken;        /* tickets given out; NULL: a block's number is its ticket */
    int32_t *turns;        /* [heads][tiles]: how many key blocks have added to a tile of dQ */
    float *sums;           /* dQ's, as sm90_backward/dq_sums.cuh lays them out; NULL: d_q has them */
    bool fresh;            /* the first to come to a tile of dQ finds nothing to add to */
    int32_t blocks;        /* of threads that own keys */
    int32_t *done;         /* ADDERS for each of them that has added its dQ; NULL: no block stores d_q */
    int32_t *stored;       /* tiles of heads of d_q that were taken */
    bool wide;             /* rows of d_q are aligned to 16 bytes */
    /* Blocks that store d_q: beside the others, from block number beside_from on; once no keys are left. */
    uint32_t beside_from, beside, behind;
    sm90_lists lists;
};

/* Fills lists.clean's memory; adds the shares that a launch left to dK and dV, or to `sums` until the last.
 */
quern_status sm90_lists_clean(const attend_kernel &a, const sm90_lists &lists, int32_t *clean,
                              cudaStream_t stream);
quern_status sm90_lists_sum(const attend_launch &l, const sm90_lists &lists, int kv0, int heads, float *sums,
                            cudaStream_t stream);

/* `d_q`: without sums f32, its heads those of this launch; added to. */
typedef quern_status sm90_attend_back(const attend_args *args, const attend_launch &l,
                                      const sm90_backward_plan &plan, const quern_tensor &d_q,
                                      cudaStream_t stream);
sm90_attend_back sm90_backward_bf16_64, sm90_backward_bf16_128, sm90_backward_bf16_192;
sm90_attend_back sm90_backward_f16_64, sm90_backward_f16_128, sm90_backward_f16_192;

/* Of head dim 256, and of 192/128 where dQ's sums have no room: dQ, and dK and dV, by kernels of their own.
 */
sm90_attend sm90_rows_bf16_192, sm90_rows_bf16_256, sm90_rows_f16_192, sm90_rows_f16_256;
typedef quern_status sm90_attend_keys(const attend_args *args, const attend_launch &l,
                                      const sm90_backward_plan &plan, cudaStream_t stream);
sm90_attend_keys sm90_keys_bf16_192, sm90_keys_bf16_256, sm90_keys_f16_192, sm90_keys_f16_256;

/* The kernels of any GPU with warpgroup products (sm90_wgmma/kernels.cuh). */
attend_part wgmma_forward_bf16_64, wgmma_forward_bf16_128, wgmma_forward_bf16_256;
attend_part wgmma_forward_f16_64, wgmma_forward_f16_128, wgmma_forward_f16_256;
attend_part wgmma_rows_bf16_64, wgmma_rows_bf16_128, wgmma_rows_bf16_256;
attend_part wgmma_rows_f16_64, wgmma_rows_f16_128, wgmma_rows_f16_256;
attend_part wgmma_keys_bf16_64, wgmma_keys_bf16_128, wgmma_keys_bf16_256;
attend_part wgmma_keys_f16_64, wgmma_keys_f16_128, wgmma_keys_f16_256;

#endif
