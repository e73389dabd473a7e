/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_once.cu - hyper-connections of four copies of 4096 channels in bf16, x read once. A cluster of 16
 * blocks has eight tokens at a time, each block 256 channels of all their copies:
 *
 *   feed    asks for x and f of a tile
 *   sum     a warp a copy: products with fn, which stays in registers
 *   pair    products of copies with copies; one block of the cluster, each in turn, gets the sums of all
 *   weigh   makes the weights of that block's tiles, four lanes a token, and sends them to all blocks
 *   mix     a warp a token: its input and new copies, from x that has stayed in shared memory
 *
 * The norm of the input follows from the products of copies with copies, so no other sums are exchanged. A
 * tile takes 1.1 us at the copy rate, and some 8 from its copy to its stores, most of it the weights': nine
 * tiles of 20 KB a block are on their way. An H200 has room for seven such clusters. Limit: the copy rate.
 */
#include "hopper/products.cuh"
#include "hyper/four/weights.cuh"
#include "hyper/sm90/operand.cuh"
#include "hyper/sm90/weights.cuh"
#include "variants.cuh"

#include <atomic>

namespace sm90_hyper_once
{

using namespace sm90_hyper;

enum {
    BLOCKS = 16, /* of a cluster */
    CHANNELS = 256,
    BOXES = CHANNELS / BOX,
    LINES = TOKENS * LINE, /* bytes of a box of f */
    STAGES = 9,
    GROUP_THREADS = 128,
    SUM_FIRST = GROUP_THREADS, /* the first group feeds, weighs and pairs */
    MIX_FIRST = 2 * GROUP_THREADS,
    THREADS = MIX_FIRST + TOKENS * 32,
    PAIR_FIRST = 2 * 32, /* warps of that group */
    PAIR_THREADS = 2 * 32,
    FEED_REGISTERS = 72,
    OPERAND_REGISTERS = 240,
    MIX_REGISTERS = 96
};
enum { TOKENS_LEAST = 512, TOKENS_MOST = INT32_MAX / 2 };
static_assert((int)CHANNELS == (int)HALF, "boxes are those of a half of the backward's panel");

/* A block's sums of a tile. */
struct tile_sums {
    float product[PRODUCTS], pair[TOKENS][COPIES][COPIES];
};
enum { SUMS_CHUNKS = sizeof(tile_sums) / 16, PRODUCT_CHUNKS = PRODUCTS / 4 };

/* What a token's copies are multiplied by; an odd number of 16 bytes. */
struct __align__(16) token_factors
{
    float weight[WEIGHTS], scale, unused[3];
};

struct shared {
    struct stage {
        char x[BOXES][BOX_BYTES], f[BOXES][LINES];
    } rows[STAGES];
    tile_sums sums[BLOCKS]; /* of the tile whose weights this block makes */
    float parts[2][COPIES][PRODUCTS], pairs[2][TOKENS][COPIES][COPIES];
    token_factors made[TOKENS], factors[STAGES][TOKENS];
    float norm[CHANNELS];
    ring<STAGES> tiles;
    stage_barriers<STAGES> weighed;
    stage_barriers<1> summed;
};
static_assert(sizeof(shared) <= 227 * 1024, "a block has room");

struct row_maps {
    CUtensorMap x, f;
};

/* A cluster's tiles: first, first + stride, ... */
struct tile_walk {
    int64_t first, stride;
    int count, rank;
    __device__ __forceinline__ int64_t token(int n) const { return (first + n * stride) * TOKENS; }
};

__device__ __forceinline__ tile_walk walk_of(const four_params &p)
{
    tile_walk w;
    const int64_t tiles = (p.tokens + TOKENS - 1) / TOKENS;
    w.rank = blockIdx.x % BLOCKS;
    w.first = blockIdx.x / BLOCKS;
    w.stride = gridDim.x / BLOCKS;
    w.count = w.first < tiles ? (int)((tiles - w.first + w.stride - 1) / w.stride) : 0;
    return w;
}

template <bool OUT>
__device__ __forceinline__ void feed_tiles(const row_maps &maps, shared &m, const tile_walk &walk)
{
    for (int n = 0; n < walk.count; n++) {
        const auto at = ring_place<STAGES>::of(n);
        const int token = (int)walk.token(n), box = walk.rank * BOXES;
        auto &stage = m.rows[at.stage];
        m.tiles.wait_free(at);
        m.weighed.expect(at, sizeof(m.made));
        const uint32_t bar = m.tiles.expect(at, OUT ? sizeof(stage) : sizeof(stage.x));
        tma_load(smem_address(stage.x), maps.x, bar, 0, 0, token, box);
        if (OUT) tma_load(smem_address(stage.f), maps.f, bar, 0, 0, token, box);
    }
}

/* fn of a warp's copy at the block's channels. */
__device__ __forceinline__ void load_fn(const four_params &p, int copy, int rank, fn_operand &fn)
{
    const int lane = threadIdx.x % 32;
    const float *const from =
        p.fn + lane / 4 * p.fn_row + copy * p.width + rank * CHANNELS + lane % 4 * CHUNK;
    static_assert((int)CHUNKS * (int)DEPTH == (int)CHANNELS, "a warp has a copy");
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) load_step(p, from + c * DEPTH + s * 4, fn.a[c][s]);
}

