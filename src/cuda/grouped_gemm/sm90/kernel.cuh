/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that multiply, their epilogue, and the kernel. */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_KERNEL_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_KERNEL_CUH

#include "grouped_gemm/sm90/feed.cuh"
#include "hopper/epilogue.cuh"

namespace sm90_gemm
{

/* A unit's first operand. */
struct unit_operand {
    uint32_t step[UNIT_STEPS][4];
};

/* Transposes a matrix of 8 x 8 16-bit numbers, two a lane. */
__device__ __forceinline__ uint32_t transposed(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Decodes the transpose of a unit: the operand's rows are 64 of K, of which a warp has 16, and step j sums
 * over columns 16 j on. So a warp reads one word in four of all lanes', and of their scales. */
template <typename T> __device__ __forceinline__ void decode_transposed(unit_operand &w, const char *unit)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const char *codes = unit + lane * 16 + warp * 4,
               *scales = unit + UNIT_CODES + lane / 4 * 8 + warp / 2 * 4;
#pragma unroll
    for (int j = 0; j < UNIT_STEPS; j++) {
        uint32_t x[4];
        decode_step<T>(x, *(const uint32_t *)(codes + j * 512), *(const uint32_t *)(scales + j * 64), warp);
        w.step[j][0] = transposed(x[0]);
        w.step[j][1] = transposed(x[2]);
        w.step[j][2] = transposed(x[1]);
        w.step[j][3] = transposed(x[3]);
    }
}

template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void decode_unit(unit_operand &w, const char *unit)
{
    const int thread = threadIdx.x % 128;
    if constexpr (TRANSPOSED) {
        decode_transposed<T>(w, unit);
        return;
    }
    const uint4 codes = *(const uint4 *)(unit + thread * 16);
    const uint2 scales = *(const uint2 *)(unit + UNIT_CODES + thread / 4 * 8);
    decode_step<T>(w.step[0], codes.x, scales.x, 0);
    decode_step<T>(w.step[1], codes.y, scales.x, 1);
    decode_step<T>(w.step[2], codes.z, scales.y, 2);
    decode_step<T>(w.step[3], codes.w, scales.y, 3);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_unit(float (&c)[TOKENS / 8][4], const unit_operand &w,
                                              const char *tokens)
{
    const uint64_t tile = wg_fresh(wg_tile(smem_address(tokens), 0));
    wg_start();
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) wgmma_rs<T, TOKENS>(c, w.step[s], wg_further(tile, s * 32));
    wg_commit();
}

/* A warpgroup's place in the stages: the next one, and the one before it, which it gives back once the
 * products of its last unit have ended. */
template <int TOKENS> struct stage_walk {
    ring_place<form<TOKENS>::STAGES> at, before;
    bool any; /* of this tile */

    /* A stage's first products have begun, and those before them have ended. */
    __device__ __forceinline__ void begun(shared<TOKENS> &m)
    {
        if (any) {
            m.stages.give_back(before);
            before.advance();
        }
        any = true;
    }
};

/* Adds the sums of a tile. The products of a unit run while the next is decoded into the other of two
 * operands. The last units of a part of K, fewer than EACH, are decoded and multiplied one after the
 * other. */
template <typename T, int TOKENS, bool TRANSPOSED>
__device__ __forceinline__ void sum_tile(float (&c)[TOKENS / 8][4], const gemm_params &p, shared<TOKENS> &m,
                                         stage_walk<TOKENS> &walk, int group)
{
    enum { UNITS = form<TOKENS>::UNITS, EACH = UNITS > 1 ? UNITS : 2 };
    const int rounds = p.units / EACH, rest = p.units % EACH;
    unit_operand w[2];
    walk.any = false;
    for (int part = 0; part < p.parts; part++) {
        for (int round = 0; round < rounds; round++) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (i % UNITS == 0) m.stages.wait_full(walk.at);
                decode_unit<T, TRANSPOSED>(w[i % 2], m.b[walk.at.stage][group][i % UNITS]);
                multiply_unit<T, TOKENS>(c, w[i % 2], m.a[walk.at.stage][i % UNITS]);
                wg_wait<1>(c);
                if (i % UNITS == 0) walk.begun(m);
                if (i % UNITS == UNITS - 1) walk.at.advance();
            }
        }
        for (int i = 0; i < rest; i++) {
            if (i == 0) m.stages.wait_full(walk.at);
            decode_unit<T, TRANSPOSED>(w[0], m.b[walk.at.stage][group][i]);
            multiply_unit<T, TOKENS>(c, w[0], m.a[walk.at.stage][i]);
            wg_wait<0>(c);
            if (i == 0) walk.begun(m);
        }
        if (rest > 0) walk.at.advance();
    }
    wg_wait<0>(c);
    m.stages.give_back(walk.before);
    walk.before.advance();
}

