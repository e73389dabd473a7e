/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward.cu - hyper-connections of 512 tokens or more of four copies in bf16, of widths that forward_once.cu
 * does not take.
 *
 *   up to 6144 tokens   one kernel, whose blocks either sum or mix (forward.cuh), the mix blocks `lag` tiles
 *                       of 64 tokens behind: it spares gaps between kernels, and their first and last waves
 *   more                sums by all blocks, weights, and four_combine(), one after the other: x is read twice
 *                       then, and the mix takes all multiprocessors
 *
 * Sums are 2 MFLOP a token on the tensor cores, and x once through shared memory. Limit: x read twice; reads
 * alone go at 3.9 TB/s on an H200, and the rest at the copy rate.
 */
#include "hyper/sm90/forward_mix.cuh"
#include "hyper/sm90/forward_sums.cuh"
#include "variants.cuh"

namespace sm90_hyper_forward
{

enum { TOKENS_LEAST = 512, TOKENS_MOST = INT32_MAX / 2, SUM_BLOCKS = 64, MIX_BLOCKS_LEAST = 32, LAG = 20 };
enum { TOGETHER_MOST = 6144, UNITS_AT_ONCE = 4 }; /* tokens of one kernel; units of a block of weights */

template <int EACH, bool OUT>
__global__ void __launch_bounds__(THREADS, 1)
    hyper_forward(const __grid_constant__ forward_params p, const __grid_constant__ CUtensorMap x)
{
    extern __shared__ __align__(1024) char memory[];
    __shared__ int32_t block;
    const int sum_blocks = p.panels * p.shares;
    if (threadIdx.x == 0) block = atomicAdd(p.blocks, 1);
    __syncthreads();
    const int role = block;
    if (role < sum_blocks) sum_block(p, x, *(sum_shared *)memory, role);
    else
        mix_block<EACH, OUT>(p, *(mix_shared<EACH, OUT> *)memory, role - sum_blocks,
                             (int)gridDim.x - sum_blocks);
}

/* Kernels of more tokens. */
__global__ void __launch_bounds__(THREADS, 1)
    hyper_forward_sums(const __grid_constant__ forward_params p, const __grid_constant__ CUtensorMap x)
{
    extern __shared__ __align__(1024) char memory[];
    sum_block(p, x, *(sum_shared *)memory, blockIdx.x);
}

__global__ void __launch_bounds__(UNITS_AT_ONCE * 32)
    hyper_forward_weights(const __grid_constant__ forward_params p)
{
    const int unit = blockIdx.x * UNITS_AT_ONCE + threadIdx.x / 32;
    if (unit < p.tiles * TILE_UNITS) weigh_unit(p, unit);
}

struct plan {
    forward_params p;
    size_t counters, bytes;
};

static bool is_ours(const stage_exec *exec, const hyper_args *args)
{
    const int64_t tokens = args->x.shape[0], width = args->x.shape[2];
    return exec->compute == 90 && exec->shared_bytes >= shared_bytes<4, true>() &&
           exec->multiprocessors >= SUM_BLOCKS + MIX_BLOCKS_LEAST && args->x.dtype == QUERN_BF16 &&
           args->x.shape[1] == COPIES && !args->head && present(args->fn) && tokens >= TOKENS_LEAST &&
           tokens <= TOKENS_MOST && width % (PANEL_CHANNELS / COPIES) == 0 && width >= PANEL_CHANNELS &&
           width <= WIDTH_MOST;
}

static bool supports(const stage_exec *exec, const hyper_args *args, char *)
{
    const quern_tensor *all[] = {&args->x, &args->f, &args->h, &args->out, &args->weight, &args->fn};
    bool wide = is_ours(exec, args);
    for (const quern_tensor *t : all) wide = wide && (!present(*t) || rows_aligned16(*t));
    return wide;
}

static plan plan_of(const stage_exec *exec, const hyper_args *args, void *memory)
{
    plan all = {};
    if (!is_ours(exec, args)) return all;
    forward_params &p = all.p;
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    static_cast<hyper_call &>(p) = hyper_call_of(args);
    p.padded = (p.tokens + TOKENS - 1) / TOKENS * TOKENS;
    p.tiles = (int)(p.padded / TOKENS);
    p.panels = p.width * COPIES / PANEL_CHANNELS;
    const bool together = p.tokens <= TOGETHER_MOST;
    p.shares = together ? SUM_BLOCKS / p.panels : (int)shares_for(p.panels);
    p.lag = together ? LAG : p.tiles;
    all.counters = (size_t)(2 + p.tiles * (2 + TILE_UNITS)) * sizeof(int32_t);
    p.blocks = (int32_t *)arena_take(&a, all.counters);
    p.units = p.blocks + 1;
    p.summed = p.blocks + 2;
    p.mixed = p.summed + p.tiles;
    p.weighed = p.mixed + p.tiles;
    p.sums = (float *)arena_take(&a, (size_t)(p.panels * COLUMNS) * (size_t)p.padded * sizeof(float));
    p.weights = (float *)arena_take(&a, (size_t)p.tokens * WEIGHTS * sizeof(float));
    all.bytes = a.used + ARENA_ALIGN - 1;
    return all;
}

static size_t workspace(const stage_exec *exec, const hyper_args *args)
{
    return plan_of(exec, args, NULL).bytes;
}

static quern_status describe_x(CUtensorMap *map, const forward_params &p)
{
    const tma_tensor t = {p.x.p,
                          CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          4,
                          {BOX, COPIES, p.tokens, p.width / BOX},
                          {p.x.copy * 2, p.x.token * 2, BOX * 2},
                          {BOX, 1, TOKENS, AT_ONCE},
                          CU_TENSOR_MAP_SWIZZLE_128B};
    return tma_describe(map, t);
}

static quern_status run_apart(const forward_params &p, const CUtensorMap &x, cudaStream_t stream)
{
    quern_status status = launch_shared({stream, NULL}, hyper_forward_sums, dim3(p.panels * p.shares),
                                        THREADS, sizeof(sum_shared), "hyper, sums", p, x);
    if (status != QUERN_OK) return status;
    hyper_forward_weights<<<blocks_for(p.tiles * TILE_UNITS, UNITS_AT_ONCE), UNITS_AT_ONCE * 32, 0, stream>>>(
        p);
    status = LAUNCHED("hyper, weights");
    return status == QUERN_OK ? four_combine(p, stream) : status;
}

static quern_status run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const plan all = plan_of(exec, args, memory);
    const forward_params &p = all.p;
    const bool out = p.f.p != NULL, narrow = p.width <= 4 * EACH_WIDTH;
    const auto kernel = narrow ? (out ? hyper_forward<4, true> : hyper_forward<4, false>)
                               : (out ? hyper_forward<8, true> : hyper_forward<8, false>);
    const size_t bytes = narrow ? (out ? shared_bytes<4, true>() : shared_bytes<4, false>())
                                : (out ? shared_bytes<8, true>() : shared_bytes<8, false>());
    CUtensorMap x;
    quern_status status = describe_x(&x, p);
    if (status == QUERN_OK)
        status = cuda_report(cudaMemsetAsync(p.blocks, 0, all.counters, stream), "hyper: its counters");
    if (status != QUERN_OK) return status;
    if (p.tokens > TOGETHER_MOST) return run_apart(p, x, stream);
    return launch_shared({stream, NULL}, kernel, dim3((unsigned)exec->multiprocessors), THREADS, bytes,
                         "hyper", p, x);
}

} // namespace sm90_hyper_forward

extern const variant<hyper_args> hyper_forward_sm90 = {"hyper_forward_sm90", sm90_hyper_forward::supports,
                                                       sm90_hyper_forward::workspace,
                                                       sm90_hyper_forward::run};