/* Of the block's sums of a tile the 16 bytes number i. */
__device__ __forceinline__ float4 tile_sum(const shared &m, int turn, int i)
{
    if (i >= PRODUCT_CHUNKS) return ((const float4 *)m.pairs[turn])[i - PRODUCT_CHUNKS];
    const float4 *const products = (const float4 *)m.parts[turn] + i;
    float4 sum = products[0];
#pragma unroll
    for (int copy = 1; copy < COPIES; copy++) {
        const float4 x = products[copy * PRODUCT_CHUNKS];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    return sum;
}

/* A barrier of sum and pair. Not the aligned form, named_sync(): they execute it at two places. */
__device__ __forceinline__ void products_sync()
{
    asm volatile("barrier.sync 1, %0;" ::"n"(GROUP_THREADS + PAIR_THREADS) : "memory");
}

/* Products of copies with fn, a warp a copy; then sends the block's sums of a tile to the block that makes
 * its weights. */
__device__ __forceinline__ void sum_tiles(const four_params &p, shared &m, const tile_walk &walk)
{
    const int thread = threadIdx.x - SUM_FIRST, warp = thread / 32, lane = thread % 32;
    const uint32_t own = chunk_at(lane / 4, warp, lane % 4);
    fn_operand fn;
    ring_place<STAGES> at;
    load_fn(p, warp, walk.rank, fn);
#pragma unroll 1
    for (int n = 0; n < walk.count; n++) {
        float sum[ROW_TILES][1][4] = {};
        m.tiles.wait_full(at);
        const uint32_t stage = stage_address(m.rows, at.stage) + own;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
            const uint4 x = load_shared16(stage + c / 2 * BOX_BYTES),
                        y = load_shared16((stage ^ 64) + c / 2 * BOX_BYTES);
            multiply_chunk(sum, fn, c, x);
            multiply_chunk(sum, fn, c + 1, y);
        }
        __syncwarp();
        if (lane < READER_ARRIVALS) m.tiles.give_back(at);
        at.advance();
        leave_products(m.parts[n % 2][warp], sum);
        products_sync();
        if (thread < SUMS_CHUNKS)
            cluster_send(cluster_address(smem_address(&m.sums[walk.rank]) + thread * 16, n % BLOCKS),
                         tile_sum(m, n % 2, thread), cluster_address(smem_address(m.summed.of), n % BLOCKS));
    }
}

/* Products of a token's copies with each other, four tokens a warp. Two tokens' copies are the rows and the
 * columns of a product. */
__device__ __forceinline__ void pair_tiles(shared &m, const tile_walk &walk)
{
    enum { AT_ONCE = 2 }; /* products */
    const int thread = threadIdx.x - PAIR_FIRST, lane = thread % 32, copy = lane / 4 % COPIES,
              first = thread / 32 * 2 * AT_ONCE + lane / 16;
    uint32_t from[AT_ONCE];
    ring_place<STAGES> at;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) from[i] = chunk_at(first + 2 * i, copy, lane % 4);
