/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "run_list.h"

#include <stdio.h>
#include <string.h>

static const char intro[] =
    "# `quern run`\n\n"
    "`quern run OP IN.safetensors OUT.safetensors [--key value ...]` reads the operation's tensors from\n"
    "IN by name, computes, and writes its outputs to OUT, whole or not at all. It ignores tensors of\n"
    "other names. OUT replaces a regular file and keeps its permissions; the command follows a symbolic\n"
    "link, and writes to a pipe or device as it stands (`/dev/stdout`). It checks that OUT can be\n"
    "written before the work. Exit codes: 0 done, 2 the command line, 3 a file, tensor, dtype or\n"
    "parameter is not accepted, 4 the machine lacks what is needed, 5 a defect; SIGHUP, SIGINT and\n"
    "SIGTERM end the command at once with 129, 130 and 143 and leave nothing behind; once OUT is in\n"
    "place they change nothing. What `--json` prints comes before OUT is written, the last step: where\n"
    "standard output takes it not, that is exit code 3 and no OUT.\n\n"
    "`--profile NAME` sets a preset first, later options override it; `--threads`, `--device cpu|cuda`,\n"
    "`--json` and `--without NAME,...` (act as if IN lacked these tensors) go with every operation.\n\n"
    "act: f32, f16 or bf16, one for all; weight: f32 or the activations' dtype; float: f32, f16 or bf16;\n"
    "codes: u8 or e2m1x2; scale: u8 or e4m3; exponent: u8 or e8m0; stored: float, or bytes of a format;\n"
    "any: float or bytes; index: i32 or i64; same: that of the input of this name.\n"
    "Symbols are those of the headers: B batch, N tokens, T tokens of a varlen batch (with cu_seqlens),\n"
    "H and Hkv heads, D and Dv head dims, Nc and Tc compressed entries, Hs selection lists, l block\n"
    "size, k selected blocks, c groups; ... any number of leading dimensions; x|y one or the other, as\n"
    "the parameters say.\n\n"
    "An output that is also an optional input is passed through where the file holds it. Gradients come\n"
    "for every differentiable input that the file holds; the first input of a line \"backward with\" asks\n"
    "for them.\n\n"
    "This page is printed by `quern run --list --markdown`.\n";

typedef enum list_role { IN, IN_OPTIONAL, UPDATED, BACKWARD_WITH, OUT, OUT_BACKWARD, LIST_ROLES } list_role;

static bool has_role(const quern_op_tensor *t, list_role role)
{
    switch (role) {
    case IN: return t->input && t->needed && !t->updated;
    case IN_OPTIONAL: return t->input && !t->needed && !t->updated;
    case UPDATED: return t->updated;
    case BACKWARD_WITH: return t->trigger;
    case OUT: return t->result[QUERN_OP_FORWARD] && !t->updated;
    case OUT_BACKWARD: return t->result[QUERN_OP_BACKWARD];
    default: return false;
    }
}

/* Escapes | in Markdown, where it would end a table's cell. */
static const char *escaped(bool markdown, const char *text, char *to, size_t room)
{
    size_t n = 0;
    for (; *text != '\0' && n + 2 < room; text++) {
        if (markdown && *text == '|') to[n++] = '\\';
        to[n++] = *text;
    }
    to[n] = '\0';
    return to;
}

static void print_tensor(bool markdown, const char *name, const char *role, const char *dtype,
                         const char *fixed, const char *varlen)
{
    char shape[100], rows[100] = "";
    escaped(markdown, fixed, shape, sizeof shape);
    escaped(markdown, varlen, rows, sizeof rows);
    const bool other = *rows != '\0';
    if (markdown)
        printf("| `%s` | %s | %s | `[%s]` | %s%s%s |\n", name, role, dtype, shape, other ? "`[" : "", rows,
               other ? "]`" : "");
    else
        printf("    %-16s %-14s %-7s [%s]%s%s%s\n", name, role, dtype, shape, other ? " or [" : "", rows,
               other ? "]" : "");
}

static void print_tensors(const operation *op, const scenario_output *outputs, bool markdown)
{
    static const char *const words[] = {"in",  "in, optional", "in and out", "backward with",
                                        "out", "out, backward"};
    if (markdown) printf("\n| tensor | | dtype | shape | varlen |\n| --- | --- | --- | --- | --- |\n");
    for (int role = IN; role < LIST_ROLES; role++) {
        if (outputs != NULL && role > IN_OPTIONAL) break;
        for (int32_t i = 0; i < op->info.tensor_count; i++) {
            const quern_op_tensor *t = &op->tensors[i];
            char name[64];
            if (t->other_name == NULL) snprintf(name, sizeof name, "%s", t->name);
            else snprintf(name, sizeof name, markdown ? "%s`, `%s" : "%s, %s", t->name, t->other_name);
            if (has_role(t, (list_role)role))
                print_tensor(markdown, name, words[role], t->dtype, t->fixed, t->varlen);
        }
    }
    for (; outputs != NULL && outputs->name != NULL; outputs++)
        print_tensor(markdown, outputs->name, words[OUT], outputs->dtype, outputs->shape, "");
}

