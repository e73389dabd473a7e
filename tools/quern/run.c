/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* run.c - `quern run OP IN OUT`: one operation on the tensors of a file. */
#include "run_list.h"

#include "command.h"
#include "job.h"
#include "output.h"
#include "scenario.h"
#include "tensor_names.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

typedef struct run_options {
    bool list, markdown, save_branches;
    const char *profile, *without;
    /* Options of results, for operations that have them. */
    bool aside;
    int dtype; /* 0: the usual one, else quern_dtype + 1 */
    int64_t asked[4];
} run_options;

#define AT(member) offsetof(run_options, member)
static const option_row rows[] = {
    {"profile", OPTION_TEXT, AT(profile), NULL, "NSA preset, set before the other options: tile256, msa"},
    {"save-branches", OPTION_FLAG, AT(save_branches), NULL, "nsa: also write O_cmp, O_slc, O_win"},
    {"without", OPTION_TEXT, AT(without), NULL, "NAME,...: act as if the file lacked these tensors"},
    {"list", OPTION_FLAG, AT(list), NULL, "print every operation with its tensors and options"},
    {"markdown", OPTION_FLAG, AT(markdown), NULL, "with --list: as docs/run.md"},
};
enum { ROWS = sizeof rows / sizeof *rows, RESULT_ROWS_MAX = 6, GROUPS = 5 };
static const char *const dtype_choices[] = {"usual", "f32", "f16", "bf16", NULL};

/* The operation to run, alone or in a scenario. */
typedef struct subject {
    const char *name;
    const scenario *scenario; /* NULL: none */
    const operation *op;
    option_row params[QUERN_OP_PARAMS_MAX], results[RESULT_ROWS_MAX];
    size_t param_count, result_count;
} subject;

/* Options of results that the parameters leave open. */
static void add_result_options(subject *s)
{
    const quern_op_info *info = &s->op->info;
    bool floats = false;
    for (int32_t i = 0; i < info->tensor_count; i++) {
        const quern_op_tensor *t = &s->op->tensors[i];
        floats = floats || ((strcmp(t->dtype, "float") == 0 || strcmp(t->dtype, "stored") == 0) &&
                            t->result[QUERN_OP_FORWARD] && !t->updated);
    }
    if (floats && s->scenario == NULL)
        s->results[s->result_count++] = (option_row){"dtype", OPTION_CHOICE, AT(dtype), dtype_choices,
                                                     "of results that may be f32, f16 or bf16"};
    if (info->aside != NULL && info->aside_valued)
        s->results[s->result_count++] =
            (option_row){info->aside, OPTION_BOOL, AT(aside), NULL, RESULT_ASIDE_HELP};
    for (size_t i = 0; i < sizeof info->asked / sizeof *info->asked && info->asked[i] != NULL; i++)
        s->results[s->result_count++] = (option_row){
            info->asked[i], OPTION_INT, AT(asked) + i * sizeof(int64_t), NULL, RESULT_EXTENT_HELP};
}
#undef AT

/* False if no operation has the name. */
static bool subject_named(const char *name, subject *s)
{
    memset(s, 0, sizeof *s);
    s->name = name;
    s->scenario = scenario_named(name);
    s->op = operation_named(s->scenario != NULL ? s->scenario->op : name);
    if (s->op == NULL) return false;
    s->param_count = scenario_params(s->scenario, s->op, s->params);
    add_result_options(s);
    return true;
}

/* What the help of `run` and of an operation share: the options of every operation, then how it may end. */
static void print_common_help(const char *examples)
{
    run_options defaults = {0};
    machine_options machine = {0};
    printf("\noptions of every operation:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    print_options(&(option_group){machine_rows, machine_row_count, &machine});
    printf("\nexamples:\n%s\n"
           "exit codes: 0 done, 2 wrong command line, 3 a file, tensor or parameter is not accepted,\n"
           "4 the machine lacks what is needed, 5 a defect.\n",
           examples);
}

static void print_help(void)
{
    printf(
        "usage: quern run OP IN.safetensors OUT.safetensors [--key value ...]\n"
        "       quern run OP --help\n"
        "       quern run --list [--markdown]\n\n"
        "Reads the operation's tensors from IN, computes, and writes its outputs to OUT. The dtype is that\n"
        "of the tensors. OUT is written whole or not at all.\n\noperations:\n");
    run_names();
    printf(
        "\nquern run OP --help tells an operation's tensors and parameters, quern run --list or docs/run.md "
        "those of all.\n");
    print_common_help(
        "  quern run attention in.safetensors out.safetensors --window 512\n"
        "  quern run nsa in.safetensors out.safetensors --profile tile256 --block-size 128 --num-selected 8\n"
        "  quern run nsa-select in.safetensors out.safetensors --tile 64 --metric mean-logit --json\n");
}

static void print_subject_help(const subject *s)
{
    run_options defaults = {0};
    any_params params = params_init(s->op);
    char examples[160];
    printf("usage: quern run %s IN.safetensors OUT.safetensors [--key value ...]\n\n%s.\n\ntensors:\n",
           s->name, s->scenario != NULL && s->scenario->help != NULL ? s->scenario->help : s->op->info.help);
    run_tensors(s->op, s->scenario);
    printf("\noptions of %s:\n", s->name);
    if (s->scenario != NULL)
        print_options(&(option_group){s->scenario->rows, s->scenario->row_count, s->scenario->options});
    print_options(&(option_group){s->params, s->param_count, &params});
    print_options(&(option_group){s->results, s->result_count, &defaults});
    snprintf(examples, sizeof examples,
             "  quern run %s in.safetensors out.safetensors\n"
             "  quern run %s in.safetensors out.safetensors --threads 2 --json\n",
             s->name, s->name);
    print_common_help(examples);
}

static json_t *tensor_json(const quern_tensor *t)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->ndim; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o}", "dtype", quern_dtype_name(t->dtype), "shape", shape);
}

