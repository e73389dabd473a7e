/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which attention calls Hopper's kernels take, and which instance. */
#include "attend/any.cuh"
#include "attend/backward/params.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"
#include "variants.cuh"

enum { SHARED_BYTES = 227 * 1024, MOST_LIST = 256, LEAST_ROWS = 64 };

/* Whether the device is a Hopper GPU whose blocks have all their shared memory. */
static bool is_hopper(const stage_exec *exec)
{
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES;
}

/* Lists must come in blocks that copies can serve, short enough for a warp to sort, for rows that fill a
 * warpgroup. */
static bool list_taken(const attend_args *args, int64_t heads_of_list)
{
    if (!present(args->list)) return true;
    const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    return block % 16 == 0 && args->list.shape[3] <= MOST_LIST && args->tile * heads_of_list >= LEAST_ROWS;
}

/* What forward and backward ask of a call. */
static bool call_taken(const attend_args *args)
{
    const stage_seqs &s = args->seqs;
    if (args->q.dtype == QUERN_F32 || s.batch < 1 || s.n_kv > INT32_MAX - 1024 || s.n_q > INT32_MAX - 1024 ||
        s.batch > INT32_MAX / 2)
        return false;
    if (!tma_can(args->q) || !tma_can(args->k) || !tma_can(args->v)) return false;
    return (s.batch + s.n_q) * (args->q.shape[2] + 8) <= INT32_MAX; /* pieces are counted in 32 bits */
}

bool attend_forward_sm90_supports(const stage_exec *exec, const attend_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    if (!is_hopper(exec) || !attend_fits(args, limits) || !call_taken(args) || !rows_aligned16(args->o))
        return false;
    const bool by_head = present(args->list) && args->scope == LIST_BY_HEAD;
    const int64_t heads = by_head ? 1 : args->q.shape[2] / args->k.shape[2];
    return heads <= 128 && list_taken(args, heads);
}

/* Whether dQ can be summed, in d_q or in workspace. */
static bool dq_taken(const attend_args *args)
{
    return args->d_q.dtype == QUERN_F32 ? tma_can(args->d_q) : sm90_sums_fit(args);
}

static bool attend_backward_sm90_supports(const stage_exec *exec, const attend_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    if (!is_hopper(exec) || !attend_fits(args, limits) || !call_taken(args) || !tma_can(args->d_o) ||
        present(args->list))
        return false;
    const bool wide = args->q.shape[3] > 128 || args->v.shape[3] > 128;
    if (wide)
        return args->q.shape[2] / args->k.shape[2] <= 128; /* a query's heads fill at most a block's rows */
    return dq_taken(args);
}

/* Lists of 4 to 32 rows, whose blocks are whole stages of keys. */
static bool tokens_taken(const stage_exec *exec, const attend_args *args)
{
    char limits[STAGE_WHY_BYTES];
    if (!present(args->list) || args->mask != ATTEND_BLOCKS || !is_hopper(exec) ||
        !attend_fits(args, limits) || !call_taken(args))
        return false;
    const int64_t heads = args->scope == LIST_BY_HEAD ? 1 : args->q.shape[2] / args->k.shape[2],
                  rows = args->tile * heads;
    return (rows == 4 || rows == 8 || rows == 16 || rows == 32) && args->block_size % 64 == 0 &&
           args->list.shape[3] <= SM90_TOKEN_LIST && args->q.shape[3] <= 192 && args->v.shape[3] <= 128;
}

bool attend_forward_sm90_tokens_supports(const stage_exec *exec, const attend_args *args, char *)
{
    return tokens_taken(exec, args) && rows_aligned16(args->o);
}

static quern_status attend_forward_sm90_tokens_run(const stage_exec *exec, const attend_args *args,
                                                   void *workspace)
{
    static sm90_attend *const table[2][3] = {
        {sm90_tokens_bf16_64, sm90_tokens_bf16_128, sm90_tokens_bf16_192},
        {sm90_tokens_f16_64, sm90_tokens_f16_128, sm90_tokens_f16_192}};
    const attend_launch l = attend_launch_of(args);
    const int k = l.kernel.dim_k, v = l.kernel.dim_v;
    const quern_status status = table[l.dtype == QUERN_F16][k <= 64 && v <= 64 ? 0
                                                            : k <= 128         ? 1
                                                                               : 2](
        args, l, {exec->multiprocessors}, workspace, (cudaStream_t)exec->stream);
    return status != QUERN_OK ? status : attend_end(exec, args);
}

/* Lists of tiles that hold whole tiles of dQ, with rows enough for a block of threads to pay for the shares
 * of dK and dV that it writes. */
static bool attend_backward_sm90_lists_supports(const stage_exec *exec, const attend_args *args, char *)
{
    enum { FEWEST_ROWS = 512 };
    char limits[STAGE_WHY_BYTES];
    if (!present(args->list) || !is_hopper(exec) || !attend_fits(args, limits) || !call_taken(args) ||
        !tma_can(args->d_o))
        return false;
    const int64_t group = args->q.shape[2] / args->k.shape[2];
    if (args->scope == LIST_BY_HEAD && group > 1) return false;
    return args->tile % SM90_BACKWARD_ROWS == 0 && args->tile * group >= FEWEST_ROWS &&
           list_taken(args, group) && args->q.shape[3] <= 128 && args->v.shape[3] <= 128 && dq_taken(args);
}

