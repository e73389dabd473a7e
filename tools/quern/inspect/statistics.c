/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* statistics.c - passes over the values in pieces of a fixed size, so that sums do not depend on the
 * threads. */
#include "inspect/statistics.h"

#include "inspect/decode.h"
#include "team.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 20 }; /* values; a multiple of every block */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void add_values(statistics *s, const float *values, int64_t count)
{
    float least = INFINITY, greatest = -INFINITY;
    double sum = 0, squares = 0;
    int64_t zeros = 0, not_finite = 0;
    for (int64_t i = 0; i < count; i++) {
        const float v = values[i];
        if (!isfinite(v)) {
            not_finite++;
            continue;
        }
        zeros += v == 0.0f;
        least = v < least ? v : least;
        greatest = v > greatest ? v : greatest;
        sum += (double)v;
        squares += (double)v * (double)v;
    }
    s->elements += count;
    s->zeros += zeros;
    s->not_finite += not_finite;
    s->sum += sum;
    s->squares += squares;
    s->least = (double)least < s->least ? (double)least : s->least;
    s->greatest = (double)greatest > s->greatest ? (double)greatest : s->greatest;
}

static void merge(statistics *to, const statistics *from)
{
    to->elements += from->elements;
    to->zeros += from->zeros;
    to->not_finite += from->not_finite;
    to->sum += from->sum;
    to->squares += from->squares;
    to->blocks += from->blocks;
    to->saturated += from->saturated;
    to->bad_scales += from->bad_scales;
    to->least = fmin(to->least, from->least);
    to->greatest = fmax(to->greatest, from->greatest);
}

static statistics nothing(void)
{
    return (statistics){.least = INFINITY, .greatest = -INFINITY};
}

static statistics piece_of(const decoder *d, int64_t piece)
{
    float values[DECODE_VALUES];
    statistics s = nothing();
    const int64_t end = (piece + 1) * PIECE < d->values ? (piece + 1) * PIECE : d->values;
    for (int64_t at = piece * PIECE; at < end; at += DECODE_VALUES) {
        const int64_t count = end - at < DECODE_VALUES ? end - at : DECODE_VALUES;
        decode(d, at, count, values, &s);
        add_values(&s, values, count);
    }
    return s;
}

/* Statistics of one tensor. */
static void measure(const statistics_source *source, int threads)
{
    decoder d;
    *source->out = nothing();
    source->out->known = decoder_begin(source, &d);
    if (!source->out->known) return;
    const int64_t pieces = (d.values + PIECE - 1) / PIECE;
    statistics *parts = calloc((size_t)pieces, sizeof *parts);
    if (parts == NULL) {
        source->out->known = false;
        return;
    }
    const int team = pieces > 1 ? openmp_team(threads) : 1;
    (void)team;
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t i = 0; i < pieces; i++) parts[i] = piece_of(&d, i);
    for (int64_t i = 0; i < pieces; i++) merge(source->out, &parts[i]);
    free(parts);
}

void statistics_of(const statistics_source *sources, size_t count, int threads)
{
    const bool terminal = isatty(STDERR_FILENO) == 1;
    const double begin = now();
    double shown = begin + 1.8, all = 0, done = 0;
    for (size_t i = 0; i < count; i++) all += (double)sources[i].tensor->bytes;
    for (size_t i = 0; i < count; i++) {
        measure(&sources[i], threads);
        done += (double)sources[i].tensor->bytes;
        const double at = now();
        if (!terminal || at - shown < 0.2) continue;
        shown = at;
        const double rate = done / (at - begin);
        fprintf(stderr, "\r%3.0f%%  %.2f GB/s  %.0f s left \033[K", 100 * done / all, rate / 1e9,
                (all - done) / rate);
        fflush(stderr);
    }
    if (terminal && shown > begin + 1.8) fprintf(stderr, "\r\033[K");
}
