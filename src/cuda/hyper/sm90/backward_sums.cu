/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward_sums.cu - what four/backward_sums.cu makes, on Hopper: of every token all sums over channels that
 * its gradients need, by panels of 512 channels. A block has a panel and a share of the tokens, eight at a
 * time, whose rows come in halves of 256 channels:
 *
 *   sum     eight warps: products of copies with fn, which stays in registers
 *   pair    four warps, each with two tokens: products of rows with rows. x and d_out are both the rows and
 *           the columns of a product of 16 x 8; f and d_h norm, in two parts, are its rows from 8 on.
 *
 * A half is 40 KB, and comes each 1.3 us at the read rate; two are on their way. Limit: x, f, d_h and d_out
 * read once.
 */
#include "hopper/products.cuh"
#include "hyper/four/weights.cuh"
#include "hyper/sm90/operand.cuh"
#include "variants.cuh"

namespace sm90_hyper_sums
{

using namespace sm90_hyper;

enum {
    PAIR_WARPS = 4,
    PAIR_THREADS = PAIR_WARPS * 32,
    FEED_WARP = SUM_WARPS + PAIR_WARPS - 1, /* asks for halves, too */
    ROW_SUMS = BACKWARD_SUMS - WEIGHTS,
    SLOTS = 5,
    LINES = TOKENS * LINE /* of a box of f or d_h */
};

/* A half, in boxes. */
struct half_rows {
    char x[HALF / BOX][BOX_BYTES], d_out[HALF / BOX][BOX_BYTES], f[HALF / BOX][LINES], d_h[HALF / BOX][LINES];
};

struct shared {
    half_rows slots[SLOTS];
    float parts[2][SUM_WARPS][PRODUCTS], rows[2][ROW_SUMS][TOKENS], norm[PANEL];
    char rest[TOKENS][HALF * 2]; /* of d_h norm: what bf16 leaves of it */
    ring<SLOTS> halves;
};
static_assert(sizeof(shared) <= 227 * 1024, "a block has room");

struct row_maps {
    CUtensorMap x, d_out, f, d_h; /* as x where there is none */
};

/* Of a block: its tiles are first, first + stride, ... */
struct tile_walk {
    int panel;
    int64_t first, stride;
    int count;
};

__device__ __forceinline__ tile_walk walk_of(const four_params &p)
{
    tile_walk w;
    const int panels = p.width / PANEL;
    const int64_t tiles = (p.tokens + TOKENS - 1) / TOKENS;
    w.panel = blockIdx.x % panels;
    w.first = blockIdx.x / panels;
    w.stride = gridDim.x / panels;
    w.count = w.first < tiles ? (int)((tiles - w.first + w.stride - 1) / w.stride) : 0;
    return w;
}

__device__ __forceinline__ float *columns_of(const four_params &p, int panel, int64_t token0)
{
    return p.sums + (int64_t)panel * BACKWARD_SUMS * p.padded + token0;
}

/* Asks for half n: of tile n / 2. */
template <bool H, bool OUT>
__device__ __forceinline__ void ask(const row_maps &maps, shared &m, const tile_walk &walk, int n)
{
    enum { BYTES = HALF / BOX * (BOX_BYTES + OUT * (BOX_BYTES + LINES) + H * LINES) };
    const ring_place<SLOTS> at = ring_place<SLOTS>::of(n);
    const int token = (int)((walk.first + n / 2 * walk.stride) * TOKENS),
              box = (walk.panel * PANEL + n % 2 * HALF) / BOX;
    half_rows &t = m.slots[at.stage];
    if (threadIdx.x % 32 == 0) {
        const uint32_t bar = m.halves.expect(at, BYTES);
        tma_load(smem_address(t.x), maps.x, bar, 0, 0, token, box);
        if (OUT) tma_load(smem_address(t.d_out), maps.d_out, bar, 0, 0, token, box);
        if (OUT) tma_load(smem_address(t.f), maps.f, bar, 0, 0, token, box);
        if (H) tma_load(smem_address(t.d_h), maps.d_h, bar, 0, 0, token, box);
    }
    __syncwarp();
}

__device__ __forceinline__ void sum_tiles(const four_params &p, shared &m, const tile_walk &walk)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    /* a warp's place in a half is that in the panel, but for the half of the half */
    const uint32_t from = first_chunk(warp);
    fn_operand fn;
    ring_place<SLOTS> at;
    load_operand(p, walk.panel, fn);
#pragma unroll 1
    for (int n = 0; n < walk.count; n++) {
        float sum[ROW_TILES][1][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            m.halves.wait_full(at);
            const uint32_t slot = stage_address(m.slots, at.stage);
#pragma unroll
            for (int c = 0; c < HALF_CHUNKS; c++)
                multiply_chunk(sum, fn, half * HALF_CHUNKS + c, load_shared16(slot + chunk_further(from, c)));
            __syncwarp();
            if (lane < READER_ARRIVALS) m.halves.give_back(at);
            at.advance();
        }
        leave_products(m.parts[n % 2][warp], sum);
        named_sync(1, SUM_THREADS);
        float *const to = columns_of(p, walk.panel, (walk.first + n * walk.stride) * TOKENS);
        if (threadIdx.x < PRODUCTS)
            to[(SUM_FN + threadIdx.x / TOKENS) * p.padded + threadIdx.x % TOKENS] =
                add_warps(m.parts[n % 2], threadIdx.x);
    }
}