static size_t attend_backward_sm90_lists_bytes(const stage_exec *, const attend_args *args)
{
    if (args->q.dtype == QUERN_F32 || !present(args->list)) return 0;
    return inverse_workspace(args) + sm90_attend_backward_bytes(args);
}

static quern_status attend_backward_sm90_lists_run(const stage_exec *exec, const attend_args *args,
                                                   void *workspace)
{
    const sm90_backward_call call = {{exec->multiprocessors}, (char *)workspace + inverse_workspace(args)};
    attend_launch l;
    quern_status status = backward_begin(exec, args, 128, workspace, &l);
    if (status == QUERN_OK && args->k.shape[2] > 0)
        status = sm90_attend_backward(args, l, 0, call, (cudaStream_t)exec->stream);
    l.listed = false; /* its shares are added */
    l.kernel.splits = 1;
    return status != QUERN_OK ? status : backward_end(exec, args, l);
}

quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace,
                                  cudaStream_t stream, int32_t **counter)
{
    *counter = NULL;
    if (pieces <= device.multiprocessors) return QUERN_OK;
    *counter = (int32_t *)(((uintptr_t)workspace + 3) & ~(uintptr_t)3);
    return cuda_report(cudaMemsetAsync(*counter, 0, sizeof **counter, stream),
                       "attention: the counter of pieces");
}

static size_t attend_forward_sm90_tokens_bytes(const stage_exec *, const attend_args *args)
{
    return args->q.dtype == QUERN_F32 || !present(args->list) ? 0 : SM90_COUNT_BYTES;
}

/* None where every block has one piece, for memory that a small call asks for takes longer than its launch. A
 * piece has 128 rows or 192: of the fewest there are the most. */
static size_t attend_forward_sm90_bytes(const stage_exec *exec, const attend_args *args)
{
    enum { FEWEST_ROWS = 128, KEYS = 64 };
    const attend_launch l = attend_launch_of(args);
    const bool few = l.kernel.hs > 0 && l.kernel.hs <= FEWEST_ROWS &&
                     work_plan_of(args, l.kernel, l.listed, FEWEST_ROWS, KEYS).total <= exec->multiprocessors;
    return args->q.dtype == QUERN_F32 || few ? 0 : SM90_COUNT_BYTES;
}

static quern_status attend_forward_sm90_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    static sm90_attend *const table[2][4] = {
        {sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256},
        {sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256}};
    const attend_launch l = attend_launch_of(args);
    const int k = l.kernel.dim_k, v = l.kernel.dim_v;
    const int dims = k <= 64 && v <= 64 ? 0 : k <= 128 && v <= 128 ? 1 : k <= 192 && v <= 128 ? 2 : 3;
    const quern_status status = table[l.dtype == QUERN_F16][dims](args, l, {exec->multiprocessors}, workspace,
                                                                  (cudaStream_t)exec->stream);
    return status != QUERN_OK ? status : attend_end(exec, args);
}

static size_t attend_backward_sm90_bytes(const stage_exec *, const attend_args *args)
{
    if (args->q.dtype == QUERN_F32 || present(args->list)) return 0;
    return backward_shares_bytes(args, sm90_backward_keys(args)) + sm90_attend_backward_bytes(args);
}

static quern_status attend_backward_sm90_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    const int keys = sm90_backward_keys(args);
    const int64_t pieces = backward_pieces(args, keys);
    const sm90_backward_call call = {{exec->multiprocessors},
                                     (char *)workspace + backward_shares_bytes(args, keys)};
    attend_launch l;
    quern_status status = backward_begin(exec, args, keys, workspace, &l);
    l.kernel.tiles_shared = true;
    l.kernel.short_first = backward_short_first(args, keys);
    if (status == QUERN_OK && pieces > 0)
        status = sm90_attend_backward(args, l, pieces, call, (cudaStream_t)exec->stream);
    return status != QUERN_OK ? status : backward_end(exec, args, l);
}

/* ---- any's kernels with warpgroup products ---- */

static attend_part *forward_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {
        {wgmma_forward_bf16_64, wgmma_forward_bf16_128, wgmma_forward_bf16_256},
        {wgmma_forward_f16_64, wgmma_forward_f16_128, wgmma_forward_f16_256}};
    return part_of(l, parts);
}

static attend_part *rows_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {{wgmma_rows_bf16_64, wgmma_rows_bf16_128, wgmma_rows_bf16_256},
                                             {wgmma_rows_f16_64, wgmma_rows_f16_128, wgmma_rows_f16_256}};
    static attend_part *const few[2][3] = {{attend_rows_bf16_64, attend_rows_bf16_128, attend_rows_bf16_256},
                                           {attend_rows_f16_64, attend_rows_f16_128, attend_rows_f16_256}};
    return l.listed && few_rows(l.kernel) ? part_of(l, few) : part_of(l, parts); /* too few for a warpgroup */
}

