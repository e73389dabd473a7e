/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - calls of several queries a sequence, by their type of keys. */
#include "indexer/sm90/shared.cuh"
#include "variants.cuh"

using namespace sm90_indexer;

static bool indexer_sm90_supports(const stage_exec *exec, const indexer_args *args, char *)
{
    return queries_of(args) != 1 && sm90_takes(exec, args);
}

static size_t list_bytes(const indexer_args *args, int shares)
{
    return (size_t)args->q.shape[0] * (size_t)args->q.shape[1] * (size_t)shares * (size_t)args->idx.shape[2] *
           sizeof(uint32_t);
}

/* Lists of shares. */
static size_t indexer_sm90_bytes(const stage_exec *exec, const indexer_args *args)
{
    if (exec->compute != 90 || args->q.shape[2] != HEADS || args->q.shape[3] != WIDTH) return 0;
    const int shares = queries_of(args) != 1 ? shares_of(exec, args) : 1;
    return shares > 1 ? room_for(2 * list_bytes(args, shares)) : 0;
}

static quern_status indexer_sm90_run(const stage_exec *exec, const indexer_args *args, void *workspace)
{
    plan p;
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    const quern_status status = make_plan(exec, args, NULL, &p);
    if (status != QUERN_OK) return status;
    share_lists lists = {};
    if (p.cut.shares > 1) {
        lists.rank = room_at<uint32_t>(workspace);
        lists.index = (int32_t *)((char *)lists.rank + list_bytes(args, p.cut.shares));
    }
    if (args->format == ENTRY_FP4) return indexer_fp4(exec, p, lists);
    if (args->format != ENTRY_ROWS) return (args->rounded ? indexer_codes : indexer_fp8)(exec, p, lists);
    return (args->q.dtype == QUERN_BF16 ? indexer_bf16 : indexer_f16)(exec, p, lists);
}

extern const variant<indexer_args> indexer_sm90 = {"indexer_sm90", indexer_sm90_supports, indexer_sm90_bytes,
                                                   indexer_sm90_run};
