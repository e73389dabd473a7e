/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* inspect.c - `quern inspect`: what a checkpoint holds, and what a loader would trip over. */
#include "inspect/inspect.h"

#include "command.h"
#include "output.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct inspect_options {
    bool json, summary, headers;
    int64_t threads;
} inspect_options;

static const option_row rows[] = {
    {"json", OPTION_FLAG, offsetof(inspect_options, json), NULL, "print everything as JSON"},
    {"summary", OPTION_FLAG, offsetof(inspect_options, summary), NULL, "leave the list of tensors out"},
    {"headers", OPTION_FLAG, offsetof(inspect_options, headers), NULL,
     "read headers and scales alone: no statistics, no check of the values"},
    {"threads", OPTION_INT, offsetof(inspect_options, threads), NULL,
     "threads; 0: OMP_NUM_THREADS, else all CPUs"},
};
enum { ROWS = sizeof rows / sizeof *rows };

static void print_help(void)
{
    inspect_options defaults = {0};
    printf("usage: quern inspect FILE|FOLDER [--summary] [--headers] [--json] [--threads N]\n\n"
           "Describes a safetensors file, a model's folder (an index and its shards, or one file) or a GGUF "
           "file: "
           "tensors,\n"
           "shapes, the formats of weights, statistics of their values, and what a loader would trip over. A "
           "weight is\n"
           "recognised by what stands beside it:\n\n"
           "  nvfp4 modelopt            X.weight, X.weight_scale, X.weight_scale_2\n"
           "  nvfp4 compressed-tensors  X.weight_packed, X.weight_scale, X.weight_global_scale\n"
           "  nvfp4 gguf, mxfp4 gguf    types 40 and 39\n"
           "  mxfp4                     X.weight, X.scale of powers of two (DeepSeek-V4)\n"
           "  mxfp4 blocks              X_blocks, X_scales (gpt-oss)\n"
           "  fp8 blocks|rows|tensor    X.weight with X.scale, X.weight_scale_inv or X.weight_scale\n\n"
           "Columns: |max| the largest magnitude, rms the root mean square, zeros their share, of the values "
           "that "
           "the\n"
           "tensor stands for; of NVFP4 also the share of blocks with the greatest scale, of other blocks "
           "none.\n\n"
           "options:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    printf(
        "\nexamples:\n  quern inspect model.safetensors\n  quern inspect ./DeepSeek-V4 --summary\n"
        "  quern inspect model.gguf --json | jq '.problems[].sentence'\n\n"
        "exit codes: 0 nothing to complain of, 1 a loader would trip over something, 2 wrong command line, 3 "
        "the file is not\n"
        "accepted, 4 no memory.\n");
}

static int gather_statistics(inspection *in, int64_t threads)
{
    statistics_source *sources = calloc(in->count + 1, sizeof *sources);
    if (sources == NULL) return fail(EXIT_MACHINE, "no memory for the statistics");
    for (size_t i = 0; i < in->count; i++) sources[i] = source_of(in, &in->tensors[i]);
    statistics_of(sources, in->count, (int)threads);
    free(sources);
    return EXIT_DONE;
}

/* config.json of the folder, or beside the file. */
static int read_config(inspection *in)
{
    char path[4096];
    struct stat st;
    json_error_t error;
    const char *slash = strrchr(in->path, '/');
    const bool folder = stat(in->path, &st) == 0 && S_ISDIR(st.st_mode);
    const int used = folder ? snprintf(path, sizeof path, "%s/config.json", in->path)
                     : slash != NULL
                         ? snprintf(path, sizeof path, "%.*s/config.json", (int)(slash - in->path), in->path)
                         : snprintf(path, sizeof path, "config.json");
    if (!folder || used < 0 || (size_t)used >= sizeof path || stat(path, &st) != 0) return EXIT_DONE;
    in->config = json_load_file(path, 0, &error);
    if (in->config == NULL)
        report(in, "config", "config.json is no JSON: %s, at line %d", error.text, error.line);
    else if (!json_is_object(in->config)) report(in, "config", "config.json is no JSON object");
    return EXIT_DONE;
}

static int gather(inspection *in, const inspect_options *options)
{
    if (!inspection_list(in)) return fail(EXIT_MACHINE, "no memory for the tensors");
    const int code = read_config(in);
    return code != EXIT_DONE || options->headers ? code : gather_statistics(in, options->threads);
}

/* Opens the checkpoint. Where a folder's index and its shards disagree, that is the problem to report. */
static int open_path(inspection *in)
{
    const quern_status status = quern_checkpoint_open(in->path, &in->checkpoint);
    const char *sentence = quern_last_error(NULL);
    if (status == QUERN_OK) return EXIT_DONE;
    const bool index = strncmp(sentence, "index ", 6) == 0 || strncmp(sentence, "tensor ", 7) == 0 ||
                       strncmp(sentence, "shard ", 6) == 0;
    struct stat st;
    if (status == QUERN_ERR_OUT_OF_MEMORY || !index || stat(in->path, &st) != 0 || !S_ISDIR(st.st_mode))
        return fail_file(NULL, status);
    report(in, "index", "%s", sentence);
    return EXIT_DONE;
}

static int inspect(inspection *in, const inspect_options *options)
{
    int code = open_path(in);
    if (code == EXIT_DONE && in->checkpoint != NULL) {
        code = gather(in, options);
        if (code != EXIT_DONE) return code;
        check_all(in);
    }
    if (code != EXIT_DONE) return code;
    if (in->no_memory) return fail(EXIT_MACHINE, "no memory for the problems");
    if (options->json) {
        json_t *result = inspection_json(in);
        if (result == NULL) return fail(EXIT_MACHINE, "no memory for the result");
        output_print(result, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        json_decref(result);
    } else {
        print_table(in, options->summary);
    }
    return in->problem_count > 0 ? EXIT_MISMATCH : EXIT_DONE;
}

int verb_inspect(int argc, char **argv)
{
    inspect_options options = {0};
    const option_group group = {rows, ROWS, &options};
    int first;
    bool help;
    int code = parse_options(argc, argv, &group, 1, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (argc - first != 1)
        return fail(EXIT_USAGE, "%d paths are given: one file or folder is accepted", argc - first);
    if (options.threads < 0 || options.threads > 1024)
        return fail(EXIT_USAGE, "--threads %" PRId64 ": 0 to 1024 is accepted", options.threads);
    inspection in = {.path = argv[first]};
    code = inspect(&in, &options);
    inspection_close(&in);
    return code;
}
