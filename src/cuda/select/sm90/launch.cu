/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which selections Hopper's kernels take, and which instance. */
#include "hopper/tma.cuh"
#include "select/sm90/params.cuh"
#include "variants.cuh"

static bool select_sm90_supports(const stage_exec *exec, const select_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    if (exec->compute != 90 || exec->shared_bytes < SHARED_BYTES || args->rule.scorer != SELECT_PROBABILITY ||
        args->q.dtype == QUERN_F32 || !present(args->blocks) || present(args->groups))
        return false;
    const int64_t heads = args->q.shape[2], kv_heads = args->keys.shape[2];
    const int64_t rows =
                      args->tile * (args->rule.scope == LIST_BY_HEAD || kv_heads == 0 ? 1 : heads / kv_heads),
                  span = (args->rule.block_size + args->rule.select_block) / args->rule.stride - 2;
    if ((rows != 4 && rows != 8 && rows != 16) || args->q.shape[3] > 192 || args->rule.k > SM90_SELECT_MOST ||
        span > SM90_SELECT_HISTORY)
        return false;
    const stage_seqs &s = args->seqs;
    if (s.batch < 1 || s.batch > INT32_MAX / 2 || s.n_kv > INT32_MAX - 1024 ||
        (s.batch + s.n_q) * heads > INT32_MAX - 1024 || !tma_can(args->q) || !tma_can(args->keys))
        return false;
    return select_supports(exec, args, limits);
}

static size_t select_sm90_bytes(const stage_exec *exec, const select_args *args)
{
    return SM90_SELECT_BYTES + select_bytes(exec, args);
}

static quern_status select_sm90_run(const stage_exec *exec, const select_args *args, void *workspace)
{
    static sm90_select *const table[2][3] = {
        {sm90_select_bf16_64, sm90_select_bf16_128, sm90_select_bf16_192},
        {sm90_select_f16_64, sm90_select_f16_128, sm90_select_f16_192}};
    attend_args branch;
    const quern_status status = select_find_lse(exec, args, (char *)workspace + SM90_SELECT_BYTES, &branch);
    if (status != QUERN_OK) return status;
    const int64_t dim = args->q.shape[3];
    return table[args->q.dtype == QUERN_F16][dim <= 64    ? 0
                                             : dim <= 128 ? 1
                                                          : 2](
        select_kernel_of(args, attend_launch_of(&branch)),
        {args, exec->multiprocessors, workspace, (cudaStream_t)exec->stream});
}

extern const variant<select_args> select_sm90 = {"select_sm90", select_sm90_supports, select_sm90_bytes,
                                                 select_sm90_run};
