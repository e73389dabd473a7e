/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - the launches of attention's backward on Hopper. Above head dims 192/128 one kernel writes dQ,
 * one dK and dV. Up to there one kernel makes all three, and dQ is summed in f32: in place where d_q is f32,
 * else in workspace (dq_sums.cuh), as many key/value heads at a time as MOST_SUMS bytes hold, from where
 * blocks of the same launch store it in d_q's dtype.
 *
 * Workspace: the counters (of tickets, of blocks that are done and of tiles stored, each a word for each
 * key/value head; of turns, a word for each tile and head), then the sums, then what lists need, each from a
 * line of L2 on: with sums and shares 16 bytes off it lists took 4% longer. Limit of the kernels here:
 * bandwidth.
 */
#include "common/chunk.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90_backward/dq_sums.cuh"

static const size_t MOST_SUMS = (size_t)2 << 30;
enum { ROWS = 16, CHUNKS = 16, BESIDE_KEYS = 1024, BESIDE_WAVES = 8 };

static bool is_wide(const attend_args *args)
{
    return args->q.shape[3] > 128 || args->v.shape[3] > 128;
}

/* The padded head dim of K in the kernel that sums dQ. */
static int padded_dim(const attend_args *args)
{
    return is_wide(args) ? 192 : sm90_padded_dim(args);
}

struct room {
    int64_t tiles;         /* of 64 queries, of all sequences */
    size_t counters, sums; /* bytes */
    int64_t per;           /* key/value heads at a time */
    sm90_lists_room lists;
};

/* Bytes of the sums of dQ of a key/value head's query heads, in so many tiles. */
static size_t sums_of_a_head(const attend_args *args, int64_t tiles)
{
    const int64_t kv_heads = args->k.shape[2], group = kv_heads > 0 ? args->q.shape[2] / kv_heads : 1;
    return (size_t)(tiles * SM90_BACKWARD_ROWS * group * padded_dim(args)) * sizeof(float);
}

static room room_of(const attend_args *args)
{
    const int64_t heads = args->q.shape[2], kv_heads = args->k.shape[2];
    room r = {piece_bound(args->seqs, SM90_BACKWARD_ROWS, 1), 0, 0, kv_heads, {}};
    const size_t one = sums_of_a_head(args, r.tiles);
    r.counters = sm90_whole_lines((size_t)(3 * kv_heads + heads * r.tiles) * sizeof(int32_t));
    if (kv_heads == 0 || one == 0) return r;
    const bool in_place = args->d_q.dtype == QUERN_F32;
    int64_t most = in_place ? kv_heads : one < MOST_SUMS ? (int64_t)(MOST_SUMS / one) : 1;
    if (present(args->list)) {
        r.lists = sm90_lists_room_of(args, most < kv_heads ? most : kv_heads);
        r.lists.clean = sm90_whole_lines(r.lists.clean);
        most = r.lists.heads;
    }
    const int64_t passes = (kv_heads + most - 1) / most;
    r.per = (kv_heads + passes - 1) / passes;
    r.sums = in_place ? 0 : sm90_whole_lines(one * (size_t)r.per);
    return r;
}

bool sm90_sums_fit(const attend_args *args)
{
    const int64_t tokens = args->q.shape[0] * args->q.shape[1],
                  tiles = piece_bound(args->seqs, SM90_BACKWARD_ROWS, 1);
    return tiles * SM90_BACKWARD_ROWS <= 2 * tokens || sums_of_a_head(args, tiles) <= MOST_SUMS;
}

/* Whether dQ has a kernel of its own: dK and dV take all registers, or, above head dim 128, dQ's sums have no
 * room. */
static bool is_apart(const attend_args *args)
{
    if (!is_wide(args)) return false;
    return args->q.shape[3] > 192 || args->v.shape[3] > 128 ||
           !(args->d_q.dtype == QUERN_F32 ? tma_can(args->d_q) : sm90_sums_fit(args));
}

