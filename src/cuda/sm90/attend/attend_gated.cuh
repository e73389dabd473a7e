/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_gated.cuh - NSA's three branches and their gate in one pass on Hopper: o = sum_b g_b o_b, without
 * o_b in memory.
 *
 * It is attend_forward.cuh's kernel, whose blocks take three turns a piece: one branch's keys each, by one
 * copy of the piece's rows. After a turn each thread multiplies its O by gate / sum and adds it to what it
 * has in shared memory (f32, read and written by that thread alone); after the last it stores O. Warp 2 of
 * the feeder finds the gates meanwhile, from the piece's rows in shared memory.
 *
 * V is not searched for what is not finite: a factor of 0 makes NaN of it, which no sum undoes. So where a
 * row ends with something that is not finite its piece is computed again, with V searched; finite rows get
 * the same bits.
 *
 * Limit: the tiles of keys, as for one branch. Alone, each branch has a launch with its start and its end,
 * and the gate reads what they wrote. For that a piece's rows cannot be copied while the one before is
 * computed: at D = 128 rows take 32 KB of shared memory, K and V 128 KB, the sums 64 KB.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_GATED_CUH
#define QUERN_CUDA_SM90_ATTEND_GATED_CUH

#include "sm90/attend/attend_forward.cuh"
#include "sm90/attend/choose_by_mean.cuh"
#include "sm90/attend/gated.cuh"

namespace sm90_forward
{

struct gated_maps {
    CUtensorMap q, k[SM90_BRANCHES], v[SM90_BRANCHES];
};

struct gated_turn : work {
    int32_t branch, piece; /* the piece's number among the block's */
    bool first, last;
    bool again;      /* V is searched */
    bool list_later; /* warp 1 makes the list */
};

enum { PIECES = 4 }; /* more than are planned and not yet ended */

/* The second branch has lists; the others' pieces are its. */
struct three_branches {
    typedef sm90_gated call;
    typedef gated_maps maps;
    typedef gated_turn turn;
    static constexpr bool LISTS = false, GATED = true, MASKS = false;
    static constexpr int TURNS = SM90_BRANCHES, LISTS_AHEAD = 1, LIST_MOST = SM90_GATED_LIST, SEARCHERS = 1,
                         EXTRA = 4 * PIECES; /* whether each piece has something that is not finite */

