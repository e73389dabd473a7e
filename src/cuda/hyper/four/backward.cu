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

/* A thread's chunk of the first copy of its token of a tile, and how far apart those of the block's tiles
 * are. */
struct row_walk {
    const bf16 *at;
    int64_t copy, step;

    __device__ __forceinline__ row_walk(const token_rows &r, int64_t token, int64_t tokens, int channel)
        : at((const bf16 *)r.p + token * r.token + channel), copy(r.copy), step(tokens * r.token)
    {
    }
};

/* What a thread copies of the next tile: its token and its record's are counted from there. */
struct tile_walk {
    row_walk x, d_out, d_h;
    const uint4 *record;
    int64_t token, record_token, tokens; /* tokens: from one tile of the block to the next */
    uint32_t row_at, record_at;          /* in tile_rows */

    __device__ __forceinline__ tile_walk(const four_params &p, int64_t share, int64_t shares, int strip)
        : x(p.x, share * TILE + threadIdx.x / ROW_CHUNKS, shares * TILE, channel(strip)),
          d_out(p.d_out, share * TILE + threadIdx.x / ROW_CHUNKS, shares * TILE, channel(strip)),
          d_h(p.d_h, share * TILE + threadIdx.x / ROW_CHUNKS, shares * TILE, channel(strip))
    {
        const int t = threadIdx.x / ROW_CHUNKS, r = threadIdx.x / RECORD_CHUNKS,
                  part = threadIdx.x % RECORD_CHUNKS;
        token = share * TILE + t;
        record_token = share * TILE + r;
        tokens = shares * TILE;
        record = (const uint4 *)(p.records + share * TILE + r) + part;
        row_at = offsetof(tile_rows, row) + (t * ROW_CHUNKS + (threadIdx.x % ROW_CHUNKS ^ (t & 7))) * 16;
        record_at = offsetof(tile_rows, record) + r * sizeof(token_record) + part * 16;
    }
    static __device__ __forceinline__ int channel(int strip)
    {
        return strip * STRIP + threadIdx.x % ROW_CHUNKS * CHUNK;
    }
};

/* Starts the copies of the next tile; rows of no token are zeros. */
template <bool H, bool OUT>
__device__ __forceinline__ void copy_tile(const four_params &p, tile_walk &w, uint32_t to)
{
    enum { ROW_BYTES = sizeof(uint4[TILE][ROW_CHUNKS]) };
    static_assert(THREADS == TILE * ROW_CHUNKS, "a chunk a thread");
    const bool valid = w.token < p.tokens;
    const uint32_t row = to + w.row_at;
#pragma unroll
    for (int i = 0; i < COPIES; i++) cp_async16(row + (ROW_X + i) * ROW_BYTES, w.x.at + i * w.x.copy, valid);
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++)
        cp_async16(row + (ROW_OUT + k) * ROW_BYTES, w.d_out.at + k * w.d_out.copy, valid);
    if (H) cp_async16(row + ROW_H * ROW_BYTES, w.d_h.at, valid);
    if (threadIdx.x < TILE * RECORD_CHUNKS) cp_async16(to + w.record_at, w.record, w.record_token < p.tokens);
    w.x.at += w.x.step, w.d_out.at += w.d_out.step, w.d_h.at += w.d_h.step;
    w.record += w.tokens * RECORD_CHUNKS;
    w.token += w.tokens, w.record_token += w.tokens;
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

/* a fn of N times 8 channels, whose sums do not wait for each other; b: three words of either part. */
template <int N>
__device__ __forceinline__ void add_fn(float (&sum)[N][4], const factors &a, const uint32_t (&b)[N][6])
{
#pragma unroll
    for (int n = 0; n < N; n++) mma16816<bf16>(sum[n], a.first[0], b[n][0], b[n][1]);
#pragma unroll
    for (int n = 0; n < N; n++) mma16816<bf16>(sum[n], a.first[0], b[n][3], b[n][4]);
#pragma unroll
    for (int n = 0; n < N; n++) mma16816<bf16>(sum[n], a.first[1], b[n][0], b[n][1]);
#pragma unroll
    for (int n = 0; n < N; n++) multiply_eight(sum[n], a.rest[0], a.rest[1], b[n][2]);
#pragma unroll
    for (int n = 0; n < N; n++) multiply_eight(sum[n], a.rest[0], a.rest[1], b[n][5]);
#pragma unroll
    for (int n = 0; n < N; n++) multiply_eight(sum[n], a.rest[2], a.rest[3], b[n][2]);
}

/* The same of a warp's 16 channels of all copies. */
__device__ __forceinline__ void multiply_fn(const uint4 (&fn)[COPIES][3][32], const factors &a,
                                            float (&sum)[COPIES][2][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COPIES; i += 2) {
        float here[4][4] = {};
        uint32_t b[4][6];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint4 f0 = fn[i + c][0][lane], f1 = fn[i + c][1][lane], f2 = fn[i + c][2][lane];
            const uint32_t all[] = {f0.x, f0.y, f0.z, f0.w, f1.x, f1.y, f1.z, f1.w, f2.x, f2.y, f2.z, f2.w};
#pragma unroll
            for (int w = 0; w < 12; w++) b[c * 2 + w / 6][w % 6] = all[w];
        }
        add_fn<4>(here, a, b);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i + n / 2][n % 2][e] = here[n][e];
    }
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

