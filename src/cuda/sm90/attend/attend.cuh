/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.cuh - the attention kernels for Hopper (sm_90a): one function for each dtype and pair of padded head
 * dims. */
#ifndef QUERN_CUDA_SM90_ATTEND_CUH
#define QUERN_CUDA_SM90_ATTEND_CUH

#include "any/attend/attend_any.cuh"
#include "common/wgmma.cuh"

struct sm90_device {
    int multiprocessors;
};

enum { SM90_COUNT_BYTES = 7 }; /* of workspace, at any address, for a counter of pieces */

/* A counter in `workspace` that starts at 0 when the kernels after it do; none where every block has one
 * piece. */
quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace,
                                  cudaStream_t stream, int32_t **counter);

typedef quern_status sm90_attend(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                 void *workspace, cudaStream_t stream);
sm90_attend sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256;
sm90_attend sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256;

/* The backward: dQ, and dK and dV or their shares, of `pieces` pieces of sm90_backward_keys(args) keys; the
 * bytes of its workspace. */
struct sm90_backward_call {
    sm90_device device;
    void *workspace;
};
size_t sm90_attend_backward_bytes(const attend_args *args);
int sm90_backward_keys(const attend_args *args);
quern_status sm90_attend_backward(const attend_args *args, const attend_launch &l, int64_t pieces,
                                  const sm90_backward_call &call, cudaStream_t stream);

enum { SM90_BACKWARD_ROWS = 64 }; /* queries of a tile of dQ */

/* What the blocks of a backward's launch share. */
struct sm90_backward_plan {
    int32_t pieces;        /* of keys, of each key/value head */
    int32_t kv0, kv_heads; /* the key/value heads of this launch */
    int32_t tiles;         /* counters of a query head */
    int32_t wave;          /* blocks that start at once; every second wave walks its tiles from the first */
    bool head_first;       /* a head's tiles one after another, not a tile's heads */
    int32_t *taken;        /* tickets given out; NULL: a block's number is its ticket */
    int32_t *turns;        /* [heads][tiles]: how many key blocks have added to a tile of dQ */
};

/* `d_q`: f32, its heads those of this launch; added to. */
typedef quern_status sm90_attend_back(const attend_args *args, const attend_launch &l,
                                      const sm90_backward_plan &plan, const quern_tensor &d_q,
                                      cudaStream_t stream);
sm90_attend_back sm90_backward_bf16_64, sm90_backward_bf16_128, sm90_backward_f16_64, sm90_backward_f16_128;

/* Above head dim 128: dQ, and dK and dV, by kernels of their own. */
sm90_attend sm90_rows_bf16_192, sm90_rows_bf16_256, sm90_rows_f16_192, sm90_rows_f16_256;
typedef quern_status sm90_attend_keys(const attend_args *args, const attend_launch &l,
                                      const sm90_backward_plan &plan, cudaStream_t stream);
sm90_attend_keys sm90_keys_bf16_192, sm90_keys_bf16_256, sm90_keys_f16_192, sm90_keys_f16_256;

/* any/attend's kernels with warpgroup products (wgmma.cuh). */
attend_part wgmma_forward_bf16_64, wgmma_forward_bf16_128, wgmma_forward_bf16_256;
attend_part wgmma_forward_f16_64, wgmma_forward_f16_128, wgmma_forward_f16_256;
attend_part wgmma_rows_bf16_64, wgmma_rows_bf16_128, wgmma_rows_bf16_256;
attend_part wgmma_rows_f16_64, wgmma_rows_f16_128, wgmma_rows_f16_256;
attend_part wgmma_keys_bf16_64, wgmma_keys_bf16_128, wgmma_keys_bf16_256;
attend_part wgmma_keys_f16_64, wgmma_keys_f16_128, wgmma_keys_f16_256;

#endif
