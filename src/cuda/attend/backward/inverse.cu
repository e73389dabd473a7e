/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * inverse.cu - the inverted index of block lists: for every block, the tiles that chose it, in tile order.
 *
 * The rows of a list are cut into a fixed number of chunks. count: how often each chunk names each block
 * (integer atomics: the sum does not depend on their order). scan: exclusive sums over chunks, then over
 * blocks. fill: one warp a chunk walks its rows in order, so that each block's tiles come out ascending.
 * A row's entries count once each, and only those inside the sequence whose first key some query of the
 * tile may see. Varlen: sequence b's blocks start at index floor(k0 / lb) + b, so those of two sequences
 * never overlap.
 *
 * items: a block's rows, over all units of its key/value head, are cut into items of item_rows. item_start
 * counts the items, and slot_start the partial sums, of the blocks before one, in the order (view, kv head,
 * index).
 *
 * order: items are launched in the order of their first rows, those of a key/value head together. Those that
 * run beside each other then walk the same rows at the same time, and L2 serves what several blocks chose. In
 * the order of the blocks, dK and dV of T = 1, 64k tokens of 64/4 heads, read 30 GB from memory.
 */
#include "attend/backward/key_block.cuh"

enum { MAX_CHUNKS = 256 };

struct inverse_shape {
    int64_t lists;    /* (batch view, unit) pairs */
    int64_t rows;     /* list rows of one pair */
    int64_t capacity; /* blocks of one pair, + 1 */
    int64_t chunks, chunk_rows;
};

static inverse_shape shape_of(const attend_args *args)
{
    inverse_shape s;
    const int64_t lb = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    s.lists = args->list.shape[0] * args->list.shape[1];
    s.rows = args->list.shape[2];
    s.capacity = args->seqs.n_kv / lb + args->seqs.batch + 1;
    s.chunk_rows = (s.rows + MAX_CHUNKS - 1) / MAX_CHUNKS;
    if (s.chunk_rows < 64) s.chunk_rows = 64;
    s.chunks = (s.rows + s.chunk_rows - 1) / s.chunk_rows;
    return s;
}

struct inverse_memory {
    int32_t *count, *start, *tile, *item_start, *slot_start;
    int32_t *item_at; /* the items in the order of their launch */
    int32_t *bucket;  /* [pair][chunk]: items whose first row is there; then where the next of them goes */
};

static int64_t places_of(const attend_args *args)
{
    return args->list.shape[0] * args->k.shape[2] * shape_of(args).capacity;
}

/* Rows behind all blocks together, at most. */
static int64_t rows_of(const attend_args *args)
{
    const inverse_shape s = shape_of(args);
    const int64_t heads = args->list.shape[1] > 0 ? args->q.shape[2] / args->list.shape[1] : 1;
    return s.lists * s.rows * args->list.shape[3] * (args->tile > 0 ? args->tile : 1) * heads;
}

/* Whether items are launched in the order of their rows: these are of one list each, and L2 does not hold
 * them all. */
static bool by_rows(const attend_args *args)
{
    const int64_t *q = args->q.shape, l2_bytes = 32 << 20;
    return args->list.shape[1] == args->k.shape[2] &&
           q[0] * q[1] * q[2] * (q[3] + args->v.shape[3]) * 2 > l2_bytes;
}

int64_t inverse_item_rows(const attend_args *args)
{
    const int64_t least = 4096,
                  most = by_rows(args) ? 8192 : 2048, /* longer items beside each other lose step */
        share = (rows_of(args) / most + 63) / 64 * 64;
    return share > least ? share : least;
}

/* A block with more rows than an item's has at most twice rows / item_rows items. */
int64_t inverse_slots(const attend_args *args)
{
    const int64_t rows = rows_of(args), item = inverse_item_rows(args);
    return rows > item ? 2 * (rows / item) + 2 : 0;
}

int64_t inverse_items(const attend_args *args)
{
    return places_of(args) + inverse_slots(args);
}

