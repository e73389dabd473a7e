/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - dK and dV of lists of single tokens on Hopper, for bf16 and f16.
 *
 * A block owns a listed block's 64 keys, or 128 of them, and walks the tokens that chose it
 * (backward/inverse.cu), 64 rows a stage:
 *
 *   P = exp(S - lse), dS = P (row_scale dP - delta), dV = P^T row_scale dO, dK = scale dS^T Q.
 *
 * Everything is transposed, as in backward/dkv.cuh, so P^T and dS^T stay in registers as
 * operands. The feeding warpgroup's warp 0 copies each token's rows of Q and dO by TMA, warp 1 fetches their
 * statistics; a computing warpgroup has 64 keys and runs four products a stage one after another. One of them
 * runs its exponentials beside the other's products: two blocks an SM with one warpgroup, or, where listed
 * blocks have more than 64 keys, one block with two, which share each stage.
 *
 * At D = 128: dK 64, dV 64, S^T 32, dP^T 32 of 224 or 232 registers; shared memory for a warpgroup: K, V
 * 32 KB, Q, dO in two stages 64 KB. Limit: shared memory, of which a stage's products read 96 KB in 1024
 * clocks of the tensor cores, and the rows' way from memory: 8 KB for each token and block, 34 GB at 64k
 * tokens of 64/4 heads and 16 blocks a token.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_TOKENS_DKV_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_TOKENS_DKV_KERNEL_CUH

#include "common/launch.cuh"

#include "attend/backward/dkv.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90/attend.cuh"

namespace sm90_tokens_keys
{

enum { ROWS = 64, KEYS = 64 /* of a computing warpgroup */ };

struct maps {
    CUtensorMap q, d_o;
};

/* Of a stage's rows. */
struct statistics {
    float lse2[ROWS], delta[ROWS], row_scale[ROWS]; /* lse2: in the exp2 domain, + inf for no row */
    int32_t end[ROWS];                              /* of the keys that the row sees */
};

/* GROUPS: computing warpgroups. */
template <int DP, int GROUPS> struct __align__(1024) shared
{
    static constexpr int STAGES = 2 * GROUPS, FEED = GROUPS == 1 ? 32 : 40, COMPUTE = GROUPS == 1 ? 224 : 232;
    static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * (512 / (GROUPS + 1) * GROUPS / 2 / 8 * 8),
                  "more registers than the launch gave");
    typedef ring_place<STAGES> place;
    typedef uint16_t panel_row[64];
    panel_row k[DP / 64][GROUPS * KEYS], v[DP / 64][GROUPS * KEYS];
    panel_row q[STAGES][DP / 64][ROWS], d_o[STAGES][DP / 64][ROWS];
    statistics stats[STAGES];
    ring<STAGES> rows;

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        rows.init(1 + WARP_ARRIVALS, GROUPS * 4 * WARP_ARRIVALS);
        mbar_init_done();
    }
};

/* The tokens that a block walks: those at [first, end) of `tiles`. */
struct token_stream {
    const int32_t *tiles;
    int first, end, steps, a_stage;
};

template <typename T>
__device__ __forceinline__ token_stream find_tokens(const attend_kernel &a, const key_block &b)
{
    int64_t before = 0;
    const row_stream<T> x = find_stream<T, true>(a, b, b.kvh, 0, 0, 0, &before);
    token_stream s;
    s.tiles = x.tiles;
    s.a_stage = ROWS / a.hs;
    s.first = x.first / a.hs;
    s.end = x.end / a.hs;
    s.steps = s.end > s.first ? (s.end - s.first + s.a_stage - 1) / s.a_stage : 0;
    return s;
}

