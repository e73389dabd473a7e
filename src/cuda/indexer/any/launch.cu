/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls the kernel of any GPU takes. */
#include "common/rows.cuh"
#include "indexer/any/kernel.cuh"
#include "variants.cuh"

static bool indexer_any_supports(const stage_exec *exec, const indexer_args *args, char why[STAGE_WHY_BYTES])
{
    const size_t bytes = any_indexer::shared::bytes(any_indexer::layout_of(args));
    if (!index_takes(args, why)) return false;
    if (args->q.shape[2] <= UINT16_MAX && bytes <= exec->shared_bytes) return true;
    snprintf(why, STAGE_WHY_BYTES,
             "%lld heads of %lld channels take %zu bytes of shared memory a block: cuda:%d offers %zu",
             (long long)args->q.shape[2], (long long)args->q.shape[3], bytes, exec->device_id,
             exec->shared_bytes);
    return false;
}

static size_t indexer_any_bytes(const stage_exec *, const indexer_args *args)
{
    return room_for(index_spread_bytes(args));
}

static quern_status indexer_any_run(const stage_exec *exec, const indexer_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    index_kernel a = index_kernel_of(args, room_at<char>(workspace));
    a.status = exec->status;
    quern_status status = index_spread_rows(exec, args, a);
    if (status == QUERN_OK) status = index_report(exec, a);
    if (status != QUERN_OK) return status;
    return args->q.dtype == QUERN_BF16 ? any_indexer::indexer_bf16(exec, args, a)
                                       : any_indexer::indexer_f16(exec, args, a);
}

extern const variant<indexer_args> indexer_any = {"indexer_any", indexer_any_supports, indexer_any_bytes,
                                                  indexer_any_run};
