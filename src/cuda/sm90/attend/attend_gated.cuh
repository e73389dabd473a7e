/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_gated.cuh - NSA's three branches and their gate in one pass on Hopper: o = sum_b g_b o_b, without
 * o_b in memory.
 *
 * It is attend_forward.cuh's kernel, whose blocks take three turns a piece: one branch's keys each, by one
 * copy of the piece's rows. After a turn each thread multiplies its O by gate / sum and adds it to what it
 * has in shared memory (f32, read and written by that thread alone); after the last it stores O. The gates
 * are found at a piece's start, from its rows in shared memory.
 *
 * Limit: the tiles of keys, as for one branch. Alone, each branch has a launch with its start and its end,
 * and the gate reads what they wrote. For that a piece's rows cannot be copied while the one before is
 * computed: at D = 128 rows take 32 KB of shared memory, K and V 128 KB, the sums 64 KB.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_GATED_CUH
#define QUERN_CUDA_SM90_ATTEND_GATED_CUH

#include "sm90/attend/attend_forward.cuh"
#include "sm90/attend/gated.cuh"

namespace sm90_forward
{

struct gated_maps {
    CUtensorMap q, k[SM90_BRANCHES], v[SM90_BRANCHES];
};

struct gated_turn : work {
    int32_t branch;
    bool first, last;
};

/* The second branch has lists; the others' pieces are its. */
struct three_branches {
    typedef sm90_gated call;
    typedef gated_maps maps;
    typedef gated_turn turn;
    static constexpr bool LISTS = false, GATED = true;
    static constexpr int TURNS = SM90_BRANCHES, LISTS_AHEAD = 1, LIST_MOST = SM90_GATED_LIST;

    static __device__ __forceinline__ void find(const call &a, const work_plan &plan, int32_t index, int turn,
                                                gated_turn *w)
    {
        w->branch = (turn + SM90_FIRST_BRANCH) % SM90_BRANCHES;
        w->first = w->branch == SM90_FIRST_BRANCH;
        w->last = last(turn);
        find_work<true>(a.branch[w->branch], plan, index, w);
    }
    static __device__ __forceinline__ bool last(int turn)
    {
        return turn % SM90_BRANCHES == SM90_BRANCHES - 1;
    }
    static __device__ __forceinline__ const attend_kernel &mask(const call &a, const turn &w)
    {
        return a.branch[w.branch];
    }
    static __device__ __forceinline__ bool listed(const turn &w) { return w.branch == 1; }
    static __device__ __forceinline__ bool needs_q(const turn &w) { return w.queries > 0 && w.first; }
    static __device__ __forceinline__ const CUtensorMap &k(const maps &m, const turn &w)
    {
        return m.k[w.branch];
    }
    static __device__ __forceinline__ const CUtensorMap &v(const maps &m, const turn &w)
    {
        return m.v[w.branch];
    }
    static __device__ __forceinline__ int box(const call &, const work_plan &plan, const turn &w)
    {
        return w.branch == 1 ? plan.box : 128;
    }
    template <typename T, typename AT>
    static __device__ __forceinline__ void find_gates(const call &a, const turn &w, char *smem);
    template <typename T, typename AT, int OT>
    static __device__ __forceinline__ void leave_rows(float (&o)[OT][4], const call &a, const turn &w,
                                                      const row_state &r, const int (&place)[2], char *smem);
};

/* A head's weights of this lane's columns. */
template <typename T, int COLUMNS>
__device__ __forceinline__ void load_weights(const sm90_gated &a, int head,
                                             float (&weights)[SM90_BRANCHES][COLUMNS])
{
    const int col = (threadIdx.x & 31) * COLUMNS;
#pragma unroll
    for (int i = 0; i < SM90_BRANCHES; i++) {
        const int64_t at = head * a.w_stride[0] + i * a.w_stride[1] + col;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            weights[i][c] = 0.0f;
            if (col + c < a.branch[0].dim_k)
                weights[i][c] =
                    a.w_f32 ? ((const float *)a.w)[at + c] : to_float<T>(((const T *)a.w)[at + c]);
        }
    }
}

/* The gates of a warp's 16 rows, at the first turn of a piece. Its lanes share a row's columns, four rows of
 * one head at a time; their twelve sums meet by halves, so that a lane ends with the three of row
 * 2 (lane / 16) + lane / 8 % 2. */
