/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend.cuh - what the attention kernels, forward and backward, share: the parameters, which keys a row
 * sees, and the two streams that every mask reduces to.
 *
 * Rows. A unit is the g query heads that read one key/value head or, with head-scope lists, one head. Row r
 * of a sequence and unit is query r / hs, head r % hs. Neighbouring rows see nearly the same keys, so the
 * heads of a unit share every K/V tile and the diagonal wastes little.
 *
 * Keys. A row sees an interval [lo, hi) of key indices (causal, window, compressed visibility), met with a
 * stream of key slots: slot s of a range is key first + s; slot s of a list is offset s % lb of listed
 * block s / lb. Lists are cleaned first (padding, repeats, entries out of range or wholly in the future
 * are dropped) and sorted, so any list is safe and its order means nothing.
 */
#ifndef QUERN_CUDA_ATTEND_ATTEND_CUH
#define QUERN_CUDA_ATTEND_ATTEND_CUH

#include "common/nonfinite.cuh"

#include <math.h>

struct attend_kernel {
    seqs sq;
    view4 q, k, v, o, d_o, d_q, d_k, d_v;
    view3 lse, delta, row_scale;
    int32_t heads, kv_heads, group; /* H, Hkv, g */
    int32_t hs, units;              /* heads of a unit, and how many units there are */
    int32_t dim_k, dim_v;
    float scale, scale_log2;
    int32_t mask, causal, visibility;
    int64_t window, query_offset, block_size, stride;
    const int32_t *list;
    int64_t list_stride[3];
    int32_t list_k, tile, list_block;
    const int32_t *inverse_start, *inverse_tile; /* backward by key: block -> tiles */
    int64_t inverse_entries;                     /* of one (batch view, unit) pair */
    fast_div by_hs, by_block, by_tile_rows;      /* hs, list_block, tile * hs */
    int32_t splits;                              /* backward by key, not listed: shares of the rows */
    bool tiles_shared; /* of a sequence's tiles; a share that sees nothing of a piece writes nothing there */
    bool short_first;  /* the first of these shares have few tiles */
    const int32_t *item_start,
        *slot_start; /* listed: work items and partial sums of each block (backward/inverse.cu) */
    int64_t item_rows;
    float *part; /* partial dK, dV */
    bool vec_q, vec_k, vec_v, vec_o, vec_do;
    bool f32_dq, f32_dkv, add_q, add_k, add_v;
    const int32_t *item_at; /* the items in the order of their launch; NULL: in their own */
};

__host__ __device__ __forceinline__ key_mask mask_of(const attend_kernel &a)
{
    return {a.mask, a.causal != 0, a.visibility, a.window, a.query_offset, a.block_size, a.stride};
}

/* The interval [lo, hi) of keys that query `query` of `seq` sees. */
__device__ __forceinline__ void row_keys(const attend_kernel &a, const sequence &seq, int64_t query, int *lo,
                                         int *hi)
{
    const key_mask mask = mask_of(a);
    const key_range range = mask_keys(&mask, seq.nq, seq.nk, query);
    *lo = (int)range.lo;
    *hi = (int)range.hi;
}

/* The interval [first, end) of queries of `seq` that see key `key`. */
__device__ __forceinline__ void key_queries(const attend_kernel &a, const sequence &seq, int64_t key,
                                            int *first, int *end)
{
    const key_mask mask = mask_of(a);
    const key_range range = mask_queries(&mask, seq.nq, seq.nk, key);
    *first = (int)range.lo;
    *end = (int)range.hi;
}

/* Copies the list of `row` into `clean`, ascending and without what does not count; `flags` is scratch of the
 * same size. No row sees keys at or past `end`. Returns the number kept. All threads of the block call. */
__device__ __forceinline__ int clean_list(const int32_t *row, int k, int lb, int64_t end, int32_t *clean,
                                          int32_t *flags, int32_t *raw)
{
    for (int e = threadIdx.x; e < k; e += blockDim.x) raw[e] = row[e];
    __syncthreads();
    for (int e = threadIdx.x; e < k; e += blockDim.x) {
        const int32_t x = raw[e];
        int keep = x >= 0 && (int64_t)x * lb < end;
        for (int i = 0; keep && i < e; i++) keep = raw[i] != x;
        flags[e] = keep;
    }
    __syncthreads();
    int total = 0;
    for (int e = threadIdx.x; e < k; e += blockDim.x) {
        int at = 0;
        for (int i = 0; i < k; i++) at += flags[i] && raw[i] < raw[e];
        if (flags[e]) clean[at] = raw[e];
    }
    for (int i = 0; i < k; i++) total += flags[i];
    __syncthreads();
    return total;
}

/* Query and head of row `row` of a block whose first row is `rem` rows into query `query`. */
__device__ __forceinline__ void row_place(const attend_kernel &a, int query, int rem, int row, int *n,
                                          int *head)
{
    const int x = rem + row, q = (int)quotient((uint32_t)x, a.by_hs);
    *n = query + q;
    *head = x - q * a.hs;
}

