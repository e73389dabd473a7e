/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cpu_features.c - asks the machine what its CPU has. */
#include "core/cpu_features.h"

#include <pthread.h>

static uint32_t found;

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Registers of cpuid in their order. */
enum { EAX, EBX, ECX, EDX };
/* State that the operating system saves, bits of XCR0. */
enum { YMM = 0x6, ZMM = 0xe6, TILES = 0x600e6 };

/* Where cpuid says a feature. */
static const struct {
    uint32_t feature, leaf, subleaf;
    int reg, bit;
    uint64_t state;
} places[] = {
    {CPU_FMA, 1, 0, ECX, 12, YMM},         {CPU_F16C, 1, 0, ECX, 29, YMM},
    {CPU_AVX2, 7, 0, EBX, 5, YMM},         {CPU_AVX512F, 7, 0, EBX, 16, ZMM},
    {CPU_AVX512DQ, 7, 0, EBX, 17, ZMM},    {CPU_AVX512BW, 7, 0, EBX, 30, ZMM},
    {CPU_AVX512VL, 7, 0, EBX, 31, ZMM},    {CPU_AVX512_VNNI, 7, 0, ECX, 11, ZMM},
    {CPU_AVX512_FP16, 7, 0, EDX, 23, ZMM}, {CPU_AVX512_BF16, 7, 1, EAX, 5, ZMM},
    {CPU_AVX512_VBMI, 7, 0, ECX, 1, ZMM},  {CPU_AMX_TILE, 7, 0, EDX, 24, TILES},
    {CPU_AMX_BF16, 7, 0, EDX, 22, TILES},
};

/* The register state that the operating system saves. */
static uint64_t saved_state(void)
{
    enum { OSXSAVE = 27 };
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> OSXSAVE & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static void find(void)
{
    const uint64_t state = saved_state();
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++) {
        uint32_t reg[4];
        if ((state & places[i].state) != places[i].state) continue;
        if (!__get_cpuid_count(places[i].leaf, places[i].subleaf, &reg[EAX], &reg[EBX], &reg[ECX], &reg[EDX]))
            continue;
        if (reg[places[i].reg] >> places[i].bit & 1) found |= places[i].feature;
    }
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
#if defined(__aarch64__)
#include <sys/auxv.h>

static void find(void)
{
    enum { ASIMD = 1 << 1, SVE = 1 << 22 };      /* AT_HWCAP */
    enum { SVE_BF16 = 1 << 12, BF16 = 1 << 14 }; /* AT_HWCAP2 */
    const unsigned long has = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
    found = (has & ASIMD ? CPU_NEON : 0) | (more & BF16 ? CPU_NEON_BF16 : 0) | (has & SVE ? CPU_SVE : 0) |
            (more & SVE_BF16 ? CPU_SVE_BF16 : 0);
}
#else
static void find(void) {}
#endif

bool cpu_prefetches_into_l2(void)
{
    return true;
}
#endif

uint32_t cpu_features(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find);
    return found;
}

static bool tiles_allowed;

static void ask_for_tiles(void)
{
#if defined(__x86_64__) && defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    tiles_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#endif
}

bool cpu_may_use_tiles(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask_for_tiles);
    return tiles_allowed;
}
