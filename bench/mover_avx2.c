/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mover_avx2.c - the mover on 256-bit vectors. */
#include <immintrin.h>

#define VECTOR __m256i
#define LOAD(p) _mm256_load_si256((const __m256i *)(const void *)(p))
#define STORE(p, v) _mm256_store_si256((__m256i *)(void *)(p), v)
#define STREAM(p, v) _mm256_stream_si256((__m256i *)(void *)(p), v)
#define FENCE() _mm_sfence()
#define ABSORB(v) __asm__ volatile("" : : "x"(v))
#define MOVER_NAME mover_lines_avx2
#include "mover_lines.h"