/* The rows that a block of M owns. */
struct row_block {
    sequence seq;
    int query, rem; /* of its first row */
    int rows;       /* how many it has, <= M */
    int kvh, head0;
    const int32_t *list_row;
};

/* The block's rows by its index: M rows of a sequence and unit, or of a tile where lists are shared by tiles.
 * The longest causal rows start first. False for a block without work. */
template <int M> __device__ __forceinline__ bool find_rows(const attend_kernel &a, bool listed, row_block *b)
{
    const int u = blockIdx.y;
    const int64_t piece = (int64_t)gridDim.x - 1 - blockIdx.x;
    int64_t first, end;
    b->list_row = NULL;
    if (listed) {
        const int64_t tile_rows = (int64_t)a.tile * a.hs, per = (tile_rows + M - 1) / M, tile = piece / per;
        int64_t q0;
        if (!piece_at(a.sq, tile, a.tile, 1, &b->seq, &q0)) return false;
        first = q0 * a.hs + (piece - tile * per) * M;
        end = (q0 + a.tile < b->seq.nq ? q0 + a.tile : b->seq.nq) * a.hs;
        const int64_t row = a.sq.cu_q == NULL ? q0 / a.tile : tile;
        b->list_row =
            a.list + b->seq.view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
    } else {
        if (!piece_at(a.sq, piece, M, a.hs, &b->seq, &first)) return false;
        end = b->seq.nq * a.hs;
    }
    b->kvh = a.units == a.heads ? u / a.group : u;
    b->head0 = a.units == a.heads ? u : u * a.group;
    b->query = (int)(first / a.hs);
    b->rem = (int)(first % a.hs);
    b->rows = first + M < end ? M : (int)(end - first);
    return first < end;
}

/* Copies the block's rows of `view` into a tile of M rows; rows that it does not have become zeros. */
template <typename T, int M, int THREADS, int CHUNKS>
__device__ __forceinline__ void load_rows(const attend_kernel &a, const row_block &b, const view4 &view,
                                          int dim, bool vec, uint32_t tile, char *tile_ptr)
{
    const int mine = threadIdx.x % CHUNKS;
    const T *p =
        (const T *)view.p + b.seq.view_b * view.s[0] + b.seq.q0 * view.s[1] + b.head0 * view.s[2] + mine * 8;
    for (int r = threadIdx.x / CHUNKS; r < M; r += THREADS / CHUNKS) {
        int n, head;
        row_place(a, b.query, b.rem, r, &n, &head);
        const bool valid = r < b.rows && mine * 8 < dim;
        load_chunk16<T>(tile, tile_ptr, tile_at<M>(r, mine), valid ? p + n * view.s[1] + head * view.s[2] : p,
                        valid, vec);
    }
}

/* What the rows of a block see: the first key of their slots and how many slots there are, and the bounds
 * that tell which tiles all rows see. `list` is shared memory of three lists; the first becomes the clean
 * one. All threads call. */
struct row_bounds {
    int base, slots, last_lo, first_hi;
};

template <bool LISTED>
__device__ __forceinline__ row_bounds find_bounds(const attend_kernel &a, const row_block &b, int32_t *list)
{
    row_bounds seen;
    int last_hi, n, head;
    row_keys(a, b.seq, b.query, &seen.base, &seen.first_hi);
    row_place(a, b.query, b.rem, b.rows - 1, &n, &head);
    row_keys(a, b.seq, n, &seen.last_lo, &last_hi);
    seen.slots = last_hi - seen.base;
    if (LISTED)
        seen.slots = clean_list(b.list_row, a.list_k, a.list_block, last_hi, list, list + a.list_k,
                                list + 2 * a.list_k) *
                     a.list_block;
    return seen;
}

/* The keys that a thread's two rows see, `row` and that + 8 of the block; none where the block has no such
 * row. */
__device__ __forceinline__ void thread_bounds(const attend_kernel &a, const row_block &b, int row,
                                              int (&lo)[2], int (&hi)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int n, head;
        lo[h] = hi[h] = 0;
        row_place(a, b.query, b.rem, row + h * 8, &n, &head);
        if (row + h * 8 < b.rows) row_keys(a, b.seq, n, &lo[h], &hi[h]);
    }
}

/* Where a thread's chunk of the block's keys and values stands in their first row. */
template <typename T> struct key_rows {
    const T *k, *v;
    bool in_k, in_v;
};

template <typename T, int CHUNKS>
__device__ __forceinline__ key_rows<T> find_key_rows(const attend_kernel &a, const row_block &b)
{
    const int column = threadIdx.x % CHUNKS * 8;
    return {(const T *)a.k.p + b.seq.view_b * a.k.s[0] + b.seq.k0 * a.k.s[1] + b.kvh * a.k.s[2] + column,
            (const T *)a.v.p + b.seq.view_b * a.v.s[0] + b.seq.k0 * a.v.s[1] + b.kvh * a.v.s[2] + column,
            column < a.dim_k, column < a.dim_v};
}

