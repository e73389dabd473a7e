/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_keys.cu - dK and dV of blockwise attention on the tensor cores, for bf16 and f16, every mask.
 *
 *   dV = P^T row_scale dO, dK = scale dS^T Q (P, dS as in attend_backward_rows.cu): a block owns 16 KW keys and
 *   walks the rows that see them 64 at a time.
 * Everything is transposed: S^T = K Q^T leaves P^T in registers as the A operand of P^T dO. The packed heads of a
 * group meet in one row stream, so dK and dV are whole, without atomics. For listed blocks the row stream comes
 * from the inverted index (inverse.cu).
 *
 * Few keys with many rows (compressed entries, blocks that every tile chose) would leave most of the GPU idle: a
 * range is cut into `splits` shares of its rows, a listed block into items of item_rows. Each share leaves partial
 * sums in workspace, which a second kernel adds in the order of the rows.
 *
 * At D = 128: registers a thread dK 64, dV 64, S^T 32, dP^T 32; shared memory 128 KB. At D = 256 dK and dV do not
 * fit together and are two launches. Limit: the tensor cores.
 */
#include "any/attend/attend_backward.cuh"
#include "sm90/attend/attend.cuh"

enum { ROWS = 64 };

/* The keys and the share of rows that a block works on. */
struct key_block {
    sequence seq;
    int kvh, key0, key_end, block; /* block: listed */
    int index;                     /* in the inverse index */
    int share, shares;
    int64_t slot;                  /* of the partial sums, shares > 1 */
    int offset;                    /* of key0 in the slot */
};

/* Piece `piece` of KT keys of a range. */
template <int KT> __device__ __forceinline__ bool find_range(const attend_kernel &a, int64_t piece, int64_t pieces, key_block *b)
{
    sequence flipped;
    int64_t key0;
    if (!piece_at(by_key(a.sq), piece, KT, 1, &flipped, &key0)) return false;
    b->seq = flip(flipped);
    b->kvh = blockIdx.y;
    b->key0 = (int)key0;
    b->key_end = (int)(key0 + KT < b->seq.nk ? key0 + KT : b->seq.nk);
    b->share = blockIdx.z, b->shares = a.splits;
    b->slot = ((int64_t)blockIdx.y * pieces + piece) * a.splits;
    b->offset = 0;
    return true;
}

/* The listed block at `place` of the tables, which order them by (view, key/value head, index). */
__device__ __forceinline__ bool find_block(const attend_kernel &a, int64_t place, key_block *b)
{
    const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1, pair = place / capacity, view = pair / a.kv_heads;
    int64_t seq = view, index = place - pair * capacity;
    b->index = (int)index;
    if (a.sq.cu_q != NULL) { /* the last sequence whose blocks start at or before it */
        const int32_t *cu = by_key(a.sq).cu_q;
        int64_t lo = 0, hi = a.sq.batch;
        while (hi - lo > 1) {
            const int64_t mid = (lo + hi) / 2;
            if (border(cu, mid, a.sq.n_kv) / a.list_block + mid <= index) lo = mid;
            else hi = mid;
        }
        seq = lo;
        index -= border(cu, lo, a.sq.n_kv) / a.list_block + lo;
    }
    b->seq = sequence_at(a.sq, seq);
    b->kvh = (int)(pair - view * a.kv_heads);
    b->block = (int)index;
    if (index < 0 || index * a.list_block >= b->seq.nk) return false;
    b->key0 = (int)index * a.list_block;
    b->key_end = (int64_t)b->key0 + a.list_block < b->seq.nk ? b->key0 + a.list_block : (int)b->seq.nk;
    b->shares = a.item_start[place + 1] - a.item_start[place];
    b->slot = a.slot_start[place];
    return true;
}

