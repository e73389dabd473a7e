/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dkv.cuh - dK and dV of blockwise attention on the tensor cores, for bf16 and f16, every
 * mask.
 *
 *   dV = P^T row_scale dO, dK = scale dS^T Q (P, dS as in dq.cuh)
 *
 * A block owns 16 KW keys and walks the rows that see them 64 at a time. Everything is transposed:
 * S^T = K Q^T has P^T in registers as the A operand of P^T dO.
 * The heads of a group are one row stream, so dK and
 * dV are whole, without atomics. For listed blocks the row stream comes from the inverted index (inverse.cu).
 *
 * Few keys with many rows (compressed entries, blocks that every tile chose) would leave most of the GPU
 * idle: a range is cut into `splits` shares of its rows, a listed block into items of item_rows. Each share
 * writes partial sums to workspace, which a second kernel (shares.cu) adds in the order of the rows.
 *
 * At D = 128: registers a thread dK 64, dV 64, S^T 32, dP^T 32; shared memory 128 KB. At D = 256 dK and dV do
 * not fit together and are two launches. Limit: the tensor cores.
 */
#ifndef QUERN_CUDA_ATTEND_BACKWARD_DKV_CUH
#define QUERN_CUDA_ATTEND_BACKWARD_DKV_CUH

#include "attend/backward/key_block.cuh"

__device__ __forceinline__ void cp_async4(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}

/* The rows of one unit that a block walks: positions [first, end) of the stream of those that may see its
 * keys. */
template <typename T> struct row_stream {
    const T *q, *g; /* at this thread's chunk */
    const float *lse, *delta, *row_scale;
    const int32_t *tiles; /* listed: those that chose the block, of tile_rows rows each */
    int tile_rows, query; /* query: the first of the stream, not listed */
    int first, end, nq;
};

/* Unit `u` of the block's key/value head. [qa, qb): queries that can see some of its keys. `before`: listed,
 * rows of the units before this one. */
template <typename T, bool LISTED>
__device__ __forceinline__ row_stream<T> find_stream(const attend_kernel &a, const key_block &b, int u,
                                                     int column, int qa, int qb, int64_t *before)
{
    const sequence &seq = b.seq;
    const int head0 = a.units == a.heads ? u : u * a.group;
    row_stream<T> x;
    x.q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2] + column;
    x.g = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + seq.q0 * a.d_o.s[1] + head0 * a.d_o.s[2] + column;
    x.lse = a.lse.p + seq.view_b * a.lse.s[0] + head0 * a.lse.s[1] + seq.q0 * a.lse.s[2];
    x.delta = a.delta.p + seq.view_b * a.delta.s[0] + head0 * a.delta.s[1] + seq.q0 * a.delta.s[2];
    x.row_scale =
        a.row_scale.p + seq.view_b * a.row_scale.s[0] + head0 * a.row_scale.s[1] + seq.q0 * a.row_scale.s[2];
    x.tiles = NULL;
    x.tile_rows = a.tile * a.hs;
    x.query = qa;
    x.nq = (int)seq.nq;
    x.first = 0;
    x.end = qb > qa ? (qb - qa) * a.hs : 0;
    if (LISTED) {
        const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1, pair = seq.view_b * a.units + u;
        const int32_t *start = a.inverse_start + pair * capacity + b.index;
        x.tiles = a.inverse_tile + pair * a.inverse_entries + start[0];
        const int64_t rows = (int64_t)(start[1] - start[0]) * x.tile_rows,
                      from = b.share * a.item_rows - *before, to = from + a.item_rows;
        x.first = (int)(from < 0 ? 0 : from < rows ? from : rows);
        x.end = (int)(to < 0 ? 0 : to < rows ? to : rows);
        *before += rows;
    } else if (b.shares > 1) {
        const int per =
            ((x.end + BACKWARD_STEP - 1) / BACKWARD_STEP + b.shares - 1) / b.shares * BACKWARD_STEP;
        x.first = b.share * per < x.end ? b.share * per : x.end;
        x.end = x.first + per < x.end ? x.first + per : x.end;
    }
    return x;
}

