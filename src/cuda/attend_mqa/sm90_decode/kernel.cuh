/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - DeepSeek-V4's attention of a step on Hopper (D 512, K = V, at most 8 queries a sequence): the
 * warpgroups that compute, and the kernel. shared.cuh's head has the plan, the budget and the limit.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_KERNEL_CUH

#include "attend_mqa/sm90_decode/feed.cuh"
#include "hopper/epilogue.cuh"

namespace sm90_mqa_decode
{

/* A warp has read a stage; paired, both blocks may fill it. */
template <bool PAIRED, typename T>
__device__ __forceinline__ void give_stage_back(shared<T> &m, const ring_place<STAGES> &at)
{
    if constexpr (PAIRED) {
        __syncwarp();
        give_back_to_cluster<PAIR>(m.keys, at);
    } else m.keys.give_back(at);
}

/* S = Q K^T of a tile's two stages. */
template <typename T, bool BYTES>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], shared<T> &m, ring_place<STAGES> at)
{
    const uint64_t heads = wg_fresh(wg_tile(smem_address(m.q), 0));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m.keys.wait_full(at);
        if (!BYTES) wg_show();
        const uint64_t keys = wg_fresh(wg_tile(smem_address(m.k[at.stage]), 0));
        wg_start();
#pragma unroll
        for (int j = 0; j < HALF * 4; j++) {
            const uint32_t further = j / 4 * PANEL_BYTES + j % 4 * 32;
            const uint64_t q = wg_further(heads, half * HALF * PANEL_BYTES + further);
            if (half + j == 0) wgmma_ss<T, KEYS, false, false>(s, q, keys);
            else wgmma_ss<T, KEYS, true, false>(s, q, wg_further(keys, further));
        }
        wg_commit();
        at.advance();
    }
    wg_wait<0>(s);
}

/* Of a tile's scores, whose first `keys` columns count: the rows' maxima and sums. They become
 * exponentials. */
__device__ __forceinline__ void softmax(float (&s)[KEYS / 8][4], row_sums (&rows)[2], int keys, float scale2)
{
    const int column = threadIdx.x % 4 * 2;
    float top[4];
    if (keys < KEYS) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (i * 8 + column + c % 2 >= keys) s[i][c] = -INFINITY;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) top[c] = fmaxf(s[0][c], s[1][c]);
#pragma unroll
    for (int i = 2; i < KEYS / 8; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) top[c] = fmaxf(top[c], s[i][c]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = fmaxf(top[h * 2], top[h * 2 + 1]);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        rows[h].top = most * scale2;
        const float base = most == -INFINITY ? 0.0f : rows[h].top;
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                s[i][h * 2 + c] = exp2_fast(fmaf(s[i][h * 2 + c], scale2, -base));
                sum[c] += s[i][h * 2 + c];
            }
        rows[h].sum = row_sum(sum[0] + sum[1]);
    }
}

/* The end of an item's row: its log sums, and the factor of its values. */
__device__ __forceinline__ void finish_row(const mqa_kernel &a, const tile_info &item, const row_sums &all,
                                           const row_sums &raw, float *factor, int row, bool store)
{
    const int head = item.head0 + row;
    if (head >= a.heads) return;
    const float lse = mqa_log_sum(all.top, all.sum);
    *factor = mqa_factor(a.sink != NULL ? __ldg(a.sink + head) : -INFINITY, lse, all.sum);
    if (!store) return;
    if (a.lse.p != NULL)
        a.lse.p[item.sequence * a.lse.s[0] + head * a.lse.s[1] + item.row * a.lse.s[2]] = lse;
    if (a.lse_win.p != NULL)
        a.lse_win.p[item.sequence * a.lse_win.s[0] + head * a.lse_win.s[1] + item.row * a.lse_win.s[2]] =
            mqa_log_sum(raw.top, raw.sum);
}

/* Rows' sums of a share, of an item's shares so far, and of its raw keys. */
struct item_sums {
    row_sums share[2], all[2], raw[2];
};

