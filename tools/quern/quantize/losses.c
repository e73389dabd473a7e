/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/losses.h"

#include "command.h"
#include "output.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static double relative(const module_error *e)
{
    return e->error > 0 && e->square > 0 ? sqrt(e->error / e->square) : 0.0;
}

/* A module whose block scales were changed to the global of its group. */
static bool is_lossy(const conversion *c, const module *m)
{
    if (m->weight.encoding != ENCODING_NVFP4) return false;
    const bool reciprocal = c->format == FORMAT_COMPRESSED_TENSORS;
    const float own = m->weight.reciprocal == reciprocal ? m->weight.global : 1.0f / m->weight.global;
    return own != c->list.groups[m->group].global;
}

static const char *encoding_name(const matrix *m)
{
    static const char *const names[] = {"", "nvfp4", "mxfp4", "fp8"};
    return m->encoding == ENCODING_FLOATS ? quern_dtype_name(m->dtype) : names[m->encoding];
}

/* Weights that a reader of the report would expect to be converted. */
static void print_left(const conversion *c)
{
    for (size_t i = 0; i < c->list.stored_count; i++) {
        const stored_weight *s = &c->list.stored[i];
        char name[256];
        if (s->left == NULL || c->format == FORMAT_BF16) continue;
        text_escape(s->tensor->name, name, sizeof name);
        printf("left: %s: %s%s\n", name, s->left, s->as_values ? "; written as bf16" : "");
    }
}

void losses_print(const conversion *c)
{
    if (c->format == FORMAT_BF16) {
        printf("%zu modules are now bf16\n", c->list.count);
        return;
    }
    printf("%-56s %6s %9s %9s %9s %9s\n", "tensor", "from", "rel. RMSE", "worst", "saturated", "rounded");
    double error = 0, square = 0;
    for (size_t i = 0; i < c->list.count; i++) {
        const module *m = &c->list.modules[i];
        char name[256];
        if (c->list.stored[m->stored].as_values) continue;
        text_escape(m->name, name, sizeof name - 8);
        memcpy(name + strlen(name), ".weight", sizeof ".weight");
        printf("%-56s %6s %9.5f %9.5f %9" PRId64 " %9" PRId64 "%s\n", name, encoding_name(&m->weight),
               relative(&m->error), sqrt(m->error.worst), m->error.saturated, m->error.rounded,
               is_lossy(c, m) ? "  lossy: its global scale became that of its group" : "");
        if (m->error.square > 0) {
            error += relative(&m->error) * relative(&m->error);
            square += 1;
        }
    }
    print_left(c);
    printf("%zu tensors, root of the mean square relative RMSE %.5f\n", c->list.count,
           square > 0 ? sqrt(error / square) : 0.0);
}

void losses_plan(const conversion *c, const output_file *files, size_t count)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < c->list.count; i++) {
        const module *m = &c->list.modules[i];
        char name[256];
        text_escape(m->name, name, sizeof name);
        printf("%-56s %6s -> %s [%" PRId64 ", %" PRId64 "]\n", name, encoding_name(&m->weight),
               c->format == FORMAT_BF16 ? "bf16" : "nvfp4", m->weight.rows, m->weight.columns);
    }
    print_left(c);
    for (size_t i = 0; i < count; i++) {
        char name[256];
        text_escape(files[i].name, name, sizeof name);
        printf("%-56s %zu tensors, %" PRId64 " bytes\n", name, files[i].count, files[i].bytes);
        bytes += files[i].bytes;
    }
    printf("%" PRId64 " bytes would be written\n", bytes);
}