template <int KT> __device__ __forceinline__ bool find_item(const attend_kernel &a, int64_t places, key_block *b)
{
    const int item = blockIdx.x;
    int64_t lo = 0, hi = places;
    if (places == 0 || item >= a.item_start[places]) return false;
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (a.item_start[mid] <= item) lo = mid;
        else hi = mid;
    }
    if (!find_block(a, lo, b)) return false;
    b->share = item - a.item_start[lo];
    b->slot += b->share;
    b->offset = (int)blockIdx.z * KT;
    b->key0 += b->offset;
    if (b->key0 + KT < b->key_end) b->key_end = b->key0 + KT;
    return b->key0 < b->key_end;
}

__device__ __forceinline__ void cp_async4(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}

/* PARTS: 1 dK, 2 dV, 3 both. */
template <typename T, int DP, int KW, int PARTS, bool LISTED>
__global__ void __launch_bounds__(32 * KW, 1) attend_backward_keys(const __grid_constant__ attend_kernel a, int64_t pieces)
{
    constexpr int KT = 16 * KW, NT = ROWS / 8, OT = DP / 8, CHUNKS = DP / 8, THREADS = 32 * KW, TILE = ROWS * DP * 2, STEP = THREADS / CHUNKS;
    constexpr bool DK = PARTS & 1, DV = PARTS & 2;
    extern __shared__ __align__(1024) char smem[];
    char *sk = smem, *sv = sk + KT * DP * 2, *sq = sv + KT * DP * 2, *sdo = sq + 2 * TILE;
    float *stat = (float *)(sdo + 2 * TILE); /* [2][5][ROWS]: lse, delta, row_scale, lo, hi */
    const uint32_t ak = smem_address(sk), av = smem_address(sv), aq0 = smem_address(sq), ado0 = smem_address(sdo), astat = smem_address(stat);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mine = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    key_block b;
    if (LISTED ? !find_item<KT>(a, pieces, &b) : !find_range<KT>(a, blockIdx.x, pieces, &b)) return;
    const sequence &seq = b.seq;
    const int kvh = b.kvh, nq = (int)seq.nq;
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kvh * a.k.s[2] + mine * 8;
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + kvh * a.v.s[2] + mine * 8;
    const bool in_k = mine * 8 < a.dim_k, in_v = mine * 8 < a.dim_v;
    for (int r = row0; r < KT; r += STEP) {
        const bool in = b.key0 + r < b.key_end;
        load_chunk16<T>(ak, sk, tile_at<KT>(r, mine), in ? k + (b.key0 + r) * a.k.s[1] : k, in && in_k, a.vec_k);
        load_chunk16<T>(av, sv, tile_at<KT>(r, mine), in ? v + (b.key0 + r) * a.v.s[1] : v, in && in_v, a.vec_v);
    }

    int qa = 0, qb = 0; /* queries that can see some of these keys */
    if (!LISTED) {
        qa = first_query(seq.nq, [&](int64_t i) { int lo, hi; row_keys(a, seq, i, &lo, &hi); return hi > b.key0; });
        qb = first_query(seq.nq, [&](int64_t i) { int lo, hi; row_keys(a, seq, i, &lo, &hi); return lo >= b.key_end; });
    }
    float dk[DK ? OT : 1][4] = {}, dv[DV ? OT : 1][4] = {};
    const int units_here = a.units / a.kv_heads, tile_rows = a.tile * a.hs;
    int64_t before = 0; /* listed: rows of the units before this one */
    for (int ui = 0; ui < units_here; ui++) {
        const int u = kvh * units_here + ui, head0 = a.units == a.heads ? u : u * a.group;
        const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2] + mine * 8;
        const T *g = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + seq.q0 * a.d_o.s[1] + head0 * a.d_o.s[2] + mine * 8;
        const float *lse = a.lse.p + seq.view_b * a.lse.s[0] + head0 * a.lse.s[1] + seq.q0 * a.lse.s[2];
        const float *delta = a.delta.p + seq.view_b * a.delta.s[0] + head0 * a.delta.s[1] + seq.q0 * a.delta.s[2];
        const float *row_scale = a.row_scale.p + seq.view_b * a.row_scale.s[0] + head0 * a.row_scale.s[1] + seq.q0 * a.row_scale.s[2];
        const int32_t *tiles_here = NULL;
        int first = 0, end = qb > qa ? (qb - qa) * a.hs : 0; /* this share's stretch of the row stream */
        if (LISTED) {
            const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1, pair = seq.view_b * a.units + u;
            const int32_t *start = a.inverse_start + pair * capacity + b.index;
            tiles_here = a.inverse_tile + pair * a.inverse_entries + start[0];
            const int64_t rows = (int64_t)(start[1] - start[0]) * tile_rows, from = b.share * a.item_rows - before, to = from + a.item_rows;
            first = (int)(from < 0 ? 0 : from < rows ? from : rows);
            end = (int)(to < 0 ? 0 : to < rows ? to : rows);
            before += rows;
        } else if (b.shares > 1) {
            const int per = ((end + ROWS - 1) / ROWS + b.shares - 1) / b.shares * ROWS;
            first = b.share * per < end ? b.share * per : end;
            end = first + per < end ? first + per : end;
        }
        const int steps = end > first ? (end - first + ROWS - 1) / ROWS : 0;
        /* Query and head of stream position i; false past the end. */
        auto place = [&](int i, int *n, int *head) {
            int query = qa;
            bool in = i < end;
            if (LISTED) {
                const int at = (int)quotient((uint32_t)i, a.by_tile_rows);
                i -= at * tile_rows;
                query = in ? tiles_here[at] * a.tile : 0;
            }
            const int x = (int)quotient((uint32_t)i, a.by_hs);
            *n = query + x;
            *head = i - x * a.hs;
            return in && *n < nq;
        };
        auto load = [&](int t) {
            const uint32_t at = (t & 1) * TILE;
            int n, head;
#pragma unroll 4
            for (int r = row0; r < ROWS; r += STEP) {
                const bool in = place(first + t * ROWS + r, &n, &head);
                const uint32_t to = at + tile_at<ROWS>(r, mine);
                load_chunk16<T>(aq0, sq, to, in ? q + n * a.q.s[1] + head * a.q.s[2] : q, in && in_k, a.vec_q);
                load_chunk16<T>(ado0, sdo, to, in ? g + n * a.d_o.s[1] + head * a.d_o.s[2] : g, in && in_v, a.vec_do);
            }
            if (threadIdx.x < ROWS) {
                const int r = threadIdx.x, to = (t & 1) * 5 * ROWS + r;
                int lo = 0, hi = 0;
                if (place(first + t * ROWS + r, &n, &head)) {
                    row_keys(a, seq, n, &lo, &hi);
                    cp_async4(astat + to * 4, lse + head * a.lse.s[1] + n * a.lse.s[2]);
                    cp_async4(astat + (to + ROWS) * 4, delta + head * a.delta.s[1] + n * a.delta.s[2]);
                    if (a.row_scale.p != NULL) cp_async4(astat + (to + 2 * ROWS) * 4, row_scale + head * a.row_scale.s[1] + n * a.row_scale.s[2]);
                    else stat[to + 2 * ROWS] = 1.0f;
                }
                ((int *)stat)[to + 3 * ROWS] = lo, ((int *)stat)[to + 4 * ROWS] = hi;
            }
            cp_async_commit();
        };
        __syncthreads(); /* the last unit's stages are free */
        if (steps > 0) load(0);
        for (int t = 0; t < steps; t++) {
            cp_async_wait<0>();
            wg_show();
            __syncthreads();
            if (t + 1 < steps) load(t + 1);
            const uint32_t aq = aq0 + (t & 1) * TILE, ado = ado0 + (t & 1) * TILE;
            const float *st = stat + (t & 1) * 5 * ROWS;
            float s[NT][4] = {}, dp[NT][4] = {};
            wg_start();
            product_nt<T, DP, NT, KT, ROWS, true>(s, ak, warp * 16, aq, 0, lane);
            if (DK) product_nt<T, DP, NT, KT, ROWS, true>(dp, av, warp * 16, ado, 0, lane);
            wg_finish();
            const int key = b.key0 + warp * 16 + (lane >> 2);
            uint32_t fp[NT][2], fs[DK ? NT : 1][2];
#pragma unroll
            for (int i = 0; i < NT; i++) {
                const int r = i * 8 + (lane & 3) * 2;
                const float2 l = *(const float2 *)&st[r], de = *(const float2 *)&st[ROWS + r], rs = *(const float2 *)&st[2 * ROWS + r];
                const int2 lo = *(const int2 *)&st[3 * ROWS + r], hi = *(const int2 *)&st[4 * ROWS + r];
                const float lse2[2] = {l.x * 1.4426950408889634f, l.y * 1.4426950408889634f};
                const bool any[2] = {l.x != -INFINITY, l.y != -INFINITY};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const bool seen[2] = {any[0] && key + h * 8 >= lo.x && key + h * 8 < hi.x, any[1] && key + h * 8 >= lo.y && key + h * 8 < hi.y};
                    const float p[2] = {seen[0] ? exp2_fast(fmaf(s[i][h * 2], a.scale_log2, -lse2[0])) : 0.0f,
                                        seen[1] ? exp2_fast(fmaf(s[i][h * 2 + 1], a.scale_log2, -lse2[1])) : 0.0f};
                    if (DK) fs[DK ? i : 0][h] = pack2<T>(seen[0] ? p[0] * fmaf(dp[i][h * 2], rs.x, -de.x) : 0.0f,
                                                         seen[1] ? p[1] * fmaf(dp[i][h * 2 + 1], rs.y, -de.y) : 0.0f);
                    fp[i][h] = pack2<T>(seen[0] ? p[0] * rs.x : 0.0f, seen[1] ? p[1] * rs.y : 0.0f);
                }
            }
            /* Queries rise along the stream: the first row sees the least at the end, the last at the start. */
            const int rows_here = end - first - t * ROWS < ROWS ? end - first - t * ROWS : ROWS;
            const int *lows = (const int *)st + 3 * ROWS, *highs = (const int *)st + 4 * ROWS;
            if (highs[0] < b.key_end || lows[rows_here - 1] > b.key0) {
                char *query = sq + (t & 1) * TILE, *gradient = sdo + (t & 1) * TILE;
                auto sees = [&](int j, int h) { return key + h * 8 >= lows[j] && key + h * 8 < highs[j] && st[j] != -INFINITY; };
                if (__syncthreads_or((DK && any_nonfinite<T, ROWS, THREADS, CHUNKS>(query)) ||
                                     (DV && any_nonfinite<T, ROWS, THREADS, CHUNKS>(gradient)))) {
                    if constexpr (DK) spread_nonfinite<T, ROWS>(dk, query, 0, ROWS, true, sees);
                    if constexpr (DV) spread_nonfinite<T, ROWS>(dv, gradient, 0, ROWS, false, sees);
                    __syncthreads();
                    if (DK) clear_nonfinite<T, ROWS, THREADS, CHUNKS>(query);
                    if (DV) clear_nonfinite<T, ROWS, THREADS, CHUNKS>(gradient);
                    wg_show();
                    __syncthreads();
                }
            }
            wg_start();
#pragma unroll
            for (int kk = 0; kk < NT; kk += 2) {
                if constexpr (DV) {
                    const uint32_t f[4] = {fp[kk][0], fp[kk][1], fp[kk + 1][0], fp[kk + 1][1]};
                    product_nn<T, DP, ROWS, true>(dv, f, ado, kk * 8, lane);
                }
                if constexpr (DK) {
                    const uint32_t f[4] = {fs[kk][0], fs[kk][1], fs[kk + 1][0], fs[kk + 1][1]};
                    product_nn<T, DP, ROWS, true>(dk, f, aq, kk * 8, lane);
                }
            }
            wg_finish();
        }
    }
    cp_async_wait<0>();
    const int width = a.dim_k + a.dim_v, slot_keys = LISTED ? a.list_block : KT;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = warp * 16 + h * 8 + (lane >> 2), key = b.key0 + r;
        if (key >= b.key_end) continue;
        float *part = a.part + ((LISTED ? b.slot : b.slot + b.share) * slot_keys + b.offset + r) * width;
        const int64_t at_k = seq.view_b * a.d_k.s[0] + (seq.k0 + key) * a.d_k.s[1] + kvh * a.d_k.s[2];
        const int64_t at_v = seq.view_b * a.d_v.s[0] + (seq.k0 + key) * a.d_v.s[1] + kvh * a.d_v.s[2];
        const bool whole = b.shares <= 1;
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (lane & 3) * 2;
            if (DK && c < a.dim_k) {
                const float x = dk[DK ? i : 0][h * 2] * a.scale, y = dk[DK ? i : 0][h * 2 + 1] * a.scale;
                if (whole) store_pair<T>(a.d_k.p, at_k + c, x, y, a.f32_dkv, a.add_k);
                else *(float2 *)(part + c) = make_float2(x, y);
            }
            if (DV && c < a.dim_v) {
                const float x = dv[DV ? i : 0][h * 2], y = dv[DV ? i : 0][h * 2 + 1];
                if (whole) store_pair<T>(a.d_v.p, at_v + c, x, y, a.f32_dkv, a.add_v);
                else *(float2 *)(part + a.dim_k + c) = make_float2(x, y);
            }
        }
    }
}