int sm90_backward_keys(const attend_args *args)
{
    return args->q.shape[3] > 192 || args->v.shape[3] > 128 ? 64 : 128;
}

size_t sm90_attend_backward_bytes(const attend_args *args)
{
    if (args->q.dtype == QUERN_F32 || (present(args->list) && is_wide(args))) return 0;
    if (is_apart(args)) return SM90_COUNT_BYTES;
    if (args->d_q.dtype != QUERN_F32 && !sm90_sums_fit(args)) return 0; /* another kernel's call */
    const room r = room_of(args);
    return r.counters + r.sums + r.lists.clean + r.lists.shares + r.lists.sums + SM90_LINE - 1;
}

/* d_q (f32) becomes 0. A thread has 8 columns of a row; 16 x 16 threads. */
__global__ void __launch_bounds__(ROWS *CHUNKS)
    attend_clear_rows(view4 to, int batch, int tokens, int heads, int dim, bool wide, fast_div by_heads)
{
    const uint32_t row = blockIdx.x * ROWS + threadIdx.x / CHUNKS, token = quotient(row, by_heads),
                   head = row - token * heads;
    const int c = threadIdx.x % CHUNKS * 8;
    if (token >= (uint32_t)tokens || c >= dim) return;
    for (int b = blockIdx.y; b < batch; b += gridDim.y)
        store_chunk((float *)to.p + b * to.s[0] + token * to.s[1] + head * to.s[2] + c, chunk{}, wide);
}

static quern_status clear_rows(const attend_args *args, cudaStream_t stream)
{
    const int64_t batch = args->d_q.shape[0], tokens = args->d_q.shape[1], heads = args->d_q.shape[2];
    const dim3 grid((unsigned)((tokens * heads + ROWS - 1) / ROWS),
                    (unsigned)(batch < 65535 ? batch : 65535));
    attend_clear_rows<<<grid, ROWS * CHUNKS, 0, stream>>>(
        view4_of(args->d_q), (int)batch, (int)tokens, (int)heads, (int)args->d_q.shape[3],
        rows_aligned16(args->d_q), fast_div_by((uint32_t)heads));
    return LAUNCHED("attention's backward: dQ");
}

static bool is_windowed(const attend_kernel &a)
{
    return a.mask == ATTEND_RANGE && a.window > 0;
}

static quern_status backward_wide(const attend_args *args, const attend_launch &l, int64_t pieces,
                                  const sm90_backward_call &call, cudaStream_t stream)
{
    static sm90_attend *const rows[2][2] = {{sm90_rows_bf16_192, sm90_rows_bf16_256},
                                            {sm90_rows_f16_192, sm90_rows_f16_256}};
    static sm90_attend_keys *const keys[2][2] = {{sm90_keys_bf16_192, sm90_keys_bf16_256},
                                                 {sm90_keys_f16_192, sm90_keys_f16_256}};
    const bool half = l.dtype == QUERN_F16, most = sm90_backward_keys(args) == 64;
    const quern_status status = rows[half][most](args, l, call.device, call.workspace, stream);
    if (status != QUERN_OK) return status;
    const attend_kernel &a = l.kernel;
    sm90_backward_plan plan = {};
    plan.pieces = (int32_t)pieces;
    plan.kv_heads = a.kv_heads;
    plan.wave = INT32_MAX;
    plan.head_first = is_windowed(a);
    return keys[half][most](args, l, plan, stream);
}

/* Tiles of d_q (f32) whose first query sees nothing become 0: no block of keys may come to them. A block has
 * a tile of every gridDim.y-th head: few blocks, since most have nothing to do. */