/* The stages of a tile that lacks the warpgroup's panel. */
template <int TOKENS>
__device__ __forceinline__ void pass_tile(const gemm_params &p, shared<TOKENS> &m, stage_walk<TOKENS> &walk)
{
    for (int step = steps_of<TOKENS>(p); step > 0; step--) {
        m.stages.wait_full(walk.at);
        m.stages.give_back(walk.at);
        walk.at.advance();
        walk.before.advance();
    }
}

/* The products of a unit of up to 16 tokens, by warps: a warpgroup's products of so few columns take as long
 * as decoding, and each wait for them holds four warps. Sums have the same bits. */
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_few(float (&c)[TOKENS / 8][4], const char *unit, uint32_t tokens)
{
    const int lane = threadIdx.x % 32;
    unit_operand w;
    decode_unit<T, false>(w, unit);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            uint32_t b[4];
            ldmatrix4(b, tokens + tile_at<TOKENS>(n * 8 + lane % 8, half * 4 + lane / 8));
            mma16816<T>(c[n], w.step[2 * half], b[0], b[1]);
            mma16816<T>(c[n], w.step[2 * half + 1], b[2], b[3]);
        }
}

template <typename T, int TOKENS>
__device__ __forceinline__ void sum_few(float (&c)[TOKENS / 8][4], const gemm_params &p, shared<TOKENS> &m,
                                        ring_place<form<TOKENS>::STAGES> &at, int group)
{
    enum { UNITS = form<TOKENS>::UNITS };
    const int steps = steps_of<TOKENS>(p);
    int left = p.units; /* of this part of K */
    for (int step = 0; step < steps; step++) {
        const int count = min((int)UNITS, left);
        const char *units = m.b[at.stage][group][0];
        const uint32_t tokens = smem_address(m.a) + at.stage * (uint32_t)sizeof m.a[0];
        m.stages.wait_full(at);
        if (count == UNITS) {
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                multiply_few<T, TOKENS>(c, units + i * UNIT_BYTES, tokens + i * TOKENS * 128);
        } else {
#pragma unroll 1
            for (int i = 0; i < count; i++)
                multiply_few<T, TOKENS>(c, units + i * UNIT_BYTES, tokens + i * TOKENS * 128);
        }
        m.stages.give_back(at);
        at.advance();
        left = left > count ? left - count : p.units;
    }
}

/* Results of a warp: 16 columns of B and the tokens of a tile. */
struct warp_place {
    int32_t expert, rows;
    int64_t row0;
    int column, width; /* of C, the warp's first, and how many there are */
};

/* The factors of the sums of a thread's two columns. */
struct column_scales {
    float low, high;
};

/* A's globals of the two tokens that a thread has of a tile. */
__device__ __forceinline__ float2 row_globals(const gemm_params &p, const warp_place &w, int n)
{
    const int token = n * 8 + threadIdx.x % 4 * 2;
    return make_float2(token < w.rows ? a_global_of(p, 0, w.row0 + token) : 1.0f,
                       token + 1 < w.rows ? a_global_of(p, 0, w.row0 + token + 1) : 1.0f);
}

/* Turns sums into results. A thread's columns are lane / 4 and that + 8, under SwiGLU a gate and its up: the
 * first two of four elements then hold the result. The branches on what a call has stand outside the loops
 * over tokens: the code of one a token would not stay in the instruction cache. PLAIN: neither bias nor
 * SwiGLU. */
