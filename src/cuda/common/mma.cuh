/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mma.cuh - tensor-core building blocks of every GPU since sm_80: cp.async, ldmatrix, mma.m16n8k16, and
 * the shared-memory tile they work on: rows of DP 16-bit elements whose 16-byte chunks are permuted by
 * chunk ^ (row & 7), so that ldmatrix reads eight rows from eight different bank groups. */
#ifndef QUERN_CUDA_MMA_CUH
#define QUERN_CUDA_MMA_CUH

#include "common/device.cuh"

__device__ __forceinline__ uint32_t smem_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

template <typename T> __device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma16816<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma16816<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack2<bf16>(float lo, float hi)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&p;
}
template <> __device__ __forceinline__ uint32_t pack2<f16>(float lo, float hi)
{
    __half2 p = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&p;
}

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Byte offset of 16-byte chunk `chunk` of `row` in a tile of DP elements a row. */
template <int DP> __device__ __forceinline__ uint32_t tile_at(int row, int chunk)
{
    return (uint32_t)(row * (DP * 2) + ((chunk ^ (row & 7)) << 4));
}

/* Fragment addresses for lane `lane`. A: 16 rows x 16 k from a row-major tile. */
template <int DP> __device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t tile, int row0, int k0, int lane)
{
    ldmatrix4(r, tile + tile_at<DP>(row0 + (lane & 15), (k0 >> 3) + (lane >> 4)));
}
/* B as n x k row-major (two n8 tiles, one k16): r[0..1] for n0, r[2..3] for n0 + 8. */
template <int DP> __device__ __forceinline__ void load_b(uint32_t (&r)[4], uint32_t tile, int n0, int k0, int lane)
{
    ldmatrix4(r, tile + tile_at<DP>(n0 + ((lane >> 4) << 3) + (lane & 7), (k0 >> 3) + ((lane >> 3) & 1)));
}
/* B as k x n row-major (one k16, two n8 tiles). */
template <int DP> __device__ __forceinline__ void load_b_trans(uint32_t (&r)[4], uint32_t tile, int k0, int n0, int lane)
{
    ldmatrix4_trans(r, tile + tile_at<DP>(k0 + (lane & 15), (n0 >> 3) + (lane >> 4)));
}

/* Copies one row of `dim` elements (a multiple of 8, zeros behind it up to DP) into row `row` of a tile;
 * `worker` of `workers` threads share the row's chunks. src NULL: zeros. Finish with a commit and wait. */
template <typename T, int DP>
__device__ __forceinline__ void load_row_chunk(uint32_t tile, char *tile_ptr, int row, int chunk, const T *src, int dim, bool vec)
{
    const uint32_t at = tile_at<DP>(row, chunk);
    const bool valid = src != NULL && chunk * 8 < dim;
    if (vec || !valid) {
        cp_async16(tile + at, valid ? (const void *)(src + chunk * 8) : (const void *)tile_ptr, valid);
    } else {
        T *dst = (T *)(tile_ptr + at);
#pragma unroll
        for (int i = 0; i < 8; i++) dst[i] = src[chunk * 8 + i];
    }
}

#endif