/* Copies the rows of the tokens, a lane each. A token past the end lies outside the tensor: zeros arrive. */
template <int DP, int GROUPS>
__device__ __forceinline__ void feed(const attend_kernel &a, const key_block &b, const token_stream &x,
                                     const maps &m, shared<DP, GROUPS> &s)
{
    const int lane = threadIdx.x & 31, head0 = b.kvh * a.group;
    auto token_at = [&](int t) {
        const int i = x.first + t * x.a_stage + lane;
        return lane < x.a_stage && i < x.end ? (int)b.seq.q0 + x.tiles[i] : (int)a.sq.n_q;
    };
    int token = token_at(0);
    for (int t = 0; t < x.steps; t++) {
        const auto at = shared<DP, GROUPS>::place::of(t);
        const int next = token_at(t + 1);
        const uint32_t to = lane * a.hs * 128, q = stage_address(s.q, at.stage) + to,
                       d_o = stage_address(s.d_o, at.stage) + to;
        s.rows.wait_free(at);
        const uint32_t full = s.rows.barrier(at);
        if (lane == 0) s.rows.expect(at, sizeof s.q[0] + sizeof s.d_o[0]);
        __syncwarp();
        if (lane < x.a_stage)
            for (int p = 0; p < DP / 64; p++) {
                tma_load(q + p * ROWS * 128, m.q, full, p * 64, head0, token, (int)b.seq.view_b);
                tma_load(d_o + p * ROWS * 128, m.d_o, full, p * 64, head0, token, (int)b.seq.view_b);
            }
        token = next;
    }
}

/* A lane's two rows of a stage: row `lane` and that + 32. */
struct two_rows {
    float lse2[2], delta[2], row_scale[2];
    int end[2];
};

__device__ __forceinline__ two_rows fetch_rows(const attend_kernel &a, const key_block &b,
                                               const token_stream &x, int t)
{
    two_rows r;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = (threadIdx.x & 31) + h * 32, of = (int)quotient((uint32_t)row, a.by_hs),
                  i = x.first + t * x.a_stage + of;
        r.lse2[h] = INFINITY, r.delta[h] = 0.0f, r.row_scale[h] = 0.0f, r.end[h] = 0;
        if (i >= x.end) continue;
        const int n = x.tiles[i];
        int lo;
        row_statistics(a, b.seq, b.seq.q0 + n, b.kvh * a.group + row - of * a.hs, &r.lse2[h], &r.delta[h],
                       &r.row_scale[h]);
        row_keys(a, b.seq, n, &lo, &r.end[h]);
    }
    return r;
}

/* Fetches the rows' statistics, a stage ahead. */
template <int DP, int GROUPS>
__device__ __forceinline__ void fetch(const attend_kernel &a, const key_block &b, const token_stream &x,
                                      shared<DP, GROUPS> &s)
{
    const int lane = threadIdx.x & 31;
    two_rows r = fetch_rows(a, b, x, 0);
    for (int t = 0; t < x.steps; t++) {
        const auto at = shared<DP, GROUPS>::place::of(t);
        statistics *to = &s.stats[at.stage];
        s.rows.wait_free(at);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            to->lse2[lane + h * 32] = r.lse2[h];
            to->delta[lane + h * 32] = r.delta[h];
            to->row_scale[lane + h * 32] = r.row_scale[h];
            to->end[lane + h * 32] = r.end[h];
        }
        s.rows.give(at); /* each lane's, for what it wrote */
        r = fetch_rows(a, b, x, t + 1);
    }
}

/* P^T row_scale and dS^T in 16 bits; this thread has keys `key` and that + 8. */
template <typename T, bool WHOLE>
__device__ __forceinline__ void find_gradients(const float (&s)[ROWS / 8][4], const float (&dp)[ROWS / 8][4],
                                               const statistics *st, float scale_log2, int key,
                                               uint32_t (&fp)[ROWS / 8][2], uint32_t (&fs)[ROWS / 8][2])
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 l = *(const float2 *)&st->lse2[r], de = *(const float2 *)&st->delta[r],
                     rs = *(const float2 *)&st->row_scale[r];
        const int2 end = WHOLE ? make_int2(0, 0) : *(const int2 *)&st->end[r];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float p[2] = {exp2_fast(fmaf(s[i][h * 2], scale_log2, -l.x)),
                          exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -l.y))},
                  ds[2] = {p[0] * fmaf(dp[i][h * 2], rs.x, -de.x),
                           p[1] * fmaf(dp[i][h * 2 + 1], rs.y, -de.y)};
            if (!WHOLE) {
                if (key + h * 8 >= end.x) p[0] = ds[0] = 0.0f;
                if (key + h * 8 >= end.y) p[1] = ds[1] = 0.0f;
            }
            fs[i][h] = pack2<T>(ds[0], ds[1]);
            fp[i][h] = pack2<T>(p[0] * rs.x, p[1] * rs.y);
        }
    }
}