template <int TOKENS, bool PLAIN>
__device__ __forceinline__ void finish_sums(float (&c)[TOKENS / 8][4], const gemm_params &p,
                                            const warp_place &w, int first, column_scales unit)
{
    const int lane = threadIdx.x % 32;
    const column_terms low = column_terms_of(p, w.expert, first + lane / 4),
                       high = column_terms_of(p, w.expert, first + lane / 4 + 8);
    if (p.a_global != NULL && p.a_per == QUANTISE_GLOBAL_ROW) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            const float2 global = row_globals(p, w, n);
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[n][i] = scaled(c[n][i], i < 2 ? unit.low : unit.high, i % 2 == 0 ? global.x : global.y,
                                 i < 2 ? low.global : high.global);
        }
    } else {
        const float global = a_global_of(p, w.expert, 0);
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[n][i] =
                    scaled(c[n][i], i < 2 ? unit.low : unit.high, global, i < 2 ? low.global : high.global);
    }
    if constexpr (PLAIN) return;
    if (p.bias != NULL) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[n][i] = __fadd_rn(c[n][i], i < 2 ? low.bias : high.bias);
    }
    if (p.swiglu) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) c[n][i] = swiglu_of(p.rule, c[n][i], c[n][i + 2]);
    }
}

template <typename T, int TOKENS>
__device__ __forceinline__ void store_elements(const float (&c)[TOKENS / 8][4], const gemm_params &p,
                                               const warp_place &w)
{
    const int lane = threadIdx.x % 32, column = w.column + lane / 4, token = lane % 4 * 2;
    T *row = (T *)p.c + (w.row0 + token) * p.c_stride + column;
    const int low = column < w.width ? w.rows - token : 0,
              high = !p.swiglu && column + 8 < w.width ? w.rows - token : 0;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++, row += 8 * p.c_stride)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (n * 8 + i < low) row[i * p.c_stride] = from_float<T>(c[n][i]);
            if (n * 8 + i < high) row[i * p.c_stride + 8] = from_float<T>(c[n][i + 2]);
        }
}

/* Stores 16-bit results through shared memory, which transposes them: 32 bytes a token and warp, under SwiGLU
 * 16, where the last two of four matrices are not used. */
template <typename T, int TOKENS, bool SWIGLU>
__device__ __forceinline__ void store_rows(const float (&c)[TOKENS / 8][4], const gemm_params &p,
                                           const warp_place &w, char *staged)
{
    const int lane = threadIdx.x % 32, token = SWIGLU ? lane : lane / 2, part = SWIGLU ? 0 : lane % 2 * 16;
    const uint32_t to =
        smem_address(staged) + (SWIGLU ? lane * 16 : (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16);
    char *row = (char *)p.c + ((w.row0 + token) * p.c_stride + w.column) * 2 + part;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n += 2, row += 32 * p.c_stride) {
        const int buffer = n / 2 % 2 * (STORE_BYTES / 2);
        const uint32_t low[2] = {pack2<T>(c[n][0], c[n][1]), pack2<T>(c[n + 1][0], c[n + 1][1])};
        uint32_t packed[4] = {low[0], low[1], low[1], low[1]};
        if constexpr (!SWIGLU) {
            packed[1] = pack2<T>(c[n][2], c[n][3]);
            packed[3] = pack2<T>(c[n + 1][2], c[n + 1][3]);
        }
        stmatrix4_trans(to + buffer, packed);
        __syncwarp();
        if (n * 8 + token < w.rows && token < 16)
            *(uint4 *)row = *(const uint4 *)(staged + buffer + lane * 16);
    }
    __syncwarp();
}

/* Stores results in C's dtype, as rows where a warp's 16 columns are all there and rows are aligned. */
template <typename T, int TOKENS, bool PLAIN>
__device__ __forceinline__ void store_as(const float (&c)[TOKENS / 8][4], const gemm_params &p,
                                         const warp_place &w, bool whole, char *staged)
{
    if constexpr (TOKENS > 8 && sizeof(T) == 2) {
        if (whole && !PLAIN && p.swiglu) store_rows<T, TOKENS, true>(c, p, w, staged);
        else if (whole) store_rows<T, TOKENS, false>(c, p, w, staged);
        if (whole) return;
    }
    store_elements<T, TOKENS>(c, p, w);
}

template <int TOKENS, bool PLAIN = false>
__device__ __forceinline__ void store_tile(float (&c)[TOKENS / 8][4], const gemm_params &p,
                                           const tile_place &t, int group, char *staged, column_scales unit)
{
    const int first = (t.panel + group) * UNIT + threadIdx.x / 32 % 4 * 16;
    if (first >= p.width) return;
    const int half = p.swiglu ? 2 : 1;
    const warp_place w = {t.expert, t.rows, t.row0, first / half, p.width / half};
    const bool whole = first + 16 <= p.width && p.c_wide;
    finish_sums<TOKENS, PLAIN>(c, p, w, first, unit);
    if (p.c_dtype == QUERN_BF16) store_as<bf16, TOKENS, PLAIN>(c, p, w, whole, staged);
    else if (p.c_dtype == QUERN_F16) store_as<f16, TOKENS, PLAIN>(c, p, w, whole, staged);
    else store_as<float, TOKENS, PLAIN>(c, p, w, whole, staged);
}

