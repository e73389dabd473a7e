/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantize.c - `quern quantize SRC DST`: a checkpoint to NVFP4, in the format of an engine, or back to
 * bf16. */
#include "quantize/config_write.h"
#include "quantize/gguf_file.h"
#include "quantize/losses.h"
#include "quantize/shard_file.h"
#include "quantize/target.h"

#include "command.h"
#include "output.h"
#include "team.h"

#include <quern/file.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AT(member) offsetof(quantize_options, member)
static const char *const formats[] = {"none", "modelopt", "compressed-tensors", "gguf", NULL};
static const char *const choices[] = {"rne", "four-over-six", "search", NULL};
static const option_row rows[] = {
    {"format", OPTION_CHOICE, AT(format), formats, "of the output: whose loader reads it"},
    {"dequantize", OPTION_FLAG, AT(dequantize), NULL, "write NVFP4, MXFP4 and FP8 weights as bf16"},
    {"scales", OPTION_CHOICE, AT(scales), choices, "which scale a block gets: rne is the format's own rule"},
    {"include", OPTION_LIST, AT(include), NULL,
     "glob of the tensors to convert, instead of the default; repeatable"},
    {"exclude", OPTION_LIST, AT(exclude), NULL, "glob of tensors to leave, beside the default; repeatable"},
    {"input-scales", OPTION_TEXT, AT(input_scales), NULL,
     "activations' scales: a JSON file {module: scale}, or a number"},
    {"name-map", OPTION_TEXT, AT(name_map), NULL,
     "gguf: a file of two columns, names with {n} and {e} and GGUF's"},
    {"gguf-base", OPTION_TEXT, AT(gguf_base), NULL,
     "gguf: a file whose keys (architecture, tokenizer) are copied"},
    {"include-mtp", OPTION_FLAG, AT(include_mtp), NULL, "deepseek_v4: convert the experts of mtp.* too"},
    {"threads", OPTION_INT, AT(threads), NULL, "threads; 0: OMP_NUM_THREADS, else all CPUs"},
    {"dry-run", OPTION_FLAG, AT(dry_run), NULL, "print what would be done, and write nothing"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the report to this file as JSON"},
    {"svg", OPTION_TEXT, AT(svg), NULL, "draw the error by layer to this file (gnuplot)"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

static void print_help(void)
{
    const quantize_options defaults = {0};
    printf(
        "usage: quern quantize SRC DST --format modelopt|compressed-tensors|gguf [--key value ...]\n"
        "       quern quantize SRC DST --dequantize\n\n"
        "SRC is a safetensors file or a model's folder; DST a folder, or with --format gguf a .gguf file.\n"
        "Weights of linear layers in bf16, f16, f32, MXFP4 and FP8 become NVFP4; everything else is copied.\n"
        "A run that was interrupted goes on shard by shard when it is started again; a .gguf file is one, "
        "and "
        "begins\nanew.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, (void *)(uintptr_t)&defaults});
    printf("\nThe report has, for each tensor, the relative RMSE, that of the worst block, the blocks with a "
           "value\n"
           "beyond what their codes reach, and the MXFP4 blocks whose codes were rounded.\n\nexamples:\n"
           "  quern quantize model/ model-nvfp4/ --format modelopt --scales search --json report.json\n"
           "  quern quantize model/ model.gguf --format gguf --name-map names.txt --gguf-base base.gguf\n"
           "  quern quantize model/ out/ --format compressed-tensors --exclude '*self_attn*' --dry-run\n\n"
           "exit codes: 0 done, 2 wrong command line, 3 a file or tensor is not accepted,\n"
           "4 the machine lacks what is needed, 5 a defect.\n");
}

/* ---- the shards ---- */

static int64_t source_bytes(const conversion *c)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < c->model->count; i++) bytes += c->model->tensors[i].bytes;
    return bytes;
}

static int64_t shard_bytes(const conversion *c, size_t shard)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < c->model->count; i++)
        if (c->model->tensors[i].shard == shard) bytes += c->model->tensors[i].bytes;
    return bytes;
}

/* Shards that an earlier run has not finished, a few at a time where there are threads for them. */
static int write_shards(conversion *c, output_file *files, progress *p)
{
    shard_job jobs[FILES_AT_ONCE];
    const size_t most = c->threads < FILES_AT_ONCE ? (size_t)c->threads : FILES_AT_ONCE;
    int code = EXIT_DONE;
    size_t count = 0;
    for (size_t i = 0; i < c->model->shard_count && code == EXIT_DONE; i++) {
        shard_job *job = &jobs[count];
        job->shard = i;
        job->file = &files[i];
        if (snprintf(job->path, PATH_MAX, "%s/%s", c->options->target, files[i].name) >= PATH_MAX)
            return fail(EXIT_INPUT, "output '%s': the path is too long", TEXT_NAME(c->options->target));
        code = target_check_file(job->path);
        if (code != EXIT_DONE) return code;
        if (shard_is_done(c, i, &files[i], job->path)) progress_add(p, shard_bytes(c, i), true);
        else count++;
        if (count < most) continue;
        code = shards_write(c, jobs, count, p);
        count = 0;
    }
    return code == EXIT_DONE && count > 0 ? shards_write(c, jobs, count, p) : code;
}

