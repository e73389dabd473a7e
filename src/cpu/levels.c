/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* levels.c - levels.inc as data, the choice of a level, and the tables of each with what it inherits. */
#include "cpu/levels.h"

#include "core/cpu_features.h"
#include "core/error.h"
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
#include "cpu/pool/pool_kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ANY(tables) &tables
#if defined(QUERN_X86_LEVELS)
#define X86_64(tables) &tables
#else
#define X86_64(tables) NULL
#endif
#if defined(QUERN_AARCH64_LEVELS)
#define AARCH64(tables) &tables
#else
#define AARCH64(tables) NULL
#endif

#define LEVEL(value, name, architecture, features, fallback, tables) extern const cpu_kernels tables;
#include "cpu/levels.inc"
#undef LEVEL

typedef struct cpu_level {
    quern_cpu_level value;
    const char *name;
    uint32_t features;
    quern_cpu_level fallback;
    const cpu_kernels *own; /* NULL: not in this build */
} cpu_level;

static const cpu_level levels[] = {
#define LEVEL(value, name, architecture, features, fallback, tables)                                         \
    {(quern_cpu_level)(value), name, features, (quern_cpu_level)(fallback), architecture(tables)},
#include "cpu/levels.inc"
#undef LEVEL
};
enum { LEVELS = sizeof levels / sizeof *levels, LEVEL_NUMBERS = 32 };

#define LEVEL(value, name, architecture, features, fallback, tables)                                         \
    _Static_assert((value) < LEVEL_NUMBERS && (fallback) < (value), "a level's number");
#include "cpu/levels.inc"
#undef LEVEL

/* A level's row; LEVELS: there is none. */
static int row_of(quern_cpu_level level)
{
    int i = 0;
    while (i < LEVELS && levels[i].value != level) i++;
    return i;
}

quern_cpu_level cpu_level_at(int i)
{
    return i >= 0 && i < LEVELS ? levels[i].value : QUERN_CPU_LEVEL_AUTO;
}

bool cpu_has_level(quern_cpu_level level)
{
    const int i = row_of(level);
    if (i == LEVELS || levels[i].own == NULL) return false;
    if ((levels[i].features & ~cpu_features()) != 0) return false;
    if ((levels[i].features & CPU_AMX_TILE) != 0 && !cpu_may_use_tiles()) return false;
    return levels[i].fallback == 0 || cpu_has_level(levels[i].fallback);
}

const char *quern_cpu_level_name(quern_cpu_level level)
{
    const int i = row_of(level);
    return level == QUERN_CPU_LEVEL_AUTO ? "auto" : i < LEVELS ? levels[i].name : "?";
}

quern_cpu_level quern_cpu_level_detect(void)
{
    int i = LEVELS - 1;
    while (i > 0 && !cpu_has_level(levels[i].value)) i--;
    return levels[i].value;
}

enum { NAMES_BYTES = 200 };

/* "a, b and c" of the levels that are, or that this machine has. */
static const char *names_of(bool machine, char text[NAMES_BYTES])
{
    const char *taken[LEVELS];
    int n = 0, at = 0;
    for (int i = 0; i < LEVELS; i++)
        if (!machine || cpu_has_level(levels[i].value)) taken[n++] = levels[i].name;
    for (int i = 0; i < n && at < NAMES_BYTES; i++)
        at += snprintf(text + at, (size_t)(NAMES_BYTES - at), "%s%s",
                       i == 0       ? ""
                       : i + 1 == n ? machine ? " and " : " or "
                                    : ", ",
                       taken[i]);
    return text;
}

/* The level that QUERN_CPU names, or AUTO. */
static quern_status level_from_environment(quern_cpu_level *level)
{
    char text[NAMES_BYTES];
    const char *name = getenv("QUERN_CPU");
    *level = QUERN_CPU_LEVEL_AUTO;
    if (name == NULL || *name == '\0') return QUERN_OK;
    for (int i = 0; i < LEVELS; i++)
        if (strcmp(name, levels[i].name) == 0) *level = levels[i].value;
    if (*level != QUERN_CPU_LEVEL_AUTO) return QUERN_OK;
    return error_argument("QUERN_CPU is '%s': %s is accepted", TEXT_NAME(name), names_of(false, text));
}