/* Query and head of stream position i; false past the end. */
template <typename T, bool LISTED>
__device__ __forceinline__ bool stream_place(const attend_kernel &a, const row_stream<T> &x, int i, int *n,
                                             int *head)
{
    int query = x.query;
    const bool in = i < x.end;
    if (LISTED) {
        const int at = (int)quotient((uint32_t)i, a.by_tile_rows);
        i -= at * x.tile_rows;
        query = in ? x.tiles[at] * a.tile : 0;
    }
    const int q = (int)quotient((uint32_t)i, a.by_hs);
    *n = query + q;
    *head = i - q * a.hs;
    return in && *n < x.nq;
}

/* One stage of rows in shared memory. `stat`: [5][BACKWARD_STEP]: lse, delta, row_scale, lo, hi. */
struct row_stage {
    char *q, *g;
    uint32_t aq, ag;
    float *stat;
    uint32_t astat;
};

/* Copies stream positions from ... into a stage. */
template <typename T, int THREADS, int CHUNKS, bool LISTED>
__device__ __forceinline__ void load_stage(const attend_kernel &a, const key_block &b, const row_stream<T> &x,
                                           int from, const row_stage &to)
{
    constexpr int ROWS = BACKWARD_STEP;
    const int mine = threadIdx.x % CHUNKS;
    const bool in_k = mine * 8 < a.dim_k, in_v = mine * 8 < a.dim_v;
    int n, head;
#pragma unroll 4
    for (int r = threadIdx.x / CHUNKS; r < ROWS; r += THREADS / CHUNKS) {
        const bool in = stream_place<T, LISTED>(a, x, from + r, &n, &head);
        const uint32_t at = tile_at<ROWS>(r, mine);
        load_chunk16<T>(to.aq, to.q, at, in ? x.q + n * a.q.s[1] + head * a.q.s[2] : x.q, in && in_k,
                        a.vec_q);
        load_chunk16<T>(to.ag, to.g, at, in ? x.g + n * a.d_o.s[1] + head * a.d_o.s[2] : x.g, in && in_v,
                        a.vec_do);
    }
    if (threadIdx.x < ROWS) {
        const int r = threadIdx.x;
        int lo = 0, hi = 0;
        if (stream_place<T, LISTED>(a, x, from + r, &n, &head)) {
            row_keys(a, b.seq, n, &lo, &hi);
            cp_async4(to.astat + r * 4, x.lse + head * a.lse.s[1] + n * a.lse.s[2]);
            cp_async4(to.astat + (r + ROWS) * 4, x.delta + head * a.delta.s[1] + n * a.delta.s[2]);
            if (a.row_scale.p != NULL)
                cp_async4(to.astat + (r + 2 * ROWS) * 4,
                          x.row_scale + head * a.row_scale.s[1] + n * a.row_scale.s[2]);
            else to.stat[r + 2 * ROWS] = 1.0f;
        }
        ((int *)to.stat)[r + 3 * ROWS] = lo;
        ((int *)to.stat)[r + 4 * ROWS] = hi;
    }
    cp_async_commit();
}

/* P^T row_scale and dS^T of a stage, in 16 bits, from S^T and dP^T; this thread has keys `key` and that + 8.
 */
template <typename T, bool DK, int NT>
__device__ __forceinline__ void transposed_gradients(const float (&s)[NT][4], const float (&dp)[NT][4],
                                                     const float *st, float scale_log2, int key,
                                                     uint32_t (&fp)[NT][2], uint32_t (&fs)[DK ? NT : 1][2])
{
    constexpr int ROWS = BACKWARD_STEP;
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 l = *(const float2 *)&st[r], de = *(const float2 *)&st[ROWS + r],
                     rs = *(const float2 *)&st[2 * ROWS + r];
        const int2 lo = *(const int2 *)&st[3 * ROWS + r], hi = *(const int2 *)&st[4 * ROWS + r];
        const float lse2[2] = {l.x * 1.4426950408889634f, l.y * 1.4426950408889634f};
        const bool any[2] = {l.x != -INFINITY, l.y != -INFINITY};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool seen[2] = {any[0] && key + h * 8 >= lo.x && key + h * 8 < hi.x,
                                  any[1] && key + h * 8 >= lo.y && key + h * 8 < hi.y};
            const float p[2] = {seen[0] ? exp2_fast(fmaf(s[i][h * 2], scale_log2, -lse2[0])) : 0.0f,
                                seen[1] ? exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -lse2[1])) : 0.0f};
            if (DK)
                fs[DK ? i : 0][h] = pack2<T>(seen[0] ? p[0] * fmaf(dp[i][h * 2], rs.x, -de.x) : 0.0f,
                                             seen[1] ? p[1] * fmaf(dp[i][h * 2 + 1], rs.y, -de.y) : 0.0f);
            fp[i][h] = pack2<T>(seen[0] ? p[0] * rs.x : 0.0f, seen[1] ? p[1] * rs.y : 0.0f);
        }
    }
}