static int write_folder(conversion *c, output_file *files)
{
    progress p;
    int code = target_open(c->options->target);
    if (code != EXIT_DONE) return code;
    progress_begin(&p, source_bytes(c));
    code = write_shards(c, files, &p);
    progress_end(&p);
    if (code == EXIT_DONE) code = target_copy_others(c);
    if (code == EXIT_DONE) code = configs_write(c, c->options->target);
    return code == EXIT_DONE ? index_write(c, files, c->options->target) : code;
}

static int report(const conversion *c)
{
    int code = EXIT_DONE;
    losses_print(c);
    if (c->options->json != NULL) code = losses_json(c, c->options->json);
    return code == EXIT_DONE && c->options->svg != NULL ? losses_chart(c, c->options->svg) : code;
}

static int convert_to_folder(conversion *c)
{
    output_file *files = calloc(c->model->shard_count, sizeof *files);
    c->inputs = shard_hash_inputs(c);
    int code =
        files != NULL ? outputs_plan(c, files) : fail(EXIT_MACHINE, "no memory for the list of shards");
    for (size_t i = 0; i < c->model->shard_count && code == EXIT_DONE; i++)
        code = shard_lay_out(c, i, &files[i]);
    if (code == EXIT_DONE && c->options->dry_run) losses_plan(c, files, c->model->shard_count);
    else if (code == EXIT_DONE) {
        code = write_folder(c, files);
        if (code == EXIT_DONE) code = report(c);
    }
    for (size_t i = 0; i < c->model->shard_count && files != NULL; i++) output_free(&files[i]);
    free(files);
    return code;
}

static int convert_to_gguf(conversion *c)
{
    const int code = gguf_file_write(c);
    return code == EXIT_DONE && !c->options->dry_run ? report(c) : code;
}

/* ---- the run ---- */

static int convert_model(conversion *c)
{
    int code = config_open(c);
    if (code == EXIT_DONE) code = target_check(c);
    if (code == EXIT_DONE) code = choose_modules(c);
    if (code == EXIT_DONE && c->list.count == 0 && !c->options->dry_run)
        code = fail(EXIT_INPUT, "no tensor of '%s' is one to convert: --dry-run lists why each was left",
                    TEXT_NAME(c->options->source));
    if (code == EXIT_DONE) code = read_input_scales(c);
    if (code != EXIT_DONE) return code;
    return c->format == FORMAT_GGUF ? convert_to_gguf(c) : convert_to_folder(c);
}

static int run(const quantize_options *o)
{
    char why[MODEL_SENTENCE];
    conversion c = {.options = o,
                    .format = o->dequantize ? FORMAT_BF16 : (target_format)o->format,
                    .threads = openmp_team((int)o->threads)};
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    params.threads = 1;
    atexit(quern_file_discard_all); /* OpenMP may end the process */
    int code = output_check(o->json);
    if (code == EXIT_DONE) code = output_check(o->svg);
    if (code != EXIT_DONE) return code;
    quern_status status = quern_context_create(&params, &c.ctx);
    if (status != QUERN_OK) return fail_status(status);
    status = model_files_open(o->source, &c.model, why);
    code = status == QUERN_OK
               ? convert_model(&c)
               : fail(status == QUERN_ERR_OUT_OF_MEMORY ? EXIT_MACHINE : EXIT_INPUT, "%s", why);
    modules_free(&c.list);
    json_decref(c.config);
    model_files_close(c.model);
    quern_context_destroy(c.ctx);
    return code;
}

static int check_options(const quantize_options *o)
{
    const size_t length = strlen(o->target);
    const bool gguf = o->format == FORMAT_GGUF;
    const char *suffix = ".gguf";
    if (o->dequantize && o->format != FORMAT_NONE)
        return fail(EXIT_USAGE, "--dequantize and --format are given: one of them is accepted");
    if (!o->dequantize && o->format == FORMAT_NONE)
        return fail(EXIT_USAGE, "--format modelopt, compressed-tensors or gguf, or --dequantize, is needed");
    if (gguf && (length <= strlen(suffix) || strcmp(o->target + length - strlen(suffix), suffix) != 0))
        return fail(EXIT_USAGE, "output '%s': with --format gguf a .gguf file is accepted",
                    TEXT_NAME(o->target));
    if (!gguf && (o->name_map != NULL || o->gguf_base != NULL))
        return fail(EXIT_USAGE, "--%s: accepted with --format gguf",
                    o->name_map != NULL ? "name-map" : "gguf-base");
    if (o->threads < 0 || o->threads > 1024)
        return fail(EXIT_USAGE, "--threads %lld: 0 to 1024 is accepted", (long long)o->threads);
    if (o->svg != NULL && !have_program("gnuplot"))
        return fail(EXIT_MACHINE, "--svg needs gnuplot, which is not on the PATH");
    return EXIT_DONE;
}

int verb_quantize(int argc, char **argv)
{
    quantize_options options = {0};
    int first;
    bool help;
    int code = parse_options(argc, argv, &(option_group){rows, ROWS, &options}, 1, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (argc - first != 2)
        return fail(EXIT_USAGE, "%d words are given: SRC DST is accepted; see quern quantize --help",
                    argc - first);
    options.source = argv[first];
    options.target = argv[first + 1];
    code = check_options(&options);
    return code == EXIT_DONE ? run(&options) : code;
}
