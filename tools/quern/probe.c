/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * probe.c - `quern probe`: the longest sequence within a memory limit.
 *
 * Inputs, outputs and workspace are sized on reserved addresses, without memory, and the length is searched
 * by halving. Then the operation runs at that length, and the peak resident memory is read as proof.
 */
#include "bench.h"

#include "command.h"
#include "output.h"

#include <quern/cuda.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

typedef struct probe_options {
    const char *memory;
    bench_case what;
    machine_options machine;
    int64_t granularity;
    bool dry_run;
    const char *profile;
} probe_options;

#define AT(member) offsetof(probe_options, member)
static const option_row rows[] = {
    {"memory", OPTION_TEXT, AT(memory), NULL,
     "limit on inputs, outputs and workspace together, such as 512M or 12G"},
    {"granularity", OPTION_INT, AT(granularity), NULL, "lengths are multiples of this"},
    {"dry-run", OPTION_FLAG, AT(dry_run), NULL, "compute the length, do not prove it by a run"},
    {"profile", OPTION_TEXT, AT(profile), NULL, "NSA preset that is set before the other options: tile256"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

static probe_options default_options(const operation *op)
{
    probe_options o = {.memory = "4G", .granularity = 1024};
    o.what = bench_case_init(op);
    return o;
}

/* op NULL: without the options of an operation. */
static void print_help(const operation *op)
{
    const probe_options defaults = default_options(op);
    printf("usage: quern probe attention|nsa [--memory 12G] [--key value ...]\n\n"
           "The longest sequence whose inputs, outputs and workspace fit the limit, proven by a run.\n"
           "Parameters of the operation are options too: quern probe WHAT --help.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, (void *)(uintptr_t)&defaults});
    print_options(&(option_group){bench_case_rows, CASE_ROWS_PROBE, (void *)(uintptr_t)&defaults.what});
    print_options(&(option_group){machine_rows, machine_row_count, (void *)(uintptr_t)&defaults.machine});
    if (op != NULL)
        print_options(
            &(option_group){op->options, op->option_count, (void *)(uintptr_t)&defaults.what.params});
    printf("\nexamples:\n  quern probe nsa --memory 2G --tile 64 --metric mean-logit --dtype bf16\n"
           "  quern probe attention --memory 8G --backward --dry-run --json\n\n"
           "exit codes: 0 done, 1 the run took over 64 MiB (stacks of threads, libraries) more memory than "
           "the limit,\n"
           "2 wrong command line, 3 a parameter is not accepted, 4 the machine lacks what is needed or the "
           "limit holds no\n"
           "sequence, 5 a defect.\n");
}

/* "512M", "12G", "1000000": bytes; 0 where the text is none. */
static size_t parse_bytes(const char *text)
{
    char *end;
    const double value = strtod(text, &end);
    const double unit = *end == 'k'   ? 0x1p10
                        : *end == 'M' ? 0x1p20
                        : *end == 'G' ? 0x1p30
                        : *end == 'T' ? 0x1p40
                                      : 1;
    if (end == text || *(end + (unit > 1)) != '\0' || !(value * unit >= 1) || value * unit > 0x1p60) return 0;
    return (size_t)(value * unit);
}

/* Sets the bytes that a length takes; returns an exit code. */
static int size_of(const probe_options *o, int64_t n, quern_context *ctx, size_t *bytes)
{
    job j;
    bench_case c = o->what;
    c.n = n;
    const int code = bench_open(&j, &c, ctx, true);
    *bytes = j.total_bytes;
    job_free(&j);
    return code;
}

static int search(const probe_options *o, size_t limit, quern_context *ctx, int64_t *best, size_t *bytes)
{
    const int64_t too_long = INT32_MAX / o->granularity + 1; /* a sequence holds at most 2^31 - 1 tokens */
    int64_t low = 0, high = 1; /* in units of the granularity: low fits, high does not */
    for (size_t taken;; low = high, high = 2 * high < too_long ? 2 * high : too_long) {
        if (high == too_long) break;
        const int code = size_of(o, high * o->granularity, ctx, &taken);
        if (code != EXIT_DONE) return code;
        if (taken > limit) break;
        *bytes = taken;
    }
    while (high - low > 1) {
        size_t taken;
        const int64_t middle = low + (high - low) / 2;
        const int code = size_of(o, middle * o->granularity, ctx, &taken);
        if (code != EXIT_DONE) return code;
        if (taken <= limit) {
            low = middle;
            *bytes = taken;
        } else {
            high = middle;
        }
    }
    *best = low * o->granularity;
    return EXIT_DONE;
}

/* Peak memory of this process, or the GPU's memory in use now, while the job holds its own. */
static size_t peak_bytes(int device)
{
    quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    if (device == QUERN_CUDA)
        return quern_cuda_device_get(0, &info) == QUERN_OK ? (size_t)(info.memory_bytes - info.free_bytes)
                                                           : 0;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

/* Memory available without swapping, or free on the GPU; SIZE_MAX if unknown. */
static size_t memory_available(int device)
{
    quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    if (device == QUERN_CUDA)
        return quern_cuda_device_get(0, &info) == QUERN_OK ? (size_t)info.free_bytes : SIZE_MAX;
    char line[128];
    unsigned long long kib;
    size_t bytes = SIZE_MAX;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) bytes = (size_t)kib << 10;
    if (f != NULL) fclose(f);
    return bytes;
}

static int probe(const probe_options *o, quern_context *ctx)
{
    const size_t limit = parse_bytes(o->memory);
    int64_t n = 0;
    size_t bytes = 0;
    if (limit == 0)
        return fail(EXIT_USAGE, "--memory '%s': a size such as 512M or 12G is accepted", o->memory);
    int code = search(o, limit, ctx, &n, &bytes);
    if (code != EXIT_DONE) return code;
    if (n == 0)
        return fail(EXIT_MACHINE, "--memory %s holds not even %" PRId64 " tokens", o->memory, o->granularity);
    const size_t free_bytes = memory_available(o->what.device);
    if (!o->dry_run && bytes > free_bytes)
        return fail(EXIT_MACHINE, "the run takes %.3f GiB, %s has %.3f GiB free; --dry-run leaves it out",
                    (double)bytes * 0x1p-30, o->what.device == QUERN_CUDA ? "the GPU" : "this machine",
                    (double)free_bytes * 0x1p-30);
    if (!o->machine.json)
        printf("%s: %" PRId64 " tokens fit into %s: inputs, outputs and workspace take %.3f GiB\n",
               o->what.op->name, n, o->memory, (double)bytes * 0x1p-30);
    fflush(stdout);
    json_t *result = json_pack("{s:s, s:I, s:I, s:I}", "op", o->what.op->name, "N", (json_int_t)n, "bytes",
                               (json_int_t)bytes, "limit", (json_int_t)limit);
    if (!o->dry_run) {
        job j;
        bench_case c = o->what;
        c.n = n;
        const size_t before = peak_bytes(c.device);
        progress("%s: running %" PRId64 " tokens", o->what.op->name, n);
        code = bench_open(&j, &c, ctx, false);
        if (code == EXIT_DONE) code = job_run(&j, ctx);
        progress_clear();
        const size_t grown = peak_bytes(c.device) - before,
                     slack = (size_t)64 << 20; /* thread stacks, rounding to pages */
        const double ms[2] = {j.forward_ms, j.backward_ms};
        job_free(&j);
        if (code == EXIT_DONE) {
            if (!o->machine.json)
                printf("proven: forward %.0f ms, backward %.0f ms, resident memory grew by %.3f GiB\n", ms[0],
                       ms[1], (double)grown * 0x1p-30);
            json_object_set_new(result, "forward_ms", json_real(ms[0]));
            json_object_set_new(result, "backward_ms", json_real(ms[1]));
            json_object_set_new(result, "resident_bytes", json_integer((json_int_t)grown));
            if (grown > limit + slack)
                code = fail(EXIT_MISMATCH, "the run took %.3f GiB, more than the limit of %s",
                            (double)grown * 0x1p-30, o->memory);
        }
    }
    if (o->machine.json && code <= EXIT_MISMATCH) {
        output_print(result, JSON_INDENT(2));
    }
    json_decref(result);
    return code;
}

int verb_probe(int argc, char **argv)
{
    const operation *op = NULL;
    for (int i = 1; i < argc && op == NULL; i++)
        if (strcmp(argv[i], "nsa") == 0 || strcmp(argv[i], "attention") == 0) op = operation_named(argv[i]);
    probe_options o = default_options(op);
    const option_group groups[] = {
        {rows, ROWS, &o},
        {bench_case_rows, CASE_ROWS_PROBE, &o.what},
        {machine_rows, machine_row_count, &o.machine},
        {op != NULL ? op->options : NULL, op != NULL ? op->option_count : 0, &o.what.params}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, op != NULL ? 4 : 3, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help(op);
        return EXIT_DONE;
    }
    if (op == NULL || argc - first != 1 || strcmp(argv[first], op->name) != 0)
        return fail(EXIT_USAGE, "one of attention and nsa is accepted; see quern probe --help");
    if (o.profile != NULL) { /* first the preset, then the options over it */
        const char *profile = o.profile;
        o = default_options(op);
        code = params_preset(op, &o.what.params, profile);
        if (code == EXIT_DONE) code = parse_options(argc, argv, groups, 4, &first, &help);
        if (code != EXIT_DONE) return code;
    }
    if ((code = bench_case_check(&o.what)) != EXIT_DONE) return code;
    if (o.granularity < 1 || o.granularity > (int64_t)1 << 30)
        return fail(EXIT_USAGE, "--granularity %" PRId64 ": 1 to 2^30 is accepted", o.granularity);
    quern_context *ctx;
    code = open_context(&o.machine, &ctx);
    o.what.device = o.machine.device;
    if (code != EXIT_DONE) return code;
    code = probe(&o, ctx);
    quern_context_destroy(ctx);
    return code;
}
