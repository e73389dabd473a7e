/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - lists by the mean logit: scale mean(rows) . entry, one dot product for each list and
 * entry.
 *
 * A block of 256 threads owns LISTS consecutive lists. It reads their rows once, 16 bytes a thread and eight
 * loads in flight, and puts the means in shared memory. Then eight lanes share an entry, with the means in
 * registers (8 CHUNKS values a list and lane), 1024 entries at a time; their scores go to shared memory, and
 * a warp for each list offers them to it. Sums are f32 in a fixed order.
 *
 * Q is nearly all that is read: at tile 128 of 16 heads a list has 512 KB of rows and 256 KB of entries at
 * 64k tokens, which L2 holds for all. A block's reading, scores and list follow one another, and other blocks
 * do not cover the latter two. So where Q is large a kernel of its own adds 512 rows a block and writes the
 * sums in workspace. Lists whose sums are there, or so many that entries would count, share entries, four a
 * block. Limit: the read rate.
 */
#ifndef QUERN_CUDA_SELECT_MEAN_KERNEL_CUH
#define QUERN_CUDA_SELECT_MEAN_KERNEL_CUH

#include "select/lists.cuh"
#include "common/chunk.cuh"

namespace select_by_mean
{

/* Entries at a time; lanes of an entry; loads in flight; rows that are summed at once. */
enum { STEP = 1024, LANES = 8, AHEAD = 8, PART = SELECT_MEAN_PART };

template <int CHUNKS> struct shape {
    static constexpr int DIM = CHUNKS * LANES * CHUNK, /* padded */
        ROWS = THREADS * CHUNK / DIM;                  /* rows read at once */
};

/* A block's shared memory; the lists (list_tail) stand behind it. */
template <int CHUNKS, int LISTS> struct __align__(16) memory
{
    float part[shape<CHUNKS>::ROWS][shape<CHUNKS>::DIM], mean[LISTS][shape<CHUNKS>::DIM];
    float scores[LISTS][STEP];
    uint32_t candidates[LISTS][64]; /* for offer_many() */
};

/* The sum of a list's rows row0, row0 + `step` ... below `rows`. VEC: 16 bytes at a time. */
template <typename T, bool VEC>
__device__ __forceinline__ chunk sum_rows(const attend_kernel &a, const T *q, int row0, int rows, int step)
{
    chunk sum = {};
    int r = row0;
    auto load = [&](int row) {
        const int n = (int)quotient((uint32_t)row, a.by_hs);
        return load_chunk<T>(q + n * a.q.s[1] + (row - n * a.hs) * a.q.s[2], VEC);
    };
    auto add = [&](const chunk &x) {
#pragma unroll
        for (int c = 0; c < CHUNK; c++) sum.x[c] += x.x[c];
    };
    for (; r + (AHEAD - 1) * step < rows; r += AHEAD * step) {
        chunk x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) x[i] = load(r + i * step);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add(x[i]);
    }
    for (; r < rows; r += step) add(load(r));
    return sum;
}

/* The rows of a run's list. */
template <typename T>
__device__ __forceinline__ int rows_of(const select_kernel &s, const list_run<T> &run, int list)
{
    const int64_t from = run.q_first + (int64_t)list * s.a.tile;
    return (int)(q_end_of(from, s.a.tile, run.seq.nq) - from) * s.a.hs;
}

/* The sum of rows [r0, r0 + PART) of a run's list, of column threadIdx.x below DIM; part: [ROWS][DIM] of
 * shared memory. All threads call. */
