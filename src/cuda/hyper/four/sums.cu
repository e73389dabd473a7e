/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * sums.cu - of every token the products of its copies with fn, and their squares, by panels of channels.
 *
 * A block keeps a panel's fn in shared memory, 192 KB, and takes a share of the tokens: read from L2 for each
 * tile of tokens, fn would be as many bytes as x. A warp has 16 tokens, AHEAD steps of 32 channels of all
 * copies on their way: 16 warps x 2 x 4 KB an SM, four times what hides the latency. A read of fn from shared
 * memory serves 16 tokens; of eight it would take as long as x does. Limit: x read once.
 */
#include "hyper/four/panel.cuh"

enum { WARPS = 16, THREADS = WARPS * 32, AHEAD = 2, EIGHTS = TILE / 8 };

/* The places of a lane's chunks in a tile: token lane / 4 of each eight. */
struct lane_rows {
    const bf16 *row[EIGHTS];
};

__device__ __forceinline__ lane_rows rows_of(const four_params &p, int64_t tile, int panel)
{
    const int lane = threadIdx.x % 32;
    lane_rows r;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
        r.row[n] = (const bf16 *)p.x.p + min(tile * TILE + n * 8 + lane / 4, p.tokens - 1) * p.x.token +
                   panel * PANEL + lane % 4 * 8;
    return r;
}

__device__ __forceinline__ void load_step(const four_params &p, const lane_rows &r, int channel,
                                          uint4 (&x)[COPIES][EIGHTS])
{
#pragma unroll
    for (int i = 0; i < COPIES; i++)
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) x[i][n] = load_once(r.row[n] + i * p.x.copy + channel);
}

__device__ __forceinline__ void add_squares(const uint4 &x, float &sum)
{
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 both = unpack2<bf16>(word_of(x, w));
        sum = fmaf(both.x, both.x, sum);
        sum = fmaf(both.y, both.y, sum);
    }
}

__global__ void __launch_bounds__(THREADS, 1) four_sum(const __grid_constant__ four_params p)
{
    extern __shared__ __align__(16) char memory[];
    fn_panel &fn = *(fn_panel *)memory;
    const int panels = (p.width + PANEL - 1) / PANEL, panel = blockIdx.x % panels, lane = threadIdx.x % 32,
              steps = min(PANEL, p.width - panel * PANEL) / DEPTH;
    const int64_t tiles = p.padded / TILE, stride = (int64_t)(gridDim.x / panels) * WARPS;
    int64_t tile = (int64_t)(blockIdx.x / panels) * WARPS + threadIdx.x / 32;
    float *const columns = p.sums + (int64_t)panel * FORWARD_SUMS * p.padded;
    uint4 x[AHEAD][COPIES][EIGHTS];
    lane_rows here = rows_of(p, tile, panel);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) load_step(p, here, a * DEPTH, x[a]);
    load_panel(p, fn, panel);
    for (; tile < tiles; tile += stride) {
        float sum[ROW_TILES][EIGHTS][4] = {}, square[EIGHTS] = {};
        const lane_rows next = rows_of(p, tile + stride, panel);
        for (int step = 0; step < steps; step += AHEAD) {
            const bool last = step + AHEAD >= steps;
            const lane_rows then = {{last ? next.row[0] : here.row[0] + (step + AHEAD) * DEPTH,
                                     last ? next.row[1] : here.row[1] + (step + AHEAD) * DEPTH}};
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    multiply<EIGHTS>(sum, fn.pack[(step + a) * COPIES + i], x[a][i]);
#pragma unroll
                    for (int n = 0; n < EIGHTS; n++) add_squares(x[a][i][n], square[n]);
                }
                if (!last || tile + stride < tiles) load_step(p, then, a * DEPTH, x[a]);
            }
        }
        store_products<EIGHTS>(p, columns, tile * TILE, sum);
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            square[n] += __shfl_xor_sync(~0u, square[n], 1);
            square[n] += __shfl_xor_sync(~0u, square[n], 2);
            if (lane % 4 == 0) columns[SUM_SQUARE * p.padded + tile * TILE + n * 8 + lane / 4] = square[n];
        }
        here = next;
    }
}

size_t four_sums_bytes()
{
    return sizeof(fn_panel);
}

quern_status four_sums(const four_params &p, cudaStream_t stream)
{
    const int64_t panels = panels_of(p.width), most = (p.padded / TILE + WARPS - 1) / WARPS,
                  shares = most < shares_for(panels) ? most : shares_for(panels);
    return launch_shared({stream, NULL}, four_sum, dim3((unsigned)(panels * shares)), THREADS,
                         sizeof(fn_panel), "hyper, sums", p);
}
