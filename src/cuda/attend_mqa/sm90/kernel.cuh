/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that compute, and the kernel. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_KERNEL_CUH

#include "attend_mqa/sm90/feed.cuh"
#include "hopper/epilogue.cuh"

namespace sm90_mqa
{

/* Q from two stages: HELD panels as operands in registers, the others to their place. */
template <typename T>
__device__ __forceinline__ void hold_queries(uint32_t (&held)[HELD * 4][4], shared<T> &m,
                                             ring_place<STAGES> &at)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m.keys.wait_full(at);
        const uint32_t q = smem_address(m.k[at.stage]);
#pragma unroll
        for (int i = 0; i < HALF * 4; i++)
            if (half * HALF * 4 + i < HELD * 4)
                load_a<64>(held[half * HALF * 4 + i], q, warp * 16, i * 16, lane);
        if (half == 1) {
            const uint4 *from = (const uint4 *)m.k[at.stage][HELD - HALF];
            uint4 *to = (uint4 *)m.q;
#pragma unroll
            for (int i = 0; i < (PANELS - HELD) * 4; i++)
                to[i * 128 + threadIdx.x % 128] = from[i * 128 + threadIdx.x % 128];
        }
        m.keys.give_back(at);
        at.advance();
    }
    wg_show();
    named_sync(1, 128);
}

/* S = Q K^T of two stages. */
template <typename T>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], const uint32_t (&held)[HELD * 4][4],
                                              shared<T> &m, ring_place<STAGES> at)
{
    const uint64_t rest = wg_fresh(wg_tile(smem_address(m.q), 0));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m.keys.wait_full(at);
        wg_show();
        const uint64_t keys = wg_fresh(wg_tile(smem_address(m.k[at.stage]), 0));
        wg_start();
#pragma unroll
        for (int j = 0; j < HALF * 4; j++) {
            const int i = half * HALF * 4 + j;
            const uint64_t b = wg_further(keys, j / 4 * PANEL_BYTES + j % 4 * 32);
            if (i == 0) wg_rs_wide<T, KEYS, false, false>(s, held[i], b);
            else if (i < HELD * 4) wg_rs_wide<T, KEYS, true, false>(s, held[i], b);
            else
                wgmma_ss<T, KEYS, true, false>(s, wg_further(rest, (i / 4 - HELD) * PANEL_BYTES + i % 4 * 32),
                                               b);
        }
        wg_commit();
        at.advance();
    }
    wg_wait<0>(s);
}

/* The end of an item's rows: their log sums, and the factors of their values. */
__device__ __forceinline__ void finish_rows(const mqa_kernel &a, const stage_info &item,
                                            const softmax_rows &all, const softmax_rows &window,
                                            float *factor, int row0)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = row_sum(all.sum[h]), raw = row_sum(window.sum[h]),
                    lse = mqa_log_sum(all.base[h], sum);
        const int row = row0 + h * 8, head = item.head0 + row;
        if (threadIdx.x % 4 != 0) continue;
        if (head >= a.heads) continue;
        factor[row] = mqa_factor(a.sink != NULL ? __ldg(a.sink + head) : -INFINITY, lse, sum);
        int b = item.sequence, n = item.row;
        asm volatile(""
                     : "+r"(b), "+r"(n)); /* the addresses are not to be kept from the item's beginning on */
        if (a.lse.p != NULL) a.lse.p[b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]] = lse;
        if (a.lse_win.p != NULL)
            a.lse_win.p[b * a.lse_win.s[0] + head * a.lse_win.s[1] + n * a.lse_win.s[2]] =
                mqa_log_sum(window.base[h], raw);
    }
}

