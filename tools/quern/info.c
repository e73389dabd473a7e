/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* info.c - `quern info`: describes this machine and this build. */
#include "bench.h"
#include "command.h"
#include "machine.h"
#include "output.h"

#include <quern/cuda.h>
#include <quern/safetensors.h>

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

typedef struct info_options {
    bool measure;
    const char *file;
} info_options;

static const option_row rows[] = {
    {"file", OPTION_TEXT, offsetof(info_options, file), NULL,
     "list the tensors and the metadata of this safetensors file instead"},
    {"measure", OPTION_FLAG, offsetof(info_options, measure), NULL,
     "measure the machine's ceilings on 1 and on all threads (about 6 s), or the GPU's of memory"},
};

enum { ROWS = sizeof rows / sizeof *rows };

static void print_help(void)
{
    info_options defaults = {0};
    machine_options machine = {0};
    printf("usage: quern info [--measure] [--threads N] [--device cpu|cuda] [--json]\n"
           "       quern info --file FILE.safetensors [--json]\n\n"
           "Version, CPU level and threads; the ceilings are those that the bench divides by. Or what a file "
           "holds.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    print_options(&(option_group){machine_rows, machine_row_count, &machine});
    printf("\nexamples:\n  quern info\n  quern info --measure --threads 2 --json\n  quern info --file "
           "weights.safetensors\n\n"
           "exit codes: 0 done, 2 wrong command line, 3 the file is not accepted, 4 the machine lacks the "
           "device or CPU level\n"
           "asked for.\n");
}

/* Measures on 1 thread and on all, or the GPU's; the object maps a ceiling's name to {unit, one, all}. */
static json_t *measure(int device, int threads)
{
    json_t *object = json_object();
    for (int c = 0; c < CEILINGS; c++) {
        const bool gpu = device == QUERN_CUDA;
        const double one = gpu ? bench_ceiling_cuda((ceiling)c) : ceiling_measure((ceiling)c, 1),
                     all = !gpu && threads > 1 ? ceiling_measure((ceiling)c, threads) : one;
        if (one > 0)
            json_object_set_new(
                object, ceiling_name((ceiling)c),
                json_pack("{s:s, s:f, s:f}", "unit", ceiling_unit((ceiling)c), "one", one, "all", all));
    }
    return object;
}

/* The GPUs, each with its properties or the reason why it cannot compute. */
static void print_devices(void)
{
    int32_t count = 0;
    printf("devices  cpu");
    if (quern_cuda_device_count(&count) != QUERN_OK) count = 0;
    for (int32_t i = 0; i < count; i++) {
        quern_cuda_device d = QUERN_CUDA_DEVICE_INIT;
        if (quern_cuda_device_get(i, &d) == QUERN_OK)
            printf("; cuda:%d %s, %d.%d, %d multiprocessors, %.0f GiB, driver for CUDA %d.%d", (int)i, d.name,
                   (int)d.compute_major, (int)d.compute_minor, (int)d.multiprocessors,
                   (double)d.memory_bytes * 0x1p-30, (int)d.driver / 1000, (int)d.driver % 1000 / 10);
        else printf("; not cuda:%d: %s", (int)i, quern_last_error(NULL));
    }
    putchar('\n');
}

/* The same, as a list of objects. */
static json_t *devices_json(void)
{
    int32_t count = 0;
    json_t *list = json_pack("[{s:s}]", "device", "cpu");
    if (quern_cuda_device_count(&count) != QUERN_OK) count = 0;
    for (int32_t i = 0; i < count; i++) {
        quern_cuda_device d = QUERN_CUDA_DEVICE_INIT;
        char name[24], compute[24], driver[24];
        snprintf(name, sizeof name, "cuda:%d", (int)i);
        if (quern_cuda_device_get(i, &d) != QUERN_OK) {
            json_array_append_new(list,
                                  json_pack("{s:s, s:s}", "device", name, "refused", quern_last_error(NULL)));
            continue;
        }
        snprintf(compute, sizeof compute, "%d.%d", (int)d.compute_major, (int)d.compute_minor);
        snprintf(driver, sizeof driver, "%d.%d", (int)d.driver / 1000, (int)d.driver % 1000 / 10);
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:i, s:I, s:s}", "device", name, "name", d.name,
                                        "compute", compute, "multiprocessors", (int)d.multiprocessors,
                                        "memory_bytes", (json_int_t)d.memory_bytes, "driver_cuda", driver));
    }
    return list;
}