static attend_part *keys_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {{wgmma_keys_bf16_64, wgmma_keys_bf16_128, wgmma_keys_bf16_256},
                                             {wgmma_keys_f16_64, wgmma_keys_f16_128, wgmma_keys_f16_256}};
    return part_of(l, parts);
}

static bool attend_forward_wgmma_supports(const stage_exec *exec, const attend_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    if (!present(args->list) || !is_hopper(exec) || args->q.dtype == QUERN_F32 || !attend_fits(args, limits))
        return false;
    attend_launch l = attend_launch_of(args);
    return !few_rows(l.kernel) && attend_parts_fit(exec, args, &l, forward_of(l), NULL, limits);
}

static quern_status attend_forward_wgmma_run(const stage_exec *exec, const attend_args *args, void *)
{
    const attend_launch l = attend_launch_of(args);
    return attend_forward_by(exec, args, l, forward_of(l));
}

/* dQ by sm90_tokens_dq/kernel.cuh, dK and dV from the inverted index: by sm90_tokens_dkv/kernel.cuh where a
 * token has a list of its own and its heads fill groups of eight rows, else by any GPU's kernel. */
static bool attend_backward_sm90_tokens_supports(const stage_exec *exec, const attend_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    if (!tokens_taken(exec, args) || !tma_can(args->d_o) || args->q.shape[3] > 128) return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, keys_of(l), NULL, limits);
}

static size_t attend_backward_sm90_tokens_bytes(const stage_exec *exec, const attend_args *args)
{
    return attend_backward_any_bytes(exec, args) + SM90_COUNT_BYTES;
}

static quern_status attend_backward_sm90_tokens_run(const stage_exec *exec, const attend_args *args,
                                                    void *workspace)
{
    static sm90_attend *const rows[2][2] = {{sm90_tokens_rows_bf16_64, sm90_tokens_rows_bf16_128},
                                            {sm90_tokens_rows_f16_64, sm90_tokens_rows_f16_128}};
    static sm90_attend_tokens_keys *const keys[2][2] = {{sm90_tokens_keys_bf16_64, sm90_tokens_keys_bf16_128},
                                                        {sm90_tokens_keys_f16_64, sm90_tokens_keys_f16_128}};
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    attend_launch l;
    quern_status status = backward_begin(exec, args, backward_keys(args), workspace, &l);
    const bool f16 = l.dtype == QUERN_F16, wide = l.dim > 64,
               single = l.kernel.tile == 1 && l.kernel.hs % 8 == 0;
    if (status == QUERN_OK)
        status = rows[f16][wide](args, l, {exec->multiprocessors},
                                 (char *)workspace + attend_backward_any_bytes(exec, args), stream);
    if (status == QUERN_OK)
        status = single ? keys[f16][wide](args, l, stream) : keys_of(l)(args, l, {stream, NULL});
    return status != QUERN_OK ? status : backward_end(exec, args, l);
}

static bool attend_backward_wgmma_supports(const stage_exec *exec, const attend_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    const bool wide = args->q.shape[3] > 128 || args->v.shape[3] > 128;
    if ((!present(args->list) && !wide) || !is_hopper(exec) || args->q.dtype == QUERN_F32 ||
        !attend_fits(args, limits))
        return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, rows_of(l), keys_of(l), limits);
}

static quern_status attend_backward_wgmma_run(const stage_exec *exec, const attend_args *args,
                                              void *workspace)
{
    const attend_launch l = attend_launch_of(args);
    return attend_backward_by(exec, args, workspace, rows_of(l), keys_of(l));
}

extern const variant<attend_args> attend_forward_sm90 = {"attend_forward_sm90", attend_forward_sm90_supports,
                                                         attend_forward_sm90_bytes, attend_forward_sm90_run};
extern const variant<attend_args> attend_forward_sm90_tokens = {
    "attend_forward_sm90_tokens", attend_forward_sm90_tokens_supports, attend_forward_sm90_tokens_bytes,
    attend_forward_sm90_tokens_run};
extern const variant<attend_args> attend_forward_wgmma = {
    "attend_forward_wgmma", attend_forward_wgmma_supports, NULL, attend_forward_wgmma_run};
extern const variant<attend_args> attend_backward_sm90 = {
    "attend_backward_sm90", attend_backward_sm90_supports, attend_backward_sm90_bytes,
    attend_backward_sm90_run};
extern const variant<attend_args> attend_backward_sm90_lists = {
    "attend_backward_sm90_lists", attend_backward_sm90_lists_supports, attend_backward_sm90_lists_bytes,
    attend_backward_sm90_lists_run};
extern const variant<attend_args> attend_backward_sm90_tokens = {
    "attend_backward_sm90_tokens", attend_backward_sm90_tokens_supports, attend_backward_sm90_tokens_bytes,
    attend_backward_sm90_tokens_run};
extern const variant<attend_args> attend_backward_wgmma = {
    "attend_backward_wgmma", attend_backward_wgmma_supports, attend_backward_any_bytes,
    attend_backward_wgmma_run};