static inverse_memory carve(const attend_args *args, void *workspace, size_t *bytes)
{
    const inverse_shape s = shape_of(args);
    const size_t count = (size_t)(s.lists * s.chunks * s.capacity), start = (size_t)(s.lists * s.capacity);
    int32_t *p = (int32_t *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    const size_t tile = (size_t)(s.lists * s.rows * args->list.shape[3]),
                 places = (size_t)places_of(args) + 1, items = (size_t)inverse_items(args),
                 buckets = (size_t)(s.lists * s.chunks);
    *bytes = 4 * (count + start + tile + 2 * places + items + buckets) + 15;
    inverse_memory m = {p, p + count, p + count + start};
    m.item_start = m.tile + tile;
    m.slot_start = m.item_start + places;
    m.item_at = m.slot_start + places;
    m.bucket = m.item_at + items;
    return m;
}

size_t inverse_workspace(const attend_args *args)
{
    size_t bytes;
    carve(args, NULL, &bytes);
    return bytes;
}

/* Sequence and tile of list row `row`; false for an unused row. */
__device__ bool list_place(const attend_kernel &a, int64_t view_b, int64_t row, sequence *seq, int64_t *q0)
{
    if (a.sq.cu_q == NULL) {
        *seq = sequence_at(a.sq, view_b);
        *q0 = row * a.tile;
        return *q0 < seq->nq;
    }
    return piece_at(a.sq, row, a.tile, 1, seq, q0);
}

/* The block index of entry e of a list row, or -1 where it does not count. */
__device__ int64_t entry_block(const attend_kernel &a, const int32_t *list, int e, const sequence &seq,
                               int64_t q0)
{
    const int32_t x = list[e];
    const int64_t last = (q0 + a.tile < seq.nq ? q0 + a.tile : seq.nq) - 1;
    int lo, hi;
    row_keys(a, seq, last, &lo, &hi);
    if (x < 0 || (int64_t)x * a.list_block >= hi) return -1;
    for (int i = 0; i < e; i++)
        if (list[i] == x) return -1;
    return (a.sq.cu_q == NULL ? 0 : seq.k0 / a.list_block + seq.b) + x;
}

__global__ void inverse_count(const __grid_constant__ attend_kernel a, int64_t rows, int64_t capacity,
                              int64_t chunk_rows, int32_t *count)
{
    const int64_t pair = blockIdx.y, view_b = pair / a.units, u = pair % a.units;
    const int64_t first = (int64_t)blockIdx.x * chunk_rows,
                  end = first + chunk_rows < rows ? first + chunk_rows : rows;
    int32_t *c = count + (pair * gridDim.x + blockIdx.x) * capacity;
    for (int64_t i = threadIdx.x; i < (end - first) * a.list_k; i += blockDim.x) {
        const int64_t row = first + i / a.list_k;
        sequence seq;
        int64_t q0;
        if (!list_place(a, view_b, row, &seq, &q0)) continue;
        const int32_t *list =
            a.list + view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
        const int64_t block = entry_block(a, list, (int)(i % a.list_k), seq, q0);
        if (block >= 0) atomicAdd(&c[block], 1);
    }
}

/* The sum of `x` over the threads before this one; *total over all. 1024 threads. */
__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t *sums, int32_t *total)
{
    __syncthreads();
    sums[threadIdx.x] = x;
    __syncthreads();
    for (unsigned step = 1; step < blockDim.x; step *= 2) {
        const int32_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += left;
        __syncthreads();
    }
    *total = sums[blockDim.x - 1];
    return sums[threadIdx.x] - x;
}

/* Exclusive sums: over chunks for each block, then over blocks. One block of threads a pair. */
__global__ void inverse_scan(int64_t capacity, int64_t chunks, int32_t *count, int32_t *start)
{
    __shared__ int32_t sums[1024];
    int32_t *c = count + (int64_t)blockIdx.x * chunks * capacity, *s = start + (int64_t)blockIdx.x * capacity;
    int32_t carry = 0, all;
    for (int64_t base = 0; base < capacity; base += blockDim.x) {
        const int64_t block = base + threadIdx.x;
        int32_t total = 0;
        if (block < capacity)
            for (int64_t i = 0; i < chunks; i++) {
                const int32_t n = c[i * capacity + block];
                c[i * capacity + block] = total;
                total += n;
            }
        const int32_t begin = carry + sum_before(total, sums, &all);
        if (block < capacity) s[block] = begin;
        carry += all;
    }
}

__global__ void inverse_cut(const __grid_constant__ attend_kernel a, int64_t places, int64_t capacity,
                            const inverse_memory m)
{
    __shared__ int32_t sums[1024];
    const int units_here = a.units / a.kv_heads;
    int32_t items_before = 0, slots_before = 0, all;
    for (int64_t base = 0; base <= places; base += blockDim.x) {
        const int64_t place = base + threadIdx.x, pair = place / capacity, index = place - pair * capacity;
        int64_t rows = 0;
        if (place < places && index + 1 < capacity)
            for (int u = 0; u < units_here; u++) {
                const int32_t *s = m.start + (pair * units_here + u) * capacity + index;
                rows += (int64_t)(s[1] - s[0]) * a.tile * a.hs;
            }
        const int32_t items = place >= places      ? 0
                              : rows > a.item_rows ? (int32_t)((rows + a.item_rows - 1) / a.item_rows)
                                                   : 1;
        const int32_t item = items_before + sum_before(items, sums, &all);
        items_before += all;
        const int32_t slot = slots_before + sum_before(items > 1 ? items : 0, sums, &all);
        slots_before += all;
        if (place <= places) {
            m.item_start[place] = item;
            m.slot_start[place] = slot;
        }
    }
}