/* Adds the shares of a block's keys, in order. Grid as above, with one block for all shares. */
template <typename T, int KT, bool LISTED> __global__ void attend_backward_sum(const __grid_constant__ attend_kernel a, int64_t pieces)
{
    key_block b;
    if (LISTED ? !find_block(a, blockIdx.x, &b) : !find_range<KT>(a, blockIdx.x, pieces, &b)) return;
    if (b.shares <= 1) return;
    const int width = a.dim_k + a.dim_v, keys = LISTED ? a.list_block : KT, pairs = width / 2;
    for (int i = threadIdx.x; i < (b.key_end - b.key0) * pairs; i += blockDim.x) {
        const int r = i / pairs, c = (i - r * pairs) * 2;
        const int64_t row = b.seq.k0 + b.key0 + r;
        float2 sum = make_float2(0.0f, 0.0f);
        for (int s = 0; s < b.shares; s++) {
            const float2 x = *(const float2 *)(a.part + ((b.slot + s) * keys + r) * width + c);
            sum.x += x.x, sum.y += x.y;
        }
        if (c < a.dim_k)
            store_pair<T>(a.d_k.p, b.seq.view_b * a.d_k.s[0] + row * a.d_k.s[1] + b.kvh * a.d_k.s[2] + c, sum.x, sum.y, a.f32_dkv, a.add_k);
        else
            store_pair<T>(a.d_v.p, b.seq.view_b * a.d_v.s[0] + row * a.d_v.s[1] + b.kvh * a.d_v.s[2] + c - a.dim_k, sum.x, sum.y, a.f32_dkv, a.add_v);
    }
}