/* What follows a tile whose ends say so: sums of the raw keys, of an item's shares, and the item's end. */
template <bool PAIRED, typename T>
__device__ __forceinline__ void end_tile(const decode_kernel &w, shared<T> &m, const tile_info &info,
                                         int ends, item_sums &x, int row0)
{
    const bool first = threadIdx.x % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = row0 + h * 8;
        if (ends & ENDS_RAW) {
            x.raw[h] = x.all[h];
            (void)fold_sums(x.raw[h], x.share[h]);
        }
        if (ends & (ENDS_SHARE | ENDS_ITEM)) {
            const fold_factors f = fold_sums(x.all[h], x.share[h]);
            if (first) m.share[row] = f;
            x.share[h] = {-INFINITY, 0.0f};
        }
        if (!(ends & ENDS_ITEM) || !first) continue;
        finish_row(w.a, info, x.all[h], x.raw[h], &m.factor[row], row, !PAIRED || pair_rank() == 0);
    }
}

template <typename T, bool BYTES, bool PAIRED>
__device__ __forceinline__ void score(const decode_kernel &w, shared<T> &m)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16;
    ring_place<STAGES> at;
    ring_place<1> out;
    ring_place<1> heads;
    if (w.a.bytes) prefetch_first_rows(w, first_item<PAIRED>());
    for (;;) {
        m.keys.wait_full(at);
        const tile_info item = m.info[at.stage];
        if (item.ends & NO_ITEM) break;
        item_sums x;
#pragma unroll
        for (int h = 0; h < 2; h++) x.share[h] = x.all[h] = x.raw[h] = {-INFINITY, 0.0f};
        m.queries.wait_full(heads);
        if (BYTES) wg_show(); /* the keys are shown by who decodes them */
        for (int ends = 0; !(ends & ENDS_ITEM);) {
            float s[KEYS / 8][4];
            row_sums tile[2];
            multiply_keys<T, BYTES>(s, m, at);
            const int2 here = *(const int2 *)&m.info[at.stage]; /* keys, ends */
            ends = here.y;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                give_stage_back<PAIRED>(m, at);
                at.advance();
            }
            softmax(s, tile, here.x, w.a.scale2);
            m.weights.wait_free(out);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const fold_factors f = fold_sums(x.share[h], tile[h]);
                if (lane % 4 == 0) m.tile[row0 + lane / 4 + h * 8] = f;
            }
#pragma unroll
            for (int i = 0; i < KEYS / 8; i += 2)
                store_columns<T, 64>(smem_address(m.p), s[i], s[i + 1], row0, i);
            if (ends != 0) end_tile<PAIRED>(w, m, item, ends, x, row0 + lane / 4);
            wg_show();
            m.weights.give(out);
            out.advance();
        }
        m.queries.give_back(heads);
        heads.advance();
    }
}

/* A tile's weights times a panel of 64 columns of its rows. */
template <typename T>
__device__ __forceinline__ void multiply_panel(float (&come)[8][4], uint64_t p, uint64_t panel)
{
    wg_start();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint64_t rows = wg_further(panel, i * 16 * 128);
        if (i == 0) wgmma_ss<T, 64, false, true>(come, p, rows);
        else wgmma_ss<T, 64, true, true>(come, wg_further(p, i * 32), rows);
    }
    wg_commit();
    wg_wait<0>(come);
}

/* Folds the values of a tile into o, 64 columns at a time, which begin at `columns` in shared memory. */
template <typename T, int TILES>
__device__ __forceinline__ void add_tile(float (&o)[TILES][4], shared<T> &m, uint32_t columns, int row0)
{
    const fold_factors f[2] = {m.tile[row0], m.tile[row0 + 8]};
    const bool rises = __any_sync(~0u, f[0].held != 1.0f || f[1].held != 1.0f);
    const uint64_t p = wg_fresh(wg_tile(smem_address(m.p), 0)), v = wg_fresh(wg_tile(columns, PANEL_BYTES));
    if (rises) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) o[i][c] = __fmul_rn(o[i][c], f[c / 2].held);
    }