/* Stored where `valid`: a branch around it would take along what makes x, a token's copies one by one. */
__device__ __forceinline__ void store_four(bf16 *to, bool valid, const four &x)
{
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.cs.v2.u32 [%0], {%1, %2}; }" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(pack2<bf16>(x.x[0], x.x[1])), "r"(pack2<bf16>(x.x[2], x.x[3])), "r"((uint32_t)valid)
                 : "memory");
}

/* d_c of a lane's channels; adds to the norm's gradient. */
__device__ __forceinline__ four collapsed_backward(const token_record &r, const four &h,
                                                   const four (&x)[COPIES], const four &norm, four &d_norm)
{
    four c = {}, d;
#pragma unroll
    for (int i = 0; i < COPIES; i++) add(c, r.pre[i], x[i]);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float scaled = h.x[e] * r.scale;
        d_norm.x[e] = fmaf(scaled, c.x[e], d_norm.x[e]);
        d.x[e] = fmaf(scaled, norm.x[e], -c.x[e] * (r.mean * r.scale));
    }
    return d;
}

/* A token's factors in registers; `a` is read as operands. */
__device__ __forceinline__ token_record load_record(const token_record &from)
{
    token_record r;
#pragma unroll
    for (int i = 0; i < (int)(offsetof(token_record, a) / 16); i++)
        ((float4 *)&r)[i] = ((const float4 *)&from)[i];
    return r;
}

/* A lane's places in the gradients: of its first token; the other one is eight further. */
struct lane_out {
    bf16 *d_x, *d_f;
    int64_t token;
};

/* A lane's channels of one of its tokens: of all copies. */
template <bool H, bool OUT>
__device__ __forceinline__ void make_token(const four_params &p, const tile_rows &t, const lane_out &to,
                                           int r, const float (&sum)[COPIES][2][4], const four &norm,
                                           four &d_norm)
{
    const int token = threadIdx.x % 32 / 4 + r * 8;
    const token_record m = load_record(t.record[token]);
    const bool valid = to.token + r * 8 < p.tokens;
    four x[COPIES], d_out[COPIES], d_c = {}, d_f = {};
#pragma unroll
    for (int i = 0; i < COPIES; i++) x[i] = load_four(t, ROW_X + i, token);
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++) d_out[k] = load_four(t, ROW_OUT + k, token);
    if (H) d_c = collapsed_backward(m, load_four(t, ROW_H, token), x, norm, d_norm);
    bf16 *d_x = to.d_x + r * 8 * p.d_x.token;
#pragma unroll
    for (int i = 0; i < COPIES; i++, d_x += p.d_x.copy) {
        four d = {{sum[i][0][2 * r], sum[i][0][2 * r + 1], sum[i][1][2 * r], sum[i][1][2 * r + 1]}};
        add(d, m.of_x, x[i]);
        if (H) add(d, m.pre[i], d_c);
#pragma unroll
        for (int k = 0; OUT && k < COPIES; k++) add(d, m.comb[i][k], d_out[k]);
        store_four(d_x, valid, d);
    }
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++) add(d_f, m.post[k], d_out[k]);
    if (OUT) store_four(to.d_f + r * 8 * p.d_f.token, valid && p.d_f.p != NULL, d_f);
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
    const int64_t token0 = share * TILE + threadIdx.x % 32 / 4;
    lane_out to = {(bf16 *)p.d_x.p + token0 * p.d_x.token + channel,
                   (bf16 *)p.d_f.p + token0 * p.d_f.token + channel, token0};
    tile_walk walk(p, share, shares, strip);
    float d_fn[COPIES][WEIGHT_TILES][4] = {};
    four norm, d_norm = {};
    for (int i = threadIdx.x; i < (int)(sizeof s.fn / 16); i += THREADS)
        cp_async16(smem_address(&s.fn) + i * 16, p.fn_of_copies + strip * (sizeof s.fn / 16) + i, true);
#pragma unroll
    for (int e = 0; e < 4; e++) norm.x[e] = p.norm.at(channel + e);
#pragma unroll
    for (int r = 0; r < RING - 1; r++) {
        if (share + r * shares < tiles) copy_tile<H, OUT>(p, walk, smem_address(&s.ring[r]));
        cp_async_commit();
    }
    int place = 0;
    for (int64_t tile = share; tile < tiles; tile += shares, place = (place + 1) % RING) {
        const tile_rows &t = s.ring[place];
        cp_async_wait<RING - 2>();
        __syncthreads();
        if (tile + (RING - 1) * shares < tiles)
            copy_tile<H, OUT>(p, walk, smem_address(&s.ring[(place + RING - 1) % RING]));
        cp_async_commit();
        factors a;
        float sum[COPIES][2][4];
        load_factors(t, a);
#pragma unroll
        for (int i = 0; i < COPIES; i++) add_d_fn(d_fn[i], t, i, a);
        multiply_fn(s.fn[warp], a, sum);
#pragma unroll
        for (int r = 0; r < 2; r++) make_token<H, OUT>(p, t, to, r, sum, norm, d_norm);
        to.d_x += shares * TILE * p.d_x.token, to.d_f += shares * TILE * p.d_f.token,
            to.token += shares * TILE;
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
