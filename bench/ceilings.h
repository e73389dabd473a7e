/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ceilings.h - the machine's measured peaks: the denominators of every fraction that the bench prints. A
 * ceiling is a median of several short slices, as the figures beside it are medians. On shared machines
 * arithmetic varies by a few hundredths and memory by a factor of two from second to second, so the best
 * slice would belong to another moment.
 */
#ifndef QUERN_BENCH_CEILINGS_H
#define QUERN_BENCH_CEILINGS_H

#include <stddef.h>
#include <stdint.h>

typedef enum ceiling {
    CEILING_FMA512, /* f32 fused multiply-add, 512-bit, GFLOP/s (a multiply-add counts 2) */
    CEILING_FMA256, /* the same, 256-bit */
    CEILING_BF16,   /* vdpbf16ps, 512-bit, GFLOP/s */
    CEILING_VNNI,   /* vpdpbusd, 512-bit, GOP/s */
    CEILING_EXP2,   /* exp2 by a degree 5 polynomial, 16 lanes, Gexp/s */
    CEILING_READ,   /* memory read, GB/s */
    CEILING_COPY,   /* memory to memory, non-temporal stores, GB/s read plus written */
    CEILING_WRITE,  /* non-temporal stores, GB/s */
    CEILINGS
} ceiling;

/* "fma512", "fma256", "bf16", "vnni", "exp2", "read", "copy", "write", and their units. */
const char *ceiling_name(ceiling c);
const char *ceiling_unit(ceiling c);

/* Measures on `threads` threads for about a third of a second. 0 where the machine lacks the
 * instructions, the threads or the memory. QUERN_CEILING_MIB sets the memory that one of memory goes through;
 * 256 MiB are more than a cache holds, and tests that judge no rate take less. */
double ceiling_measure(ceiling c, int threads);

/* The kernels, one set an ISA. Compute: runs `rounds` rounds on registers and returns the number of
 * operations. Memory: one pass over `bytes` bytes (a multiple of 256). */
typedef double ceiling_compute(int64_t rounds);
typedef void ceiling_memory(void *to, const void *from, size_t bytes);
ceiling_compute ceiling_fma_avx2, ceiling_fma_avx512, ceiling_exp2_avx512, ceiling_bf16_avx512,
    ceiling_vnni_avx512;
ceiling_memory ceiling_read_plain, ceiling_copy_plain, ceiling_write_plain;
ceiling_memory ceiling_read_avx2, ceiling_copy_avx2, ceiling_write_avx2;
ceiling_memory ceiling_read_avx512, ceiling_copy_avx512, ceiling_write_avx512;

/* Memory for a bench: aligned to 2 MiB, on huge pages if possible, every page written. NULL without memory.
 * Free with free(). */
void *bench_allocate(size_t bytes);

#endif
