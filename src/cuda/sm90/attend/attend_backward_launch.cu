/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_launch.cu - the launches of attention's backward on Hopper. Above head dim 128 one kernel
 * writes dQ, one dK and dV. Up to 128 one kernel makes all three, and dQ is summed in f32: in place where d_q
 * is f32, else in workspace, as many key/value heads at a time as MOST_SUMS bytes hold, and then stored in
 * d_q's dtype.
 *
 * Workspace: the counters (tickets, a word for each key/value head; turns, a word for each tile and head),
 * then the sums, then what lists need, each from a line of L2 on: with sums and shares 16 bytes off it lists
 * took 4% longer. Limit of the kernel here: bandwidth.
 */
#include "common/chunk.cuh"
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"

static const size_t MOST_SUMS = (size_t)2 << 30;
enum { ROWS = 16, CHUNKS = 16, LINE = 128 /* bytes of L2 */ };

struct room {
    int64_t tiles;         /* of 64 queries, of all sequences */
    size_t counters, sums; /* bytes */
    int64_t per;           /* key/value heads at a time */
    sm90_lists_room lists;
};

static size_t whole_lines(size_t bytes)
{
    return (bytes + LINE - 1) & ~(size_t)(LINE - 1);
}

static room room_of(const attend_args *args)
{
    const int64_t heads = args->q.shape[2], kv_heads = args->k.shape[2],
                  group = kv_heads > 0 ? heads / kv_heads : 1;
    const size_t one =
        (size_t)(args->q.shape[0] * args->q.shape[1] * group * args->q.shape[3]) * sizeof(float);
    room r = {piece_bound(args->seqs, SM90_BACKWARD_ROWS, 1), 0, 0, kv_heads, {}};
    r.counters = whole_lines((size_t)(kv_heads + heads * r.tiles) * sizeof(int32_t));
    if (kv_heads == 0 || one == 0) return r;
    const bool in_place = args->d_q.dtype == QUERN_F32;
    int64_t most = in_place ? kv_heads : one < MOST_SUMS ? (int64_t)(MOST_SUMS / one) : 1;
    if (present(args->list)) {
        r.lists = sm90_lists_room_of(args, most < kv_heads ? most : kv_heads);
        r.lists.clean = whole_lines(r.lists.clean);
        most = r.lists.heads;
    }
    const int64_t passes = (kv_heads + most - 1) / most;
    r.per = (kv_heads + passes - 1) / passes;
    r.sums = in_place ? 0 : whole_lines(one * (size_t)r.per);
    return r;
}

static bool is_wide(const attend_args *args)
{
    return args->q.shape[3] > 128 || args->v.shape[3] > 128;
}

int sm90_backward_keys(const attend_args *args)
{
    return args->q.shape[3] > 192 || args->v.shape[3] > 128 ? 64 : 128;
}

size_t sm90_attend_backward_bytes(const attend_args *args)
{
    if (args->q.dtype == QUERN_F32 || (present(args->list) && is_wide(args))) return 0;
    if (is_wide(args)) return SM90_COUNT_BYTES;
    const room r = room_of(args);
    return r.counters + r.sums + r.lists.clean + r.lists.shares + r.lists.sums + LINE - 1;
}

/* Heads head0 ... of d_q from their sums, or 0. A thread has 8 columns of a row; 16 x 16 threads. */
template <typename T, bool ZERO>
__global__ void __launch_bounds__(ROWS *CHUNKS)
    attend_store_rows(view4 to, const float *sums, int batch, int tokens, int head0, int heads, int dim,
                      bool wide, fast_div by_heads)
{
    const uint32_t row = blockIdx.x * ROWS + threadIdx.x / CHUNKS, token = quotient(row, by_heads),
                   head = row - token * heads;
    const int c = threadIdx.x % CHUNKS * 8;
    if (token >= (uint32_t)tokens || c >= dim) return;
    for (int b = blockIdx.y; b < batch; b += gridDim.y) {
        T *p = (T *)to.p + b * to.s[0] + token * to.s[1] + (head0 + head) * to.s[2] + c;
        chunk x = {};
        if (!ZERO) x = load_chunk(sums + ((int64_t)b * tokens * heads + row) * dim + c, true);
        for (int i = 0; i < CHUNK; i++)
            x.x[i] += 0.0f; /* a zero's sign may come from a row that is not seen */
        store_chunk(p, x, wide);
    }
}