static void print_rows(const option_row *rows, size_t count, const void *base, bool markdown)
{
    for (size_t i = 0; i < count; i++) {
        char value[100], cell[160], now[64];
        option_value_text(&rows[i], value, sizeof value);
        option_current_text(&rows[i], base, now, sizeof now);
        escaped(markdown, value, cell, sizeof cell);
        if (markdown) printf("| `--%s` | %s | %s | %s |\n", rows[i].name, cell, now, rows[i].help);
        else printf("    --%s %s  %s (default %s)\n", rows[i].name, cell, rows[i].help, now);
    }
}

/* Options of results, which are no parameters. */
static void print_result_options(const quern_op_info *info, bool markdown)
{
    static const bool no = false;
    static const int64_t zero = 0;
    for (size_t i = 0; i < sizeof info->asked / sizeof *info->asked && info->asked[i] != NULL; i++)
        print_rows(&(option_row){info->asked[i], OPTION_INT, 0, NULL, RESULT_EXTENT_HELP}, 1, &zero,
                   markdown);
    if (info->aside != NULL && info->aside_valued)
        print_rows(&(option_row){info->aside, OPTION_BOOL, 0, NULL, RESULT_ASIDE_HELP}, 1, &no, markdown);
}

static void print_params(const operation *op, const scenario *s, bool markdown)
{
    const any_params defaults = params_init(op);
    option_row rows[QUERN_OP_PARAMS_MAX];
    const size_t count = scenario_params(s, op, rows);
    if (markdown) printf("\n| option | value | default | |\n| --- | --- | --- | --- |\n");
    if (s != NULL) print_rows(s->rows, s->row_count, s->options, markdown);
    print_rows(rows, count, &defaults, markdown);
    if (s == NULL) print_result_options(&op->info, markdown);
}

/* Prints a scenario whose name is no operation's. */
static void print_scenario(const scenario *s, bool markdown)
{
    const operation *op = operation_named(s->op);
    if (op == NULL || strcmp(s->name, s->op) == 0) return;
    if (markdown) printf("\n## %s\n\n%s.\n", s->name, s->help);
    else printf("%s: %s\n  tensors:\n", s->name, s->help);
    print_tensors(op, s->outputs, markdown);
    if (!markdown) printf("  options:\n");
    print_params(op, s, markdown);
}

void run_tensors(const operation *op, const scenario *s)
{
    print_tensors(op, s != NULL ? s->outputs : NULL, false);
}

void run_names(void)
{
    const quern_op *op;
    quern_op_info info;
    for (size_t i = 0; (op = quern_op_at(i)) != NULL; i++)
        if (quern_op_get(op, &info) == QUERN_OK) printf("  %-17s %s\n", info.name, info.help);
    for (size_t i = 0; scenarios[i] != NULL; i++)
        if (strcmp(scenarios[i]->name, scenarios[i]->op) != 0)
            printf("  %-17s %s\n", scenarios[i]->name, scenarios[i]->help);
}

static const operation *operation_at(size_t i)
{
    quern_op_info info;
    const quern_op *op = quern_op_at(i);
    return op != NULL && quern_op_get(op, &info) == QUERN_OK ? operation_named(info.name) : NULL;
}

void run_list(bool markdown)
{
    const operation *op;
    if (markdown) fputs(intro, stdout);
    for (size_t i = 0; (op = operation_at(i)) != NULL; i++) {
        if (markdown) printf("\n## %s\n\n%s.\n", op->name, op->info.help);
        else printf("%s: %s\n  options of family %s; tensors:\n", op->name, op->info.help, op->info.group);
        print_tensors(op, NULL, markdown);
    }
    const char *before = "";
    for (size_t i = 0; (op = operation_at(i)) != NULL; i++) {
        if (strcmp(before, op->info.group) == 0) continue;
        before = op->info.group;
        printf(markdown ? "\n## Options of family %s\n" : "options of family %s\n", before);
        print_params(op, scenario_named(op->name), markdown);
    }
    for (size_t i = 0; scenarios[i] != NULL; i++) print_scenario(scenarios[i], markdown);
}