template <typename T, int CHUNKS, bool VEC>
__device__ __forceinline__ float sum_part(const select_kernel &s, const list_run<T> &run, int list, int r0,
                                          float *part)
{
    typedef shape<CHUNKS> sh;
    constexpr int PER = sh::DIM / CHUNK;
    const attend_kernel &a = s.a;
    const int column = (int)threadIdx.x % PER * CHUNK, row0 = (int)threadIdx.x / PER;
    const int rows = rows_of<T>(s, run, list), end = r0 + PART < rows ? r0 + PART : rows;
    const T *q = run.q + (run.q_first + (int64_t)list * a.tile) * a.q.s[1] + column;
    chunk sum = {};
    if (column < a.dim_k) sum = sum_rows<T, VEC>(a, q, r0 + row0, end, sh::ROWS);
    __syncthreads(); /* the last part is read */
#pragma unroll
    for (int c = 0; c < CHUNK; c++) part[row0 * sh::DIM + column + c] = sum.x[c];
    __syncthreads();
    float all = 0.0f;
    if (threadIdx.x < sh::DIM) {
#pragma unroll
        for (int r = 0; r < sh::ROWS; r++) all += part[r * sh::DIM + threadIdx.x];
    }
    return all;
}

/* Where the parts' sums of a list row stand. */
__device__ __forceinline__ float *parts_of(const select_kernel &s, int64_t vb, int unit, int64_t row, int dim)
{
    return s.sums + ((vb * s.a.units + unit) * s.list_rows + row) * s.parts * dim;
}

/* The means of a run's lists: sums of PART rows each, added in order. GIVEN: those sums are there. All
 * threads call. */
template <typename T, int CHUNKS, int LISTS, bool GIVEN>
__device__ __forceinline__ void find_means(const select_kernel &s, const list_run<T> &run,
                                           memory<CHUNKS, LISTS> &m, int64_t vb)
{
    constexpr int DIM = shape<CHUNKS>::DIM;
    for (int list = 0; list < run.lists; list++) {
        const int rows = rows_of<T>(s, run, list);
        const float *given = GIVEN ? parts_of(s, vb, run.unit, run.row_begin + list, DIM) : NULL;
        float all = 0.0f;
        for (int r0 = 0; r0 < rows; r0 += PART)
            if (GIVEN) all += threadIdx.x < DIM ? given[r0 / PART * DIM + threadIdx.x] : 0.0f;
            else if (s.a.vec_q) all += sum_part<T, CHUNKS, true>(s, run, list, r0, &m.part[0][0]);
            else all += sum_part<T, CHUNKS, false>(s, run, list, r0, &m.part[0][0]);
        if (threadIdx.x < DIM) m.mean[list][threadIdx.x] = all / (float)rows;
    }
    __syncthreads();
}

/* A block writes the sum of PART rows of one list row; rows are aligned. */
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 3) select_sum_parts(const __grid_constant__ select_kernel s)
{
    typedef shape<CHUNKS> sh;
    __shared__ float part[sh::ROWS * sh::DIM];
    const int64_t vb = blockIdx.z, row = blockIdx.x / (unsigned)s.parts;
    const int i = (int)(blockIdx.x - row * s.parts);
    list_run<T> run;
    if (!find_run<T>(s, vb, row, 1, &run)) return; /* varlen: past the last tile */
    if (i * PART >= rows_of<T>(s, run, 0)) return;
    const float sum = sum_part<T, CHUNKS, true>(s, run, 0, i * PART, part);
    if (threadIdx.x < sh::DIM) parts_of(s, vb, run.unit, row, sh::DIM)[i * sh::DIM + threadIdx.x] = sum;
}

/* The scores of entries [e0, e0 + STEP), as far as a list goes to `end`; seen[l]: entries that list l's last
 * query sees. All threads call. */
