/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cu - the gradients of the copies, of f, of fn and of the norm's weight, from a second pass over
 * the rows:
 *
 *   d_x_i = a fn_i + p_i d_c + b x_i + sum_k comb[i, k] d_out_k        d_f = sum_k post_k d_out_k
 *   d_fn += a^T x                                                      d_norm += d_h c scale
 *
 * A block has a strip of 128 channels of all copies, whose fn stays in shared memory (48 KB), and a share of
 * the tokens, 16 at a time; a ring holds the rows of four tiles, 40 KB each. A warp has 16 channels.
 * Both products are the tensor cores', with a and fn as two bf16 (a fn without the product of both rests):
 * tokens are rows of the first, and a lane has four channels of two tokens; the second's sums, four copies
 * times 24 weights, stay in 48 registers for the whole share. Limit: copy rate.
 */
#include "hyper/four/params.cuh"

enum {
    WARPS = STRIP / 16,
    THREADS = WARPS * 32,
    RING = 4,
    ROWS = 2 * COPIES + 1,
    ROW_CHUNKS = STRIP / CHUNK,
    RECORD_CHUNKS = sizeof(token_record) / 16,
    WEIGHT_TILES = WEIGHTS / 8
};
enum { ROW_X, ROW_OUT = COPIES, ROW_H = 2 * COPIES };

/* Chunk c of a row stands at c ^ (token & 7), so that eight tokens' chunks are in different banks. */
struct tile_rows {
    uint4 row[ROWS][TILE][ROW_CHUNKS];
    token_record record[TILE];
};

struct shared {
    uint4 fn[WARPS][COPIES][3][32];
    tile_rows ring[RING];
};

__device__ __forceinline__ void copy_row(const token_rows &r, int copy, int64_t token, int channel,
                                         bool valid, uint4 *to)
{
    cp_async16(smem_address(to), (const bf16 *)r.p + token * r.token + copy * r.copy + channel, valid);
}

/* Starts the copies of a tile; rows of no token are zeros. */
template <bool H, bool OUT>
__device__ __forceinline__ void copy_tile(const four_params &p, tile_rows &to, int64_t tile, int strip)
{
    const int t = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS, at = chunk ^ (t & 7),
              channel = strip * STRIP + chunk * CHUNK, r = threadIdx.x / RECORD_CHUNKS;
    const bool valid = tile * TILE + t < p.tokens;
    const int64_t token = valid ? tile * TILE + t : 0;
    static_assert(THREADS == TILE * ROW_CHUNKS, "a chunk a thread");
#pragma unroll
    for (int i = 0; i < COPIES; i++) copy_row(p.x, i, token, channel, valid, &to.row[ROW_X + i][t][at]);
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++)
        copy_row(p.d_out, k, token, channel, valid, &to.row[ROW_OUT + k][t][at]);
    if (H) copy_row(p.d_h, 0, token, channel, valid, &to.row[ROW_H][t][at]);
    if (r >= TILE) return;
    const bool there = tile * TILE + r < p.tokens;
    const uint4 *const from = (const uint4 *)(p.records + (there ? tile * TILE + r : 0));
    cp_async16(smem_address(&to.record[r]) + threadIdx.x % RECORD_CHUNKS * 16,
               from + threadIdx.x % RECORD_CHUNKS, there);
}

/* a as operands: of a tile's tokens as rows (16 weights, then 8), and as columns of their sum. */
struct factors {
    uint32_t first[FN_PARTS][4], rest[4]; /* rest: two words a part */
    uint32_t turned[WEIGHT_TILES][4];     /* likewise */
};

__device__ __forceinline__ void load_factors(const tile_rows &t, factors &a)
{
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = matrix % 2 * 8 + lane % 8;
#pragma unroll
    for (int part = 0; part < FN_PARTS; part++)
        ldmatrix4(a.first[part], smem_address(&t.record[row].a[part][matrix / 2 * 8]));
    ldmatrix4(a.rest, smem_address(&t.record[row].a[matrix / 2][16]));
#pragma unroll
    for (int w = 0; w < WEIGHT_TILES; w++)
        ldmatrix4_trans(a.turned[w], smem_address(&t.record[row].a[matrix / 2][w * 8]));
}