__global__ void attend_clear_unseen(const __grid_constant__ attend_kernel a, view4 to, int heads, int dim)
{
    sequence seq;
    int64_t from;
    int lo, hi;
    if (!piece_at(a.sq, blockIdx.x, SM90_BACKWARD_ROWS, 1, &seq, &from)) return;
    row_keys(a, seq, (int)from, &lo, &hi);
    if (lo < hi) return;
    const int left = (int)(seq.nq - from), rows = left < SM90_BACKWARD_ROWS ? left : SM90_BACKWARD_ROWS;
    for (int head = blockIdx.y; head < heads; head += gridDim.y) {
        float *const p = (float *)to.p + seq.view_b * to.s[0] + (seq.q0 + from) * to.s[1] + head * to.s[2];
        for (int i = threadIdx.x; i < rows * dim; i += blockDim.x) {
            const int n = i / dim;
            p[n * to.s[1] + i - n * dim] = 0.0f;
        }
    }
}

static quern_status clear_unseen(const attend_kernel &a, const sm90_backward_plan &plan,
                                 const quern_tensor &d_q, cudaStream_t stream)
{
    const int heads = plan.kv_heads * a.group, dim = (int)d_q.shape[3];
    const dim3 grid((unsigned)plan.tiles, heads < 8 ? (unsigned)heads : 8);
    if (plan.tiles > 0 && heads > 0)
        attend_clear_unseen<<<grid, 256, 0, stream>>>(a, view4_of(d_q), heads, dim);
    return LAUNCHED("attention's backward: dQ of rows that see nothing");
}

/* Which blocks store d_q, if plan->done counts those that own keys. Behind these as many as run at once.
 * Beside them it pays where few pieces of keys come to a tile, so that storing takes long by the products,
 * and blocks of keys come in many waves. */
static void let_blocks_store(const attend_kernel &a, const sm90_device &device, sm90_backward_plan *plan)
{
    const int64_t tiles = (int64_t)plan->tiles * plan->kv_heads * a.group,
                  keys = plan->lists.clean != NULL ? (int64_t)a.list_k * a.list_block
                         : is_windowed(a)          ? a.window
                                                   : a.sq.n_kv / (a.causal ? 2 : 1);
    const int all = device.multiprocessors;
    if (plan->done == NULL) return;
    plan->behind = (uint32_t)(tiles < all ? tiles : all);
    plan->beside_from = (uint32_t)all / 2;
    plan->beside = keys <= BESIDE_KEYS && plan->blocks >= BESIDE_WAVES * all ? (uint32_t)all / 32 : 0;
    if (plan->wave != INT32_MAX) plan->wave = all - (int32_t)plan->beside;
}

/* The launches of lists, for the key/value heads that `plan` names: the shares of as many list rows as there
 * is room for, and their sum. */
static quern_status backward_lists(const attend_args *args, attend_launch l, const sm90_device &device,
                                   const sm90_lists_room &room, sm90_backward_plan plan,
                                   const quern_tensor &d_q, sm90_attend_back *back, char *memory,
                                   cudaStream_t stream)
{
    float *const sums = (float *)(memory + room.shares);
    int32_t *const done = plan.done;
    quern_status status = QUERN_OK;
    l.kernel.part = (float *)memory;
    l.kernel.splits = 0; /* no block's gradients are whole */
    plan.lists.rows = (int32_t)room.rows;
    for (int64_t row = 0; row < room.all_rows && status == QUERN_OK; row += room.rows) {
        plan.lists.row0 = (int32_t)row;
        if (room.all_rows - row < room.rows) plan.lists.rows = (int32_t)(room.all_rows - row);
        if (row > 0)
            status = cuda_report(cudaMemsetAsync(plan.taken, 0, sizeof *plan.taken, stream),
                                 "attention's backward: its tickets");
        plan.blocks = plan.lists.rows * plan.lists.per * plan.kv_heads;
        plan.done = row + room.rows < room.all_rows ? NULL : done; /* the last has dQ whole */
        let_blocks_store(l.kernel, device, &plan);
        if (status == QUERN_OK) status = back(args, l, plan, d_q, stream);
        if (status == QUERN_OK) status = sm90_lists_sum(l, plan.lists, plan.kv0, plan.kv_heads, sums, stream);
    }
    return status;
}