/* d_h of a warp's two tokens becomes d_h norm in bf16, and the rest. A lane has sixteen bytes of each. */
__device__ __forceinline__ void weigh_rows(half_rows &t, char (&rest)[TOKENS][HALF * 2], int token,
                                           const float *norm)
{
    const int chunk = threadIdx.x % 32;
    uint4 *const at = (uint4 *)(t.d_h[chunk / 8] + token * LINE + (((chunk ^ token) & 7) << 4));
    const uint4 h = *at;
    uint32_t high[4], low[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 n = *(const float2 *)(norm + chunk * CHUNK + w * 2);
        float2 x = unpack2<bf16>(word_of(h, w));
        x.x *= n.x, x.y *= n.y;
        high[w] = pack2<bf16>(x.x, x.y);
        const float2 back = unpack2<bf16>(high[w]);
        low[w] = pack2<bf16>(x.x - back.x, x.y - back.y);
    }
    *at = make_uint4(high[0], high[1], high[2], high[3]);
    *(uint4 *)(rest[token] + chunk * 16) = make_uint4(low[0], low[1], low[2], low[3]);
}

/* Where a lane's 16 bytes of its token's rows stand: x's and d_out's, and of f, d_h norm and the rest of it,
 * which are rows 8, 9 and 10; how far on those of the next box are. */
struct row_places {
    uint32_t low, high, step;
};

__device__ __forceinline__ row_places places_of(const half_rows &t, const char (&rest)[TOKENS][HALF * 2],
                                                int token)
{
    const int lane = threadIdx.x % 32, row = lane / 4;
    const uint32_t line = token * LINE + ((lane % 4 ^ token) << 4);
    return {smem_address(row < COPIES ? t.x : t.d_out) + chunk_at(token, row % COPIES, lane % 4),
            row < 2 ? smem_address(row == 0 ? t.f : t.d_h) + line : smem_address(rest[token]) + lane % 4 * 16,
            row < 2 ? (uint32_t)LINES : 128u};
}

/* Adds a half's products of a warp's two tokens' rows, in turn: a product waits for that of its token before
 * it. */
__device__ __forceinline__ void multiply_rows(float (&sum)[2][2][4], const half_rows &t,
                                              const char (&rest)[TOKENS][HALF * 2], int token)
{
    enum { AT_ONCE = 2 };
    const row_places at[] = {places_of(t, rest, token), places_of(t, rest, token + 1)};
#pragma unroll
    for (int first = 0; first < HALF / DEPTH; first += AT_ONCE) {
        uint4 x[2][AT_ONCE], f[2][AT_ONCE];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int chunk = first + c;
                x[n][c] = load_shared16((at[n].low ^ chunk % 2 << 6) + chunk / 2 * BOX_BYTES);
                f[n][c] = load_shared16((at[n].high ^ chunk % 2 << 6) + chunk / 2 * at[n].step);
            }
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const uint32_t a[] = {word_of(x[n][c], 2 * s), word_of(f[n][c], 2 * s),
                                          word_of(x[n][c], 2 * s + 1), word_of(f[n][c], 2 * s + 1)};
                    mma16816<bf16>(sum[n][s], a, a[0], a[2]);
                }
    }
}

/* A token's sums from the product: a lane has two columns of row lane / 4, and of row 8 + lane / 4. */
template <bool H, bool OUT>
__device__ __forceinline__ void leave_rows(float (&to)[ROW_SUMS][TOKENS], int token,
                                           const float (&parts)[2][4])
{
    const float sum[] = {parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], parts[0][2] + parts[1][2],
                         parts[0][3] + parts[1][3]};
    const int lane = threadIdx.x % 32, row = lane / 4;
    const float low[] = {sum[2] + __shfl_down_sync(~0u, sum[2], 4),
                         sum[3] + __shfl_down_sync(~0u, sum[3], 4)};
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int column = lane % 4 * 2 + e, k = column - COPIES;
        if (row < COPIES && column < COPIES && column >= row)
            to[SUM_PAIR - WEIGHTS + row * COPIES - row * (row + 1) / 2 + column][token] = sum[e];
        if (row < COPIES && k >= 0) to[SUM_OUT - WEIGHTS + row * COPIES + k][token] = OUT ? sum[e] : 0.0f;
        if (row == 0 && k >= 0) to[SUM_F - WEIGHTS + k][token] = OUT ? sum[2 + e] : 0.0f;
        if (row == 1 && k < 0) to[SUM_H - WEIGHTS + column][token] = H ? low[e] : 0.0f;
    }
}