static int64_t pieces_of(const attend_args *args, int keys)
{
    stage_seqs flipped = args->seqs;
    flipped.n_q = args->seqs.n_kv;
    return piece_bound(flipped, keys, 1);
}

static int range_keys(const attend_args *args) { return args->q.shape[3] > 128 || args->v.shape[3] > 128 ? 64 : 128; }

/* Shares of a range's rows: enough to fill a large GPU four times, where there are rows enough. Compressed entries are few,
 * and the first are seen by all: smaller shares leave less to wait for at the end. */
static int splits_of(const attend_args *args)
{
    const int64_t blocks = pieces_of(args, range_keys(args)) * args->k.shape[2],
                  rows = args->seqs.n_q * (args->q.shape[2] / (args->k.shape[2] > 0 ? args->k.shape[2] : 1));
    const int64_t finer = args->mask == ATTEND_COMPRESSED ? 4 : 1, most = 16 * finer;
    int64_t splits = blocks > 0 ? 528 * finer / blocks : 1;
    if (splits > rows / 1024) splits = rows / 1024;
    return splits < 2 ? 1 : splits > most ? (int)most : (int)splits;
}

size_t attend_backward_keys_bytes(const attend_args *args)
{
    const size_t row = (size_t)(args->q.shape[3] + args->v.shape[3]) * 4;
    if (present(args->list)) {
        const size_t keys = args->mask == ATTEND_COMPRESSED ? 128 : (size_t)args->block_size;
        return (size_t)inverse_slots(args) * keys * row + 15;
    }
    const int splits = splits_of(args);
    return splits > 1 ? (size_t)(pieces_of(args, range_keys(args)) * args->k.shape[2] * splits * range_keys(args)) * row + 15 : 0;
}

