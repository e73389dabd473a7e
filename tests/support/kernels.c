/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernels.c - the rows of src/cpu/kernels.inc as data. */
#include "kernels.h"

#include "cmocka_c11.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/kernels/row_kernels.h"
#include "cpu/pool/pool_kernels.h"

#include <math.h>
#include <string.h>

enum { ALL = (1 << TEST_KERNEL_LEVELS) - 1, BF16_DOT = 1 << (QUERN_CPU_LEVEL_AVX512BF16 - QUERN_CPU_LEVEL_PORTABLE) };

static const test_kernel rows[] = {
#define KERNEL(table, member, levels, terms, roundings, argument, test, bench)                                                                       \
    {#table, #member, offsetof(table##_kernels, member), levels, terms, roundings, argument, test, bench},
#include "cpu/kernels.inc"
#undef KERNEL
};
enum { ROWS = sizeof rows / sizeof *rows };

static unsigned checked[ROWS]; /* bit per level, as in levels */

const test_kernel *test_kernels(size_t *count)
{
    *count = ROWS;
    return rows;
}

const void *test_kernel_table(const char *table, quern_cpu_level level)
{
    if (strcmp(table, "indexer") == 0) return indexer_kernels_for(level);
    if (strcmp(table, "row") == 0) return row_kernels_for(level);
    if (strcmp(table, "pool") == 0) return pool_kernels_for(level);
    return strcmp(table, "nsa") == 0 ? (const void *)nsa_kernels_for(level) : (const void *)attention_kernels_for(level);
}

double test_kernel_bound(const char *table, const char *name, quern_cpu_level level, double terms, double argument)
{
    size_t i = 0;
    while (i < ROWS && (strcmp(rows[i].table, table) != 0 || strcmp(rows[i].name, name) != 0)) i++;
    if (i == ROWS) fail_msg("src/cpu/kernels.inc has no row for %s.%s", table, name);
    checked[i] |= 1u << (level - QUERN_CPU_LEVEL_PORTABLE);
    return (rows[i].terms * terms + rows[i].roundings + rows[i].argument * fabs(argument)) * 0x1p-24;
}

double test_kernel_rounding(quern_dtype dtype, double x)
{
    return dtype == QUERN_F16 ? fabs(x) * 0x1p-11 + 0x1p-25 : dtype == QUERN_BF16 ? fabs(x) * 0x1p-8 : 0;
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
            const unsigned bit = 1u << (own - QUERN_CPU_LEVEL_PORTABLE);
            if ((rows[i].levels & bit) != 0 && (checked[i] & bit) == 0)
                fail_msg("%s does not check %s.%s at %s", program, rows[i].table, rows[i].name, quern_cpu_level_name(own));
        }
    }
    assert_true(listed > 0);
}
