/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward.cuh - attention's backward on Hopper for bf16 and f16, where keys are a range; after
 * FlashAttention-3 (arXiv 2407.08608).
 *
 *   P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta)
 *   dV = P^T row_scale dO, dK = scale dS^T Q, dQ = scale dS K: five products.
 * A block owns 128 keys, 64 each of two computing warpgroups, and walks the rows that see them: tiles of 64
 * queries from the last to the first, each with the heads of the group one after another. S and dP are
 * transposed: S^T = K Q^T leaves P^T and dS^T in registers as the A operands of dV and dK, which stay in
 * registers. dS^T also goes to shared memory, and each warpgroup takes dS K for all 128 keys and half of the
 * columns.
 *
 * With lists of blocks, a block of threads owns 128 slots of one list: its rows are those of the list's tile,
 * all of which chose these keys. What it makes of dK and dV is that list's share (attend_lists.cu adds them).
 *
 * Every key block adds its share of dQ to f32 sums in global memory (TMA's reduction). A counter for each
 * tile and head says how many key blocks have added, and a block waits until all before it have: the order is
 * that of the keys, whoever computes them. A block waits only for blocks that took a lower ticket, so some
 * block can always go on. First keys, which see most rows, go first. Blocks that start together walk the rows
 * from the end, one step apart; those that follow (sm90_backward_plan's wave) begin one after the other, at
 * their diagonals, and walk the other way: so they stay beside each other, too, and L2 serves them all.
 *
 * Where no row of a tile sees one half of the keys, as at both ends of a window, that half's warpgroup only
 * makes its part of dQ of the other half's keys.
 *
 * Warp 0 of the feeding warpgroup copies Q and dO by TMA; warp 1 fetches the rows' statistics and looks for
 * what is not finite in rows that may hold it and do not see all of these keys; warps 2 and 3 add dQ's two
 * buffers. What is not finite in Q and dO becomes 0 between the products that read it for S and dP and those
 * for dK and dV, and the keys that such a row sees get it (NaN in dK). K that is not finite becomes 0
 * for dQ's product, and the rows that see it get NaN.
 *
 * Registers at D = 128: dK 64, dV 64, S^T 32, dP^T 32, P^T and dS^T 32 of 232 (dQ's 32 are those of S^T or
 * dP^T). Shared memory: K, V 64 KB, Q, dO 64 KB, dS 32 KB, dQ 64 KB. Limit: the tensor cores; shared memory
 * comes close behind.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_BACKWARD_CUH
#define QUERN_CUDA_SM90_ATTEND_BACKWARD_CUH

#include "common/launch.cuh"
#include "sm90/attend/attend_backward_parts.cuh"

namespace sm90_backward
{

enum { KEYS = 64 * GROUPS, ROWS = MOST_ROWS, FEED = 40, COMPUTE = 232 };

/* Offsets into shared memory. */
template <int DK, int DV> struct layout {
    static constexpr int DIM_K = DK, DIM_V = DV, KEYS = sm90_backward::KEYS, ROWS = sm90_backward::ROWS,
                         STAGES = 2;
    static constexpr int Q_BYTES = ROWS * DK * 2, DO_BYTES = ROWS * DV * 2, DS_BYTES = KEYS * ROWS * 2,
                         DQ_BYTES = ROWS * DK * 4;
    static constexpr int K = 0, V = K + KEYS * DK * 2, Q = V + KEYS * DV * 2, DO = Q + STAGES * Q_BYTES,
                         DS = DO + STAGES * DO_BYTES;
    static constexpr int DQ = DS + BUFFERS * DS_BYTES, STAT = DQ + BUFFERS * DQ_BYTES,
                         BARS = STAT + STAGES * (int)sizeof(statistics);
    static constexpr int OWN_FULL = BARS, FULL = OWN_FULL + 8, FREE = FULL + 8 * STAGES,
                         STAT_FULL = FREE + 8 * STAGES;
    static constexpr int DQ_FREE = STAT_FULL + 8 * STAGES, CLEAN = DQ_FREE + 8 * BUFFERS, BLOCK = CLEAN + 8;
    static constexpr int BYTES = BLOCK + (int)sizeof(key_block);
    static constexpr bool RATIO = false; /* its delta is of rows with row_scale */
    static constexpr bool HALVES = DK > 64; /* at D 64 steps are too short for it to pay */
    static_assert(BYTES <= 227 * 1024 && BLOCK % 8 == 0, "more than a block can have");
};

/* Both computing warpgroups: whether something in K is not finite. */
template <typename T, int DK> __device__ __forceinline__ bool search_keys(const char *keys, int32_t *odd)
{
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    uint32_t most = 0;
    for (int i = (int)(threadIdx.x - 128) * 16; i < KEYS * DK * 2; i += 4096) {
        const uint4 v = *(const uint4 *)(keys + i);
        most = __vmaxu2(most, __vmaxu2(__vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff),
                                       __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff)));
    }
    if ((most & 0xffff) >= INFINITE || most >> 16 >= INFINITE) atomicOr(odd, 1);
    named_sync(CLEANING, 256);
    return *odd != 0;
}

/* Both computing warpgroups, around dQ's product: K becomes finite; K as it was. */
template <typename T, int DK> __device__ __forceinline__ void clean_keys(char *keys)
{
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    named_sync(CLEANING, 256); /* nobody multiplies with it */
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) * 2; i < KEYS * DK * 2; i += 512) {
        uint16_t *x = (uint16_t *)(keys + i);
        if ((*x & 0x7fff) >= INFINITE) *x = 0;
    }
    async_fence();
    named_sync(CLEANING, 256);
}

