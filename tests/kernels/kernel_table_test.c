/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel_table_test.c - src/cpu/kernels.inc is complete: it has a row for every field of every level's table,
 * and the field is filled where the row says so. Each row has a test that can time it, and docs/kernels.md
 * shows the same rows. `kernel_table_test --markdown > docs/kernels.md` writes that page.
 */
#include "cmocka_c11.h"
#include "cpu/attend_mqa/mqa_kernels.h"
#include "cpu/gemm4/gemm4_kernels.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#include "cpu/levels.h"
#include "cpu/pool/pool_kernels.h"
#include "kernels.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

typedef void any_function(void);

/* Whether the table that the level uses has a function there. */
static bool filled(const test_kernel *row, quern_cpu_level level)
{
    any_function *function;
    memcpy(&function, (const char *)test_kernel_table(row->table, level) + row->offset, sizeof function);
    return function != NULL;
}

static void every_field_is_listed_once(void **state)
{
    const struct {
        const char *table;
        size_t first, end;
    } tables[] = {{"row", offsetof(row_kernels, convert), sizeof(row_kernels)},
                  {"attention", offsetof(attention_kernels, mm_f32), sizeof(attention_kernels)},
                  {"nsa", offsetof(nsa_kernels, sum_rows), sizeof(nsa_kernels)},
                  {"pool", offsetof(pool_kernels, merge), sizeof(pool_kernels)},
                  {"indexer", offsetof(indexer_kernels, score_f32), sizeof(indexer_kernels)},
                  {"format", offsetof(format_kernels, quantise_row), sizeof(format_kernels)},
                  {"swiglu", offsetof(swiglu_kernels, part_row), sizeof(swiglu_kernels)},
                  {"gemm4", offsetof(gemm4_kernels, decode_f32), sizeof(gemm4_kernels)},
                  {"mqa", offsetof(mqa_kernels, mqa_softmax_f32), sizeof(mqa_kernels)}};
    size_t count;
    const test_kernel *rows = test_kernels(&count);
    (void)state;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
        for (size_t offset = tables[t].first; offset < tables[t].end; offset += sizeof(any_function *)) {
            int found = 0;
            for (size_t i = 0; i < count; i++)
                found += strcmp(rows[i].table, tables[t].table) == 0 && rows[i].offset == offset;
            if (found != 1)
                fail_msg("function %zu of %s_kernels stands in kernels.inc %d times",
                         (offset - tables[t].first) / sizeof(any_function *), tables[t].table, found);
        }
    }
}

static void every_level_has_what_is_listed(void **state)
{
    size_t count;
    const test_kernel *rows = test_kernels(&count);
    (void)state;
    for (int n = 0; cpu_level_at(n) != QUERN_CPU_LEVEL_AUTO; n++)
        for (size_t i = 0; i < count; i++)
            if (filled(&rows[i], cpu_level_at(n)) != test_kernel_is_at(&rows[i], cpu_level_at(n)))
                fail_msg("%s.%s at %s: kernels.inc says otherwise", rows[i].table, rows[i].name,
                         quern_cpu_level_name(cpu_level_at(n)));
}

/* Reads a file of the source tree; fails the test where it is missing. */
static const char *source(const char *path)
{
    static char text[1 << 18];
    char whole[4096];
    snprintf(whole, sizeof whole, QUERN_SOURCE "/%s", path);
    FILE *f = fopen(whole, "rb");
    if (f == NULL) fail_msg("%s is missing", path);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

static bool calls(const char *text, const char *member)
{
    char call[100];
    snprintf(call, sizeof call, "->%s", member);
    for (const char *p = text; (p = strstr(p, call)) != NULL;) {
        p += strlen(call);
        if (!isalnum((unsigned char)*p) && *p != '_') return true;
    }
    return false;
}

static void every_kernel_has_a_test_and_a_benchmark(void **state)
{
    char text[200];
    size_t count;
    const test_kernel *rows = test_kernels(&count);
    (void)state;
    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof text, "tests/kernels/%s.c", rows[i].test);
        if (!calls(source(text), rows[i].name)) fail_msg("%s does not call %s", text, rows[i].name);
        if (strstr(source(text), "test_every_kernel") == NULL)
            fail_msg("%s does not end with test_every_kernel()", text);
        if (strstr(source(text), "TEST_KERNELS_MAIN(") == NULL) fail_msg("%s takes no --bench", text);
        if (rows[i].bench == NULL) continue;
        snprintf(text, sizeof text, ".name = \"%s\",", rows[i].bench);
        if (strstr(source("tools/quern/bench_subjects.c"), text) == NULL)
            fail_msg("%s: `quern bench` has no subject %s", rows[i].name, rows[i].bench);
    }
}

/* Writes the bound of a row, such as "n + 2" or "6.7 + 2|x|". */
static void print_bound(FILE *out, const test_kernel *row)
{
    const char *plus = "";
    if (row->terms == 0 && row->roundings == 0 && row->argument == 0) fputs("exact", out);
    if (row->terms != 0) {
        if (row->terms != 1) fprintf(out, "%g", row->terms);
        fputs("n", out);
        plus = " + ";
    }
    if (row->roundings != 0) {
        fprintf(out, "%s%g", plus, row->roundings);
        plus = " + ";
    }
    if (row->argument != 0) fprintf(out, "%s%g\\|x\\|", plus, row->argument);
}

static void print_page(FILE *out)
{
    size_t count;
    const test_kernel *rows = test_kernels(&count);
    fputs(
        "# CPU kernels\n\n"
        "`kernel_table_test --markdown` writes this page from src/cpu/kernels.inc. The test fails where the\n"
        "page, the tables in the library, the tests and the benchmarks disagree. Every level "
        "(src/cpu/levels.inc)\n"
        "has all kernels, its own or those it inherits, but for those of a bf16 dot product: a level without "
        "one\n"
        "widens to f32 instead. The tests are in tests/kernels; with `--bench [PATTERN]` they time the "
        "kernels\n"
        "too. The last column names the subjects of `quern bench`.\n\n"
        "The bound is in units of 2^-24 of the sum of the n terms' absolute values; x is what exp2 is taken\n"
        "of. An output in f16 or bf16 is rounded once more, to the nearest. An exact kernel copies, "
        "compares,\n"
        "or rounds just once.\n\n"
        "| kernel | levels | tested and timed by | bound | part of |\n"
        "| --- | --- | --- | --- | --- |\n",
        out);
    for (size_t i = 0; i < count; i++) {
        fprintf(out, "| %s.%s | %s | %s | ", rows[i].table, rows[i].name,
                rows[i].bf16_dot ? "with a bf16 dot product" : "all", rows[i].test);
        print_bound(out, &rows[i]);
        fprintf(out, " | %s |\n", rows[i].bench != NULL ? rows[i].bench : "–");
    }
}

static void the_page_is_current(void **state)
{
    static char page[1 << 15];
    FILE *f = fmemopen(page, sizeof page, "w");
    (void)state;
    assert_non_null(f);
    print_page(f);
    fclose(f);
    assert_string_equal(source("docs/kernels.md"), page);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_is_listed_once),
        cmocka_unit_test(every_level_has_what_is_listed),
        cmocka_unit_test(every_kernel_has_a_test_and_a_benchmark),
        cmocka_unit_test(the_page_is_current),
    };
    if (argc == 2 && strcmp(argv[1], "--markdown") == 0) {
        print_page(stdout);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