/* Calls visit(item, bucket) for each item of this thread's block of keys; pairs are of one unit each. */
template <typename F>
__device__ __forceinline__ void for_each_item(const attend_kernel &a, int64_t places, int64_t capacity,
                                              const inverse_memory &m, int64_t chunks, int64_t chunk_rows,
                                              F visit)
{
    const int64_t place = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, pair = place / capacity,
                  index = place - pair * capacity;
    if (place >= places) return;
    const int32_t first = m.item_start[place], end = m.item_start[place + 1];
    const int32_t *start = m.start + pair * capacity + index;
    const int64_t entries = index + 1 < capacity ? start[1] - start[0] : 0, rows = (int64_t)a.tile * a.hs;
    key_block b = {};
    if (a.sq.cu_q != NULL) find_block(a, place, &b);
    for (int32_t item = first; item < end; item++) {
        const int64_t entry = (item - first) * a.item_rows / rows;
        int64_t query = b.seq.q0; /* of the sequence; fixed lengths have a pair each */
        if (entry < entries) query += (int64_t)m.tile[pair * a.inverse_entries + start[0] + entry] * a.tile;
        const int64_t chunk = query / (chunk_rows * a.tile);
        visit(item, pair * chunks + (chunk < chunks ? chunk : chunks - 1));
    }
}

__global__ void inverse_count_items(const __grid_constant__ attend_kernel a, int64_t places, int64_t capacity,
                                    const inverse_memory m, int64_t chunks, int64_t chunk_rows)
{
    for_each_item(a, places, capacity, m, chunks, chunk_rows,
                  [&](int32_t, int64_t bucket) { atomicAdd(&m.bucket[bucket], 1); });
}

/* One block of threads. */
__global__ void inverse_scan_items(int64_t buckets, int32_t *bucket)
{
    __shared__ int32_t sums[1024];
    int32_t before = 0, all;
    for (int64_t base = 0; base < buckets; base += blockDim.x) {
        const int64_t i = base + threadIdx.x;
        const int32_t at = before + sum_before(i < buckets ? bucket[i] : 0, sums, &all);
        if (i < buckets) bucket[i] = at;
        before += all;
    }
}

/* The items of a bucket come in any order: none of them writes what another one does. */
__global__ void inverse_order_items(const __grid_constant__ attend_kernel a, int64_t places, int64_t capacity,
                                    const inverse_memory m, int64_t chunks, int64_t chunk_rows)
{
    for_each_item(a, places, capacity, m, chunks, chunk_rows,
                  [&](int32_t item, int64_t bucket) { m.item_at[atomicAdd(&m.bucket[bucket], 1)] = item; });
}

/* Lists of at most 32 entries, of blocks whose places fit shared memory: the entries of a row are loaded a
 * row ahead, and no place waits for memory. */
enum { FILL_MOST = 8192 };

__global__ void inverse_fill_short(const __grid_constant__ attend_kernel a, int64_t rows, int64_t capacity,
                                   int64_t chunk_rows, const int32_t *count, const int32_t *start,
                                   int32_t *tile, int64_t pair_entries)
{
    extern __shared__ int32_t next[];
    const int lane = threadIdx.x;
    const int64_t pair = blockIdx.y, view_b = pair / a.units, u = pair % a.units;
    const int64_t first = (int64_t)blockIdx.x * chunk_rows,
                  end = first + chunk_rows < rows ? first + chunk_rows : rows;
    const int32_t *c = count + (pair * gridDim.x + blockIdx.x) * capacity, *s = start + pair * capacity;
    for (int i = lane; i < capacity; i += 32) next[i] = s[i] + c[i];
    __syncwarp();
    const int32_t *list = a.list + view_b * a.list_stride[0] + u * a.list_stride[1] + lane;
    int32_t *const to = tile + pair * pair_entries;
    int32_t x = -1, ahead = lane < a.list_k && first < end ? list[first * a.list_stride[2]] : -1;
    for (int64_t row = first; row < end; row++) {
        x = ahead;
        ahead = lane < a.list_k && row + 1 < end ? list[(row + 1) * a.list_stride[2]] : -1;
        sequence seq;
        int64_t q0;
        if (!list_place(a, view_b, row, &seq, &q0)) continue;
        const int64_t last = (q0 + a.tile < seq.nq ? q0 + a.tile : seq.nq) - 1;
        int lo, hi;
        row_keys(a, seq, last, &lo, &hi);
        const uint32_t same = __match_any_sync(~0u, x);
        if (x >= 0 && (int64_t)x * a.list_block < hi && (same & ((1u << lane) - 1)) == 0) {
            const int64_t block = (a.sq.cu_q == NULL ? 0 : seq.k0 / a.list_block + seq.b) + x;
            to[next[block]++] = (int32_t)(q0 / a.tile);
        }
        __syncwarp();
    }
}