#pragma unroll 1
    for (int n = 0; n < walk.count; n++) {
        float pair[AT_ONCE][STEPS][4] = {};
        m.tiles.wait_full(at);
        const uint32_t stage = stage_address(m.rows, at.stage);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const uint4 x = load_shared16(stage + (from[i] ^ c % 2 << 6) + c / 2 * BOX_BYTES);
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    const uint32_t a[] = {word_of(x, 2 * s), 0, word_of(x, 2 * s + 1), 0};
                    mma16816<bf16>(pair[i][s], a, a[0], a[2]);
                }
            }
        __syncwarp();
        if (lane < READER_ARRIVALS) m.tiles.give_back(at);
        at.advance();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (lane / 16 == lane % 4 / 2) /* a token's copies with its own */
                *(float2 *)&m.pairs[n % 2][first + 2 * i][copy][lane % 2 * 2] =
                    make_float2(pair[i][0][0] + pair[i][1][0], pair[i][0][1] + pair[i][1][1]);
        products_sync();
    }
}

/* The cluster's sums of a lane's token: the products that its row of weights follows from, and of its copy
 * with all copies. */
__device__ __forceinline__ void add_blocks(const shared &m, float (&sum)[ROW_WEIGHTS], float (&pair)[COPIES])
{
    const int lane = threadIdx.x % 32, token = lane / COPIES, row = lane % COPIES;
#pragma unroll
    for (int j = 0; j < ROW_WEIGHTS; j++) sum[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < COPIES; j++) pair[j] = 0.0f;
#pragma unroll 4
    for (int b = 0; b < BLOCKS; b++) {
        const tile_sums &from = m.sums[b];
#pragma unroll
        for (int j = 0; j < ROW_WEIGHTS; j++) sum[j] += from.product[row_column(row, j) * TOKENS + token];
        const float4 x = *(const float4 *)from.pair[token][row];
        pair[0] += x.x, pair[1] += x.y, pair[2] += x.z, pair[3] += x.w;
    }
}

/* The sum of four lanes that have a token's rows. */
__device__ __forceinline__ float add_rows(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* 1 / the root mean square of the mixed copies, from the products of copies with copies. */
__device__ __forceinline__ float input_scale(const four_params &p, float pre, const float (&pair)[COPIES])
{
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < COPIES; j++) sum = fmaf(__shfl_sync(~0u, pre, j, COPIES), pair[j], sum);
    sum = add_rows(sum * pre);
    return 1.0f / sqrtf((sum < 0.0f ? 0.0f : sum) / (float)p.width + p.rms_eps);
}

__device__ __forceinline__ void weigh_tiles(const four_params &p, shared &m, const tile_walk &walk)
{
    const int lane = threadIdx.x % 32, index = lane / COPIES, row = lane % COPIES;
    const uint32_t made = smem_address(m.made);
    const kept_bases bases(row_bases{p.scale, p.base, row});
    ring_place<1> turn;
    for (int n = walk.rank; n < walk.count; n += BLOCKS, turn.advance()) {
        const int64_t token = walk.token(n) + index;
        float sum[ROW_WEIGHTS], pair[COPIES];
        row_weights w;
        if (lane == 0) m.summed.expect(turn, sizeof(m.sums));
        m.summed.wait_cluster(turn);
        add_blocks(m, sum, pair);
        float square = pair[0];
#pragma unroll
        for (int j = 1; j < COPIES; j++) square = row == j ? pair[j] : square;
        make_weights(p, bases, add_rows(square), sum, w);
        if (token < p.tokens) give_weights(p, token, row, w);
        float *const to = m.made[index].weight;
        to[row] = w.pre;
        to[COPIES + row] = w.post;
        *(float4 *)(to + COMB + row * COPIES) = make_float4(w.comb[0], w.comb[1], w.comb[2], w.comb[3]);
        const float scale = input_scale(p, w.pre, pair);
        if (row == 0) m.made[index].scale = scale;
        async_fence();
        __syncwarp();
        const auto at = ring_place<STAGES>::of(n);
        const uint32_t factors = smem_address(m.factors[at.stage]),
                       bar = smem_address(m.weighed.of) + at.stage * 8;
        if (lane < BLOCKS && lane != walk.rank)
            cluster_send(cluster_address(factors, lane), made, sizeof(m.made), cluster_address(bar, lane));
        for (int i = lane; i < (int)sizeof(m.made) / 16; i += 32) /* a bulk copy is to another block */
            cluster_send(cluster_address(factors, walk.rank) + i * 16, ((const float4 *)m.made)[i],
                         cluster_address(bar, walk.rank));
    }
}