template <bool H, bool OUT>
__device__ __forceinline__ void pair_tiles(const four_params &p, const row_maps &maps, shared &m,
                                           const tile_walk &walk)
{
    const int warp = threadIdx.x / 32 - SUM_WARPS, lane = threadIdx.x % 32;
    const bool feeds = warp + SUM_WARPS == FEED_WARP;
    ring_place<SLOTS> at;
    for (int n = 0; feeds && n < SLOTS - 2 && n < 2 * walk.count; n++) ask<H, OUT>(maps, m, walk, n);
#pragma unroll 1
    for (int n = 0; n < walk.count; n++) {
        float sum[2][2][4] = {};
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const int next = 2 * n + half + SLOTS - 2;
            if (feeds && next < 2 * walk.count) {
                m.halves.wait_free(ring_place<SLOTS>::of(next));
                ask<H, OUT>(maps, m, walk, next);
            }
            m.halves.wait_full(at);
            half_rows &rows = m.slots[at.stage];
#pragma unroll
            for (int t = 0; H && t < 2; t++) weigh_rows(rows, m.rest, warp * 2 + t, m.norm + half * HALF);
            __syncwarp();
            multiply_rows(sum, rows, m.rest, warp * 2);
            async_fence(); /* d_h was written */
            __syncwarp();
            if (lane < READER_ARRIVALS) m.halves.give_back(at);
            at.advance();
        }
#pragma unroll
        for (int t = 0; t < 2; t++) leave_rows<H, OUT>(m.rows[n % 2], warp * 2 + t, sum[t]);
        named_sync(2, PAIR_THREADS);
        float *const to = columns_of(p, walk.panel, (walk.first + n * walk.stride) * TOKENS);
        for (int i = threadIdx.x - SUM_THREADS; i < ROW_SUMS * TOKENS; i += PAIR_THREADS)
            to[(WEIGHTS + i / TOKENS) * p.padded + i % TOKENS] = m.rows[n % 2][i / TOKENS][i % TOKENS];
    }
}

template <bool H, bool OUT>
__global__ void __launch_bounds__(THREADS, 1)
    hyper_sums_sm90(const __grid_constant__ four_params p, const __grid_constant__ row_maps maps)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    const tile_walk walk = walk_of(p);
    if (threadIdx.x == 0) {
        m.halves.init(1, (SUM_WARPS + PAIR_WARPS) * READER_ARRIVALS);
        mbar_init_done();
    }
    for (int i = threadIdx.x; i < PANEL; i += THREADS) m.norm[i] = p.norm.at(walk.panel * PANEL + i);
    __syncthreads();
    if (threadIdx.x < SUM_THREADS) {
        registers_up<SUM_REGISTERS>();
        sum_tiles(p, m, walk);
    } else {
        registers_down<OTHER_REGISTERS>();
        pair_tiles<H, OUT>(p, maps, m, walk);
    }
#endif
}

} // namespace sm90_hyper_sums

using namespace sm90_hyper_sums;

bool hyper_sums_sm90_takes(const stage_exec *exec, const hyper_args *args)
{
    return exec->compute == 90 && exec->shared_bytes >= sizeof(shared) && args->x.shape[2] % PANEL == 0 &&
           (uintptr_t)args->fn.data % 16 == 0 && args->fn.strides[0] % 4 == 0;
}

quern_status hyper_sums_sm90_run(const four_params &p, cudaStream_t stream)
{
    const int64_t panels = p.width / PANEL, tiles = (p.tokens + TOKENS - 1) / TOKENS,
                  shares = tiles < shares_for(panels) ? tiles : shares_for(panels);
    const bool h = p.d_h.p != NULL, out = p.d_out.p != NULL;
    const auto kernel = h && out ? hyper_sums_sm90<true, true>
                        : h      ? hyper_sums_sm90<true, false>
                                 : hyper_sums_sm90<false, true>;
    row_maps maps;
    quern_status status = describe_rows(&maps.x, p, p.x, COPIES);
    maps.d_out = maps.f = maps.d_h = maps.x;
    if (status == QUERN_OK && out) status = describe_rows(&maps.d_out, p, p.d_out, COPIES);
    if (status == QUERN_OK && out) status = describe_rows(&maps.f, p, p.f, 1);
    if (status == QUERN_OK && h) status = describe_rows(&maps.d_h, p, p.d_h, 1);
    if (status != QUERN_OK) return status;
    return launch_shared({stream, NULL}, kernel, dim3((unsigned)(panels * shares)), THREADS, sizeof(shared),
                         "hyper, sums for gradients", p, maps);
}
