/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* statistics.c - passes over the values in pieces of a fixed size, so that sums do not depend on the
 * threads. */
#include "inspect/statistics.h"

#include "inspect/decode.h"
#include "quantize/progress.h"
#include "team.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

enum { PIECE = 1 << 20 }; /* values; a multiple of every block */

static pthread_t main_thread; /* which shows the progress */

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
static void measure(const statistics_source *source, int threads, progress *shown)
{
    decoder d;
    *source->out = nothing();
    source->out->known = decoder_begin(source, &d);
    const int64_t pieces = source->out->known ? (d.values + PIECE - 1) / PIECE : 0;
    statistics *parts = calloc((size_t)pieces + 1, sizeof *parts);
    source->out->known = source->out->known && parts != NULL;
    if (!source->out->known) {
        free(parts);
        progress_add(shown, (int64_t)source->tensor->bytes, true);
        return;
    }
    const int64_t share = (int64_t)source->tensor->bytes / pieces;
    const int team = pieces > 1 ? openmp_team(threads) : 1;
    (void)team;
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t i = 0; i < pieces; i++) {
        parts[i] = piece_of(&d, i);
        progress_add(shown, share, pthread_equal(pthread_self(), main_thread) != 0);
    }
    for (int64_t i = 0; i < pieces; i++) merge(source->out, &parts[i]);
    free(parts);
}

void statistics_of(const statistics_source *sources, size_t count, int threads)
{
    progress shown;
    int64_t bytes = 0;
    main_thread = pthread_self();
    for (size_t i = 0; i < count; i++) bytes += (int64_t)sources[i].tensor->bytes;
    progress_begin(&shown, bytes);
    for (size_t i = 0; i < count; i++) measure(&sources[i], threads, &shown);
    progress_end(&shown);
}