/* Eight channels of a token: c becomes the mixed copies. */
template <bool OUT>
__device__ __forceinline__ void mix_chunk(const four_params &p, const uint4 (&x)[COPIES], const uint4 &f,
                                          const float *w, bf16 *out, bool there, float (&c)[CHUNK])
{
    float factor[WEIGHTS];
    uint32_t to[COPIES][4];
#pragma unroll
    for (int j = 0; j < (OUT ? WEIGHTS : COPIES); j += 4) {
        const float4 four = *(const float4 *)(w + j);
        factor[j] = four.x, factor[j + 1] = four.y, factor[j + 2] = four.z, factor[j + 3] = four.w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 of_f = unpack2<bf16>(word_of(f, e));
        float2 sum = {}, here[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            here[i] = unpack2<bf16>(word_of(x[i], e));
            sum.x = fmaf(factor[i], here[i].x, sum.x);
            sum.y = fmaf(factor[i], here[i].y, sum.y);
        }
        c[2 * e] = sum.x, c[2 * e + 1] = sum.y;
#pragma unroll
        for (int k = 0; OUT && k < COPIES; k++) {
            float2 next = {factor[COPIES + k] * of_f.x, factor[COPIES + k] * of_f.y};
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                next.x = fmaf(factor[COMB + i * COPIES + k], here[i].x, next.x);
                next.y = fmaf(factor[COMB + i * COPIES + k], here[i].y, next.y);
            }
            to[k][e] = pack2<bf16>(next.x, next.y);
        }
    }
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++)
        if (there)
            __stcs((uint4 *)(out + k * p.out.copy), make_uint4(to[k][0], to[k][1], to[k][2], to[k][3]));
}

template <bool OUT>
__device__ __forceinline__ void mix_tiles(const four_params &p, shared &m, const tile_walk &walk)
{
    const int index = (threadIdx.x - MIX_FIRST) / 32, lane = threadIdx.x % 32, channel = lane * CHUNK,
              first = walk.rank * CHANNELS + channel;
    const uint32_t of_f = lane / 8 * LINES + index * LINE + (((lane ^ index) & 7) << 4);
    const chunk norm = load_shared(m.norm + channel);
    ring_place<STAGES> at;
    for (int n = 0; n < walk.count; n++) {
        const int64_t token = walk.token(n) + index;
        const bool there = token < p.tokens;
        uint4 x[COPIES], f = {};
        float c[CHUNK];
        uint32_t h[4];
        m.tiles.wait_full(at);
        m.weighed.wait_cluster(at);
        const uint32_t stage = stage_address(m.rows, at.stage);
#pragma unroll
        for (int i = 0; i < COPIES; i++) x[i] = load_shared16(stage + chunk_at(index, i, lane));
        if (OUT) f = load_shared16(stage + sizeof(m.rows[0].x) + of_f);
        const token_factors &w = m.factors[at.stage][index];
        mix_chunk<OUT>(p, x, f, w.weight, (bf16 *)p.out.p + token * p.out.token + first, there, c);
        const float scale = w.scale;
        __syncwarp();
        if (lane < READER_ARRIVALS) m.tiles.give_back(at);
        at.advance();
#pragma unroll
        for (int e = 0; e < 4; e++)
            h[e] = pack2<bf16>(c[2 * e] * scale * norm.x[2 * e], c[2 * e + 1] * scale * norm.x[2 * e + 1]);
        if (there)
            __stcs((uint4 *)((bf16 *)p.h.p + token * p.h.token + first), make_uint4(h[0], h[1], h[2], h[3]));
    }
}

