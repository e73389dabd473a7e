/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* main.c - finds the verb and calls it. */
#include "command.h"
#include "output.h"
#include "tensor_names.h"

#include <quern/cuda.h>
#include <quern/file.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct verb {
    const char *name;
    int (*call)(int argc, char **argv);
    const char *help;
} verbs[] = {
    {"info", verb_info, "version, CPU level, threads; with --measure the machine's ceilings"},
    {"run", verb_run, "one operation on tensors of a file"},
    {"quantize", verb_quantize, "a checkpoint to NVFP4, or back to bf16"},
    {"compare", verb_compare, "the tensors of two files"},
    {"inspect", verb_inspect, "what a checkpoint holds, and what a loader would trip over"},
    {"bench", verb_bench, "time an operation, beside the limit of the machine"},
    {"probe", verb_probe, "the longest sequence within a memory limit"},
};
enum { VERBS = sizeof verbs / sizeof *verbs };

const char *command_verb = "";

const char *const device_choices[] = {"cpu", "cuda", NULL};
const option_row machine_rows[] = {
    {"threads", OPTION_INT, offsetof(machine_options, threads), NULL,
     "threads; 0: OMP_NUM_THREADS, else all CPUs"},
    {"device", OPTION_CHOICE, offsetof(machine_options, device), device_choices, "where to compute"},
    {"json", OPTION_FLAG, offsetof(machine_options, json), NULL, "print the result as JSON"},
};
const size_t machine_row_count = sizeof machine_rows / sizeof *machine_rows;

int fail(int code, const char *format, ...)
{
    char sentence[4096], escaped[2 * sizeof sentence];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    text_escape(sentence, escaped, sizeof escaped);
    fprintf(stderr, "quern%s%s: %s\n", *command_verb != '\0' ? " " : "", command_verb, escaped);
    return code;
}

/* The library's last sentence. Where the command itself lacks memory there is none. */
static const char *reason(quern_status status)
{
    const char *sentence = quern_last_error(NULL);
    return status == QUERN_ERR_OUT_OF_MEMORY && *sentence == '\0' ? "no memory" : sentence;
}

int fail_status(quern_status status)
{
    static const int codes[] = {[QUERN_OK] = EXIT_DONE,
                                [QUERN_ERR_INVALID_ARGUMENT] = EXIT_INPUT,
                                [QUERN_ERR_UNSUPPORTED] = EXIT_MACHINE,
                                [QUERN_ERR_WORKSPACE] = EXIT_DEFECT,
                                [QUERN_ERR_OUT_OF_MEMORY] = EXIT_MACHINE,
                                [QUERN_ERR_IO] = EXIT_INPUT,
                                [QUERN_ERR_FORMAT] = EXIT_INPUT,
                                [QUERN_ERR_DEVICE] = EXIT_MACHINE,
                                [QUERN_ERR_INTERNAL] = EXIT_DEFECT};
    char sentence[4096];
    tensor_names_put(reason(status), sentence, sizeof sentence);
    return fail((unsigned)status < sizeof codes / sizeof *codes ? codes[status] : EXIT_DEFECT, "%s",
                sentence);
}

int fail_file(const char *path, quern_status status)
{
    return fail(status == QUERN_ERR_OUT_OF_MEMORY ? EXIT_MACHINE : EXIT_INPUT, "%s%s%s",
                path != NULL ? TEXT_NAME(path) : "", path != NULL ? ": " : "", reason(status));
}

int open_context(const machine_options *options, quern_context **ctx)
{
    if (options->threads < 0 || options->threads > 1024)
        return fail(EXIT_USAGE, "--threads %lld: 0 to 1024 is accepted", (long long)options->threads);
    if (options->device == QUERN_CUDA && quern_cuda_check(0) != QUERN_OK)
        return fail(EXIT_MACHINE, "--device cuda: %s", quern_last_error(NULL));
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    params.threads = (int32_t)options->threads;
    const quern_status status = quern_context_create(&params, ctx);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

static void print_help(void)
{
    printf("quern %s: sparse attention that trains, on CPUs and NVIDIA GPUs\n\nusage: quern VERB [--option "
           "value ...]\n\n",
           quern_version());
    for (size_t i = 0; i < VERBS; i++) printf("  %-8s %s\n", verbs[i].name, verbs[i].help);
    printf("\nquern VERB --help tells the rest; quern --version the version.\n"
           "\nexit codes: 0 done; 1 a comparison failed; 2 the command line is wrong;\n"
           "3 a file, its tensors or a parameter is not accepted; 4 the machine lacks what is needed\n"
           "(device, CPU level, memory, program); 5 a defect of Quern; 129, 130, 143 ended by SIGHUP, "
           "SIGINT, SIGTERM\n"
           "before a result was in place. Files are written whole or not at all, through symbolic links, and "
           "after what goes to\n"
           "standard output: where that cannot be written, none is; pipes and devices as they stand.\n"
           "environment: QUERN_CPU=portable|avx2|avx512|avx512bf16|amx forces a CPU level; OMP_NUM_THREADS;\n"
           "QUERN_CUDA_LIBRARY=FILE is the GPU's backend, if not the libquern_cuda.so.0 beside libquern.\n");
}

static int run_verb(int argc, char **argv)
{
    if (argc < 2) {
        print_help();
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help();
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("quern %s\n", quern_version());
        return EXIT_DONE;
    }
    for (size_t i = 0; i < VERBS; i++) {
        if (strcmp(argv[1], verbs[i].name) == 0) {
            command_verb = verbs[i].name;
            return verbs[i].call(argc - 1, argv + 1);
        }
    }
    return fail(EXIT_USAGE,
                "verb '%s' is unknown: info, run, quantize, compare, inspect, bench and probe are accepted",
                argv[1]);
}

void *need_memory(size_t bytes)
{
    void *p = malloc(bytes);
    if (p != NULL) return p;
    quern_file_discard_all();
    exit(fail(EXIT_MACHINE, "no memory"));
}

int main(int argc, char **argv)
{
    json_set_alloc_funcs(need_memory, free);
    output_keep_streams();
    output_end_on_signals();
    return output_flush(run_verb(argc, argv));
}