#pragma unroll
    for (int panel = 0; panel < TILES / 8; panel++) {
        float come[8][4];
        multiply_panel<T>(come, p, wg_further(v, panel * PANEL_BYTES));
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                o[panel * 8 + i][c] = fmaf(come[i][c], f[c / 2].come, o[panel * 8 + i][c]);
    }
}

/* Folds a share's values into those of the shares before, which stand in global memory, and keeps them there
 * unless the item ends. */
template <int TILES>
__device__ __forceinline__ void add_share(float (&o)[TILES][4], float *values, const fold_factors (&f)[2],
                                          int ends)
{
    float4 *const at = (float4 *)values + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        float4 held = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (ends & LATER_SHARE) held = at[i * 128];
        o[i][0] = fold_value(held.x, o[i][0], f[0]);
        o[i][1] = fold_value(held.y, o[i][1], f[0]);
        o[i][2] = fold_value(held.z, o[i][2], f[1]);
        o[i][3] = fold_value(held.w, o[i][3], f[1]);
        if (ends & ENDS_ITEM) continue;
        at[i * 128] = make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] = 0.0f;
    }
}

/* Rotates a thread's two rows of O's columns from column0 on back, at the item's position: channels from
 * `at` on. Four steps' angles are asked for at once; those of more would take too many registers. */
template <typename A, int FIRST, int TILES>
__device__ __forceinline__ void rotate_from(const mqa_rotation &r, int position, float (&o)[TILES][4], int at)
{
    enum { STEPS = 4 };
    const A *const cosine = (const A *)r.table + position * r.row, *const sine = cosine + r.dim / 2;
#pragma unroll
    for (int i0 = FIRST; i0 < TILES; i0 += STEPS) {
        float c[STEPS], s[STEPS];
        asm volatile("" : "+r"(at));
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int pair = max(at + i * 8, 0) / 2;
            c[i] = to_float<A>(cosine[pair]);
            s[i] = to_float<A>(sine[pair]);
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++, at += 8) {
            if (at < 0) continue;
            rotate_pair(o[i0 + i][0], o[i0 + i][1], c[i], s[i]);
            rotate_pair(o[i0 + i][2], o[i0 + i][3], c[i], s[i]);
        }
    }
}
template <typename A, int TILES>
__device__ __forceinline__ void rotate_back(const mqa_rotation &r, int position, float (&o)[TILES][4],
                                            int column0)
{
    const int at = column0 + threadIdx.x % 4 * 2 - (MQA_DIM - r.dim); /* of the rotated channels */
    if (r.dim <= 64) rotate_from<A, TILES - 8>(r, position, o, at + (TILES - 8) * 8);
    else rotate_from<A, 0>(r, position, o, at);
}

/* Stores a thread's two rows of O's columns from column0 on, times their factors, rotated back. */
template <typename T, int TILES>
__device__ __forceinline__ void store_values(const mqa_kernel &a, const tile_info &item, float (&o)[TILES][4],
                                             const float (&factor)[2], int row0, int column0)
{
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] = __fmul_rn(o[i][c], factor[c / 2]);
    if (MQA_DIM - a.rotation.dim < column0 + TILES * 8) {
        if (a.rotation.dtype == QUERN_F32) rotate_back<float>(a.rotation, item.position, o, column0);
        else rotate_back<T>(a.rotation, item.position, o, column0);
    }
    T *const to = (T *)a.o.p + item.sequence * a.o.s[0] + item.row * a.o.s[1] + column0 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = item.head0 + row0 + h * 8;
        store_row(to + head * a.o.s[2], o, h, head < a.heads, a.o_wide);
    }
}