/* ROWS says what the rows of an item are: mask() and finish() here, prefetch() and store() of values(). */
template <typename ROWS, typename SHARED>
__device__ __forceinline__ void score(const mqa_kernel &a, SHARED &m)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16;
    ring_place<STAGES> at;
    ring_place<2> out, made; /* made: the P that nobody has been given yet */
    for (;;) {
        m.keys.wait_full(at);
        const stage_info item = m.info[at.stage];
        if (item.kind == END) break;
        uint32_t held[HELD * 4][4];
        if (a.sink != NULL && item.head0 + lane * 2 < a.heads)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(a.sink + item.head0 + lane * 2));
        hold_queries<typename SHARED::type>(held, m, at);
        softmax_rows all = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}}, window = all;
        for (bool first = true, last = false; !last; first = false) {
            float s[KEYS / 8][4];
            multiply_keys<typename SHARED::type>(s, held, m, at);
            const int4 info = *(const int4 *)&m.info[at.stage]; /* kind, keys, last, raw_end */
            const int stage = at.stage;
            last = info.z != 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                m.keys.give_back(at);
                at.advance();
            }
            if (!first) {
                m.weights.give(made);
                made.advance();
            }
            ROWS::mask(a, m, s, stage, info.y);
            float shrink[2];
            softmax_base(s, all, a.scale2, shrink);
            m.weights.wait_free(out);
            if (lane % 4 == 0) {
                m.shrink[out.stage][row0 + lane / 4] = shrink[0];
                m.shrink[out.stage][row0 + lane / 4 + 8] = shrink[1];
            }
            const uint32_t p = smem_address(m.p[out.stage]);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i += 2) softmax_exponentials(s[i], s[i + 1], all, a.scale2);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i += 2)
                store_columns<typename SHARED::type, 64>(p, s[i], s[i + 1], row0, i);
            if (info.w) window = all;
            if (last) ROWS::finish(a, m, item, all, window, m.factor[out.stage], row0 + lane / 4);
            wg_show();
            out.advance();
        }
        m.weights.give(made);
        made.advance();
    }
}

/* Brings a position's angles to L1. */
__device__ __forceinline__ void prefetch_angles(const mqa_rotation &r, int position)
{
    const int size = r.dtype == QUERN_F32 ? 4 : 2, at = threadIdx.x % 128 * 32;
    if (at < r.dim * size)
        asm volatile("prefetch.global.L1 [%0];" ::"l"((const char *)r.table + position * r.row * size + at));
}

/* Rotates a thread's rows [first, end) of its two back, of O's columns from column0 on, at a position. */
template <typename A>
__device__ __forceinline__ void rotate_values(const mqa_rotation &r, int position, float (&o)[32][4],
                                              int column0, int first = 0, int end = 2)
{
    const A *const cosine = (const A *)r.table + position * r.row;
    rotate_back<A>(cosine, cosine + r.dim / 2, o, column0 + threadIdx.x % 4 * 2 - (MQA_DIM - r.dim), first,
                   end);
}

template <typename T, bool WIDE>
__device__ __forceinline__ void store_heads(const mqa_kernel &a, T *to, const float (&o)[32][4], int head)
{
#pragma unroll
    for (int h = 0; h < 2; h++, head += 8) store_row(to + head * a.o.s[2], o, h, head < a.heads, WIDE);
}

/* Stores a thread's two rows of 256 columns of O, times their factors, rotated back. */
template <typename T>
__device__ __forceinline__ void store_values(const mqa_kernel &a, const stage_info &item, float (&o)[32][4],
                                             const float (&factor)[2], int row0, int column0)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) asm volatile("mul.f32 %0, %0, %1;" : "+f"(o[i][c]) : "f"(factor[c / 2]));
    if (MQA_DIM - a.rotation.dim < column0 + 256) {
        if (a.rotation.dtype == QUERN_F32) rotate_values<float>(a.rotation, item.position, o, column0);
        else rotate_values<T>(a.rotation, item.position, o, column0);
    }
    T *const to = (T *)a.o.p + item.sequence * a.o.s[0] + item.row * a.o.s[1] + column0 + threadIdx.x % 4 * 8;
    if (a.o_wide) store_heads<T, true>(a, to, o, item.head0 + row0);
    else store_heads<T, false>(a, to, o, item.head0 + row0);
}