    static __device__ __forceinline__ void find(const call &a, const work_plan &plan, int32_t index, int turn,
                                                gated_turn *w)
    {
        begin_turn(turn, w);
        find_work<true>(a.branch[w->branch], plan, index, w);
    }
    static __device__ __forceinline__ void begin_turn(int turn, gated_turn *w)
    {
        w->branch = (turn + SM90_FIRST_BRANCH) % SM90_BRANCHES;
        w->piece = turn / SM90_BRANCHES;
        w->first = w->branch == SM90_FIRST_BRANCH;
        w->last = last(turn);
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
    static __device__ __forceinline__ bool makes_list(const call &a) { return a.choice.here; }
    template <typename T, int DK, int DV, typename W>
    static __device__ __forceinline__ void help(const call &a, char *smem, uint32_t base);
    template <int DK, int DV, typename W>
    static __device__ __forceinline__ void plan_pieces(const call &a, const work_plan &plan, char *smem,
                                                       uint32_t base);
    template <typename T, int DK, int DV, typename W>
    static __device__ __forceinline__ void leave_gates(const call &a, char *smem, uint32_t base);
    template <typename T, typename AT>
    static __device__ __forceinline__ void find_gates(const call &a, const turn &w, char *smem);
    template <typename T, typename AT, int OT>
    static __device__ __forceinline__ void leave_rows(float (&o)[OT][4], const call &a, const turn &w,
                                                      const row_state &r, const int (&place)[2], char *smem);
};

/* The pieces that the block may have to compute again. */
template <typename AT> __device__ __forceinline__ int32_t *odd_piece(char *smem, int piece)
{
    return (int32_t *)(smem + AT::EXTRA) + piece % PIECES;
}

/* Varlen: list rows that no tile has, of those that the kernel makes. The planner of each block calls. */
static __device__ __forceinline__ void pad_lists(const sm90_choice &c, const attend_kernel &a)
{
    const seqs &s = a.sq;
    if (!c.here || c.blocks == NULL || s.cu_q == NULL) return;
    const int lane = threadIdx.x & 31;
    int64_t rows = 0;
    for (int64_t b = lane; b < s.batch; b += 32) {
        const int64_t n = cu_seqlens_at(s.cu_q, b + 1, s.n_q) - cu_seqlens_at(s.cu_q, b, s.n_q);
        rows += n > 0 ? (n + a.tile - 1) / a.tile : 0;
    }
    for (int i = 16; i > 0; i /= 2) rows += __shfl_xor_sync(~0u, rows, i);
    for (int64_t row = rows + blockIdx.x; row < c.rows; row += gridDim.x)
        for (int u = 0; u < a.units; u++) {
            for (int i = lane; i < c.k; i += 32) c.blocks[u * c.stride[1] + row * c.stride[2] + i] = -1;
            if (c.count != NULL && lane == 0) c.count[u * c.count_stride[1] + row * c.count_stride[2]] = 0;
        }
}

/* Warp 3 of the feeder: plans the turns, as far ahead as there are places. A piece that ended with something
 * that is not finite comes again; whether it did is known when the piece after the next one is planned. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::plan_pieces(const call &a, const work_plan &plan, char *smem,
                                                            uint32_t base)
{
    typedef layout<DK, DV, W> at;
    bool more = true;
    int32_t next = (int32_t)blockIdx.x, before[2] = {-1, -1}; /* planned before, the last one first */
    pad_lists(a.choice, a.branch[1]);
    for (int turn = 0; more;) {
        const int piece = turn / SM90_BRANCHES;
        int32_t index = next;
        wait_end_before<DK, DV, W>(base, turn);
        const bool drained = next >= plan.total;
        bool again = before[1] >= 0 && *odd_piece<at>(smem, piece - 2) != 0;
        if (again) {
            index = before[1];
        } else if (drained) {
            for (int i = 1; i < SM90_BRANCHES; i++) wait_end_before<DK, DV, W>(base, turn + i);
            again = before[0] >= 0 && *odd_piece<at>(smem, piece - 1) != 0;
            index = again ? before[0] : -1;
            more = again;
            before[0] = -1;
        }
        before[1] = before[0];
        before[0] = again ? -1 : index;
        __syncwarp(); /* all have read */
        if ((threadIdx.x & 31) == 0) *odd_piece<at>(smem, piece) = 0;
#pragma unroll 1
        for (int i = 0; i == 0 || (i < SM90_BRANCHES && more); i++, turn++) {
            typename W::turn w = {};
            w.again = again;
            w.queries = -1;
            if (more) W::find(a, plan, index, turn, &w);
            w.list_later = more && W::listed(w) && a.choice.here;
            if (w.list_later) w.slots = 0;
            if (turn == 1 && !a.choice.here) wait_for_before(); /* what chooses waits itself */
            leave_turn<DK, DV, W>(a, w, turn, smem, base);
        }
        if (!again && !drained) next = next_piece(plan);
    }
}

/* Warp 1 of the feeder: makes lists, and searches the tiles of V of a piece that is computed again. The end
 * of the turn before tells it that the tiles are those that it counts. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::help(const call &a, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    int step = 0;
    int32_t entry0 = 0, entries = 0;
    for (int turn = 0;; turn++) {
        typename W::turn &w = *(typename W::turn *)&wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) return;
        if (w.branch == 0) entry0 = w.k0, entries = w.nk;
        if constexpr (!W::MASKS)
            if (w.list_later) {
                int kept = 0;
                if (w.queries > 0)
                    kept = choose_by_mean<T, DK>(a.choice, a.branch[0], a.branch[1], w, entry0, entries,
                                                 (int32_t *)(smem + at::LIST));
                if ((threadIdx.x & 31) == 0) w.slots = kept * a.branch[1].list_block;
                mbar_arrive(base + at::LIST_FULL); /* each lane's, for what it wrote */
                __syncwarp();
            }
        const int tiles = (w.slots + at::KEYS - 1) / at::KEYS;
        if (w.again && tiles > 0) {
            if (turn > 0)
                mbar_wait(base + at::TURN_FREE + 8 * ((turn - 1) % W::TURNS), (turn - 1) / W::TURNS & 1);
            for (int t = 0; t < tiles; t++) {
                const int stage = (step + t) % STAGES;
                mbar_wait(base + at::V_FULL + 8 * stage, (step + t) / STAGES & 1);
                search_tile<T, DK, DV, W>(smem, base, stage, 0);
            }
        }
        step += tiles;
        free_turn<DK, DV, W>(base, turn);
    }
}