__global__ void inverse_fill(const __grid_constant__ attend_kernel a, int64_t rows, int64_t capacity,
                             int64_t chunk_rows, int32_t *count, const int32_t *start, int32_t *tile,
                             int64_t pair_entries)
{
    const int64_t pair = blockIdx.y, view_b = pair / a.units, u = pair % a.units;
    const int64_t first = (int64_t)blockIdx.x * chunk_rows,
                  end = first + chunk_rows < rows ? first + chunk_rows : rows;
    int32_t *c = count + (pair * gridDim.x + blockIdx.x) * capacity;
    const int32_t *s = start + pair * capacity;
    for (int64_t row = first; row < end; row++) {
        sequence seq;
        int64_t q0;
        if (!list_place(a, view_b, row, &seq, &q0)) continue;
        const int32_t *list =
            a.list + view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
        for (int e = threadIdx.x; e < a.list_k; e += 32) {
            const int64_t block = entry_block(a, list, e, seq, q0);
            if (block >= 0) tile[pair * pair_entries + s[block] + c[block]++] = (int32_t)(q0 / a.tile);
        }
        __syncwarp();
    }
}

quern_status inverse_build(const stage_exec *exec, const attend_args *args, attend_kernel *kernel,
                           void *workspace)
{
    const inverse_shape s = shape_of(args);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    size_t bytes;
    const inverse_memory m = carve(args, workspace, &bytes);
    kernel->inverse_start = m.start;
    kernel->inverse_tile = m.tile;
    kernel->inverse_entries = s.rows * kernel->list_k;
    kernel->item_start = m.item_start;
    kernel->slot_start = m.slot_start;
    kernel->item_at = NULL;
    kernel->item_rows = inverse_item_rows(args);
    if (s.lists == 0) return QUERN_OK;
    const cudaError_t code =
        cudaMemsetAsync(m.count, 0, (size_t)(s.lists * s.chunks * s.capacity) * 4, stream);
    if (code != cudaSuccess) return cuda_report(code, "inverse: clear");
    const dim3 grid((unsigned)s.chunks, (unsigned)s.lists);
    if (s.rows > 0)
        inverse_count<<<grid, 256, 0, stream>>>(*kernel, s.rows, s.capacity, s.chunk_rows, m.count);
    inverse_scan<<<(unsigned)s.lists, 1024, 0, stream>>>(s.capacity, s.chunks, m.count, m.start);
    if (s.rows > 0 && kernel->list_k <= 32 && s.capacity <= FILL_MOST)
        inverse_fill_short<<<grid, 32, (size_t)s.capacity * sizeof(int32_t), stream>>>(
            *kernel, s.rows, s.capacity, s.chunk_rows, m.count, m.start, m.tile, kernel->inverse_entries);
    else if (s.rows > 0)
        inverse_fill<<<grid, 32, 0, stream>>>(*kernel, s.rows, s.capacity, s.chunk_rows, m.count, m.start,
                                              m.tile, kernel->inverse_entries);
    const int64_t places = places_of(args);
    inverse_cut<<<1, 1024, 0, stream>>>(*kernel, places, s.capacity, m);
    if (by_rows(args) && s.rows > 0) {
        const unsigned blocks = (unsigned)((places + 255) / 256);
        const int64_t buckets = s.lists * s.chunks;
        const cudaError_t cleared = cudaMemsetAsync(m.bucket, 0, (size_t)buckets * 4, stream);
        if (cleared != cudaSuccess) return cuda_report(cleared, "inverse: clear");
        inverse_count_items<<<blocks, 256, 0, stream>>>(*kernel, places, s.capacity, m, s.chunks,
                                                        s.chunk_rows);
        inverse_scan_items<<<1, 1024, 0, stream>>>(buckets, m.bucket);
        inverse_order_items<<<blocks, 256, 0, stream>>>(*kernel, places, s.capacity, m, s.chunks,
                                                        s.chunk_rows);
        kernel->item_at = m.item_at;
    }
    return LAUNCHED("inverse");
}