quern_status sm90_attend_backward(const attend_args *args, const attend_launch &l, int64_t pieces,
                                  const sm90_backward_call &call, cudaStream_t stream)
{
    static sm90_attend_back *const table[2][3] = {
        {sm90_backward_bf16_64, sm90_backward_bf16_128, sm90_backward_bf16_192},
        {sm90_backward_f16_64, sm90_backward_f16_128, sm90_backward_f16_192}};
    if (is_apart(args)) return backward_wide(args, l, pieces, call, stream);
    const attend_kernel &a = l.kernel;
    const room r = room_of(args);
    char *const counters = (char *)sm90_whole_lines((uintptr_t)call.workspace);
    float *const sums = (float *)(counters + r.counters);
    const bool in_place = args->d_q.dtype == QUERN_F32;
    /* Causal blocks that begin together end one after the other at the diagonal, and those that follow begin
     * so: walking away from it they stay beside each other, and L2 serves them all. */
    const bool windowed = is_windowed(a);
    sm90_backward_plan plan = {};
    plan.pieces = (int32_t)pieces;
    plan.tiles = (int32_t)r.tiles;
    plan.wave = a.causal && !windowed && a.splits == 1 ? call.device.multiprocessors : INT32_MAX;
    plan.head_first = windowed;
    plan.turns = (int32_t *)counters + 3 * a.kv_heads;
    plan.sums = in_place ? NULL : sums;
    plan.wide = rows_aligned16(args->d_q);
    sm90_attend_back *const back = table[l.dtype == QUERN_F16][is_wide(args) ? 2 : l.dim > 64];
    char *const lists = (char *)sums + r.sums;
    quern_status status =
        cuda_report(cudaMemsetAsync(counters, 0, r.counters, stream), "attention's backward: its counters");
    if (l.listed) {
        plan.lists = {(int32_t *)lists,
                      (int32_t)args->list.shape[2],
                      (int32_t)r.lists.all_rows,
                      0,
                      0,
                      (int32_t)r.lists.per,
                      16};
        while (plan.lists.box < 128 && a.list_block % (2 * plan.lists.box) == 0) plan.lists.box *= 2;
        if (status == QUERN_OK) status = sm90_lists_clean(a, plan.lists, (int32_t *)lists, stream);
    }
    /* In d_q a tile of a varlen sequence may reach into the next one, where nothing may be stored. Lists
     * leave no tile out. */
    plan.fresh = !in_place || (a.sq.cu_q == NULL && !args->accumulate_q && (!l.listed || r.lists.per > 0));
    if (status == QUERN_OK && in_place && !args->accumulate_q && !plan.fresh)
        status = clear_rows(args, stream);
    quern_tensor d_q = args->d_q;
    for (int64_t kv0 = 0; kv0 < a.kv_heads && status == QUERN_OK; kv0 += r.per) {
        plan.kv0 = (int32_t)kv0;
        plan.kv_heads = (int32_t)(a.kv_heads - kv0 < r.per ? a.kv_heads - kv0 : r.per);
        if (in_place) {
            d_q.data = (float *)args->d_q.data + kv0 * a.group * d_q.strides[2];
            d_q.shape[2] = plan.kv_heads * a.group;
            if (plan.fresh && !l.listed) status = clear_unseen(a, plan, d_q, stream);
        }
        plan.taken = (int32_t *)counters + kv0 / r.per;
        plan.done = in_place ? NULL : plan.taken + a.kv_heads;
        plan.stored = plan.taken + 2 * a.kv_heads;
        plan.blocks = (int32_t)(pieces * a.splits * plan.kv_heads);
        if (!l.listed) let_blocks_store(a, call.device, &plan);
        if (status == QUERN_OK)
            status = l.listed ? backward_lists(args, l, call.device, r.lists, plan, d_q, back,
                                               lists + r.lists.clean, stream)
                              : back(args, l, plan, d_q, stream);
    }
    return status;
}