static void print_text(const quern_context *ctx, const json_t *ceilings, bool gpu)
{
    char cpu[128];
    machine_cpu(cpu, sizeof cpu);
    printf("quern    %s (%s)\ncpu      %s\nlevel    %s (this machine: %s)\nthreads  %d\n", quern_version(),
           machine_commit(), cpu, quern_cpu_level_name(quern_context_cpu_level(ctx)),
           quern_cpu_level_name(quern_cpu_level_detect()), (int)quern_context_threads(ctx));
    print_devices();
    if (ceilings == NULL) return;
    printf("\n%-10s %12s %12s\n", "ceiling", gpu ? "cuda:0" : "1 thread", gpu ? "" : "all threads");
    const char *name;
    json_t *row;
    json_object_foreach((json_t *)(uintptr_t)ceilings, name, row)
    {
        printf("%-10s %12.1f ", name, json_real_value(json_object_get(row, "one")));
        if (gpu) printf("%12s ", "");
        else printf("%12.1f ", json_real_value(json_object_get(row, "all")));
        printf("%s\n", json_string_value(json_object_get(row, "unit")));
    }
}

/* "[2, 3]", the view's shape: with packed 4-bit floats the last extent counts bytes. */
static void shape_text(const quern_tensor *t, char *text, size_t room)
{
    size_t used = (size_t)snprintf(text, room, "[");
    for (int32_t i = 0; i < t->ndim; i++)
        used += (size_t)snprintf(text + used, room - used, "%s%" PRId64, i > 0 ? ", " : "", t->shape[i]);
    snprintf(text + used, room - used, "]");
}

static json_t *tensor_json(const char *name, const quern_tensor *t)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->ndim; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:o, s:s, s:o}", "name", output_text(name), "dtype", quern_dtype_name(t->dtype),
                     "shape", shape);
}

/* One tensor as a line, or added to `list`. Returns an exit code. */
static int describe(const quern_safetensors *file, const char *name, json_t *list)
{
    quern_tensor t;
    char shape[32 * QUERN_MAX_DIMS], escaped[512];
    const quern_status status = quern_safetensors_get(file, name, &t);
    if (status != QUERN_OK) return fail_file(NULL, status);
    if (list != NULL)
        return json_array_append_new(list, tensor_json(name, &t)) == 0
                   ? EXIT_DONE
                   : fail(EXIT_MACHINE, "no memory for the result");
    shape_text(&t, shape, sizeof shape);
    text_escape(name, escaped, sizeof escaped);
    printf("%-40s %-7s %s\n", escaped, quern_dtype_name(t.dtype), shape);
    return EXIT_DONE;
}

static int info_file(const char *path, bool json)
{
    quern_safetensors *file = NULL;
    const quern_status status = quern_safetensors_open(path, &file);
    if (status != QUERN_OK) return fail_file(path, status);
    json_t *list = json ? json_array() : NULL, *metadata = json ? json_object() : NULL;
    int code = json && (list == NULL || metadata == NULL) ? fail(EXIT_MACHINE, "no memory for the result")
                                                          : EXIT_DONE;
    for (size_t i = 0; i < quern_safetensors_count(file) && code == EXIT_DONE; i++)
        code = describe(file, quern_safetensors_name(file, i), list);
    for (size_t i = 0; i < quern_safetensors_metadata_count(file) && code == EXIT_DONE; i++) {
        const char *key = quern_safetensors_metadata_key(file, i),
                   *value = quern_safetensors_metadata(file, key);
        char left[256], right[1024];
        text_escape(key, left, sizeof left);
        text_escape(value, right, sizeof right);
        if (json)
            json_object_set_new(metadata, strstr(key, "\xc0\x80") != NULL ? left : key, output_text(value));
        else printf("metadata %s: %s\n", left, right);
    }
    if (code == EXIT_DONE && json) {
        json_t *result = json_pack("{s:O, s:O}", "tensors", list, "metadata", metadata);
        output_print(result, JSON_INDENT(2));
        json_decref(result);
    }
    json_decref(list);
    json_decref(metadata);
    quern_safetensors_close(file);
    return code;
}

int verb_info(int argc, char **argv)
{
    info_options options = {0};
    machine_options machine = {0};
    const option_group groups[] = {{rows, ROWS, &options}, {machine_rows, machine_row_count, &machine}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (first != argc) return fail(EXIT_USAGE, "'%s' is left over: info takes options only", argv[first]);
    if (options.file != NULL) return info_file(options.file, machine.json);
    quern_context *ctx;
    code = open_context(&machine, &ctx);
    if (code != EXIT_DONE) return code;
    json_t *ceilings = options.measure ? measure(machine.device, quern_context_threads(ctx)) : NULL;
    if (machine.json) {
        json_t *result = json_pack("{s:s, s:s, s:o, s:o}", "version", quern_version(), "commit",
                                   machine_commit(), "machine", machine_json(ctx), "devices", devices_json());
        if (ceilings != NULL) json_object_set(result, "ceilings", ceilings);
        output_print(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        json_decref(result);
    } else {
        print_text(ctx, ceilings, machine.device == QUERN_CUDA);
    }
    json_decref(ceilings);
    quern_context_destroy(ctx);
    return EXIT_DONE;
}
