/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel of tokens that share a tile takes. */
#include "attend_mqa/sm90_tokens/groups.cuh"
#include "variants.cuh"

extern "C" {
#include "core/arena.h"
}

using namespace sm90_mqa_tokens;

static bool tokens_supports(const stage_exec *exec, const attend_mqa_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    const bool rows = args->format == ENTRY_ROWS && !present(args->kv_table) && !present(args->entries_table),
               few = args->q.shape[2] <= HEADS_MOST &&
                     (!present(args->entries) || args->entries.shape[1] < (int64_t)1 << ENTRY_BITS);
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[3] == MQA_DIM && rows &&
           few && mqa_takes(args, limits);
}

static tokens_kernel kernel_of(const attend_mqa_args *args)
{
    tokens_kernel k = {};
    while (k.head_bits < 3 || 1 << k.head_bits < args->q.shape[2]) k.head_bits++;
    k.tokens = ROWS >> k.head_bits;
    k.a_sequence = (int32_t)((args->q.shape[1] + k.tokens - 1) / k.tokens);
    k.items = (int32_t)args->q.shape[0] * k.a_sequence;
    if (present(args->list)) {
        const int64_t all = args->list.shape[2] * k.tokens, entries = args->entries.shape[1];
        k.list_row = all < entries ? all : entries;
    }
    return k;
}

static void carve(tokens_kernel *k, arena *a)
{
    k->groups = (token_group *)arena_take(a, (size_t)k->items * sizeof *k->groups);
    k->lists = (uint32_t *)arena_take(a, (size_t)k->items * (size_t)k->list_row * sizeof *k->lists);
}

static size_t tokens_bytes(const stage_exec *, const attend_mqa_args *args)
{
    if (args->q.shape[2] > HEADS_MOST) return 0;
    tokens_kernel k = kernel_of(args);
    arena a = {NULL, 0};
    carve(&k, &a);
    return arena_size(&a);
}

static quern_status tokens_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    tokens_kernel k = kernel_of(args);
    arena a = arena_on(workspace);
    carve(&k, &a);
    if (!present(args->list)) k.lists = NULL;
    k.plan = mqa_planner_of(exec, args, workspace);
    k.a = mqa_kernel_of(args, k.plan);
    const quern_status status = plan_groups(exec, k);
    if (status != QUERN_OK) return status;
    return args->q.dtype == QUERN_BF16 ? tokens_bf16(exec, k) : tokens_f16(exec, k);
}

extern const variant<attend_mqa_args> attend_mqa_sm90_tokens = {"attend_mqa_sm90_tokens", tokens_supports,
                                                                tokens_bytes, tokens_run};