template <typename T, int CHUNKS, int LISTS, bool VEC>
__device__ __forceinline__ void score_step(const select_kernel &s, const list_run<T> &run,
                                           memory<CHUNKS, LISTS> &m, int e0, int end,
                                           const int (&seen)[LISTS])
{
    typedef shape<CHUNKS> sh;
    /* Chunks in flight; loads of single elements take more registers. */
    constexpr int AT_ONCE = (LISTS > 1 ? 2 : 4) / (VEC ? 1 : 2), GROUPS = THREADS / LANES;
    const attend_kernel &a = s.a;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES, nk = (int)run.seq.nk;
    float mean[LISTS][CHUNKS][CHUNK];
#pragma unroll
    for (int l = 0; l < LISTS; l++)
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                mean[l][j][c] = l < run.lists ? m.mean[l][(lane + j * LANES) * CHUNK + c] : 0.0f;
    const int last = end - e0 < STEP ? end - e0 : STEP;
    for (int i0 = 0; i0 < last; i0 += AT_ONCE * GROUPS) {
        float dot[AT_ONCE][LISTS] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int e = e0 + i0 + i * GROUPS + first;
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                const int column = (lane + j * LANES) * CHUNK;
                chunk x = {};
                if (e < nk && column < a.dim_k) x = load_chunk<T>(run.k + e * a.k.s[1] + column, VEC);
#pragma unroll
                for (int l = 0; l < LISTS; l++)
#pragma unroll
                    for (int c = 0; c < CHUNK; c++) dot[i][l] = fmaf(mean[l][j][c], x.x[c], dot[i][l]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int e = i0 + i * GROUPS + first;
#pragma unroll
            for (int l = 0; l < LISTS; l++) {
                float sum = dot[i][l];
#pragma unroll
                for (int w = 1; w < LANES; w *= 2) sum += __shfl_xor_sync(~0u, sum, w);
                if (lane == 0) m.scores[l][e] = e0 + e < seen[l] ? sum * a.scale : -INFINITY;
            }
        }
    }
}

__device__ __forceinline__ own_groups open_groups(const select_kernel &s, const sequence &seq, int64_t q0,
                                                  const best_list &room)
{
    own_groups x;
    int ignore, seen_first;
    row_keys(s.a, seq, q_end_of(q0, s.a.tile, seq.nq) - 1, &ignore, &x.seen_last);
    row_keys(s.a, seq, q0, &ignore, &seen_first);
    x.keep_last = s.a.causal && x.seen_last > 0 ? (x.seen_last - 1) / GROUP : -1;
    x.keep_first = s.a.causal && seen_first > 0 ? (seen_first - 1) / GROUP : -1;
    x.best = {room.key, room.index, room.size > kept_groups(x) ? room.size - kept_groups(x) : 0};
    return x;
}

/* Offers the groups of a step, by the mean of the scores that the last query sees. */
__device__ __forceinline__ void close_groups(const own_groups &x, int e0, const float *scores)
{
    const int lane = threadIdx.x & 31;
    for (int g = e0 / GROUP; g * GROUP < x.seen_last && g * GROUP < e0 + STEP; g++) {
        const int seen = x.seen_last - g * GROUP < GROUP ? x.seen_last - g * GROUP : GROUP;
        float sum = 0.0f;
        for (int j = lane; j < seen; j += 32) sum += scores[g * GROUP - e0 + j];
        for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
        if (g != x.keep_last && g != x.keep_first) offer(x.best, lane == 0, sum / (float)seen, g, lane);
    }
}

/* Fills the lists of a run. All threads call. */
template <typename T, int CHUNKS, int LISTS, bool GIVEN>
__device__ __forceinline__ void fill_lists(const select_kernel &s, const list_run<T> &run,
                                           memory<CHUNKS, LISTS> &m, int64_t vb)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const list_tail<LISTS> lists(&m + 1, s.rule.k + s.c);
    const bool mine = warp < run.lists;
    const int64_t q0 = run.q_first + (int64_t)(mine ? warp : 0) * s.a.tile;
    const contest in = find_contest(s, run.seq.nq, q0);
    const best_list best = lists.list(warp, 0, in.size);
    int seen[LISTS], end = 0;