__device__ __forceinline__ void multiply_eight(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* a fn of 8 channels; b: three words of either part. */
__device__ __forceinline__ void add_fn(float (&sum)[4], const factors &a, const uint32_t *b)
{
    mma16816<bf16>(sum, a.first[0], b[0], b[1]);
    mma16816<bf16>(sum, a.first[0], b[3], b[4]);
    mma16816<bf16>(sum, a.first[1], b[0], b[1]);
    multiply_eight(sum, a.rest[0], a.rest[1], b[2]);
    multiply_eight(sum, a.rest[0], a.rest[1], b[5]);
    multiply_eight(sum, a.rest[2], a.rest[3], b[2]);
}

/* Adds a copy's channels of a tile to fn's gradient. */
__device__ __forceinline__ void add_d_fn(float (&sum)[WEIGHT_TILES][4], const tile_rows &t, int copy,
                                         const factors &a)
{
    const int lane = threadIdx.x % 32, matrix = lane / 8, token = matrix / 2 * 8 + lane % 8,
              chunk = threadIdx.x / 32 * 2 + matrix % 2;
    uint32_t x[4];
    ldmatrix4_trans(x, smem_address(&t.row[ROW_X + copy][token][chunk ^ (token & 7)]));
#pragma unroll
    for (int w = 0; w < WEIGHT_TILES; w++) {
        mma16816<bf16>(sum[w], x, a.turned[w][0], a.turned[w][1]);
        mma16816<bf16>(sum[w], x, a.turned[w][2], a.turned[w][3]);
    }
}

/* A lane's four channels of a token. */
struct four {
    float x[4];
};

__device__ __forceinline__ four load_four(const tile_rows &t, int row, int token)
{
    const int q = threadIdx.x % 4, chunk = threadIdx.x / 32 * 2 + q / 2;
    const uint2 raw = *(const uint2 *)((const char *)&t.row[row][token][chunk ^ (token & 7)] + q % 2 * 8);
    const float2 low = unpack2<bf16>(raw.x), high = unpack2<bf16>(raw.y);
    return {{low.x, low.y, high.x, high.y}};
}

__device__ __forceinline__ void add(four &to, float factor, const four &from)
{
#pragma unroll
    for (int e = 0; e < 4; e++) to.x[e] = fmaf(factor, from.x[e], to.x[e]);
}

__device__ __forceinline__ void store_four(const token_rows &r, int64_t token, int copy, int channel,
                                           const four &x)
{
    __stcs((uint2 *)((bf16 *)r.p + token * r.token + copy * r.copy + channel),
           make_uint2(pack2<bf16>(x.x[0], x.x[1]), pack2<bf16>(x.x[2], x.x[3])));
}

/* d_c of a lane's channels; adds to the norm's gradient. */
__device__ __forceinline__ four collapsed_backward(const tile_rows &t, int token, const four (&x)[COPIES],
                                                   const four &norm, four &d_norm)
{
    const token_record &r = t.record[token];
    const four h = load_four(t, ROW_H, token);
    four c = {}, d;
#pragma unroll
    for (int i = 0; i < COPIES; i++) add(c, r.pre[i], x[i]);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        d_norm.x[e] = fmaf(h.x[e] * c.x[e], r.scale, d_norm.x[e]);
        d.x[e] = (h.x[e] * norm.x[e] - c.x[e] * r.mean) * r.scale;
    }
    return d;
}

/* What a lane needs of its two tokens, lane / 4 and eight more. */
struct token_values {
    four x[2][COPIES], d_out[2][COPIES], d_c[2];
};

template <bool H, bool OUT>
__device__ __forceinline__ void load_values(const tile_rows &t, const four &norm, four &d_norm,
                                            token_values &v)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = threadIdx.x % 32 / 4 + r * 8;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            v.x[r][i] = load_four(t, ROW_X + i, token);
            if (OUT) v.d_out[r][i] = load_four(t, ROW_OUT + i, token);
        }
        if (H) v.d_c[r] = collapsed_backward(t, token, v.x[r], norm, d_norm);
    }
}

template <bool H, bool OUT>
__device__ __forceinline__ void make_copies(const four_params &p, const shared &s, const tile_rows &t,
                                            int64_t token0, int channel, const factors &a,
                                            const token_values &v)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        float sum[2][4] = {};
        const uint4 f0 = s.fn[warp][i][0][lane], f1 = s.fn[warp][i][1][lane], f2 = s.fn[warp][i][2][lane];
        const uint32_t b[2][6] = {{f0.x, f0.y, f0.z, f0.w, f1.x, f1.y}, {f1.z, f1.w, f2.x, f2.y, f2.z, f2.w}};
        add_fn(sum[0], a, b[0]);
        add_fn(sum[1], a, b[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const token_record &m = t.record[lane / 4 + r * 8];
            const int64_t token = token0 + lane / 4 + r * 8;
            four d = {{sum[0][2 * r], sum[0][2 * r + 1], sum[1][2 * r], sum[1][2 * r + 1]}};
            add(d, m.of_x, v.x[r][i]);
            if (H) add(d, m.pre[i], v.d_c[r]);
#pragma unroll
            for (int k = 0; OUT && k < COPIES; k++) add(d, m.comb[i][k], v.d_out[r][k]);
            if (token < p.tokens) store_four(p.d_x, token, i, channel, d);
        }
    }