/* Whether `x` holds for any of the computing threads; a barrier of these. */
template <int THREADS> __device__ __forceinline__ bool any_computes(bool x)
{
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, "
        "q;\n}"
        : "=r"(any)
        : "r"((uint32_t)x), "n"(THREADS)
        : "memory");
    return any != 0;
}

/* What is not finite in a stage, some of whose pairs do not see each other: the keys that see it get it, and
 * the products find 0. */
template <typename T, int DP, int THREADS>
__device__ __forceinline__ void guard(char *q, char *g, const statistics *st, int key, float (&dk)[DP / 8][4],
                                      float (&dv)[DP / 8][4])
{
    if (!any_computes<THREADS>(any_nonfinite<T, ROWS, THREADS, DP / 8>(q) ||
                               any_nonfinite<T, ROWS, THREADS, DP / 8>(g)))
        return;
    auto sees = [&](int j, int h) { return key + h * 8 < st->end[j]; };
    spread_nonfinite<T, ROWS>(dk, q, 0, ROWS, true, sees);
    spread_nonfinite<T, ROWS>(dv, g, 0, ROWS, false, sees);
    named_sync(1, THREADS);
    clear_nonfinite<T, ROWS, THREADS, DP / 8>(q);
    clear_nonfinite<T, ROWS, THREADS, DP / 8>(g);
    async_fence();
    named_sync(1, THREADS);
}

/* C[64][64] = A[64][.] B[64][.]^T over DP columns, of 64 rows of a tile of KEYS_HERE and a tile of 64. */
template <typename T, int DP, int KEYS_HERE>
__device__ __forceinline__ void multiply(float (&c)[8][4], uint32_t a, uint32_t b)
{
    const uint64_t ta = wg_fresh(wg_tile(a, 0)), tb = wg_fresh(wg_tile(b, 0));
#pragma unroll
    for (int k = 0; k < DP; k += 16) {
        const uint64_t x = wg_further(ta, (k >> 6) * (KEYS_HERE * 128) + (k & 63) * 2),
                       y = wg_further(tb, (k >> 6) * (ROWS * 128) + (k & 63) * 2);
        if (k == 0) wg_ss_wide<T, 64, false>(c, x, y);
        else wg_ss_wide<T, 64, true>(c, x, y);
    }
    wg_commit();
}