#pragma unroll
    for (int l = 0; l < LISTS; l++) {
        const int64_t last = q_end_of(run.q_first + (int64_t)l * s.a.tile, s.a.tile, run.seq.nq) - 1;
        int ignore;
        seen[l] = 0;
        if (l >= run.lists) continue;
        row_keys(s.a, run.seq, last, &ignore, &seen[l]);
        end = (int)mask_blocks_seen(s.a.causal != 0, run.seq.nq, last, s.select_block);
    }
    if (mine)
        for (int i = lane; i < lists.each; i += 32) best.key[i] = 0;
    find_means<T, CHUNKS, LISTS, GIVEN>(s, run, m, vb);
    const own_groups groups = open_groups(s, run.seq, q0, lists.list(warp, s.rule.k, s.c));
    for (int e0 = 0; e0 < end; e0 += STEP) {
        if (s.a.vec_k) score_step<T, CHUNKS, LISTS, true>(s, run, m, e0, end, seen);
        else score_step<T, CHUNKS, LISTS, false>(s, run, m, e0, end, seen);
        __syncthreads();
        if (mine) {
            if (in.size <= 32)
                close_many<4, false>(s, in, best, e0, STEP, m.scores[warp], m.candidates[warp]);
            else close_blocks(s, in, best, e0, STEP, m.scores[warp]);
            if (s.c > 0) close_groups(groups, e0, m.scores[warp]);
        }
        __syncthreads();
    }
    if (!mine) return;
    write_blocks(s, in, best, vb, run.unit, run.row_begin + warp);
    if (s.c > 0) write_groups(s, groups, vb, run.unit, run.row_begin + warp);
}

/* A block owns LISTS consecutive list rows. Of varlen tensors they may lie in several sequences; those of
 * each sequence are filled in turn. */
template <typename T, int CHUNKS, int LISTS, bool GIVEN>
__global__ void __launch_bounds__(THREADS, 2) select_mean(const __grid_constant__ select_kernel s)
{
    extern __shared__ __align__(128) char smem[];
    memory<CHUNKS, LISTS> &m = *(memory<CHUNKS, LISTS> *)smem;
    const int64_t vb = blockIdx.z, row0 = ((int64_t)gridDim.x - 1 - blockIdx.x) * LISTS; /* longest first */
    for (int done = 0; done < LISTS;) {
        list_run<T> run;
        if (row0 + done >= s.list_rows) return;
        if (!find_run<T>(s, vb, row0 + done, LISTS - done, &run)) { /* varlen: rows past the last tile */
            if (threadIdx.x < 32) pad_lists(s, vb, blockIdx.y, row0 + done, row0 + LISTS);
            return;
        }
        fill_lists<T, CHUNKS, LISTS, GIVEN>(s, run, m, vb);
        done += run.lists;
        __syncthreads();
    }
}

template <typename T, int CHUNKS, int LISTS, bool GIVEN>
static quern_status launch(const select_kernel &s, int64_t views, const launcher &to)
{
    const dim3 grid((unsigned)((s.list_rows + LISTS - 1) / LISTS), (unsigned)s.a.units, (unsigned)views);
    return launch_shared(to, select_mean<T, CHUNKS, LISTS, GIVEN>, grid, THREADS,
                         sizeof(memory<CHUNKS, LISTS>) + list_tail<LISTS>::bytes(s.rule.k + s.c), "select",
                         s);
}

/* The sums by a kernel of their own, then the lists. */
template <typename T, int CHUNKS>
static quern_status launch_both(const select_kernel &s, int64_t views, const launcher &to)
{
    const dim3 grid((unsigned)(s.list_rows * s.parts), (unsigned)s.a.units, (unsigned)views);
    select_sum_parts<T, CHUNKS><<<grid, THREADS, 0, to.stream>>>(s);
    const quern_status status = LAUNCHED("select: sums of rows");
    return status != QUERN_OK ? status : launch < T, CHUNKS, CHUNKS == 2 ? 4 : 1, true > (s, views, to);
}

/* Four lists share the entries that a block reads where there are blocks enough. */
template <typename T> static quern_status run(const select_kernel &s, int64_t views, const launcher &to)
{
    enum { MANY = 8192 };
    const bool many = s.list_rows * s.a.units * views >= MANY;
    if (s.sums != NULL && s.a.vec_q && to.most == NULL)
        return s.a.dim_k > 128 ? launch_both<T, 4>(s, views, to) : launch_both<T, 2>(s, views, to);
    if (s.a.dim_k > 128) return launch<T, 4, 1, false>(s, views, to);
    if (many) return launch<T, 2, 4, false>(s, views, to);
    return s.a.dim_k > 64 ? launch<T, 2, 1, false>(s, views, to) : launch<T, 1, 1, false>(s, views, to);
}

} // namespace select_by_mean

#endif
