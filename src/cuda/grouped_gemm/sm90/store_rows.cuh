/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* store_rows.cuh - the epilogue of products whose rows are tokens: 64 of them, 16 a warp, by EIGHTS times
 * eight columns. A thread has tokens lane / 4 and that + 8, and of each eight columns two neighbours. */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_STORE_ROWS_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_STORE_ROWS_CUH

#include "grouped_gemm/params.cuh"

namespace sm90_gemm
{

enum { RUN_EIGHTS = 4 /* that a warp stages at once: STORE_BYTES */ };

/* What a tile's columns are multiplied by, and what is added. */
template <int EIGHTS> struct column_table {
    float unit[EIGHTS * 8], global[EIGHTS * 8], bias[EIGHTS * 8];
};

/* The part of one of `threads` threads; a barrier follows. UNIT_OF: the factor of a column's sums. */
template <int EIGHTS, typename UNIT_OF>
__device__ __forceinline__ void fill_columns(column_table<EIGHTS> &table, const gemm_params &p,
                                             int32_t expert, int first, int thread, int threads,
                                             UNIT_OF unit_of)
{
#pragma unroll 1
    for (int column = thread; column < EIGHTS * 8; column += threads) {
        const column_terms terms = column_terms_of(p, expert, first + column);
        table.unit[column] = unit_of(min(first + column, p.width - 1));
        table.global[column] = terms.global;
        table.bias[column] = terms.bias;
    }
}

/* Rows of a warp: `rows` of them from row0 on, columns from `column` on. */
struct warp_rows {
    int32_t expert, rows;
    int64_t row0;
    int column, width; /* of C */
};

/* Of each eight columns' floats the two of this thread. */
__device__ __forceinline__ float2 own_two(const float *of, int n)
{
    return *(const float2 *)(of + n * 8 + threadIdx.x % 4 * 2);
}

/* Turns sums into results. Under SwiGLU a run of eight gates stands before its ups; the first half of c then
 * holds the results. */
template <int EIGHTS>
__device__ __forceinline__ void finish_rows(float (&c)[EIGHTS][4], const gemm_params &p, const warp_rows &w,
                                            const column_table<EIGHTS> &table)
{
    const int row = threadIdx.x % 32 / 4;
    if (p.a_global != NULL && p.a_per == QUANTISE_GLOBAL_ROW) {
        const float low = row < w.rows ? a_global_of(p, 0, w.row0 + row) : 1.0f,
                    high = row + 8 < w.rows ? a_global_of(p, 0, w.row0 + row + 8) : 1.0f;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            const float2 unit = own_two(table.unit, n), global = own_two(table.global, n);
            c[n][0] = scaled(c[n][0], unit.x, low, global.x);
            c[n][1] = scaled(c[n][1], unit.y, low, global.y);
            c[n][2] = scaled(c[n][2], unit.x, high, global.x);
            c[n][3] = scaled(c[n][3], unit.y, high, global.y);
        }
    } else {
        const float a_global = a_global_of(p, w.expert, 0);
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            const float2 unit = own_two(table.unit, n), global = own_two(table.global, n);
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[n][i] =
                    scaled(c[n][i], i % 2 == 0 ? unit.x : unit.y, a_global, i % 2 == 0 ? global.x : global.y);
        }
    }
    if (p.bias != NULL) {
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            const float2 bias = own_two(table.bias, n);
#pragma unroll
            for (int i = 0; i < 4; i++) c[n][i] = __fadd_rn(c[n][i], i % 2 == 0 ? bias.x : bias.y);
        }
    }
    if (p.swiglu) {
#pragma unroll
        for (int n = 0; n < EIGHTS; n += 2)
#pragma unroll
            for (int i = 0; i < 4; i++) c[n / 2][i] = swiglu_of(p.rule, c[n][i], c[n + 1][i]);
    }
}