template <typename T, int DP, int KW, int PARTS, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, int64_t pieces, const launcher &to)
{
    constexpr int KT = 16 * KW;
    const size_t bytes = (size_t)(2 * KT + 4 * ROWS) * DP * 2 + 10 * ROWS * 4;
    const dim3 grid = LISTED ? dim3((unsigned)inverse_items(args), 1, (unsigned)((a.list_block + KT - 1) / KT))
                             : dim3((unsigned)pieces, (unsigned)a.kv_heads, (unsigned)a.splits);
    return launch_shared(to, attend_backward_keys<T, DP, KW, PARTS, LISTED>, grid, 32 * KW, bytes, "attend_backward by keys", a, pieces);
}

template <typename T, int DP, int KW, bool LISTED>
static quern_status run(const attend_args *args, const attend_launch &l, const launcher &to, const sm90_backward_call *hopper)
{
    const attend_kernel &a = l.kernel;
    constexpr int KT = 16 * KW;
    const int64_t capacity = LISTED ? a.sq.n_kv / a.list_block + a.sq.batch + 1 : 0;
    const int64_t pieces = LISTED ? args->k.shape[0] * a.kv_heads * capacity : pieces_of(args, KT);
    if (pieces == 0 || a.kv_heads == 0) return QUERN_OK;
    quern_status status;
    if (hopper != NULL) {
        status = sm90_attend_backward(args, l, pieces, *hopper, to.stream);
    } else if constexpr (DP <= 128) {
        status = launch<T, DP, KW, 3, LISTED>(args, a, pieces, to);
    } else {
        status = launch<T, DP, KW, 1, LISTED>(args, a, pieces, to);
        if (status == QUERN_OK) status = launch<T, DP, KW, 2, LISTED>(args, a, pieces, to);
    }
    if (status != QUERN_OK || to.most != NULL || (LISTED ? inverse_slots(args) == 0 : a.splits <= 1)) return status;
    attend_backward_sum<T, KT, LISTED><<<dim3((unsigned)pieces, LISTED ? 1u : (unsigned)a.kv_heads), 256, 0, to.stream>>>(a, pieces);
    return LAUNCHED("attend_backward: sum of shares");
}

