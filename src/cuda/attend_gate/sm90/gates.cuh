/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gates.cuh - the gates of a piece's rows in kernel.cuh's kernels, found by warp 2 of the feeder,
 * and by warp 1 where it makes no lists, from the rows of Q in shared memory while the others walk the first
 * branch. */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_GATES_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_GATES_CUH

#include "attend_gate/sm90/feed.cuh"

namespace sm90_gate
{

/* The gates of a share of a piece's rows, of weights in Q's dtype: products of 16 rows with eight columns of
 * weights at a time, three columns for each head of a query, of which a row takes those of its own. The first
 * weights are fetched before Q is there, which `rows_there` waits for. */
template <typename T, int WARPS, int D, typename W, typename F>
__device__ __forceinline__ void multiply_gates(const sm90_gated &a, const gated_turn &w, int part,
                                               shared<D, W> &sm, const F &rows_there)
{
    const attend_kernel &b = a.branch[1];
    const int lane = threadIdx.x & 31, columns = SM90_BRANCHES * b.hs, rows = w.queries * b.hs,
              share = (rows + 16 * WARPS - 1) / (16 * WARPS) * 16, from_row = part * share,
              to_row = from_row + share < rows ? from_row + share : rows;
    float *const gates = &sm.gates[0][0];
#pragma unroll 1
    for (int n0 = 0; n0 < columns; n0 += 8) {
        uint32_t weights[D / 8];
        const int n = n0 + (lane >> 2), head = n / SM90_BRANCHES, branch = n - head * SM90_BRANCHES;
        const T *from = (const T *)a.w + (w.head0 + head) * a.w_stride[0] + branch * a.w_stride[1];
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const int col = i * 8 + (lane & 3) * 2;
            weights[i] = n < columns && col < b.dim_k ? *(const uint32_t *)(from + col) : 0;
        }
        if (n0 == 0) rows_there();
#pragma unroll 1
        for (int row0 = from_row; row0 < to_row; row0 += 16) {
            float logit[2][4] = {};
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                uint32_t q[4];
                load_a<M>(q, smem_address(sm.q), row0, i * 16, lane);
                mma16816<T>(logit[i & 1], q, weights[i * 2], weights[i * 2 + 1]);
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int column = n0 + (lane & 3) * 2 + (c & 1), row = row0 + (lane >> 2) + (c >> 1) * 8,
                          own = (row - (int)quotient((uint32_t)row, b.by_hs) * b.hs) * SM90_BRANCHES;
                if (column >= own && column < own + SM90_BRANCHES)
                    gates[row * SM90_BRANCHES + column - own] = logit[0][c] + logit[1][c];
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = from_row * SM90_BRANCHES + lane; i < to_row * SM90_BRANCHES; i += 32) {
        const int row = i / SM90_BRANCHES, n = (int)quotient((uint32_t)row, b.by_hs),
                  head = row - n * b.hs + w.head0;
        const float gate = 1.0f / (1.0f + expf(-gates[i]));
        gates[i] = gate;
        if (a.gates.p != NULL)
            ((float *)a.gates.p)[(int64_t)w.view * a.gates.s[0] + (w.q0 + w.query + n) * a.gates.s[1] +
                                 head * a.gates.s[2] + i - row * SM90_BRANCHES] = gate;
    }
}

/* A head's weights of this lane's columns. */
template <typename T, int COLUMNS>
__device__ __forceinline__ void load_weights(const sm90_gated &a, int head,
                                             float (&weights)[SM90_BRANCHES][COLUMNS])
{
    typedef row_part<T, COLUMNS> part;
    struct alignas(4 * COLUMNS) wide_part {
        float x[COLUMNS];
    };
    const int col = (threadIdx.x & 31) * COLUMNS;
    const int64_t at = head * a.w_stride[0] + col;
    const bool all = col + COLUMNS <= a.branch[0].dim_k;
    if (all && a.w_vec && a.w_f32) { /* loads wait for no branch */
        wide_part x[SM90_BRANCHES];
#pragma unroll
        for (int i = 0; i < SM90_BRANCHES; i++)
            x[i] = *(const wide_part *)((const float *)a.w + at + i * a.w_stride[1]);
#pragma unroll
        for (int i = 0; i < SM90_BRANCHES; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) weights[i][c] = x[i].x[c];
        return;
    }
    if (all && a.w_vec) {
        part x[SM90_BRANCHES];
#pragma unroll
        for (int i = 0; i < SM90_BRANCHES; i++)
            x[i] = *(const part *)((const T *)a.w + at + i * a.w_stride[1]);
#pragma unroll
        for (int i = 0; i < SM90_BRANCHES; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) weights[i][c] = to_float<T>(x[i].x[c]);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < SM90_BRANCHES; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int64_t from = at + i * a.w_stride[1] + c;
            float x = 0.0f;
            if (col + c < a.branch[0].dim_k)
                x = a.w_f32 ? ((const float *)a.w)[from] : to_float<T>(((const T *)a.w)[from]);
#pragma unroll
            for (int k = 0; k < SM90_BRANCHES; k++)
                if (k == i) weights[k][c] = x;
        }
}

/* Sums over the lanes of a row's three logits, of eight rows: added by halving, so that a lane ends with
 * those of row lane / 4. */
__device__ __forceinline__ void sum_logits(float (&g)[8][SM90_BRANCHES])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < SM90_BRANCHES; i++) {
#pragma unroll
        for (int step = 16, n = 4; n > 0; step /= 2, n /= 2)
#pragma unroll
            for (int k = 0; k < n; k++) {
                const float away = lane & step ? g[k][i] : g[k + n][i];
                g[k][i] = (lane & step ? g[k + n][i] : g[k][i]) + __shfl_xor_sync(~0u, away, step);
            }
        g[0][i] += __shfl_xor_sync(~0u, g[0][i], 2);
        g[0][i] += __shfl_xor_sync(~0u, g[0][i], 1);
    }
}