template <typename T, int DP, int GROUPS>
__device__ __forceinline__ void compute(const attend_kernel &a, const key_block &b, shared<DP, GROUPS> &sm,
                                        int group)
{
    constexpr int NT = ROWS / 8, OT = DP / 8, THREADS = GROUPS * 128, KEYS_HERE = GROUPS * KEYS;
    const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), key = b.key0 + row;
    const token_stream x = find_tokens<T>(a, b);
    const uint32_t k = smem_address(sm.k) + group * KEYS * 128, v = smem_address(sm.v) + group * KEYS * 128;
    load_keys<T, KEYS_HERE, THREADS, DP / 8>(a, b, smem_address(sm.k), (char *)sm.k, smem_address(sm.v),
                                             (char *)sm.v);
    float dk[OT][4] = {}, dv[OT][4] = {};
    cp_async_commit();
    cp_async_wait<0>();
    async_fence();
    named_sync(1, THREADS);
    for (int t = 0; t < x.steps; t++) {
        const auto at = shared<DP, GROUPS>::place::of(t);
        const statistics *st = &sm.stats[at.stage];
        const uint32_t q = stage_address(sm.q, at.stage), g = stage_address(sm.d_o, at.stage);
        float s[NT][4], dp[NT][4];
        uint32_t fp[NT][2], fs[NT][2];
        sm.rows.wait_full(at);
        wg_start();
        multiply<T, DP, KEYS_HERE>(s, k, q);
        multiply<T, DP, KEYS_HERE>(dp, v, g);
        wg_wait<0>(s);
        wg_wait<0>(dp);
        if (st->end[0] >= b.key_end) {
            find_gradients<T, true>(s, dp, st, a.scale_log2, key, fp, fs);
        } else {
            find_gradients<T, false>(s, dp, st, a.scale_log2, key, fp, fs);
            guard<T, DP, THREADS>((char *)sm.q[at.stage], (char *)sm.d_o[at.stage], st, key, dk, dv);
        }
        const uint64_t tq = wg_fresh(wg_tile(q, ROWS * 128)), tg = wg_fresh(wg_tile(g, ROWS * 128));
        wg_start();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t f[4] = {fp[kk][0], fp[kk][1], fp[kk + 1][0], fp[kk + 1][1]};
            wg_rs_wide<T, DP, true, true>(dv, f, wg_further(tg, kk * 8 * 128));
        }
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t f[4] = {fs[kk][0], fs[kk][1], fs[kk + 1][0], fs[kk + 1][1]};
            wg_rs_wide<T, DP, true, true>(dk, f, wg_further(tq, kk * 8 * 128));
        }
        wg_commit();
        wg_wait<0>(dv);
        wg_wait<0>(dk);
        sm.rows.give_back(at); /* each lane's, for what it read */
    }
    store_keys<T, true, true, true, OT>(a, b, row, a.list_block, dk, dv);
}

template <typename T, int DP, int GROUPS>
__global__ void __launch_bounds__((GROUPS + 1) * 128, 2 / GROUPS)
    attend_tokens_keys(const __grid_constant__ attend_kernel a, int64_t pieces,
                       const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shared<DP, GROUPS> S;
    extern __shared__ __align__(1024) char smem[];
    S &s = *(S *)smem;
    key_block b;
    if (!find_item<GROUPS * KEYS, true>(a, pieces, &b)) return;
    if (threadIdx.x == 0) s.init();
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (warp >= GROUPS * 4) {
        registers_down<S::FEED>();
        if (warp == GROUPS * 4) feed(a, b, find_tokens<T>(a, b), m, s);
        else if (warp == GROUPS * 4 + 1) fetch(a, b, find_tokens<T>(a, b), s);
    } else {
        registers_up<S::COMPUTE>();
        compute<T>(a, b, s, GROUPS == 1 ? 0 : warp / 4);
    }
#endif
}

template <typename T, int DP, int GROUPS>
static quern_status launch(const attend_args *args, const attend_kernel &a, int64_t pieces, const maps &m,
                           cudaStream_t stream)
{
    const int parts = (a.list_block + GROUPS * KEYS - 1) / (GROUPS * KEYS);
    const dim3 grid((unsigned)inverse_items(args), 1, (unsigned)parts);
    return launch_shared({stream, NULL}, attend_tokens_keys<T, DP, GROUPS>, grid, (GROUPS + 1) * 128,
                         sizeof(shared<DP, GROUPS>), "attend_backward_sm90_tokens by keys", a, pieces, m);
}

template <typename T, int DP>
static quern_status run(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    const attend_kernel &a = l.kernel;
    const int64_t pieces = backward_pieces(args, KEYS);
    if (pieces == 0 || a.kv_heads == 0) return QUERN_OK;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, 1);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, a.hs, 1);
    if (status != QUERN_OK) return status;
    return a.list_block > KEYS ? launch<T, DP, 2>(args, a, pieces, m, stream)
                               : launch<T, DP, 1>(args, a, pieces, m, stream);
}

} // namespace sm90_tokens_keys

#endif