/* Takes what is not finite in a stage's rows out of the products, where some of its pairs do not see each
 * other: queries rise along the stream, so its first row sees the least at the end and its last the least at
 * the start. */
template <typename T, int THREADS, int CHUNKS, bool DK, bool DV, typename PRODUCTS, int OK, int OV>
__device__ __forceinline__ void guard_stage(const key_block &b, const row_stage &stage, int rows, int key,
                                            float (&dk)[OK][4], float (&dv)[OV][4])
{
    constexpr int ROWS = BACKWARD_STEP;
    const int *lows = (const int *)stage.stat + 3 * ROWS, *highs = (const int *)stage.stat + 4 * ROWS;
    if (highs[0] >= b.key_end && lows[rows - 1] <= b.key0) return;
    auto sees = [&](int j, int h) {
        return key + h * 8 >= lows[j] && key + h * 8 < highs[j] && stage.stat[j] != -INFINITY;
    };
    if (!__syncthreads_or((DK && any_nonfinite<T, ROWS, THREADS, CHUNKS>(stage.q)) ||
                          (DV && any_nonfinite<T, ROWS, THREADS, CHUNKS>(stage.g))))
        return;
    if constexpr (DK) spread_nonfinite<T, ROWS>(dk, stage.q, 0, ROWS, true, sees);
    if constexpr (DV) spread_nonfinite<T, ROWS>(dv, stage.g, 0, ROWS, false, sees);
    __syncthreads();
    if (DK) clear_nonfinite<T, ROWS, THREADS, CHUNKS>(stage.q);
    if (DV) clear_nonfinite<T, ROWS, THREADS, CHUNKS>(stage.g);
    PRODUCTS::show();
    __syncthreads();
}

/* Writes a thread's two keys' gradients, or their share of them; `row`: the first of them in the block, whose
 * slots of partial sums have slot_keys keys. */
