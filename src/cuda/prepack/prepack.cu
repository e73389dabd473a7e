/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.cu - weights to the order of the products' fragments and back, a unit a block of 128 threads.
 * Limit: weights read and written once. */
#include "grouped_gemm/weights.cuh"
#include "common/launch.cuh"
#include "variants.cuh"

struct prepack_params {
    weight_source w;
    uint8_t *repacked;
    int64_t expert; /* bytes from one to the next */
    bool wide;
};

__device__ __forceinline__ void put_word(uint8_t *to, uint32_t word, bool wide)
{
    if (wide) {
        *(uint32_t *)to = word;
    } else {
        for (int b = 0; b < 4; b++) to[b] = (uint8_t)(word >> 8 * b);
    }
}
__device__ __forceinline__ uint32_t get_word(const uint8_t *from, bool wide)
{
    uint32_t word = 0;
    if (wide) return *(const uint32_t *)from;
    for (int b = 0; b < 4; b++) word |= (uint32_t)from[b] << 8 * b;
    return word;
}

__global__ void __launch_bounds__(128) pack_units(const __grid_constant__ prepack_params a)
{
    const int panel = blockIdx.x / a.w.units, unit = blockIdx.x % a.w.units, warp = threadIdx.x / 32,
              lane = threadIdx.x % 32;
    uint8_t *to = a.repacked + blockIdx.y * a.expert + ((int64_t)panel * a.w.units + unit) * UNIT_BYTES;
    const unit_part p = gather_unit(a.w, blockIdx.y, panel, unit, warp, lane);
    for (int s = 0; s < UNIT_STEPS; s++) put_word(to + threadIdx.x * 16 + s * 4, p.codes[s], a.wide);
    for (int i = 0; lane % 4 == 0 && i < 2; i++)
        put_word(to + UNIT_CODES + (warp * 8 + lane / 4) * 8 + i * 4, p.scales[i], a.wide);
}

__global__ void __launch_bounds__(128) unpack_units(const __grid_constant__ prepack_params a)
{
    const int panel = blockIdx.x / a.w.units, unit = blockIdx.x % a.w.units, warp = threadIdx.x / 32,
              lane = threadIdx.x % 32;
    const weight_source &w = a.w;
    const uint8_t *from = a.repacked + blockIdx.y * a.expert + ((int64_t)panel * w.units + unit) * UNIT_BYTES;
    for (int s = 0; s < UNIT_STEPS; s++) {
        const int k0 = unit * UNIT + s * 16;
        if (k0 >= w.k) return;
        const uint32_t word = get_word(from + threadIdx.x * 16 + s * 4, a.wide),
                       scales = get_word(from + UNIT_CODES + (warp * 8 + lane / 4) * 8 + s / 2 * 4, a.wide);
        for (int reg = 0; reg < 4; reg++) {
            const int column = panel * UNIT + column_of(warp, lane, reg), pair = k0 / 2 + pair_of(lane, reg);
            if (column >= w.n) continue;
            w.codes[blockIdx.y * w.codes_expert + pair * w.pair + column * w.column] =
                (uint8_t)(code_from_word(word, reg, 0) | code_from_word(word, reg, 1) << 4);
            if (lane % 4 == 0 && reg < 2)
                *scale_place(w, blockIdx.y, k0 / 16, column) = (uint8_t)(scales >> (s % 2 * 8 + reg * 16));
        }
    }
}

int64_t prepack_bytes(int64_t n, int64_t k);
int64_t prepack_bytes(int64_t n, int64_t k)
{
    return (n / UNIT + (n % UNIT != 0)) * (k / UNIT + (k % UNIT != 0)) * UNIT_BYTES;
}

static quern_status prepack_any_run(const stage_exec *exec, const prepack_args *args, void *)
{
    prepack_params a = {
        weight_source_of({}, args->codes, args->scales, args->k_major, args->order, args->n, args->k),
        (uint8_t *)args->repacked.data, args->repacked.strides[0],
        (uintptr_t)args->repacked.data % 4 == 0 && args->repacked.strides[0] % 4 == 0};
    a.w.status = exec->status;
    const dim3 grid((unsigned)a.w.panels * (unsigned)a.w.units, (unsigned)args->repacked.shape[0]);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (grid.x == 0 || grid.y == 0) return QUERN_OK;
    if (args->inverse) unpack_units<<<grid, 128, 0, stream>>>(a);
    else pack_units<<<grid, 128, 0, stream>>>(a);
    return LAUNCHED("prepack");
}

extern const variant<prepack_args> prepack_any = {"prepack_any", NULL, NULL, prepack_any_run};
