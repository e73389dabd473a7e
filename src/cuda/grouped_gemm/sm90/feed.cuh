/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that fills the stages. Panels past the last are not filled: their columns are not
 * stored. */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_FEED_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_FEED_CUH

#include "grouped_gemm/sm90/shared.cuh"

namespace sm90_gemm
{

/* The units of one stage: `count` from `unit` on, at column `column` of A. */
struct stage_units {
    int unit, count, column;
};
template <int TOKENS> __device__ __forceinline__ stage_units units_at(const gemm_params &p, int step)
{
    const int across = (p.units + form<TOKENS>::UNITS - 1) / form<TOKENS>::UNITS, part = step / across,
              unit = (step - part * across) * form<TOKENS>::UNITS;
    return {unit, min((int)form<TOKENS>::UNITS, p.units - unit), (part * p.units + unit) * UNIT};
}
template <int TOKENS> __device__ __forceinline__ int steps_of(const gemm_params &p)
{
    return p.parts * ((p.units + form<TOKENS>::UNITS - 1) / form<TOKENS>::UNITS);
}

template <int TOKENS>
__device__ __forceinline__ void copy_tokens(const CUtensorMap &a, shared<TOKENS> &m, const tile_place &t,
                                            const stage_units &u, int stage, uint32_t bar)
{
    for (int i = 0; i < u.count; i++)
        tma_load(smem_address(m.a[stage][i]), a, bar, u.column + i * UNIT, 0, (int)t.row0, 0);
}

/* A panel's units of a stage, which follow one another unless the weights are transposed. */
template <int UNITS>
__device__ __forceinline__ void copy_weights(const gemm_params &p, char (&to)[UNITS][UNIT_BYTES],
                                             int32_t expert, int panel, const stage_units &u, uint32_t bar)
{
    const uint8_t *from = p.b.repacked + expert * p.b.repacked_expert;
    if (!p.transposed) {
        bulk_load(smem_address(to), from + ((int64_t)panel * p.units + u.unit) * UNIT_BYTES,
                  (uint32_t)(u.count * UNIT_BYTES), bar);
        return;
    }
    for (int i = 0; i < u.count; i++)
        bulk_load(smem_address(to[i]), from + ((int64_t)(u.unit + i) * p.panels + panel) * UNIT_BYTES,
                  UNIT_BYTES, bar);
}

/* Repacked weights: all by one thread. */
template <int TOKENS>
__device__ __forceinline__ void feed_repacked(const gemm_params &p, const CUtensorMap &a, shared<TOKENS> &m)
{
    ring_place<form<TOKENS>::STAGES> at;
    const int32_t tiles = m.tiles.count;
    const int steps = steps_of<TOKENS>(p);
    for (int32_t tile = blockIdx.x; tile < tiles; tile = next_tile(m.tiles, tile, form<TOKENS>::PAIRS)) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, form<TOKENS>::GROUPS);
        const int panels = min((int)form<TOKENS>::GROUPS, p.panels - t.panel);
        for (int step = 0; step < steps; step++) {
            const stage_units u = units_at<TOKENS>(p, step);
            m.stages.wait_free(at);
            const uint32_t bar = smem_address(&m.stages.full[at.stage]);
            mbar_expect(bar, (uint32_t)(u.count * (TOKENS * 128 + panels * UNIT_BYTES)));
            for (int g = 0; g < panels; g++) copy_weights(p, m.b[at.stage][g], t.expert, t.panel + g, u, bar);
            copy_tokens(a, m, t, u, at.stage, bar);
            at.advance();
        }
    }
}

/* A thread's part of a unit to its place. */
__device__ __forceinline__ void put_part(char *unit, const unit_part &w)
{
    *(uint4 *)(unit + threadIdx.x * 16) = make_uint4(w.codes[0], w.codes[1], w.codes[2], w.codes[3]);
    if (threadIdx.x % 4 == 0)
        *(uint2 *)(unit + UNIT_CODES + threadIdx.x / 4 * 8) = make_uint2(w.scales[0], w.scales[1]);
}

/* Weights in the caller's layout: each thread gathers a lane's part. */
template <int TOKENS>
__device__ __forceinline__ void feed_gathered(const gemm_params &p, const CUtensorMap &a, shared<TOKENS> &m)
{
    ring_place<form<TOKENS>::STAGES> at;
    const int32_t tiles = m.tiles.count;
    const int steps = steps_of<TOKENS>(p), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int32_t tile = blockIdx.x; tile < tiles; tile = next_tile(m.tiles, tile, form<TOKENS>::PAIRS)) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, form<TOKENS>::GROUPS);
        const int panels = min((int)form<TOKENS>::GROUPS, p.panels - t.panel);
        for (int step = 0; step < steps; step++) {
            const stage_units u = units_at<TOKENS>(p, step);
            m.stages.wait_free(at);
            const uint32_t bar = smem_address(&m.stages.full[at.stage]);
            if (threadIdx.x == 0) {
                mbar_expect(bar, (uint32_t)(u.count * TOKENS * 128));
                copy_tokens(a, m, t, u, at.stage, bar);
            }
            for (int g = 0; g < panels; g++)
#pragma unroll 1
                for (int i = 0; i < u.count; i++) {
                    const int panel = t.panel + g, unit = u.unit + i;
                    put_part(m.b[at.stage][g][i], gather_unit(p.b, t.expert, p.transposed ? unit : panel,
                                                              p.transposed ? panel : unit, warp, lane));
                }
            if (threadIdx.x != 0) m.stages.give(at);
            else mbar_arrive(bar);
            at.advance();
        }
    }
}

} // namespace sm90_gemm

#endif
