/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lists.cu - what kernel.cuh takes of lists of blocks, and what becomes of the lists' shares
 * of dK and dV: the tiles that chose a block are added in their order (backward/inverse.cu), key by key.
 *
 * A list's share has 128 keys for each block of threads: at 16 blocks of 64 keys and D = 128 1 MiB. They are
 * made for as many key/value heads and list rows at a time as MOST_SHARES bytes hold; where a head's rows do
 * not fit, f32 sums stay in workspace from one part of them to the next.
 *
 * Workspace: the clean lists, the shares, the sums. Limit of the sum: its bytes over the read rate.
 */
#include "attend/backward/key_block.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"

static const size_t MOST_SHARES = (size_t)1 << 30;
enum { SLOTS = 128, MOST_LIST = 256, WARPS = 4, KEYS = 16, THREADS = 256, MOST_WIDTH = 256 };

sm90_lists_room sm90_lists_room_of(const attend_args *args, int64_t most_heads)
{
    const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size,
                  views = args->list.shape[0], width = args->q.shape[3] + args->v.shape[3];
    sm90_lists_room r = {};
    r.rows = r.all_rows = views * args->list.shape[2];
    r.per = (args->list.shape[3] * block + SLOTS - 1) / SLOTS;
    const size_t row = (size_t)(r.per * SLOTS * width) * sizeof(float);
    const int64_t fit = row > 0 ? (int64_t)(MOST_SHARES / row) : 0;
    r.heads = r.all_rows > 0 ? fit / r.all_rows : most_heads;
    if (r.heads > most_heads) r.heads = most_heads;
    if (r.heads < 1) r.heads = 1;
    if (r.rows * r.heads > fit) r.rows = fit > 0 ? fit : 1;
    r.clean = (size_t)(args->list.shape[1] * r.all_rows * args->list.shape[3]) * sizeof(int32_t);
    r.shares = (size_t)(r.heads * r.rows) * row;
    if (r.rows < r.all_rows)
        r.sums = (size_t)(r.heads * args->k.shape[0] * args->k.shape[1] * width) * sizeof(float);
    return r;
}

/* The lists as sm90_lists wants them; a warp has one. */
__global__ void __launch_bounds__(32 * WARPS)
    attend_clean_lists(const __grid_constant__ attend_kernel a, int view_rows, int all_rows, int32_t *clean)
{
    __shared__ int32_t room[WARPS][2][MOST_LIST];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, u = blockIdx.y,
              at = (int)blockIdx.x * WARPS + warp, view = at / view_rows, row = at - view * view_rows;
    if (at >= all_rows) return;
    sequence seq = {};
    int64_t query = (int64_t)row * a.tile;
    if (a.sq.cu_q == NULL) seq = sequence_at(a.sq, view);
    else if (!piece_at(a.sq, row, a.tile, 1, &seq, &query)) return;
    if (query >= seq.nq) return;
    int lo, hi;
    row_keys(a, seq, (query + a.tile < seq.nq ? query + a.tile : seq.nq) - 1, &lo, &hi);
    const int32_t *list = a.list + view * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
    const int kept = clean_by_warp(list, a.list_k, a.list_block, hi, room[warp][0], room[warp][1]);
    int32_t *to = clean + ((int64_t)u * all_rows + at) * a.list_k;
    for (int i = lane; i < a.list_k; i += 32) to[i] = i < kept ? room[warp][0][i] : -1;
}

quern_status sm90_lists_clean(const attend_kernel &a, const sm90_lists &lists, int32_t *clean,
                              cudaStream_t stream)
{
    if (lists.all_rows == 0 || a.units == 0) return QUERN_OK;
    attend_clean_lists<<<dim3(blocks_for(lists.all_rows, WARPS), (unsigned)a.units), 32 * WARPS, 0, stream>>>(
        a, lists.view_rows, lists.all_rows, clean);
    return LAUNCHED("attention's backward: clean lists");
}

/* Where `block` stands in a clean list that holds it. */
__device__ __forceinline__ int find_entry(const int32_t *list, int k, int block)
{
    int lo = 0, hi = k - 1;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        const int32_t x = list[mid];
        if (x < 0 || x >= block) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

/* The first list row of sequence `b`; all lanes of the warp call. */
__device__ __forceinline__ int first_list_row(const attend_kernel &a, const sm90_lists &lists,
                                              const sequence &seq)
{
    if (a.sq.cu_q == NULL) return (int)seq.view_b * lists.view_rows;
    int rows = 0;
    for (int64_t b = threadIdx.x & 31; b < seq.b; b += 32)
        rows += (int)((sequence_at(a.sq, b).nq + a.tile - 1) / a.tile);
    for (int w = 16; w > 0; w /= 2) rows += __shfl_xor_sync(~0u, rows, w);
    return rows;
}

/* A thread's columns of up to KEYS keys of a block, each 256 / (width / 4) keys. */
enum { OWN = KEYS * MOST_WIDTH / 4 / THREADS };

/* Adds the shares of the tiles `rows` names in turn: lanes [from, end) hold their first rows in `a.part`. */
__device__ __forceinline__ void add_shares(float4 (&sum)[OWN], const float *part, int64_t row, int from,
                                           int end, const int (&at)[OWN], int width, int items)
{
    enum { AHEAD = 4 };
    for (int j = from; j < end; j += AHEAD) {
        float4 x[AHEAD][OWN];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float *share = part + __shfl_sync(~0u, row, j + i < end ? j + i : j) * width;
#pragma unroll
            for (int n = 0; n < OWN; n++)
                x[i][n] = j + i < end && n < items ? __ldcs((const float4 *)(share + at[n]))
                                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                sum[n].x += x[i][n].x;
                sum[n].y += x[i][n].y;
                sum[n].z += x[i][n].z;
                sum[n].w += x[i][n].w;
            }
    }
}