/* Warp 2 of the feeder. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::leave_gates(const call &a, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    int used = 0;
    for (int turn = 0;; turn++) {
        const typename W::turn &w = wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) return;
        if (W::needs_q(w)) {
            mbar_wait(base + at::Q_FULL, used & 1);
            find_gates<T, at>(a, w, smem);
            mbar_arrive(base + at::GATES_FULL); /* each lane's, for what it wrote */
            used++;
        }
        free_turn<DK, DV, W>(base, turn);
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

/* Sums over the lanes of a row's three logits, of eight rows: they meet by halves, so that a lane ends with
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

/* The gates of a piece's rows. The lanes share a row's columns, eight rows of one head at a time. */
template <typename T, typename AT>
__device__ __forceinline__ void three_branches::find_gates(const call &a, const turn &w, char *smem)
{
    constexpr int M = AT::M, COLUMNS = AT::Q_STAGE / M / 64;
    const attend_kernel &b = a.branch[1];
    const int lane = threadIdx.x & 31, col = lane * COLUMNS, rows = w.queries * b.hs, hs = b.hs;
    const char *const from = smem + AT::Q + (col >> 6) * (M * 128) + (col & 7) * 2;
#pragma unroll 1
    for (int j = 0; j < hs; j++) {
        const int head = j + w.head0;
        float weights[SM90_BRANCHES][COLUMNS];
        if (a.gate == GATE_WEIGHTS) load_weights<T>(a, head, weights);
#pragma unroll 1
        for (int r0 = j; r0 < rows; r0 += 8 * hs) {
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
            ((float *)(smem + AT::GATES))[row * SM90_BRANCHES + i] = gate;
        }
    }
    __syncwarp();
}

/* Adds a turn's O to the sums of its rows; after the last turn stores them, and notes if something is not
 * finite. */
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
        by[h] *= mine[h] ? ((const float *)(smem + AT::GATES))[place[h] * SM90_BRANCHES + w.branch] : 0.0f;
    }
    float zero[2] = {0.0f, 0.0f}; /* of this thread's rows, unless something is not finite */
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
    if (!w.last) return;
#pragma unroll
    for (int i = 0; i < OT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) zero[c >> 1] = fmaf(o[i][c], 0.0f, zero[c >> 1]);
    if ((mine[0] && zero[0] != 0.0f) || (mine[1] && zero[1] != 0.0f))
        atomicOr(odd_piece<AT>(smem, w.piece), 1);
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

typedef void gated_kernel(sm90_gated a, work_plan plan, gated_maps m);

template <typename T, int D, typename W>
static quern_status launch_pieces(const attend_gate_args *args, const sm90_gated &a,
                                  const sm90_device &device, void *workspace, cudaStream_t stream,
                                  work_plan plan, gated_kernel *kernel)
{
    typedef shape<D, D, W> sh;
    if (plan.total == 0) return QUERN_OK;
    gated_maps m;
    quern_status status = tma_describe(&m.q, args->branch[1].q, a.branch[1].hs, plan.queries);
    for (int i = 0; i < SM90_BRANCHES && status == QUERN_OK; i++) {
        const int box = i == 1 ? plan.box : sh::KEYS;
        status = tma_describe(&m.k[i], args->branch[i].k, 1, box);
        if (status == QUERN_OK) status = tma_describe(&m.v[i], args->branch[i].v, 1, box);
    }
    if (status == QUERN_OK) status = sm90_count_from_zero(plan.total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    const char *const name = "attend_gated_sm90";
    const int threads = 128 * (sh::GROUPS + 1);
    if (a.behind && plan.taken == NULL) /* the kernel before it makes entries or lists */
        return launch_behind(stream, kernel, dim3(blocks), threads, layout<D, D, W>::BYTES, name, a, plan, m);
    return launch_shared({stream, NULL}, kernel, dim3(blocks), threads, layout<D, D, W>::BYTES, name, a, plan,
                         m);
}

template <typename T, int D>
static quern_status launch_gated(const attend_gate_args *args, const sm90_gated &a, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    typedef shape<D, D, three_branches> sh;
    const work_plan plan = plan_of(&args->branch[1], a.branch[1], true, sh::M, sh::KEYS);
    return launch_pieces<T, D, three_branches>(args, a, device, workspace, stream, plan,
                                               attend_gated_sm90<T, D>);
}

} // namespace sm90_forward

#endif
