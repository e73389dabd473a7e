/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* run.c - `quern run OP IN OUT`: one operation on the tensors of a file. */
#include "run_list.h"

#include "command.h"
#include "compressor.h"
#include "job.h"
#include "output.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

typedef struct run_options {
    bool list, markdown, save_branches;
    const char *profile, *without;
} run_options;

#define AT(member) offsetof(run_options, member)
static const option_row rows[] = {
    {"profile", OPTION_TEXT, AT(profile), NULL, "NSA preset that is set before the other options: tile256"},
    {"save-branches", OPTION_FLAG, AT(save_branches), NULL, "nsa: also write O_cmp, O_slc, O_win"},
    {"without", OPTION_TEXT, AT(without), NULL, "NAME,...: act as if the file lacked these tensors"},
    {"list", OPTION_FLAG, AT(list), NULL, "print every operation with its tensors and options"},
    {"markdown", OPTION_FLAG, AT(markdown), NULL, "with --list: as docs/run.md"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

static void print_help(void)
{
    run_options defaults = {0};
    machine_options machine = {0};
    printf("usage: quern run OP IN.safetensors OUT.safetensors [--key value ...]\n"
           "       quern run --list [--markdown]\n\n"
           "Reads the operation's tensors from IN, computes, and writes its outputs to OUT. The dtype is that\n"
           "of the tensors. OUT is written whole or not at all.\n\noperations:\n");
    for (size_t i = 0; i < operation_count; i++) printf("  %-17s %s\n", operations[i].name, operations[i].help);
    printf("  csa-compress, hca-compress\n                    DeepSeek-V4's compressors; their options: quern run csa-compress --help\n");
    printf("\noptions of every operation:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    print_options(&(option_group){machine_rows, machine_row_count, &machine});
    printf("\nThe parameters of an operation: quern run --list, or docs/run.md.\n\nexamples:\n"
           "  quern run attention in.safetensors out.safetensors --window 512\n"
           "  quern run nsa in.safetensors out.safetensors --profile tile256 --block-size 128 --num-selected 8\n"
           "  quern run nsa-select in.safetensors out.safetensors --tile 64 --metric mean_logit --json\n\n"
           "exit codes: 0 done, 2 wrong command line, 3 a file, tensor or parameter is not accepted,\n"
           "4 the machine lacks what is needed, 5 a defect.\n");
}

static json_t *tensor_json(const quern_tensor *t)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->ndim; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o}", "dtype", quern_dtype_name(t->dtype), "shape", shape);
}

static void print_result(const job *j, quern_context *ctx)
{
    json_t *outputs = json_object();
    for (size_t i = 0; i < j->op->family->slot_count; i++)
        if (j->owned[i] != NULL && !j->input[i]) json_object_set_new(outputs, j->op->family->slots[i].name, tensor_json(&j->storage[i]));
    json_t *result = json_pack("{s:s, s:s, s:s, s:i, s:f, s:I, s:o}", "version", quern_version(), "op", j->op->name,
                               "isa", quern_cpu_level_name(quern_context_cpu_level(ctx)), "threads",
                               (int)quern_context_threads(ctx), "forward_ms", j->forward_ms, "workspace_bytes",
                               (json_int_t)j->workspace_bytes, "outputs", outputs);
    if (j->backward) json_object_set_new(result, "backward_ms", json_real(j->backward_ms));
    output_print(result, JSON_INDENT(2));
    json_decref(result);
}

static int compute(const operation *op, const any_params *params, const run_options *options,
                   const machine_options *machine, const char *in, const char *out)
{
    quern_context *ctx = NULL;
    quern_safetensors *file = NULL;
    int code = output_check(out);
    if (code == EXIT_DONE) code = open_context(machine, &ctx);
    if (code != EXIT_DONE) return code;
    const quern_status status = quern_safetensors_open(in, &file);
    if (status != QUERN_OK) {
        quern_context_destroy(ctx);
        return fail(EXIT_INPUT, "%s: %s", TEXT_NAME(in), quern_last_error(NULL));
    }
    job j;
    job_init(&j, op, params);
    j.save_branches = options->save_branches;
    j.device = machine->device;
    code = job_read(&j, file, in, options->without);
    if (code == EXIT_DONE) code = job_prepare(&j, ctx);
    if (code == EXIT_DONE) code = job_run(&j, ctx);
    if (code == EXIT_DONE) code = job_write(&j, out);
    if (code == EXIT_DONE && machine->json) print_result(&j, ctx);
    job_free(&j);
    quern_safetensors_close(file);
    quern_context_destroy(ctx);
    return code;
}

int verb_run(int argc, char **argv)
{
    if (compressor_asked(argc, argv)) return compressor_run(argc, argv);
    run_options options = {0};
    machine_options machine = {0};
    any_params params = params_init(&family_nsa);
    const operation *op = NULL;
    for (int i = 1; i < argc && op == NULL; i++) op = operation_named(argv[i]);
    if (op != NULL) params = params_init(op->family);
    const option_group groups[] = {{rows, ROWS, &options},
                                   {machine_rows, machine_row_count, &machine},
                                   {op != NULL ? op->family->params : NULL, op != NULL ? op->family->param_count : 0, &params}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, op != NULL ? 3 : 2, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (options.list) {
        run_list(options.markdown);
        return EXIT_DONE;
    }
    if (argc - first != 3)
        return fail(EXIT_USAGE, "%d words are given: OP IN OUT is accepted; see quern run --help", argc - first);
    op = operation_named(argv[first]);
    if (op == NULL) return fail(EXIT_USAGE, "operation '%s' is unknown; quern run --list prints those there are", argv[first]);
    if (options.profile != NULL) { /* first the preset, then the options over it */
        if (op->family != &family_nsa) return fail(EXIT_USAGE, "--profile: only operations of the nsa family have presets");
        params = params_init(op->family);
        if (quern_nsa_params_preset(&params.nsa, options.profile) != QUERN_OK)
            return fail(EXIT_USAGE, "--profile: %s", quern_last_error(NULL));
        code = parse_options(argc, argv, groups, 3, &first, &help);
        if (code != EXIT_DONE) return code;
    }
    return compute(op, &params, &options, &machine, argv[first + 1], argv[first + 2]);
}
