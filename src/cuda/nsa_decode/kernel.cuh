/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the block of one query and key/value head after another. */
#ifndef QUERN_CUDA_NSA_DECODE_KERNEL_CUH
#define QUERN_CUDA_NSA_DECODE_KERNEL_CUH

#include "nsa_decode/choose.cuh"

namespace nsa_decode
{

/* The keys of a range, or tokens of the blocks of a list, which rises, up to `end`. */
struct branch_keys {
    range_keys range;
    const int32_t *list; /* NULL: the range */
    fast_div by;         /* the blocks' length */
    int n; /* slots */

    __device__ __forceinline__ int64_t operator()(int slot) const
    {
        if (list == NULL) return range(slot);
        const uint32_t i = quotient((uint32_t)slot, by);
        const uint64_t key = (uint64_t)(uint32_t)list[i] * by.d + ((uint32_t)slot - i * by.d);
        return key < (uint64_t)range.end ? (int64_t)key : -1;
    }
};

/* Keeps rows' scores, of which there are n a row. */
struct kept_scores {
    float *to;
    int64_t width;
    int rows, n;
    __device__ __forceinline__ bool wanted() const { return rows > 0; }
    __device__ __forceinline__ void operator()(int slot, int row, float score) const
    {
        if (row < rows && slot < n) to[row * width + slot] = score;
    }
};

template <class W> struct nsa_memory {
    enum { ENTRIES = (sizeof(block_memory<W>::o) - sizeof(choose_space<4>)) / 16 * 4 };
    union {
        block_memory<W> walk;
        choose_space<ENTRIES> space;
    };
    choose_room choose;
    static_assert(sizeof(choose_space<ENTRIES>) <= sizeof(block_memory<W>::o), "queries stay where they are");
};

/* The gates of a head, by a warp: as the gate stage sums them. */
template <typename T>
__device__ __forceinline__ void find_gates(const nsa_kernel &a, const nsa_query &q, int row, float *to)
{
    const int lane = threadIdx.x % 32, head = q.kv * a.group + row, dim = a.plane[SLC].dim;
    float *const given =
        a.gates.p != NULL ? (float *)a.gates.p + q.t * a.gates.s[1] + head * a.gates.s[2] : NULL;
    float g[3] = {};
    if (a.gate == GATE_WEIGHTS && !a.ungated) {
        const chunk x =
            lane * CHUNK < dim
                ? load_chunk<T>((const T *)a.q.p + q.t * a.q.s[1] + head * a.q.s[2] + lane * CHUNK, a.q_wide)
                : chunk{};
        chunk w[3] = {};
#pragma unroll
        for (int b = 0; b < 3; b++) {
            const int64_t at = head * a.w_s[0] + b * a.w_s[1] + lane * CHUNK;
            if (lane * CHUNK < dim)
                w[b] = a.w_f32 ? load_chunk<float>((const float *)a.w + at, a.w_wide)
                               : load_chunk<T>((const T *)a.w + at, a.w_wide);
        }
#pragma unroll
        for (int b = 0; b < 3; b++) {
#pragma unroll
            for (int e = 0; e < CHUNK; e++) g[b] = fmaf(x.x[e], w[b].x[e], g[b]);
#pragma unroll
            for (int by = 16; by > 0; by /= 2) g[b] += __shfl_xor_sync(~0u, g[b], by);
        }
    }
#pragma unroll
    for (int b = 0; b < 3; b++) {
        if (a.ungated) g[b] = 1.0f;
        else if (a.gate == GATE_WEIGHTS) g[b] = 1.0f / (1.0f + expf(-g[b]));
        else g[b] = a.gate == GATE_NONE ? 1.0f / 3.0f : given[b];
        if (lane != b) continue;
        to[b] = g[b];
        if (a.gate != GATE_GIVEN && !a.ungated && given != NULL) given[b] = g[b];
    }
}

/* What a block has of a chunk of a query's rows. */
template <class W> struct chunk_rows {
    int row0, rows;
    __device__ __forceinline__ chunk_rows(const nsa_kernel &a, int first)
        : row0(first), rows(a.group - first < W::ROWS ? a.group - first : W::ROWS)
    {
    }
};

/* A branch's O of all rows, times the gates. */
__device__ __forceinline__ float4 *branch_sums(const nsa_kernel &a, float *scratch, int branch)
{
    return (float4 *)(scratch + a.at.sum + (int64_t)branch * a.group * a.plane[SLC].dim_v);
}

template <class W>
__device__ __forceinline__ void load_rows(const nsa_kernel &a, const nsa_query &q, nsa_memory<W> &m,
                                          const chunk_rows<W> &c)
{
    typedef typename W::element T;
    __syncthreads();
    W::load(m.walk.q, {(const T *)a.q.p + q.t * a.q.s[1] + (q.kv * a.group + c.row0) * a.q.s[2], a.q.s[2],
                       c.rows, a.plane[SLC].dim, a.q_wide});
    __syncthreads();
}

/* Keeps a branch's O, times the gates, of rows [from, from + rows) of the chunk; of the entries writes each
 * row's lse, in powers of two. */
template <class W>
__device__ __forceinline__ void keep_sums(const nsa_kernel &a, const nsa_memory<W> &m, const chunk_rows<W> &c,
                                          int branch, int from, int rows, float *scratch)
{
    const int fours = a.plane[SLC].dim_v / 4;
    const bool values = a.has(branch);
    for (int i = threadIdx.x; i < c.rows * fours; i += THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        if (row < from || row >= from + rows) continue;
        const row_total all = total_of(m.walk, row);
        if (column == 0 && branch == CMP)
            scratch[a.at.lse + c.row0 + row] = all.sum == 0.0f ? 0.0f : base_of(all.top) + log2f(all.sum);
        if (!values) continue;
        const float by = factor_of(all.sum, 0.0f, NULL) * scratch[a.at.gates + (c.row0 + row) * 3 + branch];
        const float4 x = total_at(m.walk, all, row, column);
        branch_sums(a, scratch, branch)[(int64_t)c.row0 * fours + i] =
            make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
    }
    __syncthreads();
}

/* The list of rows [row0, row0 + rows), into shared memory; returns its length. */
template <class W>
__device__ __forceinline__ int find_list(const nsa_kernel &a, const nsa_query &q, nsa_memory<W> &m,
                                         float *scratch, int row0, int rows, int list_head)
{
    if (a.listed) return read_list(a, q, list_head, m.choose.list);
    float *const entries = q.seen <= m.ENTRIES ? m.space.entries : scratch + a.at.entries;
    if (a.mean_logit)
        add_means<typename W::element>(a, q, q.kv * a.group + row0, rows, m.choose.mean, entries);
    else add_probabilities(a, q, scratch, row0, rows, entries);
    const int count = choose_blocks(a, q, scratch, entries, m.choose, m.space.kth);
    if (a.lists != NULL) write_list(a, q, list_head, m.choose.list, count);
    return count;
}

/* The keys of a branch's list j, of `rows` rows. */
template <class W>
__device__ __forceinline__ branch_keys find_keys(const nsa_kernel &a, const nsa_query &q, nsa_memory<W> &m,
                                                 float *scratch, int branch, int j, int lists)
{
    branch_keys k = {{0, 0, q.seen}, NULL, a.by_block, q.seen};
    if (branch == WIN) {
        k.range = range_of(q.position < 0 ? 0 : mask_window_first(q.position, a.window), q.position + 1);
        k.n = (int)(k.range.end - k.range.start);
    } else if (branch == SLC) {
        const int rows = a.group / lists;
        k.range.end = q.position + 1;
        k.list = m.choose.list;
        k.n = (int)(find_list(a, q, m, scratch, j * rows, rows, q.kv * lists + j) * a.select_block);
    }
    return k;
}

/* The branches: one text, as code that does not fit into the instruction cache is slow. Half of the blocks
 * begin with the window, so that some read keys while others choose; as sums are added at the end, no bit
 * depends on that. */
template <class W>
__device__ __forceinline__ void run_branches(const nsa_kernel &a, const nsa_query &q, nsa_memory<W> &m,
                                             float *scratch)
{
    const bool scored = a.chooses() && !a.mean_logit;
    int loaded = -1; /* the chunk of rows that shared memory holds */
    const bool late = blockIdx.x < (gridDim.x + 1) / 2;
    for (int i = 0; i < BRANCHES; i++) {
        const int branch = late ? i : (i + WIN) % BRANCHES;
        if (!a.has(branch) && !(branch == CMP && scored)) continue;
        const int lists = branch == SLC && a.by_head ? a.group : 1;
        for (int j = 0; j < lists; j++) {
            const branch_keys keys = find_keys(a, q, m, scratch, branch, j, lists);
            for (int row0 = 0; row0 < a.group; row0 += W::ROWS) {
                if (lists > 1 && (j < row0 || j >= row0 + W::ROWS)) continue;
                const chunk_rows<W> c(a, row0);
                const kept_scores scores = {scratch + a.at.scores + row0 * a.at.width, a.at.width,
                                            branch == CMP && scored ? c.rows : 0, q.seen};
                if (loaded != row0) load_rows(a, q, m, c);
                loaded = row0;
                W w;
                w.open();
                w.run({a.plane[branch], q.b, q.kv, a.status}, keys, keys.n, m.walk.q,
                      m.walk.ring[threadIdx.x / 32], a.scale2, a.has(branch), scores);
                __syncthreads();
                w.store_sums(m.walk, c.rows);
                __syncthreads();
                keep_sums(a, m, c, branch, lists > 1 ? j - row0 : 0, lists > 1 ? 1 : c.rows, scratch);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_sum(const nsa_kernel &a, const nsa_query &q, float *scratch)
{
    const int fours = a.plane[SLC].dim_v / 4;
    for (int i = threadIdx.x; i < a.group * fours; i += THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        T *const to = (T *)a.o.p + q.t * a.o.s[1] + (q.kv * a.group + row) * a.o.s[2] + column;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int branch = CMP; branch < BRANCHES; branch++) {
            if (!a.has(branch)) continue;
            const float4 x = branch_sums(a, scratch, branch)[i];
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        store_four<T>(to, sum, a.o_wide);
    }
}

__device__ __forceinline__ bool find_query(const nsa_kernel &a, int64_t task, nsa_query *q)
{
    q->t = task / a.plane[SLC].heads;
    q->kv = (int)(task - q->t * a.plane[SLC].heads);
    q->b = step_sequence_of(a.step, q->t);
    if (q->b < 0) return false;
    const step_rows r = step_rows_at(a.step, q->b);
    const int64_t tokens = r.first + r.count;
    const bool good = r.first >= 0 && plane_holds(a.plane[CMP], tokens, r.count, a.block_size, a.stride) &&
                      plane_holds(a.plane[SLC], tokens, r.count, 0, 0) &&
                      plane_holds(a.plane[WIN], tokens, r.count, 0, 0);
    if (!good && threadIdx.x == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    q->position = good ? r.first + q->t - r.row : -1;
    q->seen = a.plane[CMP].p != NULL ? (int)mask_entries(q->position + 1, a.block_size, a.stride) : 0;
    return true;
}

/* A block's part of a call. */
template <class W> __device__ __forceinline__ void take_queries(const nsa_kernel &a, nsa_memory<W> &m)
{
    typedef typename W::element T;
    float *const scratch = a.scratch + blockIdx.x * a.at.floats;
    const int64_t tasks = a.step.total * a.plane[SLC].heads;
    if (blockIdx.x == 0) step_check(a.step, a.status);
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        nsa_query q;
        if (!find_query(a, task, &q)) continue;
        for (int row = threadIdx.x / 32; row < a.group; row += WARPS)
            find_gates<T>(a, q, row, scratch + a.at.gates + row * 3);
        run_branches(a, q, m, scratch);
        store_sum<T>(a, q, scratch);
        __syncthreads();
    }
}

/* A walk's kernel. */
template <class W>
static quern_status launch(void (*kernel)(nsa_kernel), const stage_exec *exec, const nsa_kernel &a,
                           const launcher &to)
{
    const int64_t tasks = a.step.total * a.plane[SLC].heads, most = blocks_at_once(exec);
    return launch_shared(to, kernel, dim3((unsigned)(tasks < most ? tasks : most)), THREADS,
                         sizeof(nsa_memory<W>), "sparse attention of a step over pages", a);
}

} // namespace nsa_decode

#endif