template <typename T, int TOKENS, bool TRANSPOSED>
__device__ __forceinline__ void multiply(const gemm_params &p, shared<TOKENS> &m, int group)
{
    const int32_t tiles = m.tiles.count;
    stage_walk<TOKENS> walk;
    for (int32_t tile = blockIdx.x; tile < tiles; tile = next_tile(m.tiles, tile, form<TOKENS>::PAIRS)) {
        float c[TOKENS / 8][4];
        if (!has_panel(m.tiles, tile, group)) {
            pass_tile(p, m, walk);
            continue;
        }
        clear_sums(c);
        sum_tile<T, TOKENS, TRANSPOSED>(c, p, m, walk, group);
        store_tile<TOKENS, TRANSPOSED>(c, p, tile_at(m.tiles, p, tile, TOKENS, form<TOKENS>::GROUPS), group,
                                       m.out[threadIdx.x / 32 - 4], {weight_scale<T>(), weight_scale<T>()});
    }
}

/* The same of up to 16 tokens. */
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_narrow(const gemm_params &p, shared<TOKENS> &m, int group)
{
    const int32_t tiles = m.tiles.count;
    ring_place<form<TOKENS>::STAGES> at;
    for (int32_t tile = before_first(tiles); tile < tiles; tile += gridDim.x) {
        float c[TOKENS / 8][4];
        const tile_place t = tile_or_empty(m.tiles, p, tile, TOKENS, form<TOKENS>::GROUPS);
        clear_sums(c);
        if (tile >= 0) sum_few<T, TOKENS>(c, p, m, at, group);
        store_tile<TOKENS>(c, p, t, group, m.out[threadIdx.x / 32 - 4],
                           {weight_scale<T>(), weight_scale<T>()});
    }
}

template <typename T, int TOKENS, bool TRANSPOSED>
__global__ void __launch_bounds__(form<TOKENS>::THREADS, form<TOKENS>::BLOCKS)
    grouped_gemm_sm90(const __grid_constant__ gemm_params p, const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<TOKENS> &m = *(shared<TOKENS> *)memory;
    if (threadIdx.x == 0) {
        tma_prefetch(a);
        m.stages.init(p.b.repacked != NULL ? 1 : 129, form<TOKENS>::GROUPS * 128);
        mbar_init_done();
    }
    if constexpr (TOKENS == FEW_TOKENS) {
        wait_for_before();
        let_next_start();
    }
    make_tiles(m.tiles, p, TOKENS, p.panels, form<TOKENS>::GROUPS);
    finish_tail(m.tiles, p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        if constexpr (TOKENS >= 128) registers_down<FEW_REGISTERS>();
        if (p.b.repacked == NULL) feed_gathered(p, a, m);
        else if (threadIdx.x == 0) feed_repacked(p, a, m);
    } else {
        if constexpr (TOKENS >= 128) registers_up<MANY_REGISTERS>();
        if constexpr (TOKENS <= 16) multiply_narrow<T, TOKENS>(p, m, role - 1);
        else multiply<T, TOKENS, TRANSPOSED>(p, m, role - 1);
    }
#endif
}

template <typename T, int TOKENS, bool TRANSPOSED = false>
static quern_status launch_kernel(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a)
{
    const dim3 grid((unsigned)exec->multiprocessors * form<TOKENS>::BLOCKS);
    if (TOKENS == FEW_TOKENS)
        return launch_behind((cudaStream_t)exec->stream, grouped_gemm_sm90<T, TOKENS, TRANSPOSED>, grid,
                             form<TOKENS>::THREADS, sizeof(shared<TOKENS>), "grouped_gemm", p, a);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, grouped_gemm_sm90<T, TOKENS, TRANSPOSED>, grid,
                         form<TOKENS>::THREADS, sizeof(shared<TOKENS>), "grouped_gemm", p, a);
}

} // namespace sm90_gemm

#endif