template <typename T, int DK>
__device__ __forceinline__ void restore_keys(const attend_kernel &a, const key_block &b, char *keys)
{
    named_sync(CLEANING, 256);
#pragma unroll 1
    for (int i = (int)threadIdx.x - 128; i < KEYS * DK / 8; i += 256) {
        const int row = i / (DK / 8), chunk = i - row * (DK / 8), first = key_of(b, row), key = b.k0 + first;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (first < b.nk && chunk * 8 < a.dim_k)
            x = *(const uint4 *)((const T *)a.k.p + b.view * a.k.s[0] + key * a.k.s[1] + b.kvh * a.k.s[2] +
                                 chunk * 8);
        *(uint4 *)(keys + tile_at<KEYS>(row, chunk)) = x;
    }
    async_fence();
    named_sync(CLEANING, 256);
}

/* dQ of the rows that see what is not finite in K becomes NaN. */
template <typename T, int NQ>
__device__ __forceinline__ void poison_rows(float (&dq)[NQ / 8][4], const attend_kernel &a,
                                            const key_block &b, const char *keys, int query, int head,
                                            int group)
{
    int lo[2] = {0, 0}, hi[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = query + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) + h * 8;
        float lse2, delta, row_scale;
        if (n >= b.nq) continue;
        row_statistics(a, sequence_of(b), b.q0 + n, head, &lse2, &delta, &row_scale);
        if (lse2 != INFINITY) row_keys(a, sequence_of(b), n, &lo[h], &hi[h]);
    }
#pragma unroll 1
    for (int j = 0; j < KEYS; j++) {
        const int key = key_of(b, j);
        const bool s0 = key >= lo[0] && key < hi[0], s1 = key >= lo[1] && key < hi[1];
        if (!s0 && !s1) continue;
#pragma unroll
        for (int i = 0; i < NQ / 8; i++) {
            const T *p = (const T *)(keys + tile_at<KEYS>(j, group * (NQ / 8) + i)) + (threadIdx.x & 3) * 2;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const bool odd = !isfinite(to_float<T>(p[c]));
                if (odd && s0) dq[i][c] = NAN;
                if (odd && s1) dq[i][2 + c] = NAN;
            }
        }
    }
}