template <typename T, int DP> static quern_status choose(const attend_args *args, const attend_launch &l, const launcher &to, const sm90_backward_call *hopper)
{
    constexpr int WIDE = DP > 128 ? 4 : 8;
    if (!l.listed) return run<T, DP, WIDE, false>(args, l, to, hopper);
    if (l.kernel.list_block <= 64) return run<T, DP, 4, true>(args, l, to, NULL);
    return run<T, DP, WIDE, true>(args, l, to, NULL);
}

template <typename T> static quern_status choose_dim(const attend_args *args, const attend_launch &l, const launcher &to, const sm90_backward_call *hopper)
{
    return l.dim == 64    ? choose<T, 64>(args, l, to, hopper)
           : l.dim == 128 ? choose<T, 128>(args, l, to, hopper)
                          : choose<T, 256>(args, l, to, hopper);
}

quern_status attend_backward_by_keys(const attend_args *args, const attend_launch &launch_args, void *workspace, const launcher &to, const sm90_backward_call *hopper)
{
    attend_launch l = launch_args;
    l.kernel.part = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    l.kernel.splits = l.listed ? 1 : splits_of(args);
    return l.dtype == QUERN_BF16 ? choose_dim<bf16>(args, l, to, hopper) : choose_dim<f16>(args, l, to, hopper);
}