template <bool OUT>
__global__ void __launch_bounds__(THREADS, 1)
    hyper_forward_once(const __grid_constant__ four_params p, const __grid_constant__ row_maps maps)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    const tile_walk walk = walk_of(p);
    if (threadIdx.x == 0) {
        m.tiles.init(1, (COPIES + PAIR_THREADS / 32 + TOKENS) * READER_ARRIVALS);
        m.weighed.init(1);
        m.summed.init(1);
        mbar_init_done();
    }
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) m.norm[i] = p.norm.at(walk.rank * CHANNELS + i);
    __syncthreads();
    cluster_sync_arrive();
    cluster_sync_wait();
    if (threadIdx.x < SUM_FIRST) {
        registers_down<FEED_REGISTERS>();
        if (threadIdx.x == 0) feed_tiles<OUT>(maps, m, walk);
        if (threadIdx.x / 32 == 1) weigh_tiles(p, m, walk);
        if (threadIdx.x >= PAIR_FIRST) pair_tiles(m, walk);
    } else if (threadIdx.x < MIX_FIRST) {
        registers_up<OPERAND_REGISTERS>();
        sum_tiles(p, m, walk);
    } else {
        registers_down<MIX_REGISTERS>();
        mix_tiles<OUT>(p, m, walk);
    }
    __syncwarp();
    __syncthreads();
    cluster_sync_arrive();
    cluster_sync_wait(); /* no block ends before others have sent it what they send */
#endif
}

static const void *kernel_of(bool out)
{
    return out ? (const void *)hyper_forward_once<true> : (const void *)hyper_forward_once<false>;
}

/* How many clusters the current device runs at a time; 0: it has none of this size. */
static int count_clusters(const void *kernel)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = BLOCKS;
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    config.gridDim = dim3(BLOCKS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(shared);
    config.attrs = &size;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
        shared_allow(kernel, sizeof(shared)) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
        cudaGetLastError(); /* the call is other kernels' then */
        return 0;
    }
    return clusters;
}

/* The same, asked once a device. */
static int clusters_at_once(bool out)
{
    enum { DEVICES = 64 };
    static std::atomic<int> known[DEVICES][2]; /* one more than the number */
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    if (device >= DEVICES) return count_clusters(kernel_of(out));
    std::atomic<int> &here = known[device][out];
    if (here.load(std::memory_order_relaxed) == 0) here.store(count_clusters(kernel_of(out)) + 1);
    return here.load(std::memory_order_relaxed) - 1;
}

static bool supports(const stage_exec *exec, const hyper_args *args, char *)
{
    const quern_tensor *all[] = {&args->x, &args->f, &args->h, &args->out, &args->weight, &args->fn};
    bool takes = exec->compute == 90 && exec->shared_bytes >= sizeof(shared) && args->x.dtype == QUERN_BF16 &&
                 args->x.shape[1] == COPIES && args->x.shape[2] == BLOCKS * CHANNELS && !args->head &&
                 present(args->fn) && args->x.shape[0] >= TOKENS_LEAST && args->x.shape[0] <= TOKENS_MOST;
    for (const quern_tensor *t : all) takes = takes && (!present(*t) || rows_aligned16(*t));
    return takes && clusters_at_once(present(args->f)) > 0;
}

static size_t workspace(const stage_exec *, const hyper_args *)
{
    return 0;
}

static quern_status run(const stage_exec *exec, const hyper_args *args, void *)
{
    four_params p = {};
    static_cast<hyper_call &>(p) = hyper_call_of(args);
    const bool out = p.f.p != NULL;
    const int64_t tiles = (p.tokens + TOKENS - 1) / TOKENS, most = clusters_at_once(out);
    const dim3 grid((unsigned)((tiles < most ? tiles : most) * BLOCKS));
    row_maps maps;
    quern_status status = describe_rows(&maps.x, p, p.x, COPIES);
    maps.f = maps.x;
    if (status == QUERN_OK && out) status = describe_rows(&maps.f, p, p.f, 1);
    if (status != QUERN_OK) return status;
    return launch_cluster((cudaStream_t)exec->stream,
                          out ? hyper_forward_once<true> : hyper_forward_once<false>, grid, THREADS,
                          sizeof(shared), "hyper, x once", BLOCKS, false, p, maps);
}

} // namespace sm90_hyper_once

extern const variant<hyper_args> hyper_forward_once = {"hyper_forward_once", sm90_hyper_once::supports,
                                                       sm90_hyper_once::workspace, sm90_hyper_once::run};