template <typename T, typename AT>
__device__ __forceinline__ void three_branches::find_gates(const call &a, const turn &w, char *smem)
{
    if (!w.first) return;
    constexpr int COLUMNS = AT::Q_STAGE / AT::M / 64;
    const attend_kernel &b = a.branch[1];
    const int lane = threadIdx.x & 31, row0 = (threadIdx.x - 128) / 32 * 16, col = lane * COLUMNS,
              heads = b.hs < 16 ? b.hs : 16;
    const char *const from = smem + AT::Q + (col >> 6) * (AT::M * 128) + (col & 7) * 2;
#pragma unroll 1
    for (int j = 0; j < heads; j++) {
        const int head = row0 + j - (int)quotient((uint32_t)(row0 + j), b.by_hs) * b.hs + w.head0;
        float weights[SM90_BRANCHES][COLUMNS];
        if (a.gate == GATE_WEIGHTS) load_weights<T>(a, head, weights);
#pragma unroll 1
        for (int r0 = j; r0 < 16; r0 += 4 * b.hs) {
            float g[4][SM90_BRANCHES] = {};
            if (a.gate == GATE_WEIGHTS) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int row = row0 + (r0 + k * b.hs < 16 ? r0 + k * b.hs : r0);
                    const T *q = (const T *)(from + row * 128 + (((col >> 3) ^ row) & 7) * 16);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        const float x = to_float<T>(q[c]);
#pragma unroll
                        for (int i = 0; i < SM90_BRANCHES; i++) g[k][i] = fmaf(x, weights[i][c], g[k][i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < SM90_BRANCHES; i++) {
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        const float away = lane & 16 ? g[k][i] : g[k + 2][i];
                        g[k][i] = (lane & 16 ? g[k + 2][i] : g[k][i]) + __shfl_xor_sync(~0u, away, 16);
                    }
                    const float away = lane & 8 ? g[0][i] : g[1][i];
                    g[0][i] = (lane & 8 ? g[1][i] : g[0][i]) + __shfl_xor_sync(~0u, away, 8);
#pragma unroll
                    for (int step = 4; step > 0; step /= 2) g[0][i] += __shfl_xor_sync(~0u, g[0][i], step);
                }
            }
            const int i = lane & 7, r = r0 + (lane >> 3 & 3) * b.hs, row = row0 + r;
            if (i >= SM90_BRANCHES || r >= 16) continue;
            const int n = (int)quotient((uint32_t)row, b.by_hs);
            float *given = (float *)a.gates.p + (int64_t)w.view * a.gates.s[0] +
                           (w.q0 + w.query + n) * a.gates.s[1] + head * a.gates.s[2] + i;
            float gate = 1.0f / 3.0f;
            if (a.gate == GATE_GIVEN) gate = n < w.queries ? *given : 0.0f;
            if (a.gate == GATE_WEIGHTS)
                gate = 1.0f / (1.0f + expf(-(i == 0 ? g[0][0] : i == 1 ? g[0][1] : g[0][2])));
            if (a.gate != GATE_GIVEN && a.gates.p != NULL && n < w.queries) *given = gate;
            ((float *)(smem + AT::GATES))[row * SM90_BRANCHES + i] = gate;
        }
    }
    __syncwarp();
}

/* Adds a turn's O to the sums of its rows; after the last turn stores them. */
template <typename T, typename AT, int OT>
__device__ __forceinline__ void three_branches::leave_rows(float (&o)[OT][4], const call &a, const turn &w,
                                                           const row_state &r, const int (&place)[2],
                                                           char *smem)
{
    constexpr int THREADS = AT::M * 2;
    float4 *sums = (float4 *)(smem + AT::SUMS) + (threadIdx.x - 128);
    const attend_kernel &b = a.branch[w.branch];
    float by[2];
    T *to[2];
    bool mine[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], b.by_hs), head = place[h] - n * b.hs + w.head0;
        const int64_t row = (int64_t)w.q0 + w.query + n;
        mine[h] = n < w.queries;
        to[h] = (T *)a.o.p + (int64_t)w.view * a.o.s[0] + row * a.o.s[1] + head * a.o.s[2];
        const float sum = end_row(b, w, r, h, head, row, mine[h]);
        by[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
        by[h] *= ((const float *)(smem + AT::GATES))[place[h] * SM90_BRANCHES + w.branch];
    }
#pragma unroll
    for (int i = 0; i < OT; i++) {
        float4 x = make_float4(o[i][0] * by[0], o[i][1] * by[0], o[i][2] * by[1], o[i][3] * by[1]);
        if (!w.first) {
            const float4 before = sums[i * THREADS];
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        if (!w.last) sums[i * THREADS] = x;
        o[i][0] = x.x, o[i][1] = x.y, o[i][2] = x.z, o[i][3] = x.w;
    }
    if (w.last)
#pragma unroll
        for (int h = 0; h < 2; h++) store_row<T, OT>(o, h, 1.0f, to[h], mine[h], b.dim_v);
}

template <typename T, int D>
__global__ void __launch_bounds__(128 * (shape<D, D, three_branches>::GROUPS + 1), 1)
    attend_gated_sm90(const __grid_constant__ sm90_gated a, const __grid_constant__ work_plan plan,
                      const __grid_constant__ gated_maps m)
{
    take_turns<T, D, D, three_branches>(a, plan, m);
}

template <typename T, int D>
static quern_status launch_gated(const attend_gate_args *args, const sm90_gated &a, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    typedef shape<D, D, three_branches> sh;
    const attend_args &listed = args->branch[1];
    work_plan plan = plan_of(&listed, a.branch[1], true, sh::M, sh::KEYS);
    if (plan.total == 0) return QUERN_OK;
    gated_maps m;
    quern_status status = tma_describe(&m.q, listed.q, a.branch[1].hs, plan.queries);
    for (int i = 0; i < SM90_BRANCHES && status == QUERN_OK; i++) {
        const int box = i == 1 ? plan.box : sh::KEYS;
        status = tma_describe(&m.k[i], args->branch[i].k, 1, box);
        if (status == QUERN_OK) status = tma_describe(&m.v[i], args->branch[i].v, 1, box);
    }
    if (status == QUERN_OK) status = sm90_count_from_zero(plan.total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_gated_sm90<T, D>, dim3(blocks), 128 * (sh::GROUPS + 1),
                         layout<D, D, three_branches>::BYTES, "attend_gated_sm90", a, plan, m);
}

} // namespace sm90_forward

#endif
