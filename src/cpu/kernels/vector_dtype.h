/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* vector_dtype.h - loads and stores of a level's vectors from and to f32, f16 and bf16 memory. The dtype is a
 * constant where it matters: BY_DTYPE picks the call. */
#ifndef QUERN_CPU_VECTOR_DTYPE_H
#define QUERN_CPU_VECTOR_DTYPE_H

#include "core/half.h"
#include "cpu/kernels/vector.h"

#include <quern/quern.h>

#if !defined(__FMA__)
/* Functions of their own: inlined, four lanes of these branches in every load and store are most of what the
 * compiler reads of the portable kernels. */
__attribute__((noinline, unused)) static vfloat widen_f16(vhalf h)
{
    vfloat v;
    for (int i = 0; i < LANES; i++) v[i] = float_from_f16(h[i]);
    return v;
}

__attribute__((noinline, unused)) static vhalf narrow_f16(vfloat v)
{
    vhalf h;
    for (int i = 0; i < LANES; i++) h[i] = f16_from_float(v[i]);
    return h;
}
#endif

INLINE vfloat widen(vhalf h, const quern_dtype dtype)
{
#if defined(__AVX512F__)
    if (dtype == QUERN_BF16) return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
    return _mm512_cvtph_ps((__m256i)h);
#elif defined(__FMA__)
    if (dtype == QUERN_BF16) return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
    return _mm256_cvtph_ps((__m128i)h);
#else
    if (dtype == QUERN_BF16) return (vfloat)(__builtin_convertvector(h, vuint) << 16);
    return widen_f16(h);
#endif
}

/* Elements at ... at + LANES - 1 of a row as f32. */
INLINE vfloat load_as(const void *p, const quern_dtype dtype, int64_t at)
{
    if (dtype == QUERN_F32) return v_load((const float *)p + at);
    vhalf h;
    memcpy(&h, (const uint16_t *)p + at, sizeof h);
    return widen(h, dtype);
}

INLINE vhalf narrow_as(vfloat v, const quern_dtype dtype)
{
    if (dtype == QUERN_BF16) return v_narrow(v);
#if defined(__AVX512F__)
    return (vhalf)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__FMA__)
    return (vhalf)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return narrow_f16(v);
#endif
}

INLINE void store_as(void *p, const quern_dtype dtype, int64_t at, vfloat v)
{
    if (dtype == QUERN_F32) {
        v_store((float *)p + at, v);
    } else {
        const vhalf h = narrow_as(v, dtype);
        memcpy((uint16_t *)p + at, &h, sizeof h);
    }
}

/* The same with non-temporal stores; p + at is aligned to the stored vector. */
INLINE void stream_as(void *p, const quern_dtype dtype, int64_t at, vfloat v)
{
#if defined(__AVX512F__)
    if (dtype == QUERN_F32) _mm512_stream_ps((float *)p + at, (__m512)v);
    else _mm256_stream_si256((__m256i *)((uint16_t *)p + at), (__m256i)narrow_as(v, dtype));
#elif defined(__FMA__)
    if (dtype == QUERN_F32) _mm256_stream_ps((float *)p + at, (__m256)v);
    else _mm_stream_si128((__m128i *)((uint16_t *)p + at), (__m128i)narrow_as(v, dtype));
#else
    store_as(p, dtype, at, v);
#endif
}

INLINE int64_t dtype_bytes(quern_dtype dtype)
{
    return dtype == QUERN_F32 ? 4 : 2;
}

/* The last n - at < LANES elements of a row; the other lanes are 0. */
INLINE vfloat load_tail(const void *p, const quern_dtype dtype, int64_t at, int64_t n)
{
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 kept = (__mmask16)((1u << (n - at)) - 1u);
    if (dtype == QUERN_F32) return _mm512_maskz_loadu_ps(kept, (const float *)p + at);
    return widen((vhalf)_mm256_maskz_loadu_epi16(kept, (const uint16_t *)p + at), dtype);
#else
    float buffer[LANES] = {0};
    memcpy(buffer, (const char *)p + at * dtype_bytes(dtype), (size_t)((n - at) * dtype_bytes(dtype)));
    return load_as(buffer, dtype, 0);
#endif
}

INLINE void store_tail(void *p, const quern_dtype dtype, int64_t at, int64_t n, vfloat v)
{
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 kept = (__mmask16)((1u << (n - at)) - 1u);
    if (dtype == QUERN_F32) _mm512_mask_storeu_ps((float *)p + at, kept, v);
    else _mm256_mask_storeu_epi16((uint16_t *)p + at, kept, (__m256i)narrow_as(v, dtype));
#else
    float buffer[LANES];
    store_as(buffer, dtype, 0, v);
    memcpy((char *)p + at * dtype_bytes(dtype), buffer, (size_t)((n - at) * dtype_bytes(dtype)));
#endif
}

INLINE vfloat load_some(const void *p, const quern_dtype dtype, int64_t at, int64_t n)
{
    return at + LANES <= n ? load_as(p, dtype, at) : load_tail(p, dtype, at, n);
}

INLINE void store_some(void *p, const quern_dtype dtype, int64_t at, int64_t n, vfloat v)
{
    if (at + LANES <= n) store_as(p, dtype, at, v);
    else store_tail(p, dtype, at, n, v);
}

/* Calls a function whose first parameter is a constant dtype. */
#define BY_DTYPE(dtype, call)                                                                                \
    do {                                                                                                     \
        if ((dtype) == QUERN_F32) call(QUERN_F32);                                                           \
        else if ((dtype) == QUERN_BF16) call(QUERN_BF16);                                                    \
        else call(QUERN_F16);                                                                                \
    } while (0)

#endif