template <typename T, bool BYTES, bool PAIRED>
__device__ __forceinline__ void values(const decode_kernel &w, shared<T> &m, int group)
{
    enum { TILES = PAIRED ? 16 : 32 };
    const int row0 = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, half = PAIRED ? pair_rank() : group;
    const uint32_t columns = PAIRED ? group * (HALF / 2) * PANEL_BYTES : 0; /* where they begin in a stage */
    ring_place<STAGES> at, other;                                           /* of the stages with its half */
    ring_place<1> in;
    if (half == 1) at.advance();
    else other.advance();
    for (;;) {
        m.keys.wait_full(at);
        const tile_info item = m.info[at.stage];
        if (item.ends & NO_ITEM) break;
        float o[TILES][4], factor[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) o[i][c] = 0.0f;
        for (int ends = 0; !(ends & ENDS_ITEM);) {
            m.weights.wait_full(in);
            if (!BYTES) wg_show();
            ends = m.info[at.stage].ends;
            if constexpr (PAIRED) {
                give_stage_back<PAIRED>(m, other);
                other.advance();
                other.advance();
            }
            add_tile<T>(o, m, stage_address(m.k, at.stage) + columns, row0);
            give_stage_back<PAIRED>(m, at);
            if (ends & ENDS_SHARE) {
                const fold_factors f[2] = {m.share[row0], m.share[row0 + 8]};
                add_share(o, w.values + ((int64_t)blockIdx.x * 2 + group) * VALUE_FLOATS, f, ends);
            }
            if (ends & ENDS_ITEM) {
                factor[0] = m.factor[row0];
                factor[1] = m.factor[row0 + 8];
            }
            m.weights.give_back(in);
            at.advance();
            at.advance();
            in.advance();
        }
        store_values<T>(w.a, item, o, factor, row0, half * 256 + (PAIRED ? group * 128 : 0));
    }
}

/* Registers of the warpgroups' threads: 512 of a thread of each. */
template <bool PAIRED> struct registers {
    enum { FEED = PAIRED ? 136 : 88, SCORE = PAIRED ? 112 : 88, VALUES = PAIRED ? 128 : 168 };
};

template <typename T, bool BYTES, bool PAIRED>
__device__ __forceinline__ void take_roles(const decode_kernel &w, shared<T> &m)
{
    typedef registers<PAIRED> budget;
    let_next_start();
    if (threadIdx.x == 0) {
        if (PAIRED) m.keys.init(PAIR_FILLERS, PAIR_USERS);
        else m.keys.init(BYTES ? KEY_FILLERS / 2 : KEY_FILLERS, KEY_USERS);
        m.weights.init(WEIGHT_FILLERS, WEIGHT_USERS);
        m.queries.init(QUERY_FILLERS, QUERY_USERS);
        mbar_init_done();
    }
    __syncthreads();
    if (PAIRED) {
        cluster_sync_arrive();
        cluster_sync_wait();
    }
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        if constexpr (PAIRED) registers_up<budget::FEED>();
        else registers_down<budget::FEED>();
        feed<T, BYTES, PAIRED>(w, m);
    } else if (group == 1) {
        registers_down<budget::SCORE>();
        score<T, BYTES, PAIRED>(w, m);
    } else {
        if constexpr (!PAIRED) registers_up<budget::VALUES>();
        values<T, BYTES, PAIRED>(w, m, group - 2);
    }
    if (PAIRED) { /* the other block may still free this one's stages */
        cluster_sync_arrive();
        cluster_sync_wait();
    }
}

template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS, 1) attend_mqa_sm90_decode(const __grid_constant__ decode_kernel w)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    take_roles<T, BYTES, false>(w, *(shared<T> *)memory);
#endif
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) attend_mqa_sm90_pair(const __grid_constant__ decode_kernel w)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    take_roles<T, true, true>(w, *(shared<T> *)memory);
#endif
}

template <typename T, bool BYTES>
static quern_status launch_whole(const stage_exec *exec, const decode_kernel &w)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if constexpr (BYTES)
        if (w.paired)
            return launch_cluster(stream, attend_mqa_sm90_pair<T>, dim3((unsigned)w.items * PAIR), THREADS,
                                  sizeof(shared<T>), "attention of a step", PAIR, w.planned, w);
    const unsigned grid = (unsigned)(w.items < exec->multiprocessors ? w.items : exec->multiprocessors);
    return launch_cluster(stream, attend_mqa_sm90_decode<T, BYTES>, dim3(grid), THREADS, sizeof(shared<T>),
                          "attention of a step", 1, w.planned, w);
}

} // namespace sm90_mqa_decode

#endif
