/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cpu_features.h - what this machine's CPU has, as far as kernels ask. */
#ifndef QUERN_CORE_CPU_FEATURES_H
#define QUERN_CORE_CPU_FEATURES_H

#include <stdbool.h>
#include <stdint.h>

/* Bits of cpu_features(). */
enum {
    CPU_AVX2 = 1 << 0,
    CPU_FMA = 1 << 1,
    CPU_F16C = 1 << 2,
    CPU_AVX512F = 1 << 3,
    CPU_AVX512BW = 1 << 4,
    CPU_AVX512DQ = 1 << 5,
    CPU_AVX512VL = 1 << 6,
    CPU_AVX512_VNNI = 1 << 7,
    CPU_AVX512_BF16 = 1 << 8,
    CPU_AVX512_FP16 = 1 << 9,
    CPU_NEON = 1 << 10, /* of AArch64 */
    CPU_NEON_BF16 = 1 << 11,
    CPU_SVE = 1 << 12,
    CPU_SVE_BF16 = 1 << 13,
    CPU_AVX512_VBMI = 1 << 14,
    CPU_AMX_TILE = 1 << 15,
    CPU_AMX_BF16 = 1 << 16
};

/* A feature counts only if the operating system saves its registers: a CPU may have AVX-512 under a kernel
 * that does not. Asked of the machine once. */
uint32_t cpu_features(void);

/* Whether this process may use AMX's tiles. Linux is asked at the first call; it then makes the process's
 * signal frames 8 KiB longer, and refuses where a signal stack is too small for them. */
bool cpu_may_use_tiles(void);

/* Whether lines that a kernel asks for far ahead should go into L2, not L1. */
bool cpu_prefetches_into_l2(void);

#endif