/* Copies K and V of slots [slot0, slot0 + 64) into rows at_row ... of their tiles. Slots that are consecutive
 * keys inside the sequence, as nearly all are, need no check of each. `column` gets a list's keys. `k`, `v`
 * stand at this thread's chunk. */
template <typename T, int ROWS, int THREADS, int CHUNKS, bool LISTED>
__device__ __forceinline__ void load_slots(const attend_kernel &a, const T *k, const T *v, bool in_k,
                                           bool in_v, int nk, int base, int slots, const int32_t *list,
                                           int slot0, int at_row, uint32_t ak, uint32_t av, char *sk,
                                           char *sv, int32_t *column)
{
    constexpr int STEP = THREADS / CHUNKS;
    const int mine = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    int start = base + slot0;
    bool run = slot0 + 64 <= slots && a.vec_k && a.vec_v;
    if (LISTED) {
        const int e = (int)quotient((uint32_t)slot0, a.by_block), off = slot0 - e * a.list_block;
        run = run && off + 64 <= a.list_block;
        if (run) start = list[e] * a.list_block + off;
        run = run && start + 64 <= nk;
    }
    if (run) {
        const T *pk = k + (start + row0) * a.k.s[1], *pv = v + (start + row0) * a.v.s[1];
        const int64_t dk = STEP * a.k.s[1], dv = STEP * a.v.s[1];
#pragma unroll
        for (int i = 0; i < 64 / STEP; i++, pk += dk, pv += dv) {
            const uint32_t to = STEP % 8 == 0 ? tile_at<ROWS>(at_row + row0, mine) + i * STEP * 128
                                              : tile_at<ROWS>(at_row + row0 + i * STEP, mine);
            cp_async16(ak + to, pk, in_k);
            cp_async16(av + to, pv, in_v);
        }
        if (LISTED && threadIdx.x < 64) column[threadIdx.x] = start + threadIdx.x;
        return;
    }
    for (int r = row0; r < 64; r += STEP) {
        const int slot = slot0 + r;
        int key = nk;
        if (LISTED) {
            const int e = (int)quotient((uint32_t)slot, a.by_block);
            if (slot < slots) key = list[e] * a.list_block + (slot - e * a.list_block);
            if (mine == 0) column[r] = key;
        } else if (slot < slots) {
            key = base + slot;
        }
        const bool in = key < nk;
        const uint32_t to = tile_at<ROWS>(at_row + r, mine);
        load_chunk16<T>(ak, sk, to, in ? k + key * a.k.s[1] : k, in && in_k, a.vec_k);
        load_chunk16<T>(av, sv, to, in ? v + key * a.v.s[1] : v, in && in_v, a.vec_v);
    }
}

/* Whether every row of a block sees every key of slots [slot0, slot0 + KEYS), given the bounds of its rows.
 */
template <int KEYS, bool LISTED>
__device__ __forceinline__ bool all_seen(const attend_kernel &a, const int32_t *list, int base, int slot0,
                                         int slots, int last_lo, int first_hi)
{
    if (slot0 + KEYS > slots) return false;
    if (!LISTED) return base + slot0 >= last_lo && base + slot0 + KEYS <= first_hi;
    const int end = (int)quotient((uint32_t)(slot0 + KEYS - 1), a.by_block);
    for (int e = (int)quotient((uint32_t)slot0, a.by_block); e <= end; e++)
        if ((int64_t)(list[e] + 1) * a.list_block > first_hi) return false;
    return true;
}

/* Blocks of M rows, for find_rows(). */
static inline dim3 row_grid(const attend_args *args, const attend_kernel &a, int m, bool listed)
{
    const int64_t pieces = listed
                               ? piece_bound(args->seqs, a.tile, 1) * (((int64_t)a.tile * a.hs + m - 1) / m)
                               : piece_bound(args->seqs, m, a.hs);
    return dim3((unsigned)pieces, (unsigned)a.units);
}

/* Whether a tile of a list's queries fits one warp's rows. */
static inline bool few_rows(const attend_kernel &a)
{
    return (int64_t)a.tile * a.hs <= 16;
}

struct attend_launch {
    attend_kernel kernel;
    quern_dtype dtype;
    int dim;  /* padded head dim of the kernel: 64, 128 or 256 */
    int keys; /* the backward of a range: those of a piece */
    bool listed;
    float2 *norm; /* the backward of f32, [B,H,N]: P = exp((S - x) scale - y) */
};
attend_launch attend_launch_of(const attend_args *args);

/* The inverted index of a list (backward/inverse.cu): which tiles chose each block, in tile order, and how
 * the rows behind each block are cut into items of item_rows, so that no block that everybody chose holds up
 * the rest, and in which order the items are launched.
 * A block of several items gets a slot of partial sums for each. Bounds on both, for grids and workspace. */
size_t inverse_workspace(const attend_args *args);
int64_t inverse_items(const attend_args *args);
int64_t inverse_slots(const attend_args *args);
int64_t inverse_item_rows(const attend_args *args);
quern_status inverse_build(const stage_exec *exec, const attend_args *args, attend_kernel *kernel,
                           void *workspace);

#endif