template <typename T, bool ZERO>
static quern_status store_rows(const attend_args *args, const float *sums, int64_t head0, int64_t heads,
                               cudaStream_t stream)
{
    const int64_t batch = args->d_q.shape[0], tokens = args->d_q.shape[1];
    const dim3 grid((unsigned)((tokens * heads + ROWS - 1) / ROWS),
                    (unsigned)(batch < 65535 ? batch : 65535));
    attend_store_rows<T, ZERO><<<grid, ROWS * CHUNKS, 0, stream>>>(
        view4_of(args->d_q), sums, (int)batch, (int)tokens, (int)head0, (int)heads, (int)args->d_q.shape[3],
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
    return keys[half][most](
        args, l, {(int32_t)pieces, 0, a.kv_heads, 0, INT32_MAX, is_windowed(a), NULL, NULL, false, {}},
        stream);
}

/* Tiles of d_q (f32) whose first query sees nothing become 0: no block of keys may come to them. A block has
 * a tile of one head. */
__global__ void attend_clear_unseen(const __grid_constant__ attend_kernel a, view4 to)
{
    const int head = (int)blockIdx.y, batch = (int)blockIdx.z, from = (int)blockIdx.x * SM90_BACKWARD_ROWS;
    int lo, hi;
    row_keys(a, sequence_at(a.sq, batch), from, &lo, &hi);
    if (lo < hi) return;
    const int left = (int)a.sq.n_q - from, rows = left < SM90_BACKWARD_ROWS ? left : SM90_BACKWARD_ROWS;
    for (int i = threadIdx.x; i < rows * a.dim_k; i += blockDim.x) {
        const int n = i / a.dim_k, c = i - n * a.dim_k;
        ((float *)to.p)[batch * to.s[0] + (from + n) * to.s[1] + head * to.s[2] + c] = 0.0f;
    }
}

static quern_status clear_unseen(const attend_kernel &a, const quern_tensor &d_q, cudaStream_t stream)
{
    const dim3 grid(blocks_for(d_q.shape[1], SM90_BACKWARD_ROWS), (unsigned)d_q.shape[2],
                    (unsigned)d_q.shape[0]);
    if (grid.x > 0 && grid.y > 0 && grid.z > 0)
        attend_clear_unseen<<<grid, 256, 0, stream>>>(a, view4_of(d_q));
    return LAUNCHED("attention's backward: dQ of rows that see nothing");
}

/* The launches of lists, for the key/value heads that `plan` names: the shares of as many list rows as there
 * is room for, and their sum. */
static quern_status backward_lists(const attend_args *args, attend_launch l, const sm90_lists_room &room,
                                   sm90_backward_plan plan, const quern_tensor &d_q, sm90_attend_back *back,
                                   char *memory, cudaStream_t stream)
{
    float *const sums = (float *)(memory + room.shares);
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
        if (status == QUERN_OK) status = back(args, l, plan, d_q, stream);
        if (status == QUERN_OK) status = sm90_lists_sum(l, plan.lists, plan.kv0, plan.kv_heads, sums, stream);
    }
    return status;
}

quern_status sm90_attend_backward(const attend_args *args, const attend_launch &l, int64_t pieces,
                                  const sm90_backward_call &call, cudaStream_t stream)
{
    static sm90_attend_back *const table[2][2] = {{sm90_backward_bf16_64, sm90_backward_bf16_128},
                                                  {sm90_backward_f16_64, sm90_backward_f16_128}};
    if (is_wide(args)) return backward_wide(args, l, pieces, call, stream);
    const attend_kernel &a = l.kernel;
    const room r = room_of(args);
    char *const counters = (char *)whole_lines((uintptr_t)call.workspace);
    float *const sums = (float *)(counters + r.counters);
    const bool in_place = args->d_q.dtype == QUERN_F32;
    quern_tensor d_q = args->d_q;
    /* Causal blocks that begin together end one after the other at the diagonal, and those that follow begin
     * so: walking away from it they stay beside each other, and L2 serves them all. */
    const bool windowed = is_windowed(a);
    const int32_t wave = a.causal && !windowed && a.splits == 1 ? call.device.multiprocessors : INT32_MAX;
    sm90_backward_plan plan = {(int32_t)pieces,
                               0,
                               0,
                               (int32_t)r.tiles,
                               wave,
                               windowed,
                               (int32_t *)counters,
                               (int32_t *)counters + a.kv_heads,
                               false,
                               {}};
    sm90_attend_back *const back = table[l.dtype == QUERN_F16][l.dim > 64];
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
    /* A tile of a varlen sequence may reach into the next one, where nothing may be stored. Lists leave no
     * tile out. */
    plan.fresh = a.sq.cu_q == NULL && d_q.shape[0] <= 65535 && a.heads <= 65535 &&
                 !(in_place && args->accumulate_q) && (!l.listed || r.lists.per > 0);
    if (status == QUERN_OK && in_place && !args->accumulate_q && !plan.fresh)
        status = store_rows<float, true>(args, NULL, 0, a.heads, stream);
    for (int64_t kv0 = 0; kv0 < a.kv_heads && status == QUERN_OK; kv0 += r.per, plan.taken++) {
        plan.kv0 = (int32_t)kv0;
        plan.kv_heads = (int32_t)(a.kv_heads - kv0 < r.per ? a.kv_heads - kv0 : r.per);
        const int64_t heads = (int64_t)plan.kv_heads * a.group;
        if (in_place) {
            d_q.data = (float *)args->d_q.data + kv0 * a.group * d_q.strides[2];
            d_q.shape[2] = heads;
        } else {
            d_q.data = sums;
            d_q.dtype = QUERN_F32;
            d_q.shape[2] = heads;
            d_q.strides[3] = 1;
            d_q.strides[2] = d_q.shape[3];
            d_q.strides[1] = heads * d_q.shape[3];
            d_q.strides[0] = d_q.shape[1] * d_q.strides[1];
            if (!plan.fresh)
                status = cuda_report(
                    cudaMemsetAsync(sums, 0, (size_t)(d_q.shape[0] * d_q.strides[0]) * sizeof(float), stream),
                    "attention's backward: its sums");
        }
        if (status == QUERN_OK && plan.fresh && !l.listed) status = clear_unseen(a, d_q, stream);
        if (status == QUERN_OK)
            status = l.listed
                         ? backward_lists(args, l, r.lists, plan, d_q, back, lists + r.lists.clean, stream)
                         : back(args, l, plan, d_q, stream);
        if (status == QUERN_OK && !in_place)
            status = l.dtype == QUERN_BF16 ? store_rows<bf16, false>(args, sums, kv0 * a.group, heads, stream)
                                           : store_rows<f16, false>(args, sums, kv0 * a.group, heads, stream);
    }
    return status;
}