/* KEYS keys of a listed block: the shares of the list rows of this launch. `sums`: what earlier launches
 * left, NULL where there is but one; `first`, `last`: of the launches. */
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    attend_sum_lists(const __grid_constant__ attend_kernel a, const __grid_constant__ sm90_lists lists,
                     int kv0, int heads, float *sums, bool first, bool last)
{
    const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1;
    const int chunks = a.list_block / KEYS, chunk = (int)(blockIdx.x % chunks), lane = threadIdx.x & 31;
    const int64_t piece = blockIdx.x / chunks, pair = piece / capacity, view = pair / heads;
    const int head = (int)(pair - view * heads);
    key_block b;
    if (!find_block(a, (view * a.kv_heads + kv0 + head) * capacity + piece - pair * capacity, &b)) return;
    const int left = b.key_end - b.key0 - chunk * KEYS, keys = left < KEYS ? left : KEYS;
    if (keys <= 0) return;
    const int width = a.dim_k + a.dim_v, wide = width / 4;
    int at[OWN], items = 0;
    float4 sum[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int i = (int)threadIdx.x + n * THREADS, key = i / wide;
        at[n] = key * width + (i - key * wide) * 4;
        if (key < keys) items = n + 1;
        sum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float *kept = sums + ((int64_t)(head * a.sq.n_kv) + b.seq.k0 + b.key0 + chunk * KEYS) * width;
    if (a.sq.cu_q == NULL) kept += view * heads * a.sq.n_kv * width;
    if (!first)
#pragma unroll
        for (int n = 0; n < OWN; n++)
            if (n < items) sum[n] = *(const float4 *)(kept + at[n]);
    const int64_t list_pair = b.seq.view_b * a.units + b.kvh;
    const int32_t *start = a.inverse_start + list_pair * capacity + b.index,
                  *tiles = a.inverse_tile + list_pair * a.inverse_entries + start[0];
    const int count = start[1] - start[0], row0 = first_list_row(a, lists, b.seq);
    for (int base = 0; base < count; base += 32) {
        const int row = base + lane < count ? row0 + tiles[base + lane] - lists.row0 : -1;
        const bool in = row >= 0 && row < lists.rows;
        const uint32_t mask = __ballot_sync(~0u, in); /* neighbours, since tiles rise */
        if (mask == 0) continue;
        int64_t place = 0;
        if (in) {
            const int32_t *list =
                lists.clean + ((int64_t)b.kvh * lists.all_rows + lists.row0 + row) * a.list_k;
            place = ((int64_t)head * lists.rows + row) * lists.per * SLOTS +
                    find_entry(list, a.list_k, b.block) * a.list_block + chunk * KEYS;
        }
        const int from = __ffs((int)mask) - 1;
        add_shares(sum, a.part, place, from, from + __popc(mask), at, width, items);
    }
    if (!last) {
#pragma unroll
        for (int n = 0; n < OWN; n++)
            if (n < items) *(float4 *)(kept + at[n]) = sum[n];
        return;
    }
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        if (n >= items) continue;
        const int key = at[n] / width, c = at[n] - key * width;
        const int64_t row = b.seq.k0 + b.key0 + chunk * KEYS + key;
        const bool of_k = c < a.dim_k;
        const view4 &to = of_k ? a.d_k : a.d_v;
        const int64_t place =
            b.seq.view_b * to.s[0] + row * to.s[1] + b.kvh * to.s[2] + (of_k ? c : c - a.dim_k);
        const bool add = of_k ? a.add_k : a.add_v;
        store_pair<T>(to.p, place, sum[n].x, sum[n].y, a.f32_dkv, add);
        store_pair<T>(to.p, place + 2, sum[n].z, sum[n].w, a.f32_dkv, add);
    }
}

quern_status sm90_lists_sum(const attend_launch &l, const sm90_lists &lists, int kv0, int heads, float *sums,
                            cudaStream_t stream)
{
    const attend_kernel &a = l.kernel;
    const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1,
                  views = a.sq.cu_q == NULL ? a.sq.batch : 1;
    const dim3 grid((unsigned)(views * heads * capacity * (a.list_block / KEYS)));
    const bool first = lists.row0 == 0, last = lists.row0 + lists.rows >= lists.all_rows;
    if (l.dtype == QUERN_BF16)
        attend_sum_lists<bf16><<<grid, THREADS, 0, stream>>>(a, lists, kv0, heads, sums, first, last);
    else attend_sum_lists<f16><<<grid, THREADS, 0, stream>>>(a, lists, kv0, heads, sums, first, last);
    return LAUNCHED("attention's backward: sum of lists' shares");
}
