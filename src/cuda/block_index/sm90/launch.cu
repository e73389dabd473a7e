/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel takes. */
#include "block_index/sm90/kernel.cuh"
#include "variants.cuh"

static bool block_index_sm90_supports(const stage_exec *exec, const block_index_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024, LIST_MOST = 64 };
    char limits[STAGE_WHY_BYTES];
    const int64_t size = args->rule.block_size, units = args->keys.shape[2],
                  hs = units > 0 ? args->q.shape[2] / units : 0;
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.dtype != QUERN_F32 &&
           !present(args->scores) && args->q.shape[3] <= 128 && args->rule.k <= LIST_MOST &&
           (size == 64 || size % sm90_block_index::STEP == 0) && hs >= 1 && hs <= sm90_block_index::ROWS &&
           args->seqs.batch >= 1 && tma_can(args->q) && tma_can(args->keys) &&
           block_index_takes(args, limits);
}

static quern_status block_index_sm90_run(const stage_exec *exec, const block_index_args *args, void *)
{
    const block_index_kernel a = block_index_kernel_of(args);
    const quern_status status = args->q.dtype == QUERN_BF16
                                    ? sm90_block_index::block_index_bf16(exec, args, a)
                                    : sm90_block_index::block_index_f16(exec, args, a);
    return status == QUERN_OK ? block_index_pad(exec, a) : status;
}

extern const variant<block_index_args> block_index_sm90 = {"block_index_sm90", block_index_sm90_supports,
                                                           NULL, block_index_sm90_run};