template <typename T, bool DK, bool DV, bool LISTED, int OT, int OK, int OV>
__device__ __forceinline__ void store_keys(const attend_kernel &a, const key_block &b, int row, int slot_keys,
                                           const float (&dk)[OK][4], const float (&dv)[OV][4])
{
    const sequence &seq = b.seq;
    const int width = a.dim_k + a.dim_v;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8, key = b.key0 + r;
        if (key >= b.key_end) continue;
        float *part = a.part + ((LISTED ? b.slot : b.slot + b.share) * slot_keys + b.offset + r) * width;
        const int64_t at_k = seq.view_b * a.d_k.s[0] + (seq.k0 + key) * a.d_k.s[1] + b.kvh * a.d_k.s[2];
        const int64_t at_v = seq.view_b * a.d_v.s[0] + (seq.k0 + key) * a.d_v.s[1] + b.kvh * a.d_v.s[2];
        const bool whole = b.shares <= 1;
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
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

/* Copies the block's keys and values into tiles of KT rows. */
template <typename T, int KT, int THREADS, int CHUNKS>
__device__ __forceinline__ void load_keys(const attend_kernel &a, const key_block &b, uint32_t ak, char *sk,
                                          uint32_t av, char *sv)
{
    const int mine = threadIdx.x % CHUNKS;
    const bool in_k = mine * 8 < a.dim_k, in_v = mine * 8 < a.dim_v;
    const T *k =
        (const T *)a.k.p + b.seq.view_b * a.k.s[0] + b.seq.k0 * a.k.s[1] + b.kvh * a.k.s[2] + mine * 8;
    const T *v =
        (const T *)a.v.p + b.seq.view_b * a.v.s[0] + b.seq.k0 * a.v.s[1] + b.kvh * a.v.s[2] + mine * 8;
    for (int r = threadIdx.x / CHUNKS; r < KT; r += THREADS / CHUNKS) {
        const bool in = b.key0 + r < b.key_end;
        load_chunk16<T>(ak, sk, tile_at<KT>(r, mine), in ? k + (b.key0 + r) * a.k.s[1] : k, in && in_k,
                        a.vec_k);
        load_chunk16<T>(av, sv, tile_at<KT>(r, mine), in ? v + (b.key0 + r) * a.v.s[1] : v, in && in_v,
                        a.vec_v);
    }
}

template <int DP, int KT> struct keys_shared {
    uint16_t k[KT * DP], v[KT * DP], q[2][BACKWARD_STEP * DP], d_o[2][BACKWARD_STEP * DP];
    float stat[2][5 * BACKWARD_STEP]; /* row_stage */
};

/* PARTS: 1 dK, 2 dV, 3 both. */
template <typename T, int DP, int KW, int PARTS, bool LISTED, typename PRODUCTS>
__global__ void __launch_bounds__(32 * KW, 1)
    attend_backward_keys(const __grid_constant__ attend_kernel a, int64_t pieces)
{
    constexpr int ROWS = BACKWARD_STEP, KT = 16 * KW, NT = ROWS / 8, OT = DP / 8, CHUNKS = DP / 8,
                  THREADS = 32 * KW, TILE = ROWS * DP * 2;
    constexpr bool DK = PARTS & 1, DV = PARTS & 2;
    extern __shared__ __align__(1024) char smem[];
    keys_shared<DP, KT> &m = *(keys_shared<DP, KT> *)smem;
    char *sk = (char *)m.k, *sv = (char *)m.v, *sq = (char *)m.q, *sdo = (char *)m.d_o;
    float *stat = (float *)m.stat;
    const uint32_t ak = smem_address(sk), av = smem_address(sv), aq0 = smem_address(sq),
                   ado0 = smem_address(sdo), astat = smem_address(stat);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    key_block b;
    if (LISTED ? !find_item<KT>(a, pieces, &b) : !find_range(a, blockIdx.x, pieces, KT, &b)) return;
    load_keys<T, KT, THREADS, CHUNKS>(a, b, ak, sk, av, sv);
    auto stage_at = [&](int t) {
        const int at = (t & 1) * TILE, of = (t & 1) * 5 * ROWS;
        return row_stage{sq + at, sdo + at, aq0 + at, ado0 + at, stat + of, astat + of * 4};
    };

    int qa = 0, qb = 0; /* queries that can see some of these keys */
    if (!LISTED) {
        qa = first_query(b.seq.nq, [&](int64_t i) {
            int lo, hi;
            row_keys(a, b.seq, i, &lo, &hi);
            return hi > b.key0;
        });
        qb = first_query(b.seq.nq, [&](int64_t i) {
            int lo, hi;
            row_keys(a, b.seq, i, &lo, &hi);
            return lo >= b.key_end;
        });
    }
    const int units_here = a.units / a.kv_heads;
    float dk[DK ? OT : 1][4] = {}, dv[DV ? OT : 1][4] = {};
    int64_t before = 0;
    for (int ui = 0; ui < units_here; ui++) {
        row_stream<T> x =
            find_stream<T, LISTED>(a, b, b.kvh * units_here + ui, threadIdx.x % CHUNKS * 8, qa, qb, &before);
        const int steps = x.end > x.first ? (x.end - x.first + ROWS - 1) / ROWS : 0;
        auto load = [&](int t) {
            load_stage<T, THREADS, CHUNKS, LISTED>(a, b, x, x.first + t * ROWS, stage_at(t));
        };
        __syncthreads(); /* the last unit's stages are free */
        if (steps > 0) load(0);
        for (int t = 0; t < steps; t++) {
            cp_async_wait<0>();
            PRODUCTS::show();
            __syncthreads();
            if (t + 1 < steps) load(t + 1);
            const row_stage now = stage_at(t);
            float s[NT][4] = {}, dp[NT][4] = {};
            PRODUCTS::start();
            PRODUCTS::template nt<T, DP, NT, KT, ROWS>(s, ak, warp * 16, now.aq, 0, lane);
            if (DK) PRODUCTS::template nt<T, DP, NT, KT, ROWS>(dp, av, warp * 16, now.ag, 0, lane);
            PRODUCTS::finish();
            const int key = b.key0 + warp * 16 + (lane >> 2);
            uint32_t fp[NT][2], fs[DK ? NT : 1][2];
            transposed_gradients<T, DK>(s, dp, now.stat, a.scale_log2, key, fp, fs);
            const int rows_here = x.end - x.first - t * ROWS < ROWS ? x.end - x.first - t * ROWS : ROWS;
            guard_stage<T, THREADS, CHUNKS, DK, DV, PRODUCTS>(b, stage_at(t), rows_here, key, dk, dv);
            PRODUCTS::start();
#pragma unroll
            for (int kk = 0; kk < NT; kk += 2) {
                if constexpr (DV) {
                    const uint32_t f[4] = {fp[kk][0], fp[kk][1], fp[kk + 1][0], fp[kk + 1][1]};
                    PRODUCTS::template nn<T, DP, ROWS>(dv, f, now.ag, kk * 8, lane);
                }
                if constexpr (DK) {
                    const uint32_t f[4] = {fs[kk][0], fs[kk][1], fs[kk + 1][0], fs[kk + 1][1]};
                    PRODUCTS::template nn<T, DP, ROWS>(dk, f, now.aq, kk * 8, lane);
                }
            }
            PRODUCTS::finish();
        }
    }
    cp_async_wait<0>();
    store_keys<T, DK, DV, LISTED, OT>(a, b, warp * 16 + (lane >> 2), LISTED ? a.list_block : KT, dk, dv);
}

template <typename T, int DP, int KW, int PARTS, bool LISTED, typename PRODUCTS>
static quern_status launch_keys(const attend_args *args, const attend_kernel &a, int64_t pieces,
                                const launcher &to)
{
    constexpr int KT = 16 * KW;
    const dim3 grid = LISTED
                          ? dim3((unsigned)inverse_items(args), 1, (unsigned)((a.list_block + KT - 1) / KT))
                          : dim3((unsigned)pieces, (unsigned)a.kv_heads, (unsigned)a.splits);
    return launch_shared(to, attend_backward_keys<T, DP, KW, PARTS, LISTED, PRODUCTS>, grid, 32 * KW,
                         sizeof(keys_shared<DP, KT>),
                         "attend_backward by keys", a, pieces);
}

template <typename T, int DP, int KW, bool LISTED, typename PRODUCTS>
static quern_status keys_by(const attend_args *args, const attend_kernel &a, const launcher &to)
{
    const int64_t pieces = backward_pieces(args, 16 * KW);
    if (pieces == 0 || a.kv_heads == 0) return QUERN_OK;
    if constexpr (DP <= 128) {
        return launch_keys<T, DP, KW, 3, LISTED, PRODUCTS>(args, a, pieces, to);
    } else {
        const quern_status status = launch_keys<T, DP, KW, 1, LISTED, PRODUCTS>(args, a, pieces, to);
        return status != QUERN_OK ? status : launch_keys<T, DP, KW, 2, LISTED, PRODUCTS>(args, a, pieces, to);
    }
}

template <typename T, int DP, typename PRODUCTS>
static quern_status keys_of_list(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int WIDE = DP > 128 ? 4 : 8;
    if (l.kernel.list_block <= 64) return keys_by<T, DP, 4, true, PRODUCTS>(args, l.kernel, to);
    return keys_by<T, DP, WIDE, true, PRODUCTS>(args, l.kernel, to);
}

template <typename T, int DP, typename PRODUCTS>
static quern_status keys_of(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int WIDE = DP > 128 ? 4 : 8;
    return l.listed ? keys_of_list<T, DP, PRODUCTS>(args, l, to)
                    : keys_by<T, DP, WIDE, false, PRODUCTS>(args, l.kernel, to);
}

#endif
