/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "run_list.h"

#include "compressor.h"
#include "ops.h"

#include <stdio.h>
#include <string.h>

static const char *const dtype_words[] = {"act", "weight", "f32", "i32"};

static const char intro[] =
    "# `quern run`\n\n"
    "`quern run OP IN.safetensors OUT.safetensors [--key value ...]` reads the operation's tensors from IN by\n"
    "name, computes, and writes its outputs to OUT, whole or not at all. Tensors of other names are left alone.\n"
    "OUT replaces a regular file and keeps its permissions; a symbolic link is followed, a pipe or device written as\n"
    "it stands (`/dev/stdout`). An OUT that cannot be written is found before the work. Exit codes: 0 done, 2 the command\n"
    "line, 3 a file, tensor, dtype or parameter is not accepted, 4 the machine lacks what is needed, 5 a defect; SIGINT\n"
    "and SIGTERM end the command at once with 130 and 143 and leave nothing behind.\n"
    "`--profile NAME` sets a preset first, later options override it; `--threads`, `--device cpu|cuda`, `--json`\n"
    "and `--without NAME,...` (act as if IN lacked these tensors) go with every operation.\n\n"
    "act: f32, f16 or bf16, one for all; weight: f32 or the activations' dtype. Symbols are those of the\n"
    "headers: B batch, N tokens, T tokens of a packed batch (with cu_seqlens), H and Hkv heads, D and Dv head\n"
    "dims, Nc and Tc compressed entries, Hs selection lists, l block size, k selected blocks, c groups.\n"
    "An output that stands among the optional inputs is passed through where it was handed in. Gradients come\n"
    "for every differentiable input that the file holds; the first input of a line \"backward with\" asks for them.\n\n"
    "This page is printed by `quern run --list --markdown`.\n";

typedef struct printer {
    bool markdown;
    const char *role;
    const family *f;
} printer;

static bool print_slot(void *arg, const slot *s)
{
    const printer *p = arg;
    char packed[80] = "";
    if (s->packed != NULL) snprintf(packed, sizeof packed, p->markdown ? "`[%s]`" : "or [%s]", s->packed);
    if (p->markdown) {
        char bar[60]; /* a | would end the cell */
        size_t n = 0;
        for (const char *c = s->fixed; *c != '\0' && n + 4 < sizeof bar; c++)
            n += (size_t)snprintf(bar + n, sizeof bar - n, "%s%c", *c == '|' ? "\\" : "", *c);
        printf("| `%s` | %s | %s | `[%s]` | %s |\n", s->name, p->role, dtype_words[s->dtype], bar, packed);
    } else {
        printf("    %-16s %-14s %-7s [%s] %s\n", s->name, p->role, dtype_words[s->dtype], s->fixed, packed);
    }
    return true;
}

static void print_tensors(const operation *op, bool markdown)
{
    const char *const lists[] = {op->needs, op->takes, op->trigger, op->gives, op->gradients};
    const char *const roles[] = {"in", "in, optional", "backward with", "out", "out, backward"};
    if (markdown) printf("\n| tensor | | dtype | shape | packed |\n| --- | --- | --- | --- | --- |\n");
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        printer p = {markdown, roles[i], op->family};
        list_each(op->family, lists[i], print_slot, &p);
    }
}

static void print_params(const family *f, bool markdown)
{
    const any_params defaults = params_init(f);
    if (markdown) printf("\n| option | value | default | |\n| --- | --- | --- | --- |\n");
    for (size_t i = 0; i < f->param_count; i++) {
        const option_row *row = &f->params[i];
        char value[100], escaped[160], now[60];
        option_value_text(row, value, sizeof value);
        option_current_text(row, &defaults, now, sizeof now);
        size_t n = 0;
        for (const char *c = value; *c != '\0' && n + 3 < sizeof escaped; c++) {
            if (markdown && *c == '|') escaped[n++] = '\\';
            escaped[n++] = *c;
        }
        escaped[n] = '\0';
        if (markdown) printf("| `--%s` | %s | %s | %s |\n", row->name, escaped, now, row->help);
        else printf("    --%s %s  %s (default %s)\n", row->name, escaped, row->help, now);
    }
}

void run_list(bool markdown)
{
    static const family *const families[] = {&family_attention, &family_nsa, &family_list, NULL};
    if (markdown) fputs(intro, stdout);
    for (size_t i = 0; i < operation_count; i++) {
        const operation *op = &operations[i];
        if (markdown) printf("\n## %s\n\n%s.\n", op->name, op->help);
        else printf("%s: %s\n  options of family %s; tensors:\n", op->name, op->help, op->family->name);
        print_tensors(op, markdown);
    }
    for (const family *const *f = families; *f != NULL; f++) {
        printf(markdown ? "\n## Options of family %s\n" : "options of family %s\n", (*f)->name);
        print_params(*f, markdown);
    }
    compressor_list(markdown);
}