#pragma unroll
    for (int r = 0; OUT && r < 2; r++) {
        const token_record &m = t.record[lane / 4 + r * 8];
        const int64_t token = token0 + lane / 4 + r * 8;
        four d = {};
#pragma unroll
        for (int k = 0; k < COPIES; k++) add(d, m.post[k], v.d_out[r][k]);
        if (p.d_f.p != NULL && token < p.tokens) store_four(p.d_f, token, 0, channel, d);
    }
}

/* Writes the sums of a block's share of the tokens. */
__device__ __forceinline__ void store_shares(const four_params &p, int64_t share, int channel0,
                                             const float (&d_fn)[COPIES][WEIGHT_TILES][4], four &d_norm)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; p.d_fn_parts != NULL && i < COPIES; i++)
#pragma unroll
        for (int w = 0; w < WEIGHT_TILES; w++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = w * 8 + lane % 4 * 2 + e % 2, channel = channel0 + lane / 4 + e / 2 * 8;
                p.d_fn_parts[((share * WEIGHTS + j) * COPIES + i) * p.width + channel] = d_fn[i][w][e];
            }
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
        for (int by = 4; by < 32; by *= 2) d_norm.x[e] += __shfl_xor_sync(~0u, d_norm.x[e], by);
        if (p.d_norm_parts != NULL && lane < 4)
            p.d_norm_parts[share * p.width + channel0 + lane * 4 + e] = d_norm.x[e];
    }
}

template <bool H, bool OUT>
__global__ void __launch_bounds__(THREADS, 1) four_copies(const __grid_constant__ four_params p)
{
    extern __shared__ __align__(16) char memory[];
    shared &s = *(shared *)memory;
    const int strips = p.width / STRIP, strip = blockIdx.x % strips, warp = threadIdx.x / 32,
              channel0 = strip * STRIP + warp * 16, channel = channel0 + threadIdx.x % 4 * 4;
    const int64_t share = blockIdx.x / strips, shares = gridDim.x / strips, tiles = p.padded / TILE;
    float d_fn[COPIES][WEIGHT_TILES][4] = {};
    four norm, d_norm = {};
    for (int i = threadIdx.x; i < (int)(sizeof s.fn / 16); i += THREADS)
        cp_async16(smem_address(&s.fn) + i * 16, p.fn_of_copies + strip * (sizeof s.fn / 16) + i, true);
#pragma unroll
    for (int e = 0; e < 4; e++) norm.x[e] = p.norm.at(channel + e);
#pragma unroll
    for (int r = 0; r < RING - 1; r++) {
        if (share + r * shares < tiles) copy_tile<H, OUT>(p, s.ring[r], share + r * shares, strip);
        cp_async_commit();
    }
    int place = 0;
    for (int64_t tile = share; tile < tiles; tile += shares, place = (place + 1) % RING) {
        const tile_rows &t = s.ring[place];
        const int64_t next = tile + (RING - 1) * shares;
        cp_async_wait<RING - 2>();
        __syncthreads();
        if (next < tiles) copy_tile<H, OUT>(p, s.ring[(place + RING - 1) % RING], next, strip);
        cp_async_commit();
        factors a;
        token_values v;
        load_factors(t, a);
#pragma unroll
        for (int i = 0; i < COPIES; i++) add_d_fn(d_fn[i], t, i, a);
        load_values<H, OUT>(t, norm, d_norm, v);
        make_copies<H, OUT>(p, s, t, tile * TILE, channel, a, v);
    }
    store_shares(p, share, channel0, d_fn, d_norm);
}

size_t four_copies_backward_bytes()
{
    return sizeof(shared);
}

quern_status four_copies_backward(const four_params &p, cudaStream_t stream)
{
    const int64_t strips = p.width / STRIP;
    const bool h = p.d_h.p != NULL, out = p.d_out.p != NULL;
    const auto kernel = h && out ? four_copies<true, true>
                        : h      ? four_copies<true, false>
                                 : four_copies<false, true>;
    return launch_shared({stream, NULL}, kernel, dim3((unsigned)(strips * shares_for(strips))), THREADS,
                         sizeof(shared), "hyper, gradients of copies", p);
}
