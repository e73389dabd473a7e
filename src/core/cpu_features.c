/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cpu_features.c - which CPU level this machine offers. A feature counts only if the operating system
 * saves its registers (XCR0): a CPU may have AVX-512 under a kernel that does not. */
#include "runtime/context.h"

#if defined(QUERN_X86_LEVELS)
#include <cpuid.h>

static uint64_t xgetbv0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

quern_cpu_level quern_cpu_level_detect(void)
{
    enum { OSXSAVE = 1 << 27, AVX = 1 << 28, FMA = 1 << 12, F16C = 1 << 29 }; /* leaf 1 ecx */
    enum { AVX2 = 1 << 5, F = 1 << 16, DQ = 1 << 17, BW = 1 << 30 };          /* leaf 7 ebx */
    enum { VNNI = 1 << 11 };                                                  /* leaf 7 ecx */
    const uint32_t vl = 1u << 31, bf16 = 1u << 5;                             /* leaf 7 ebx; leaf 7.1 eax */
    const uint64_t ymm_state = 0x6, zmm_state = 0xe6;
    uint32_t a, b, c, d, features, extended, a1;
    if (!__get_cpuid(1, &a, &b, &features, &d)) return QUERN_CPU_LEVEL_PORTABLE;
    const uint32_t base = OSXSAVE | AVX | FMA | F16C;
    if ((features & base) != base || !__get_cpuid_count(7, 0, &a, &extended, &c, &d))
        return QUERN_CPU_LEVEL_PORTABLE;
    const uint64_t xcr0 = xgetbv0();
    if ((xcr0 & ymm_state) != ymm_state || !(extended & AVX2)) return QUERN_CPU_LEVEL_PORTABLE;
    const uint32_t avx512 = F | DQ | BW | vl;
    if ((xcr0 & zmm_state) != zmm_state || (extended & avx512) != avx512) return QUERN_CPU_LEVEL_AVX2;
    if (!(c & VNNI) || !__get_cpuid_count(7, 1, &a1, &b, &c, &d) || !(a1 & bf16))
        return QUERN_CPU_LEVEL_AVX512;
    return QUERN_CPU_LEVEL_AVX512BF16;
}

/* A line on its way into L1 occupies one of L1's fill buffers until it is there. A Zen 4 has 24, which is
 * 14 GB/s at a latency of 110 ns; its L2 has room for more. A Zen 5 reads faster into L1. */
bool cpu_prefetches_into_l2(void)
{
    enum { ZEN5 = 0x1a };
    uint32_t a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return true;
    const bool amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return true;
    const uint32_t family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    return !(amd && family == ZEN5);
}
#else
quern_cpu_level quern_cpu_level_detect(void)
{
    return QUERN_CPU_LEVEL_PORTABLE;
}

bool cpu_prefetches_into_l2(void)
{
    return true;
}
#endif