int losses_json(const conversion *c, const char *path)
{
    json_t *tensors = json_array(), *left = json_array();
    for (size_t i = 0; i < c->list.count && c->format != FORMAT_BF16; i++) {
        const module *m = &c->list.modules[i];
        char name[1024];
        if (c->list.stored[m->stored].as_values) continue;
        snprintf(name, sizeof name, "%s.weight", m->name);
        json_t *row =
            json_pack("{s:s, s:s, s:o, s:o, s:I, s:I}", "name", name, "from", encoding_name(&m->weight),
                      "relative_rmse", output_number(relative(&m->error)), "worst_block",
                      output_number(sqrt(m->error.worst)), "saturated_blocks", (json_int_t)m->error.saturated,
                      "rounded_blocks", (json_int_t)m->error.rounded);
        if (is_lossy(c, m)) json_object_set_new(row, "lossy", json_true());
        if (json_array_append_new(tensors, row) != 0) {
            json_decref(tensors);
            json_decref(left);
            return fail(EXIT_MACHINE, "no memory for the report");
        }
    }
    for (size_t i = 0; i < c->list.stored_count && c->format != FORMAT_BF16; i++) {
        const stored_weight *s = &c->list.stored[i];
        if (s->left != NULL)
            json_array_append_new(left, json_pack("{s:s, s:s}", "name", s->tensor->name, "reason", s->left));
    }
    json_t *root = json_pack("{s:o, s:o}", "tensors", tensors, "left", left);
    if (root == NULL) return fail(EXIT_MACHINE, "no memory for the report");
    const int code = output_json(path, root, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    return code;
}

/* The kinds of modules of the chart: the last word of their names. */
static const char *kind_of(const module *m)
{
    return m->name + m->parsed.parent;
}

static bool seen_before(const conversion *c, size_t index)
{
    for (size_t i = 0; i < index; i++)
        if (strcmp(kind_of(&c->list.modules[i]), kind_of(&c->list.modules[index])) == 0) return true;
    return false;
}

/* A point for each layer: the root of the mean square over the modules of the kind. */
static void print_kind(const conversion *c, FILE *f, const char *kind, int64_t layers)
{
    for (int64_t layer = -1; layer <= layers; layer++) {
        double sum = 0;
        int64_t n = 0;
        for (size_t i = 0; i < c->list.count; i++) {
            const module *m = &c->list.modules[i];
            if (m->parsed.layer != layer || strcmp(kind_of(m), kind) != 0) continue;
            sum += relative(&m->error) * relative(&m->error);
            n++;
        }
        if (n > 0) fprintf(f, "%" PRId64 " %.6g\n", layer, sqrt(sum / (double)n));
    }
}

/* Letters that mean nothing to gnuplot. */
static void plain_title(const char *name, char *title, size_t room)
{
    size_t n = 0;
    for (; name[n] != '\0' && n + 1 < room; n++) {
        const char ch = name[n];
        const bool plain =
            (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch >= '0' && ch <= '9') || ch == '.';
        title[n] = plain ? ch : ch == '_' ? '-' : '?';
    }
    title[n] = '\0';
}

int losses_chart(const conversion *c, const char *path)
{
    enum { KINDS_MAX = 12 };
    FILE *f = tmpfile();
    if (f == NULL) return fail(EXIT_MACHINE, "no temporary file for gnuplot's script: %s", strerror(errno));
    size_t kinds[KINDS_MAX], count = 0;
    int64_t layers = -1;
    for (size_t i = 0; i < c->list.count; i++) {
        if (c->list.modules[i].parsed.layer > layers) layers = c->list.modules[i].parsed.layer;
        if (count < KINDS_MAX && !seen_before(c, i)) kinds[count++] = i;
    }
    fprintf(
        f,
        "set terminal svg size 720,480 background '#ffffff' font 'sans-serif,13'\nset grid\nset key below\n"
        "set xlabel 'layer'\nset ylabel 'relative RMSE'\nset yrange [0:*]\n");
    for (size_t k = 0; k < count; k++) {
        fprintf(f, "$k%zu << EOD\n", k);
        print_kind(c, f, kind_of(&c->list.modules[kinds[k]]), layers);
        fprintf(f, "EOD\n");
    }
    fprintf(f, count > 0 ? "plot " : "plot 0 notitle");
    for (size_t k = 0; k < count; k++) {
        char title[80];
        plain_title(kind_of(&c->list.modules[kinds[k]]), title, sizeof title);
        fprintf(f, "%s$k%zu using 1:2 with linespoints linewidth 2 linecolor %zu title '%s'",
                k > 0 ? ", " : "", k, k + 1, title);
    }
    fprintf(f, "\n");
    const int code = output_chart(path, f);
    fclose(f);
    return code;
}