quern_status cpu_choose_level(quern_cpu_level asked, quern_cpu_level *level)
{
    char text[NAMES_BYTES];
    quern_status status = QUERN_OK;
    *level = asked;
    if (asked == QUERN_CPU_LEVEL_AUTO) status = level_from_environment(level);
    if (status != QUERN_OK) return status;
    if (*level == QUERN_CPU_LEVEL_AUTO) *level = quern_cpu_level_detect();
    if (row_of(*level) == LEVELS)
        return error_argument("params.cpu_level is %d: 0 (automatic), or one of %s, is accepted", (int)*level,
                              names_of(false, text));
    if (!cpu_has_level(*level))
        return error_set(QUERN_ERR_UNSUPPORTED, "CPU level %s: this machine has %s",
                         quern_cpu_level_name(*level), names_of(true, text));
    return QUERN_OK;
}

/* Every level's tables, by its number. */
typedef struct level_tables {
    row_kernels rows;
    format_kernels formats;
    swiglu_kernels swiglu;
    attention_kernels attention;
    nsa_kernels nsa;
    pool_kernels pool;
    indexer_kernels indexer;
    gemm4_kernels gemm4;
    mqa_kernels mqa;
    e4m3_kernels e4m3;
    hyper_kernels hyper;
} level_tables;

static level_tables tables[LEVEL_NUMBERS];
static cpu_kernels kernels[LEVEL_NUMBERS];

/* A table is words, pointers to functions and numbers: those of `own` that are not 0 replace the ones in
 * `to`. */
static void override(void *to, const void *own, size_t bytes)
{
    for (size_t at = 0; own != NULL && at < bytes; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, (const char *)own + at, sizeof word);
        if (word != 0) memcpy((char *)to + at, &word, sizeof word);
    }
}

static void make_tables(const cpu_level *level)
{
    level_tables *t = &tables[level->value];
    const cpu_kernels *own = level->own;
    *t = tables[level->fallback];
    override(&t->rows, own->rows, sizeof t->rows);
    override(&t->formats, own->formats, sizeof t->formats);
    override(&t->swiglu, own->swiglu, sizeof t->swiglu);
    override(&t->attention, own->attention, sizeof t->attention);
    override(&t->nsa, own->nsa, sizeof t->nsa);
    override(&t->pool, own->pool, sizeof t->pool);
    override(&t->indexer, own->indexer, sizeof t->indexer);
    override(&t->gemm4, own->gemm4, sizeof t->gemm4);
    override(&t->mqa, own->mqa, sizeof t->mqa);
    override(&t->e4m3, own->e4m3, sizeof t->e4m3);
    override(&t->hyper, own->hyper, sizeof t->hyper);
    t->attention.rows = t->nsa.rows = t->pool.rows = &t->rows;
    kernels[level->value] = (cpu_kernels){.rows = &t->rows,
                                          .formats = &t->formats,
                                          .swiglu = &t->swiglu,
                                          .attention = &t->attention,
                                          .nsa = &t->nsa,
                                          .pool = &t->pool,
                                          .indexer = &t->indexer,
                                          .gemm4 = &t->gemm4,
                                          .mqa = &t->mqa,
                                          .e4m3 = &t->e4m3,
                                          .hyper = &t->hyper};
}

static void make_all(void)
{
    make_tables(&levels[0]);
    for (int value = 0; value < LEVEL_NUMBERS; value++) kernels[value] = kernels[levels[0].value];
    for (int i = 1; i < LEVELS; i++)
        if (levels[i].own != NULL) make_tables(&levels[i]);
}

const cpu_kernels *cpu_kernels_for(quern_cpu_level level)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_all);
    return &kernels[(unsigned)level < LEVEL_NUMBERS ? level : QUERN_CPU_LEVEL_AUTO];
}
