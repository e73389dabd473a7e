/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mma.cuh - tensor-core building blocks of every GPU since sm_80: cp.async, ldmatrix, mma.m16n8k16, and
 * the shared-memory tile they work on: panels of 64 16-bit columns whose 16-byte chunks are permuted by
 * chunk ^ (row & 7), so that ldmatrix reads eight rows from eight different bank groups, and so that Hopper's
 * warpgroup products (wgmma.cuh) can read the same tile. Accumulators have one layout in both. */
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
__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;");
}
template <int N> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void store_shared(uint32_t address, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32_t address, float x, float y, float z, float w)
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}
__device__ __forceinline__ void stmatrix4(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
/* The same of transposed matrices: a row of shared memory is a column of fragments. */
__device__ __forceinline__ void stmatrix4_trans(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Nothing for f32, which has no product of its own here. */
template <typename T>
__device__ __forceinline__ void mma16816(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t)
{
}
template <>
__device__ __forceinline__ void mma16816<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma16816<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack2<bf16>(float lo, float hi)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&p;
}
template <> __device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi)
{
    __half2 p = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&p;
}

template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t x);
template <> __device__ __forceinline__ float2 unpack2<bf16>(uint32_t x)
{
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}
template <> __device__ __forceinline__ float2 unpack2<__half>(uint32_t x)
{
    return __half22float2(*(__half2 *)&x);
}

/* x[j] of each of four lanes that follow one another becomes what lane j of them has in x[lane & 3]. */
__device__ __forceinline__ void transpose_by_four(uint32_t (&x)[4])
{
#pragma unroll
    for (int by = 1; by <= 2; by *= 2) {
        const bool upper = (threadIdx.x & by) != 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = by == 1 ? i * 2 : i, high = low + by;
            const uint32_t other = __shfl_xor_sync(~0u, upper ? x[low] : x[high], by);
            if (upper) x[low] = other;
            else x[high] = other;
        }
    }
}

/* Eight 16-bit elements that follow one another; wide: `to` is aligned to 16 bytes. */
template <typename T> __device__ __forceinline__ void store_eight(T *to, const uint32_t (&x)[4], bool wide)
{
    if (wide) {
        __stcs((uint4 *)to, make_uint4(x[0], x[1], x[2], x[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ((uint16_t *)to)[i * 2] = (uint16_t)x[i];
        ((uint16_t *)to)[i * 2 + 1] = (uint16_t)(x[i] >> 16);
    }
}

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Byte offset of 16-byte chunk `chunk` of `row` in a tile of ROWS rows: panels of 64 columns, 128 bytes a
 * row. */
template <int ROWS> __device__ __forceinline__ uint32_t tile_at(int row, int chunk)
{
    return (uint32_t)((chunk >> 3) * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4));
}

/* Fragment addresses for lane `lane`. A: 16 rows x 16 k from a row-major tile. */
template <int ROWS>
__device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t tile, int row0, int k0, int lane)
{
    ldmatrix4(r, tile + tile_at<ROWS>(row0 + (lane & 15), (k0 >> 3) + (lane >> 4)));
}
/* B as n x k row-major (two n8 tiles, one k16): r[0..1] for n0, r[2..3] for n0 + 8. */
template <int ROWS>
__device__ __forceinline__ void load_b(uint32_t (&r)[4], uint32_t tile, int n0, int k0, int lane)
{
    ldmatrix4(r, tile + tile_at<ROWS>(n0 + ((lane >> 4) << 3) + (lane & 7), (k0 >> 3) + ((lane >> 3) & 1)));
}
/* B as k x n row-major (one k16, two n8 tiles). */
template <int ROWS>
__device__ __forceinline__ void load_b_trans(uint32_t (&r)[4], uint32_t tile, int k0, int n0, int lane)
{
    ldmatrix4_trans(r, tile + tile_at<ROWS>(k0 + (lane & 15), (n0 >> 3) + (lane >> 4)));
}

/* Copies a chunk of a row, or zeros where it is not valid, to `at` of a tile. Finish with a commit and wait.
 */
template <typename T>
__device__ __forceinline__ void load_chunk16(uint32_t tile, char *tile_ptr, uint32_t at, const T *src,
                                             bool valid, bool vec)
{
    if (vec || !valid) {
        cp_async16(tile + at, src, valid);
    } else {
        T *dst = (T *)(tile_ptr + at);
#pragma unroll
        for (int i = 0; i < 8; i++) dst[i] = src[i];
    }
}

/* Products of 16 rows a warp by mma.sync. A kernel takes the kind of its products as a parameter, so that one
 * text runs on Hopper's warpgroup products, too (attend/sm90_wgmma/products.cuh). Those ask for more: show()
 * before the barrier after which shared memory that threads filled is an operand, start() before registers
 * become operands or accumulators, finish() before accumulators are read. */
struct warp_products {
    static __device__ __forceinline__ void show() {}
    static __device__ __forceinline__ void start() {}
    static __device__ __forceinline__ void finish() {}

    /* acc[n][.] += A[row0 + ..][k] B[n0 + n 8 + ..][k] over DP columns. */
    template <typename T, int DP, int NT, int ROWS_A, int ROWS_B>
    static __device__ __forceinline__ void nt(float (&acc)[NT][4], uint32_t a, int row0, uint32_t b, int n0,
                                              int lane)
    {
#pragma unroll
        for (int k0 = 0; k0 < DP; k0 += 16) {
            uint32_t fa[4];
            load_a<ROWS_A>(fa, a, row0, k0, lane);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t fb[4];
                load_b<ROWS_B>(fb, b, n0 + n * 8, k0, lane);
                mma16816<T>(acc[n], fa, fb[0], fb[1]);
                mma16816<T>(acc[n + 1], fa, fb[2], fb[3]);
            }
        }
    }

    /* acc[n][.] += A[..][k] B[k0 + k][n 8 + ..] for the 16 k of fragment `fa` and DP columns. */
    template <typename T, int DP, int ROWS_B>
    static __device__ __forceinline__ void nn(float (&acc)[DP / 8][4], const uint32_t (&fa)[4], uint32_t b,
                                              int k0, int lane)
    {
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            uint32_t fb[4];
            load_b_trans<ROWS_B>(fb, b, k0, n * 8, lane);
            mma16816<T>(acc[n], fa, fb[0], fb[1]);
            mma16816<T>(acc[n + 1], fa, fb[2], fb[3]);
        }
    }
};

/* warp_products::nt with A's fragments in registers. */
template <typename T, int DP, int NT, int ROWS_B>
__device__ __forceinline__ void product_nt_held(float (&acc)[NT][4], const uint32_t (&fa)[DP / 16][4],
                                                uint32_t b, int n0, int lane)
{
#pragma unroll
    for (int k0 = 0; k0 < DP; k0 += 16)
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t fb[4];
            load_b<ROWS_B>(fb, b, n0 + n * 8, k0, lane);
            mma16816<T>(acc[n], fa[k0 / 16], fb[0], fb[1]);
            mma16816<T>(acc[n + 1], fa[k0 / 16], fb[2], fb[3]);
        }
}

#endif
