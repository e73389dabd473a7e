/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* shares.cu - how the rows of dK and dV are cut into shares where there are few keys, and the sum of
 * the shares' partial gradients, in order. Limit of the sum: its bytes over the copy rate. */
#include "attend/backward/key_block.cuh"

enum { THREADS = 256, CHUNKS = 4 /* blocks of threads for a listed block */ };
enum {
    FILL = 528, /* blocks of threads that fill a large GPU four times */
    FINER = 4,  /* times as many for compressed entries */
    MOST_SHARES = 16 * FINER
};
static_assert(MOST_SHARES <= 64, "a bit and a thread each");

/* Lists the shares that left something of a piece in their order, and returns how many: where a sequence has
 * fewer tiles than there are shares, some between others have none. All threads of the block call. */
__device__ __forceinline__ int left_shares(const attend_kernel &a, const key_block &b, int keys,
                                           uint8_t (&left)[MOST_SHARES])
{
    __shared__ unsigned long long seen_by;
    const int s = threadIdx.x;
    if (s == 0) seen_by = 0;
    __syncthreads();
    bool leaves = s < b.shares;
    if (leaves && a.tiles_shared) {
        const tile_range tiles =
            tiles_of_share(a, b.seq, keys, tiles_that_see(a, b.seq, b.key0, b.key_end - 1), s);
        leaves = tiles.from < tiles.to;
    }
    if (leaves) atomicOr(&seen_by, 1ull << s);
    __syncthreads();
    if (leaves) left[__popcll(seen_by & ((1ull << s) - 1))] = (uint8_t)s;
    __syncthreads();
    return __popcll(seen_by);
}

/* Grid as that of the shares, with gridDim.z blocks for all of them, each with a part of the keys. A thread
 * has four columns of a key. */
template <typename T, bool LISTED>
__global__ void __launch_bounds__(THREADS)
    attend_backward_sum(const __grid_constant__ attend_kernel a, int64_t pieces, int keys)
{
    if (LISTED && a.item_start[blockIdx.x + 1] - a.item_start[blockIdx.x] <= 1) return;
    key_block b;
    if (LISTED ? !find_block(a, blockIdx.x, &b) : !find_range(a, blockIdx.x, pieces, keys, &b)) return;
    if (b.shares <= 1) return;
    __shared__ uint8_t left_by[MOST_SHARES];
    const int shares = LISTED ? b.shares : left_shares(a, b, keys, left_by);
    const int width = a.dim_k + a.dim_v, wide = width / 4, per = (keys + gridDim.z - 1) / gridDim.z,
              first = (int)blockIdx.z * per, left = b.key_end - b.key0 - first,
              mine = left < per ? left : per;
    const int64_t slot = b.slot * keys * width, next = (int64_t)keys * width;
    for (int i = threadIdx.x; i < mine * wide; i += THREADS) {
        const int r = first + i / wide, c = i % wide * 4;
        const int64_t row = b.seq.k0 + b.key0 + r;
        const float *from = a.part + slot + r * width + c;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int s = 0; s < shares; s++) {
            const float4 x = __ldcs((const float4 *)(from + (LISTED ? s : left_by[s]) * next));
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        const bool of_k = c < a.dim_k, add = of_k ? a.add_k : a.add_v;
        const view4 &to = of_k ? a.d_k : a.d_v;
        const int64_t at =
            b.seq.view_b * to.s[0] + row * to.s[1] + b.kvh * to.s[2] + (of_k ? c : c - a.dim_k);
        store_pair<T>(to.p, at, sum.x, sum.y, a.f32_dkv, add);
        store_pair<T>(to.p, at + 2, sum.z, sum.w, a.f32_dkv, add);
    }
}

int64_t backward_pieces(const attend_args *args, int keys)
{
    if (present(args->list)) {
        const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
        return args->k.shape[0] * args->k.shape[2] * (args->seqs.n_kv / block + args->seqs.batch + 1);
    }
    stage_seqs flipped = args->seqs;
    flipped.n_q = args->seqs.n_kv;
    return piece_bound(flipped, keys, 1);
}

int backward_keys(const attend_args *args)
{
    return args->q.shape[3] > 128 || args->v.shape[3] > 128 ? 64 : 128;
}

/* Enough to fill a large GPU four times, where there are rows enough. Compressed entries are few, and all
 * rows see the first ones: smaller shares shorten the wait for the last one. */
int backward_splits(const attend_args *args, int keys)
{
    if (present(args->list)) return 1;
    const int64_t blocks = backward_pieces(args, keys) * args->k.shape[2],
                  rows = args->seqs.n_q * (args->q.shape[2] / (args->k.shape[2] > 0 ? args->k.shape[2] : 1));
    const int64_t finer = args->mask == ATTEND_COMPRESSED ? FINER : 1, most = MOST_SHARES / FINER * finer;
    int64_t splits = blocks > 0 ? FILL * finer / blocks : 1;
    if (splits > rows / 1024) splits = rows / 1024;
    return splits < 2 ? 1 : splits > most ? (int)most : (int)splits;
}

/* Of compressed entries the first rows see few. The last shares are up to three times as long as even ones:
 * there must be so many blocks of threads that the others do not wait for these. */
bool backward_short_first(const attend_args *args, int keys)
{
    const int64_t blocks = backward_pieces(args, keys) * args->k.shape[2];
    return args->mask == ATTEND_COMPRESSED && args->causal &&
           blocks * backward_splits(args, keys) >= 3 * FILL;
}

size_t backward_shares_bytes(const attend_args *args, int keys)
{
    const size_t row = (size_t)(args->q.shape[3] + args->v.shape[3]) * 4;
    if (present(args->list)) {
        const size_t block = args->mask == ATTEND_COMPRESSED ? 128 : (size_t)args->block_size;
        return (size_t)inverse_slots(args) * block * row + 15;
    }
    const int splits = backward_splits(args, keys);
    return splits > 1 ? (size_t)(backward_pieces(args, keys) * args->k.shape[2] * splits * keys) * row + 15
                      : 0;
}

template <typename T>
static void start_sum(const attend_kernel &a, bool listed, int64_t pieces, int keys, cudaStream_t stream)
{
    if (listed) {
        attend_backward_sum<T, true>
            <<<dim3((unsigned)pieces, 1, CHUNKS), THREADS, 0, stream>>>(a, pieces, a.list_block);
    } else {
        const unsigned parts = (unsigned)(keys * ((a.dim_k + a.dim_v) / 4) + THREADS - 1) / THREADS;
        attend_backward_sum<T, false>
            <<<dim3((unsigned)pieces, (unsigned)a.kv_heads, parts), THREADS, 0, stream>>>(a, pieces, keys);
    }
}

quern_status backward_sum_shares(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    const int64_t pieces = backward_pieces(args, l.keys);
    if (pieces == 0 || l.kernel.kv_heads == 0) return QUERN_OK;
    if (l.listed ? inverse_slots(args) == 0 : l.kernel.splits <= 1) return QUERN_OK;
    if (l.dtype == QUERN_BF16) start_sum<bf16>(l.kernel, l.listed, pieces, l.keys, stream);
    else start_sum<f16>(l.kernel, l.listed, pieces, l.keys, stream);
    return LAUNCHED("attend_backward: sum of shares");
}
