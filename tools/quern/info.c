/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* info.c - `quern info`: what this machine and this build are. */
#include "command.h"
#include "machine.h"
#include "output.h"

#include "ceilings.h"

#include <quern/cuda.h>

#include <jansson.h>
#include <stdio.h>

typedef struct info_options {
    bool measure;
} info_options;

static const option_row rows[] = {
    {"measure", OPTION_FLAG, offsetof(info_options, measure), NULL, "measure the machine's ceilings on 1 and on all threads (about 6 s)"},
};

static void print_help(void)
{
    info_options defaults = {0};
    machine_options machine = {0};
    printf("usage: quern info [--measure] [--threads N] [--device cpu|cuda] [--json]\n\n"
           "Version, CPU level and threads; the ceilings are those that the bench divides by.\n\noptions:\n");
    print_options(&(option_group){rows, 1, &defaults});
    print_options(&(option_group){machine_rows, machine_row_count, &machine});
    printf("\nexamples:\n  quern info\n  quern info --measure --threads 2 --json\n\n"
           "exit codes: 0 done, 2 wrong command line, 4 the machine lacks the device or CPU level asked for.\n");
}

/* Measures on 1 thread and on all; the object maps a ceiling's name to {unit, one, all}. */
static json_t *measure(int threads)
{
    json_t *object = json_object();
    for (int c = 0; c < CEILINGS; c++) {
        const double one = ceiling_measure((ceiling)c, 1), all = threads > 1 ? ceiling_measure((ceiling)c, threads) : one;
        if (one > 0)
            json_object_set_new(object, ceiling_name((ceiling)c),
                                json_pack("{s:s, s:f, s:f}", "unit", ceiling_unit((ceiling)c), "one", one, "all", all));
    }
    return object;
}

/* The GPUs, each with what it is or why it cannot compute. */
static void print_devices(void)
{
    int32_t count = 0;
    printf("devices  cpu");
    if (quern_cuda_device_count(&count) != QUERN_OK) count = 0;
    for (int32_t i = 0; i < count; i++) {
        quern_cuda_device d = QUERN_CUDA_DEVICE_INIT;
        if (quern_cuda_device_get(i, &d) == QUERN_OK)
            printf("; cuda:%d %s, %d.%d, %d multiprocessors, %.0f GiB, driver for CUDA %d.%d", (int)i, d.name, (int)d.compute_major,
                   (int)d.compute_minor, (int)d.multiprocessors, (double)d.memory_bytes * 0x1p-30, (int)d.driver / 1000, (int)d.driver % 1000 / 10);
        else
            printf("; not cuda:%d: %s", (int)i, quern_last_error(NULL));
    }
    putchar('\n');
}

static void print_text(const quern_context *ctx, const json_t *ceilings)
{
    char cpu[128];
    machine_cpu(cpu, sizeof cpu);
    printf("quern    %s (%s)\ncpu      %s\nlevel    %s (this machine: %s)\nthreads  %d\n", quern_version(),
           machine_commit(), cpu, quern_cpu_level_name(quern_context_cpu_level(ctx)), quern_cpu_level_name(quern_cpu_level_detect()),
           (int)quern_context_threads(ctx));
    print_devices();
    if (ceilings == NULL) return;
    printf("\n%-10s %12s %12s\n", "ceiling", "1 thread", "all threads");
    const char *name;
    json_t *row;
    json_object_foreach((json_t *)(uintptr_t)ceilings, name, row)
        printf("%-10s %12.1f %12.1f %s\n", name, json_real_value(json_object_get(row, "one")),
               json_real_value(json_object_get(row, "all")), json_string_value(json_object_get(row, "unit")));
}

int verb_info(int argc, char **argv)
{
    info_options options = {0};
    machine_options machine = {0};
    const option_group groups[] = {{rows, 1, &options}, {machine_rows, machine_row_count, &machine}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (first != argc) return fail(EXIT_USAGE, "'%s' is left over: info takes options only", argv[first]);
    quern_context *ctx;
    code = open_context(&machine, &ctx);
    if (code != EXIT_DONE) return code;
    json_t *ceilings = options.measure ? measure(quern_context_threads(ctx)) : NULL;
    if (machine.json) {
        json_t *result = json_pack("{s:s, s:s, s:o}", "version", quern_version(), "commit", machine_commit(), "machine",
                                   machine_json(ctx));
        if (ceilings != NULL) json_object_set(result, "ceilings", ceilings);
        output_print(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        json_decref(result);
    } else {
        print_text(ctx, ceilings);
    }
    json_decref(ceilings);
    quern_context_destroy(ctx);
    return EXIT_DONE;
}