/* dq = dS, in shared memory transposed, times NQ columns of K. */
template <typename T, int NQ>
__device__ __forceinline__ void columns_of_rows(float (&dq)[NQ / 8][4], uint32_t ds, uint32_t columns)
{
    const uint64_t x0 = wg_fresh(wg_tile(ds, KEYS * 128)), y0 = wg_fresh(wg_tile(columns, KEYS * 128));
    wg_start();
#pragma unroll
    for (int c = 0; c < KEYS; c += 16) {
        const uint64_t x = wg_further(x0, c * 128), y = wg_further(y0, c * 128);
        if (c == 0) wg_rows<T, NQ, false>(dq, x, y);
        else wg_rows<T, NQ, true>(dq, x, y);
    }
    wg_commit();
}

/* Puts scale dq where TMA takes it from; `to`: this lane's first two columns. */
template <int ROWS, int NQ>
__device__ __forceinline__ void write_rows(const float (&dq)[NQ / 8][4], uint32_t to, float scale)
{
#pragma unroll
    for (int i = 0; i < NQ / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            store_shared((to ^ (i & 3) << 5) + (i >> 2) * (ROWS * 128) + h * 1024, dq[i][h * 2] * scale,
                         dq[i][h * 2 + 1] * scale);
}

/* A computing warpgroup: where it leaves its dS^T and its part of dQ, and what its product of dQ reads. */
template <typename T, typename AT> struct computing {
    static constexpr int NT = ROWS / 8, NQ = AT::DIM_K / 2;
    const attend_kernel &a;
    const sm90_backward_plan &plan;
    key_block &b;
    char *smem;
    uint32_t base;
    int group, steps;
    /* A lane's part of the first stmatrix of dS^T (rows of 64 queries, one for each key), and of the
     * first store of dQ (panels of 32 columns). */
    uint32_t own_ds, own_dq, all_ds, columns;
    bool odd; /* something in K is not finite */

    __device__ __forceinline__ computing(const attend_kernel &kernel, const sm90_backward_plan &shared,
                                         key_block &block, char *memory, uint32_t address, int which)
        : a(kernel), plan(shared), b(block), smem(memory), base(address), group(which)
    {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
        steps = b.tiles * a.hs;
        own_ds = base + AT::DS + tile_at<KEYS>(group * 64 + warp * 16 + (lane & 15), lane >> 4);
        own_dq = base + AT::DQ + group * (NQ / 32) * (ROWS * 128) +
                 tile_at<ROWS>(warp * 16 + (lane >> 2), lane >> 1 & 1) + (lane & 1) * 8;
        all_ds = base + AT::DS;
        columns = base + AT::K + (AT::DIM_K == 64 ? group * 64 : group * (KEYS * 128));
    }

    __device__ __forceinline__ const statistics *statistics_of(int t) const
    {
        return (const statistics *)(smem + AT::STAT) + t % AT::STAGES;
    }

    /* Step t's dS^T, for both warpgroups. The other one is past its product with this buffer: it has filled
     * the other one since, and this one waited for it. */
    __device__ __forceinline__ void write_ds(const uint32_t (&f)[NT / 2][4], int t) const
    {
#pragma unroll
        for (int i = 0; i < NT / 2; i++) stmatrix4((own_ds + t % BUFFERS * AT::DS_BYTES) ^ i << 5, f[i]);
        async_fence();
        named_arrive(DS_FULL + 2 * (t % BUFFERS) + (group ^ 1), 256);
    }

    __device__ __forceinline__ void start_dq(float (&dq)[NQ / 8][4], int t) const
    {
        named_sync(DS_FULL + 2 * (t % BUFFERS) + group, 256);
        columns_of_rows<T, NQ>(dq, all_ds + t % BUFFERS * AT::DS_BYTES, columns);
    }

    /* Puts step t's dQ where TMA takes it from. */
    __device__ __forceinline__ void hand_over(float (&dq)[NQ / 8][4], int t, bool unclean) const
    {
        const int buffer = t % BUFFERS;
        if (unclean) {
            int head;
            const int tile = tile_at_step(a, plan, b, t, &head);
            poison_rows<T, NQ>(dq, a, b, smem + AT::K, tile * ROWS, head, group);
        }
        mbar_wait(base + AT::DQ_FREE + 8 * buffer, (t / BUFFERS & 1) ^ 1);
        write_rows<ROWS, NQ>(dq, own_dq + buffer * AT::DQ_BYTES, a.scale);
        async_fence();
        named_arrive(DQ_FULL + buffer, 128 * GROUPS + 32);
    }

    /* Step t where no row sees this warpgroup's keys: its part of dQ is of the other one's. */
    template <typename CLEAN>
    __device__ __forceinline__ void other_step(int t, int part, const CLEAN &clean) const
    {
        const uint32_t none[NT / 2][4] = {};
        const bool unclean = odd && part != 0;
        float dq[NQ / 8][4];
        mbar_wait(base + AT::FULL + 8 * (t % AT::STAGES), t / AT::STAGES & 1);
        if (part & 2) clean(t);
        write_ds(none, t);
        if (unclean) clean_keys<T, AT::DIM_K>(smem + AT::K);
        start_dq(dq, t);
        mbar_arrive(base + AT::FREE + 8 * (t % AT::STAGES)); /* each lane's, for what it read */
        wg_wait<0>(dq);
        if (unclean) restore_keys<T, AT::DIM_K>(a, b, smem + AT::K);
        hand_over(dq, t, unclean);
    }
};

template <typename T, int DK, int DV>
__device__ __forceinline__ void compute(const attend_kernel &a, const sm90_backward_plan &plan, key_block &b,
                                        char *smem, uint32_t base, int group)
{
    typedef layout<DK, DV> at;
    constexpr int NT = ROWS / 8;
    computing<T, at> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2),
              key = key_of(b, place);
    const uint32_t ak = base + at::K + group * 64 * 128, av = base + at::V + group * 64 * 128;
    const bool scaled = a.row_scale.p != NULL;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    w.odd = false;
    if (w.steps > 0) {
        mbar_wait(base + at::OWN_FULL, 0);
        w.odd = search_keys<T, DK>(smem + at::K, &b.odd);
    }
    auto clean = [&](int t) {
        const statistics *st = w.statistics_of(t);
        clean_rows<T, ROWS, DK, DV>(smem + at::Q + t % at::STAGES * at::Q_BYTES,
                                    smem + at::DO + t % at::STAGES * at::DO_BYTES, base + at::CLEAN,
                                    [&](const char *q, const char *g) {
                                        spread_rows<T, ROWS>(dk, q, st, key, true);
                                        spread_rows<T, ROWS>(dv, g, st, key, false);
                                    });
    };
    /* Whether some rows of step t may see its keys. */
    bool mine = !at::HALVES || (halves_seen(a, plan, b, 0) >> group & 1) != 0;
    int t = 0, part = 0;
    auto wait_for_statistics = [&]() {
        mbar_wait(base + at::STAT_FULL + 8 * (t % at::STAGES), t / at::STAGES & 1);
        part = w.statistics_of(t)->part;
        mine = at::HALVES ? (w.statistics_of(t)->next_halves >> group & 1) != 0 : t + 1 < w.steps;
    };
#pragma unroll 1
    while (t < w.steps) {
        if (at::HALVES && !mine) {
            wait_for_statistics();
            w.other_step(t, part, clean);
            t++;
            continue;
        }
        float s[NT][4], dp[NT][4], dq[w.NQ / 8][4];
        uint32_t fp[NT / 2][4], fs[NT / 2][4];
        mbar_wait(base + at::FULL + 8 * (t % at::STAGES), t / at::STAGES & 1);
        rows_by_keys<T, ROWS, KEYS, DK>(s, ak, base + at::Q + t % at::STAGES * at::Q_BYTES);
        rows_by_keys<T, ROWS, KEYS, DV>(dp, av, base + at::DO + t % at::STAGES * at::DO_BYTES);
        wg_wait<0>(s);
        wg_wait<0>(dp);
#pragma unroll 1
        for (; mine; t++) {
            const int stage = t % at::STAGES, next = (t + 1) % at::STAGES;
            wait_for_statistics();
            const statistics *st = w.statistics_of(t);
            if (part != 0) softmax<T, true, true>(s, dp, fp, fs, st, a.scale_log2, key);
            else if (scaled) softmax<T, true, false>(s, dp, fp, fs, st, a.scale_log2, key);
            else softmax<T, false, false>(s, dp, fp, fs, st, a.scale_log2, key);
            if (part & 2) clean(t);
            w.write_ds(fs, t);
            const bool unclean = w.odd && part != 0;
            if (unclean) clean_keys<T, DK>(smem + at::K);
            wg_start();
            keys_by_rows<T, ROWS, DV>(dv, fp, base + at::DO + stage * at::DO_BYTES);
            keys_by_rows<T, ROWS, DK>(dk, fs, base + at::Q + stage * at::Q_BYTES);
            w.start_dq(dq, t);
            wg_wait<1>(dv);
            wg_wait<1>(dk);
            mbar_arrive(base + at::FREE + 8 * stage); /* each lane's, for what it read */
            if (unclean) {
                wg_wait<0>(dq);
                restore_keys<T, DK>(a, b, smem + at::K);
            }
            /* Behind the last of these steps the products below are of what the stage holds, and nobody reads
             * them. */
            if (mine) mbar_wait(base + at::FULL + 8 * next, (t + 1) / at::STAGES & 1);
            rows_by_keys<T, ROWS, KEYS, DK>(s, ak, base + at::Q + next * at::Q_BYTES);
            wg_wait<1>(dq);
            w.hand_over(dq, t, unclean);
            rows_by_keys<T, ROWS, KEYS, DV>(dp, av, base + at::DO + next * at::DO_BYTES);
            wg_wait<0>(s);
            wg_wait<0>(dp);
        }
    }
    store_keys<T, KEYS>(dk, a, b, place, d_k_of(a));
    store_keys<T, KEYS>(dv, a, b, place, d_v_of(a));
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_backward_sm90(const __grid_constant__ attend_kernel a,
                         const __grid_constant__ sm90_backward_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV> at;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    key_block &b = *(key_block *)(smem + at::BLOCK);
    if (threadIdx.x < 32 && !find_keys<KEYS, ROWS>(a, plan, &b) && threadIdx.x == 0) b.key_end = b.tiles = -1;
    if (threadIdx.x == 0) {
        mbar_init(base + at::OWN_FULL, 1);
        for (int i = 0; i < at::STAGES; i++) {
            mbar_init(base + at::FULL + 8 * i, 1), mbar_init(base + at::FREE + 8 * i, 128 * GROUPS);
            mbar_init(base + at::STAT_FULL + 8 * i, WARP_ARRIVALS);
        }
        for (int i = 0; i < BUFFERS; i++) mbar_init(base + at::DQ_FREE + 8 * i, 1);
        mbar_init(base + at::CLEAN, 128 * GROUPS);
        mbar_init_done();
    }
    __syncthreads();
    if (b.tiles < 0) return;
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<FEED>();
        if (warp == 0) feed<at>(a, plan, b, m, base);
        else if (warp == 1) fetch_statistics<T, at>(a, plan, b, smem, base);
        else add_rows<at>(a, plan, b, m, base, warp - 2);
    } else {
        registers_up<COMPUTE>();
        compute<T, DK, DV>(a, plan, b, smem, base, group - 1);
    }
#endif
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_backward_plan &plan,
                        const quern_tensor &d_q, cudaStream_t stream)
{
    const int box = plan.lists.box > 0 ? plan.lists.box : KEYS;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, box);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, box);
    if (status == QUERN_OK) status = tma_describe(&m.d_q, d_q, 1, ROWS);
    if (status != QUERN_OK) return status;
    const unsigned of_head = plan.lists.clean != NULL ? (unsigned)plan.lists.rows * (unsigned)plan.lists.per
                                                      : (unsigned)plan.pieces * (unsigned)l.kernel.splits,
                   blocks = of_head * (unsigned)plan.kv_heads;
    return launch_shared({stream, NULL}, attend_backward_sm90<T, DK, DV>, dim3(blocks), 128 * (GROUPS + 1),
                         layout<DK, DV>::BYTES, "attend_backward_sm90", l.kernel, plan, m);
}

} // namespace sm90_backward

#endif
