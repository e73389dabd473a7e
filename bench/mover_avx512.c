/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mover_avx512.c - the mover on 512-bit vectors. */
#include <immintrin.h>

#define VECTOR __m512i
#define LOAD(p) _mm512_load_si512((const void *)(p))
#define STORE(p, v) _mm512_store_si512((void *)(p), v)
#define STREAM(p, v) _mm512_stream_si512((__m512i *)(void *)(p), v)
#define FENCE() _mm_sfence()
#define ABSORB(v) __asm__ volatile("" : : "v"(v))
#define MOVER_NAME mover_lines_avx512
#include "mover_lines.h"