/* The same of other weights and gates. The lanes share a row's columns, eight rows of one head at a time. */
template <typename T, int WARPS, int D, typename W>
__device__ __forceinline__ void find_gates(const sm90_gated &a, const gated_turn &w, int part,
                                           shared<D, W> &sm)
{
    constexpr int COLUMNS = D / 32;
    const attend_kernel &b = a.branch[1];
    const int lane = threadIdx.x & 31, col = lane * COLUMNS, rows = w.queries * b.hs, hs = b.hs;
    const char *const from = (const char *)sm.q + (col >> 6) * (M * 128) + (col & 7) * 2;
#pragma unroll 1
    for (int j = 0; j < hs; j++) {
        const int head = j + w.head0;
        float weights[SM90_BRANCHES][COLUMNS];
        if (a.gate == GATE_WEIGHTS) load_weights<T>(a, head, weights);
#pragma unroll 1
        for (int r0 = j + part * 8 * hs; r0 < rows; r0 += WARPS * 8 * hs) {
            float g[8][SM90_BRANCHES] = {};
            if (a.gate == GATE_WEIGHTS) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int row = r0 + k * hs < rows ? r0 + k * hs : r0;
                    const row_part<T, COLUMNS> q =
                        *(const row_part<T, COLUMNS> *)(from + row * 128 + (((col >> 3) ^ row) & 7) * 16);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        const float x = to_float<T>(q.x[c]);
#pragma unroll
                        for (int i = 0; i < SM90_BRANCHES; i++) g[k][i] = fmaf(x, weights[i][c], g[k][i]);
                    }
                }
                sum_logits(g);
            }
            const int i = lane & 3, row = r0 + (lane >> 2) * hs;
            if (i >= SM90_BRANCHES || row >= rows) continue;
            const int n = (int)quotient((uint32_t)row, b.by_hs);
            float *given = (float *)a.gates.p + (int64_t)w.view * a.gates.s[0] +
                           (w.q0 + w.query + n) * a.gates.s[1] + head * a.gates.s[2] + i;
            float gate = 1.0f / 3.0f;
            if (a.gate == GATE_GIVEN) gate = *given;
            if (a.gate == GATE_WEIGHTS)
                gate = 1.0f / (1.0f + expf(-(i == 0 ? g[0][0] : i == 1 ? g[0][1] : g[0][2])));
            if (a.gate != GATE_GIVEN && a.gates.p != NULL) *given = gate;
            sm.gates[row][i] = gate;
        }
    }
    __syncwarp();
}

/* Warp 2 of the feeder, which is `part` 0 of those that find gates, and warp 1 if there are two. */
template <typename T, int D, typename W>
__device__ __forceinline__ void three_branches::make_gates(const call &a, int part, shared<D, W> &sm)
{
    int used = 0, step = 0;
    for (int turn = 0;; turn++) {
        const gated_turn &w = wait_turn(sm, turn);
        if (w.queries < 0) return;
        if (W::needs_q(w)) {
            const auto rows_there = [&]() { sm.queries.wait_full(ring_place<1>::of(used)); };
            if (a.gate == GATE_WEIGHTS && !a.w_f32 && a.w_vec) {
                multiply_gates<T, W::GATE_WARPS>(a, w, part, sm, rows_there);
            } else {
                rows_there();
                find_gates<T, W::GATE_WARPS>(a, w, part, sm);
            }
            sm.gates_full.arrive({}); /* each lane's, for what it wrote */
            used++;
        }
        if (part == 1) step = search_again<T>(w, turn, step, sm);
        free_turn(sm, turn);
    }
}

} // namespace sm90_gate

#endif
