/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernels.c - the rows of src/cpu/kernels.inc as data; what was checked of them, and how long each takes. */
#include "kernel_time.h"
#include "kernels.h"

#include "cmocka_c11.h"
#include "cpu/attend_mqa/mqa_kernels.h"
#include "cpu/e4m3/e4m3_kernels.h"
#include "cpu/gemm4/gemm4_kernels.h"
#include "cpu/hyper/hyper_kernels.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#include "cpu/levels.h"
#include "cpu/pool/pool_kernels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { ALL = false, BF16_DOT = true };

static const test_kernel rows[] = {
#define KERNEL(table, member, levels, terms, roundings, argument, test, bench)                               \
    {#table, #member, offsetof(table##_kernels, member), levels, terms, roundings, argument, test, bench},
#include "cpu/kernels.inc"
#undef KERNEL
};
enum { ROWS = sizeof rows / sizeof *rows };

static unsigned checked[ROWS]; /* bit per level, by its number */

const test_kernel *test_kernels(size_t *count)
{
    *count = ROWS;
    return rows;
}

const void *test_kernel_table(const char *table, quern_cpu_level level)
{
    const cpu_kernels *k = cpu_kernels_for(level);
    const struct {
        const char *name;
        const void *table;
    } tables[] = {
        {"row", k->rows}, {"format", k->formats}, {"swiglu", k->swiglu},   {"attention", k->attention},
        {"nsa", k->nsa},  {"pool", k->pool},      {"indexer", k->indexer}, {"gemm4", k->gemm4},
        {"mqa", k->mqa},  {"e4m3", k->e4m3},      {"hyper", k->hyper}};
    size_t i = 0;
    while (strcmp(tables[i].name, table) != 0) i++;
    return tables[i].table;
}

bool test_kernel_is_at(const test_kernel *row, quern_cpu_level level)
{
    return !row->bf16_dot || cpu_kernels_for(level)->attention->mm_bf16 != NULL;
}

static size_t row_index(const char *table, const char *name)
{
    size_t i = 0;
    while (i < ROWS && (strcmp(rows[i].table, table) != 0 || strcmp(rows[i].name, name) != 0)) i++;
    if (i == ROWS) fail_msg("src/cpu/kernels.inc has no row for %s.%s", table, name);
    return i;
}

double test_kernel_bound(const char *table, const char *name, quern_cpu_level level, double terms,
                         double argument)
{
    const size_t i = row_index(table, name);
    checked[i] |= 1u << level;
    return (rows[i].terms * terms + rows[i].roundings + rows[i].argument * fabs(argument)) * 0x1p-24;
}

double test_kernel_rounding(quern_dtype dtype, double x)
{
    return dtype == QUERN_F16 ? fabs(x) * 0x1p-11 + 0x1p-25 : dtype == QUERN_BF16 ? fabs(x) * 0x1p-8 : 0;
}

/* Timing. */
typedef struct measure {
    double ticks; /* of a call; 0: not measured */
    int64_t work;
} measure;
static measure measures[ROWS][TEST_LEVEL_NUMBERS];
static unsigned timed[ROWS]; /* bit per level: there is a call to time */
static const char *pattern;  /* NULL: nothing is timed */

enum { BATCHES = 15 };
static const double batch_ticks = 2e5;

#if defined(__x86_64__)
static const char *const ticks = "cycles"; /* of the time stamp counter */
static double now(void)
{
    return (double)__builtin_ia32_rdtsc();
}
#else
static const char *const ticks = "ns";
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}
#endif

test_timer test_timer_of(const char *table, const char *name, quern_cpu_level level, int64_t work)
{
    const size_t i = row_index(table, name);
    char whole[100];
    measure *m = &measures[i][level];
    timed[i] |= 1u << level;
    snprintf(whole, sizeof whole, "%s.%s", table, name);
    if (pattern == NULL || strstr(whole, pattern) == NULL || work <= m->work)
        return (test_timer){.best = NULL};
    *m = (measure){0, work};
    return (test_timer){.best = &m->ticks, .calls = 1, .batches = BATCHES, .started = now()};
}

/* The first batches grow until one takes long enough; the least of the others counts. */
bool test_timer_goes_on(test_timer *t)
{
    if (t->best == NULL) return false;
    if (t->made++ < t->calls) return true;
    const double spent = now() - t->started;
    t->made = 1;
    if (spent < batch_ticks / 2) {
        t->calls *= 2;
    } else {
        const double each = spent / (double)t->calls;
        if (*t->best == 0 || each < *t->best) *t->best = each;
        if (--t->batches == 0) return false;
    }
    t->started = now();
    return true;
}

static void print_measures(void)
{
    printf("%-32s %-11s %9s %12s %8s/work  times portable\n", "kernel", "level", "work", ticks, ticks);
    for (size_t i = 0; i < ROWS; i++)
        for (int level = 1; level < TEST_LEVEL_NUMBERS; level++) {
            const measure *m = &measures[i][level], *first = &measures[i][QUERN_CPU_LEVEL_PORTABLE];
            if (m->ticks == 0) continue;
            const double each = m->ticks / (double)m->work;
            char whole[100], times[20] = "-";
            if (first->ticks != 0)
                snprintf(times, sizeof times, "%.2f", first->ticks / (double)first->work / each);
            snprintf(whole, sizeof whole, "%s.%s", rows[i].table, rows[i].name);
            printf("%-32s %-11s %9lld %12.1f %13.4f  %14s\n", whole,
                   quern_cpu_level_name((quern_cpu_level)level), (long long)m->work, m->ticks, each, times);
        }
}

void test_kernels_time(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) pattern = argc > 2 ? argv[2] : "";
}

int test_kernels_report(int failed)
{
    if (pattern != NULL) print_measures();
    return failed;
}

void test_every_kernel(void **state)
{
    const char *program = *state;
    int listed = 0;
    for (size_t i = 0; i < ROWS; i++) {
        if (strcmp(rows[i].test, program) != 0) continue;
        listed++;
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_cpu_level own; /* of the table that this level uses */
            memcpy(&own, test_kernel_table(rows[i].table, level), sizeof own);
            const unsigned bit = 1u << own;
            if (!test_kernel_is_at(&rows[i], level)) continue;
            if ((checked[i] & bit) == 0)
                fail_msg("%s does not check %s.%s at %s", program, rows[i].table, rows[i].name,
                         quern_cpu_level_name(own));
            if ((timed[i] & bit) == 0)
                fail_msg("%s has no call of %s.%s to time at %s", program, rows[i].table, rows[i].name,
                         quern_cpu_level_name(own));
        }
    }
    assert_true(listed > 0);
}
