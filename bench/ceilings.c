/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "ceilings.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { SLICES = 12, MAX_THREADS = 256 };
static const int64_t compute_rounds = 200000;         /* about 5 ms */
static const size_t memory_mib = 256;                 /* over all threads: eight times a large L3 */

static const char *const names[CEILINGS] = {"fma512", "fma256", "bf16", "vnni",
                                            "exp2",   "read",   "copy", "write"};
static const char *const units[CEILINGS] = {"GFLOP/s", "GFLOP/s", "GFLOP/s", "GOP/s",
                                            "Gexp/s",  "GB/s",    "GB/s",    "GB/s"};

const char *ceiling_name(ceiling c)
{
    return names[c];
}

const char *ceiling_unit(ceiling c)
{
    return units[c];
}

#if defined(__x86_64__)
static ceiling_compute *compute_kernel(ceiling c)
{
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    switch (c) {
    case CEILING_FMA512: return avx512 ? ceiling_fma_avx512 : NULL;
    case CEILING_FMA256: return avx2 ? ceiling_fma_avx2 : NULL;
    case CEILING_BF16: return avx512 && __builtin_cpu_supports("avx512bf16") ? ceiling_bf16_avx512 : NULL;
    case CEILING_VNNI: return avx512 && __builtin_cpu_supports("avx512vnni") ? ceiling_vnni_avx512 : NULL;
    case CEILING_EXP2: return avx512 ? ceiling_exp2_avx512 : NULL;
    default: return NULL;
    }
}

static ceiling_memory *memory_kernel(ceiling c)
{
    const int level = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
    static ceiling_memory *const kernels[3][3] = {
        {ceiling_read_plain, ceiling_copy_plain, ceiling_write_plain},
        {ceiling_read_avx2, ceiling_copy_avx2, ceiling_write_avx2},
        {ceiling_read_avx512, ceiling_copy_avx512, ceiling_write_avx512},
    };
    return c >= CEILING_READ ? kernels[level][c - CEILING_READ] : NULL;
}
#else
static ceiling_compute *compute_kernel(ceiling c)
{
    (void)c;
    return NULL;
}

static ceiling_memory *memory_kernel(ceiling c)
{
    static ceiling_memory *const kernels[] = {ceiling_read_plain, ceiling_copy_plain, ceiling_write_plain};
    return c >= CEILING_READ ? kernels[c - CEILING_READ] : NULL;
}
#endif

static volatile uint64_t read_sink;

void ceiling_read_plain(void *to, const void *from, size_t bytes)
{
    const uint64_t *p = from;
    uint64_t sum[8] = {0};
    (void)to;
    for (size_t i = 0; i < bytes / 8; i += 8)
        for (int k = 0; k < 8; k++) sum[k] += p[i + (size_t)k];
    for (int k = 0; k < 8; k++) read_sink = sum[k];
}

void ceiling_copy_plain(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

void ceiling_write_plain(void *to, const void *from, size_t bytes)
{
    (void)from;
    memset(to, 1, bytes);
}

void *bench_allocate(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    if (bytes > SIZE_MAX / 2) return NULL;
    void *p = aligned_alloc(page, (bytes + page) & ~(page - 1));
    if (p == NULL) return NULL;
    (void)madvise(p, (bytes + page) & ~(page - 1), MADV_HUGEPAGE);
    memset(p, 0, bytes);
    return p;
}

typedef struct team {
    pthread_mutex_t gate; /* closed until all threads are there, or one could not be created */
    pthread_barrier_t barrier;
    ceiling_compute *compute;
    ceiling_memory *memory;
    size_t bytes; /* a thread */
    int threads;
    bool incomplete; /* a thread could not be created: none goes to the barrier */
    atomic_bool failed;
    double begin[MAX_THREADS][SLICES], end[MAX_THREADS][SLICES], work[MAX_THREADS][SLICES];
} team;

typedef struct member {
    team *team;
    int index;
} member;

/* Binds the calling thread to the index-th CPU that the process may use: two threads on one CPU would halve
 * every ceiling. If that fails, the scheduler decides. */
static void pin(int index)
{
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all) || index-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        (void)sched_setaffinity(0, sizeof one, &one);
        return;
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *arg)
{
    const member *m = arg;
    team *t = m->team;
    pthread_mutex_lock(&t->gate);
    pthread_mutex_unlock(&t->gate);
    if (t->incomplete) return NULL;
    if (t->threads > 1) pin(m->index);
    char *memory = t->memory != NULL ? bench_allocate(2 * t->bytes) : NULL;
    if (t->memory != NULL && memory == NULL) atomic_store(&t->failed, true);
    /* The source is random: some machines write zeros at twice the speed of other data. */
    uint64_t random = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; memory != NULL && i < t->bytes; i += sizeof random) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        memcpy(memory + i, &random, sizeof random);
    }
    for (int s = 0; s < SLICES; s++) {
        pthread_barrier_wait(&t->barrier);
        t->begin[m->index][s] = now();
        if (t->compute != NULL) {
            t->work[m->index][s] = t->compute(compute_rounds);
        } else if (memory != NULL) {
            t->memory(memory + t->bytes, memory, t->bytes);
            t->work[m->index][s] = (double)t->bytes;
        }
        t->end[m->index][s] = now();
    }
    free(memory);
    return NULL;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the slices; false where a thread or its memory was missing. */
static bool run_team(team *t)
{
    pthread_t handles[MAX_THREADS];
    member members[MAX_THREADS];
    int started = 0;
    if (pthread_barrier_init(&t->barrier, NULL, (unsigned)t->threads) != 0) return false;
    pthread_mutex_init(&t->gate, NULL);
    pthread_mutex_lock(&t->gate);
    for (; started < t->threads; started++) {
        members[started] = (member){t, started};
        if (pthread_create(&handles[started], NULL, work, &members[started]) != 0) break;
    }
    t->incomplete = started < t->threads;
    if (t->incomplete) atomic_store(&t->failed, true);
    pthread_mutex_unlock(&t->gate);
    for (int i = 0; i < started; i++) pthread_join(handles[i], NULL);
    pthread_mutex_destroy(&t->gate);
    pthread_barrier_destroy(&t->barrier);
    return !atomic_load(&t->failed);
}

/* MiB that a memory ceiling goes through. */
static size_t memory_size(void)
{
    const char *text = getenv("QUERN_CEILING_MIB");
    const long mib = text != NULL ? strtol(text, NULL, 10) : 0;
    return mib >= 1 && mib < 4096 ? (size_t)mib : memory_mib;
}

double ceiling_measure(ceiling c, int threads)
{
    team *t = calloc(1, sizeof *t);
    double rates[SLICES] = {0};
    if (t == NULL) return 0;
    t->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    t->compute = compute_kernel(c);
    t->memory = memory_kernel(c);
    t->bytes = (memory_size() << 20) / (size_t)t->threads & ~(size_t)4095;
    const bool ran = (t->compute != NULL || t->memory != NULL) && run_team(t);
    for (int s = 0; s < SLICES && ran; s++) {
        double begin = t->begin[0][s], end = t->end[0][s], done = 0;
        for (int i = 0; i < t->threads; i++) {
            if (t->begin[i][s] < begin) begin = t->begin[i][s];
            if (t->end[i][s] > end) end = t->end[i][s];
            done += t->work[i][s];
        }
        rates[s] = done * (c == CEILING_COPY ? 2 : 1) / (end - begin) * 1e-9;
    }
    free(t);
    qsort(rates, SLICES, sizeof *rates, ascending);
    return 0.5 * (rates[SLICES / 2 - 1] + rates[SLICES / 2]);
}