template <typename ROWS, typename SHARED>
__device__ __forceinline__ void values(const mqa_kernel &a, SHARED &m, int half)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16 + lane / 4;
    ring_place<STAGES> at; /* of the stages with its half */
    ring_place<2> in;
    if (half == 1) at.advance();
    for (;;) {
        m.keys.wait_full(at);
        const stage_info item = m.info[at.stage];
        if (item.kind == END) break;
        m.keys.give_back(at);
        at.advance();
        at.advance();
        ROWS::prefetch(a, item);
        float o[32][4], factor[2];
        clear_sums(o);
        for (bool last = false; !last;) {
            m.weights.wait_full(in);
            wg_show();
            last = m.info[at.stage].last;
            const float shrink[2] = {m.shrink[in.stage][row0], m.shrink[in.stage][row0 + 8]};
            if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 32; i++)
#pragma unroll
                    for (int c = 0; c < 4; c++) o[i][c] *= shrink[c / 2];
            }
            const uint64_t p = wg_fresh(wg_tile(smem_address(m.p[in.stage]), 0)),
                           v = wg_fresh(wg_tile(smem_address(m.k[at.stage]), PANEL_BYTES));
            wg_start();
#pragma unroll
            for (int i = 0; i < 4; i++) { /* with 512 threads a block ptxas takes no m64n256 */
                wgmma_ss<typename SHARED::type, 128, true, true>(*(float(*)[16][4])o, wg_further(p, i * 32),
                                                                 wg_further(v, i * 16 * 128));
                wgmma_ss<typename SHARED::type, 128, true, true>(
                    *(float(*)[16][4])(o + 16), wg_further(p, i * 32),
                    wg_further(v, 2 * PANEL_BYTES + i * 16 * 128));
            }
            wg_commit();
            wg_wait<0>(o);
            m.keys.give_back(at);
            if (last) {
                factor[0] = m.factor[in.stage][row0];
                factor[1] = m.factor[in.stage][row0 + 8];
            }
            m.weights.give_back(in);
            at.advance();
            at.advance();
            in.advance();
        }
        ROWS::store(a, m, item, o, factor, row0, half * 256);
    }
}

/* A row is a head of the item's token. */
template <typename T> struct heads_of_token {
    static __device__ __forceinline__ void mask(const mqa_kernel &, const shared<T> &,
                                                float (&s)[KEYS / 8][4], int, int keys)
    {
        if (keys == KEYS) return;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (i * 8 + threadIdx.x % 4 * 2 + c % 2 >= keys) s[i][c] = -INFINITY;
    }
    static __device__ __forceinline__ void finish(const mqa_kernel &a, const shared<T> &,
                                                  const stage_info &item, const softmax_rows &all,
                                                  const softmax_rows &window, float *factor, int row0)
    {
        finish_rows(a, item, all, window, factor, row0);
    }
    static __device__ __forceinline__ void prefetch(const mqa_kernel &a, const stage_info &item)
    {
        prefetch_angles(a.rotation, item.position);
    }
    static __device__ __forceinline__ void store(const mqa_kernel &a, const shared<T> &,
                                                 const stage_info &item, float (&o)[32][4],
                                                 const float (&factor)[2], int row0, int column0)
    {
        store_values<T>(a, item, o, factor, row0, column0);
    }
};

template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS, 1)
    attend_mqa_sm90(const __grid_constant__ mqa_kernel a, const int items, const int groups)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<T> &m = *(shared<T> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(KEY_FILLERS, KEY_USERS);
        m.weights.init(WEIGHT_FILLERS, WEIGHT_USERS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<FEED_REGISTERS>();
        feed<T, BYTES>(a, m, items, groups);
    } else {
        registers_up<COMPUTE_REGISTERS>();
        if (group == 1) score<heads_of_token<T>>(a, m);
        else values<heads_of_token<T>>(a, m, group - 2);
    }
#endif
}

template <typename T, bool BYTES> static quern_status launch(const stage_exec *exec, const mqa_kernel &a)
{
    const int groups = (a.heads + HEADS - 1) / HEADS, items = a.rows * groups;
    const unsigned grid = (unsigned)(items < exec->multiprocessors ? items : exec->multiprocessors);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, attend_mqa_sm90<T, BYTES>, dim3(grid), THREADS,
                         sizeof(shared<T>), "attention over entries", a, items, groups);
}

} // namespace sm90_mqa

#endif
