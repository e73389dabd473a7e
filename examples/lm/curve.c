/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* curve.c - the losses of a run as text, and those of several runs in one chart by gnuplot. */
#include "lm.h"

#include <quern/file.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MEAN = 20 }; /* steps of a running mean */

bool curve_save(const char *path, const lm_curve *c)
{
    if (path == NULL) return true;
    char line[96];
    quern_file *file = NULL;
    if (quern_file_create(path, &file) != QUERN_OK) return failure("%s", quern_last_error(NULL)) == 0;
    int size = snprintf(line, sizeof line, "%" PRId64 " %s\n", c->count, c->name);
    for (int64_t i = 0; i <= c->count; i++) {
        (void)quern_file_write(file, line, (size_t)size); /* an error of it is one of the commit too */
        if (i < c->count) size = snprintf(line, sizeof line, "%.6f\n", c->loss[i]);
    }
    return quern_file_commit(file) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}

bool curve_load(const char *path, lm_curve *c)
{
    FILE *f = fopen(path, "r");
    if (f == NULL) return failure("cannot read %s: %s", path, strerror(errno)) == 0;
    *c = (lm_curve){0};
    bool ok = fscanf(f, "%" SCNd64 " %63[a-z0-9 ]", &c->count, c->name) == 2 && c->count >= 0 &&
              c->count <= 1000000000;
    c->loss = ok ? calloc((size_t)c->count + 1, sizeof *c->loss) : NULL;
    ok = c->loss != NULL;
    for (int64_t i = 0; ok && i < c->count; i++) ok = fscanf(f, "%lf", &c->loss[i]) == 1;
    fclose(f);
    return ok || failure("%s: losses that lm train wrote are accepted", path) == 0;
}

/* Writes what gnuplot prints for the script. It reads the script by a descriptor and prints to a pipe: no
 * path of the user reaches it or a shell. */
static bool plot(const char *path, FILE *script)
{
    char command[128], bytes[4096];
    quern_file *file = NULL;
    if (quern_file_create(path, &file) != QUERN_OK) return failure("%s", quern_last_error(NULL)) == 0;
    snprintf(command, sizeof command, "command -v gnuplot >/dev/null && exec gnuplot -d /proc/%ld/fd/%d",
             (long)getpid(), fileno(script));
    FILE *svg = popen(command, "r");
    size_t size = 0;
    for (size_t n; svg != NULL && (n = fread(bytes, 1, sizeof bytes, svg)) > 0; size += n)
        (void)quern_file_write(file, bytes, n);
    if (svg == NULL || pclose(svg) != 0 || size == 0) {
        failure("warning: no curve in %s, for gnuplot is missing or failed", path);
        quern_file_discard(file);
        return true;
    }
    return quern_file_commit(file) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}

/* A line for each step with a loss: the mean of the last MEAN of them. */
static void write_means(FILE *script, const lm_curve *c)
{
    double recent[MEAN], sum = 0.0;
    int64_t seen = 0;
    for (int64_t i = 0; i < c->count; i++) {
        if (!(c->loss[i] > 0.0)) continue;
        sum += c->loss[i] - (seen >= MEAN ? recent[seen % MEAN] : 0.0);
        recent[seen++ % MEAN] = c->loss[i];
        fprintf(script, "%" PRId64 " %f\n", i + 1, sum / (double)(seen < MEAN ? seen : MEAN));
    }
    fprintf(script, "e\n");
}

bool curves_draw(const char *path, const lm_curve *curves, int count)
{
    if (path == NULL) return true;
    FILE *script = tmpfile();
    if (script == NULL) return failure("no temporary file for gnuplot's script: %s", strerror(errno)) == 0;
    fprintf(script,
            "set terminal svg size 720,400 background '#ffffff' font 'sans-serif,13'\n"
            "set xlabel 'step'\nset ylabel 'bits per byte, mean of %d steps'\nset grid\nplot ",
            MEAN);
    for (int i = 0; i < count; i++)
        fprintf(script, "%s'-' with lines lw 2 title '%s'", i > 0 ? ", " : "", curves[i].name);
    fprintf(script, "\n");
    for (int i = 0; i < count; i++) write_means(script, &curves[i]);
    bool ok = fflush(script) == 0 || failure("no room for gnuplot's script: %s", strerror(errno)) == 0;
    ok = ok && plot(path, script);
    fclose(script);
    return ok;
}