/* Elements one by one: C's rows or its width are out of line. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void store_alone(const float (&c)[EIGHTS][4], const gemm_params &p,
                                            const warp_rows &w, int columns)
{
    const int lane = threadIdx.x % 32, row = lane / 4, column = w.column + lane % 4 * 2,
              left = min(columns - lane % 4 * 2, w.width - column);
    T *at = (T *)p.c + (w.row0 + row) * p.c_stride + column;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (n * 8 + i % 2 < left && row + i / 2 * 8 < w.rows)
                at[i / 2 * 8 * p.c_stride + n * 8 + i % 2] = from_float<T>(c[n][i]);
}

/* 16-bit results through shared memory: RUN_EIGHTS at once, 64 bytes a row, in two places in turn. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void store_runs(const float (&c)[EIGHTS][4], const gemm_params &p,
                                           const warp_rows &w, int columns, char (*staged)[STORE_BYTES])
{
    const int lane = threadIdx.x % 32, in = lane / 8 % 2 * 8 + lane % 8, row = lane / 4,
              left = min(columns, w.width - w.column);
    const uint32_t to = smem_address(staged) + in * 64;
    const char *from = staged[0] + row * 64 + ((lane % 4) ^ (row >> 1 & 3)) * 16;
    char *at = (char *)p.c + ((w.row0 + row) * p.c_stride + w.column) * 2 + lane % 4 * 16;
#pragma unroll
    for (int run = 0; run < EIGHTS; run += RUN_EIGHTS) {
        const int place = run / RUN_EIGHTS % 2 * STORE_BYTES;
        if (run * 8 >= left) break;
#pragma unroll
        for (int n = run; n < run + RUN_EIGHTS && n < EIGHTS; n += 2) {
            const uint32_t packed[4] = {pack2<T>(c[n][0], c[n][1]), pack2<T>(c[n][2], c[n][3]),
                                        pack2<T>(c[n + 1][0], c[n + 1][1]),
                                        pack2<T>(c[n + 1][2], c[n + 1][3])};
            stmatrix4(to + place + (((n - run + lane / 16) ^ (in >> 1 & 3)) << 4), packed);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + half * 8 < w.rows && (run + lane % 4) * 8 < left)
                *(uint4 *)(at + half * 16 * p.c_stride + run * 16) =
                    *(const uint4 *)(from + place + half * 512);
    }
    __syncwarp();
}

template <typename T, int EIGHTS>
__device__ __forceinline__ void store_rows_as(const float (&c)[EIGHTS][4], const gemm_params &p,
                                              const warp_rows &w, char (*staged)[STORE_BYTES])
{
    const int columns = EIGHTS * 8 / (p.swiglu ? 2 : 1);
    if constexpr (sizeof(T) == 2) {
        if (p.c_wide && (w.width % 8 == 0 || w.column + columns <= w.width)) {
            store_runs<T>(c, p, w, columns, staged);
            return;
        }
    }
    store_alone<T>(c, p, w, columns);
}

/* Stores 64 tokens of a tile, those from `first` on, by columns from `column` on. */
template <int EIGHTS>
__device__ __forceinline__ void store_tokens(float (&c)[EIGHTS][4], const gemm_params &p, const tile_place &t,
                                             int first, int column, const column_table<EIGHTS> &table,
                                             char (*staged)[STORE_BYTES])
{
    const int half = p.swiglu ? 2 : 1, token = first + threadIdx.x / 32 % 4 * 16;
    const warp_rows w = {t.expert, t.rows - token, t.row0 + token, column / half, p.width / half};
    if (w.rows <= 0 && t.rows > 0) return; /* a tile of no rows brings the code */
    finish_rows(c, p, w, table);
    if (p.c_dtype == QUERN_BF16) store_rows_as<bf16>(c, p, w, staged);
    else if (p.c_dtype == QUERN_F16) store_rows_as<f16>(c, p, w, staged);
    else store_rows_as<float>(c, p, w, staged);
}

} // namespace sm90_gemm

#endif