static void print_result(const job *j, const char *name, quern_context *ctx)
{
    json_t *outputs = json_object();
    for (int32_t i = 0; i < j->op->info.tensor_count; i++)
        if (j->owned[i] != NULL && (!j->input[i] || j->op->tensors[i].updated))
            json_object_set_new(outputs, quern_op_tensor_name(j->op->op, &j->params, i),
                                tensor_json(&j->storage[i]));
    for (size_t i = 0; i < j->added_count; i++)
        json_object_set_new(outputs, j->added_names[i], tensor_json(&j->added[i]));
    json_t *result = json_pack("{s:s, s:s, s:s, s:i, s:f, s:I, s:o}", "version", quern_version(), "op", name,
                               "isa", quern_cpu_level_name(quern_context_cpu_level(ctx)), "threads",
                               (int)quern_context_threads(ctx), "forward_ms", j->forward_ms,
                               "workspace_bytes", (json_int_t)j->workspace_bytes, "outputs", outputs);
    if (j->backward) json_object_set_new(result, "backward_ms", json_real(j->backward_ms));
    output_print(result, JSON_INDENT(2));
    json_decref(result);
}

static int compute(const subject *s, job *j, quern_context *ctx)
{
    int code = EXIT_DONE;
    if (s->scenario != NULL && s->scenario->inputs != NULL) code = s->scenario->inputs(j);
    if (code != EXIT_DONE) return code;
    if (s->scenario != NULL) return s->scenario->compute(j, ctx);
    code = job_prepare(j, ctx);
    return code == EXIT_DONE ? job_run(j, ctx) : code;
}

static int run_subject(const subject *s, const any_params *params, const run_options *options,
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
        return fail_file(in, status);
    }
    job j;
    job_init(&j, s->op, params);
    tensor_names_of(s->op, &j.params);
    j.aside =
        s->op->info.aside != NULL && (s->op->info.aside_valued ? options->aside : options->save_branches);
    j.device = machine->device;
    j.dtype = options->dtype > 0 ? options->dtype - 1 : JOB_DTYPE_USUAL;
    memcpy(j.asked, options->asked, sizeof j.asked);
    j.set_params = s->scenario != NULL ? s->scenario->set_params : NULL;
    code = job_read(&j, file, in, options->without);
    if (code == EXIT_DONE) code = compute(s, &j, ctx);
    if (code == EXIT_DONE && machine->json) print_result(&j, s->name, ctx);
    if (code == EXIT_DONE) code = output_flush(code); /* a result that cannot be told is not written */
    if (code == EXIT_DONE) code = job_write(&j, s->name, out);
    tensor_names_of(NULL, NULL);
    job_free(&j);
    quern_safetensors_close(file);
    quern_context_destroy(ctx);
    return code;
}

int verb_run(int argc, char **argv)
{
    run_options options = {0};
    machine_options machine = {0};
    subject s = {0};
    for (int i = 1; i < argc && s.op == NULL; i++) (void)subject_named(argv[i], &s);
    any_params params = params_init(s.op);
    const option_group groups[GROUPS] = {{s.scenario != NULL ? s.scenario->rows : NULL,
                                          s.scenario != NULL ? s.scenario->row_count : 0,
                                          s.scenario != NULL ? s.scenario->options : NULL},
                                         {s.params, s.param_count, &params},
                                         {s.results, s.result_count, &options},
                                         {rows, ROWS, &options},
                                         {machine_rows, machine_row_count, &machine}};
    int first;
    bool help;
    int code = parse_options(argc, argv, groups, GROUPS, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        if (s.op != NULL) print_subject_help(&s);
        else print_help();
        return EXIT_DONE;
    }
    if (options.list) {
        run_list(options.markdown);
        return EXIT_DONE;
    }
    if (argc - first != 3)
        return fail(EXIT_USAGE, "%d words are given: OP IN OUT is accepted; see quern run --help",
                    argc - first);
    if (s.op == NULL || strcmp(s.name, argv[first]) != 0)
        return fail(EXIT_USAGE, "operation '%s' is unknown; quern run --list prints those there are",
                    argv[first]);
    if (options.profile != NULL) { /* first the preset, then the options over it */
        code = params_preset(s.op, &params, options.profile);
        if (code == EXIT_DONE) code = parse_options(argc, argv, groups, GROUPS, &first, &help);
        if (code != EXIT_DONE) return code;
    }
    return run_subject(&s, &params, &options, &machine, argv[first + 1], argv[first + 2]);
}
