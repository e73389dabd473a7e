/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel takes. */
#include "indexer/sm90/shared.cuh"
#include "variants.cuh"

using namespace sm90_indexer;

static bool indexer_sm90_supports(const stage_exec *exec, const indexer_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    static_assert(sizeof(shared<bf16, 2>) <= SHARED_BYTES && sizeof(shared<bf16, 3>) <= SHARED_BYTES &&
                      most_of(2) >= 2048,
                  "lists of 2048 entries have room");
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[2] == HEADS &&
           args->q.shape[3] == WIDTH && args->idx.shape[2] <= most_of(2) && index_takes(args, limits);
}

static quern_status indexer_sm90_run(const stage_exec *exec, const indexer_args *args, void *)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    const index_kernel a = index_kernel_of(args);
    return args->q.dtype == QUERN_BF16 ? indexer_bf16(exec, a) : indexer_f16(exec, a);
}

extern const variant<indexer_args> indexer_sm90 = {"indexer_sm90", indexer_sm90_supports, NULL,
                                                   indexer_sm90_run};
