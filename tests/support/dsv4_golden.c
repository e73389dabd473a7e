/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_golden.c - reads the compressors' golden vectors. */
#include "dsv4_golden.h"

#include "cmocka_c11.h"
#include "golden.h"
#include "tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The raw cases rotate at a block's last token; those without a rotation are the indexer's. */
typedef struct raw_case {
    const char *file, *prefix, *out, *proj;
    int64_t width, tokens, start, position, blocks, ratio;
    bool prev;
} raw_case;

static const raw_case raw_cases[] = {
    {"raw_csa", "main.", "fresh.main.", "proj_f", 512, 27, 0, 0, 6, 4, false},
    {"raw_csa", "main.", "cont.main.", "proj_c", 512, 23, 2, 100, 5, 4, true},
    {"raw_csa", "main.", "offset_noprev.main.", "proj_c", 512, 23, 3, 8, 4, 4, false},
    {"raw_csa", "idx.", "fresh.idx.", "proj_f", 128, 27, 0, 0, 6, 4, false},
    {"raw_csa", "idx.", "cont.idx.", "proj_c", 128, 23, 2, 100, 5, 4, true},
    {"raw_csa", "idx.", "offset_noprev.idx.", "proj_c", 128, 23, 3, 8, 4, 4, false},
    {"raw_hca", "", "fresh.", "proj", 512, 261, 0, 0, 2, 128, false},
    {"raw_hca", "", "cont.", "proj", 512, 261, 5, 384, 2, 128, false},
};
enum { RAW_CASES = sizeof raw_cases / sizeof *raw_cases };

static double *get(const quern_safetensors *file, const char *prefix, const char *name, int64_t count)
{
    char full[128];
    quern_tensor view;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    if (quern_safetensors_get(file, full, &view) != QUERN_OK)
        fail_msg("%s: %s", full, quern_last_error(NULL));
    if (view.dtype != QUERN_BF16) return golden_get(file, prefix, name, count);
    double *values = test_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)view.data)[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        values[i] = (double)value;
    }
    return values;
}

static dsv4_golden read_raw(const char *directory, const raw_case *c)
{
    const bool csa = c->ratio == 4;
    const int64_t width = c->width, max_pos = csa ? 160 : 640;
    quern_safetensors *file = golden_open(directory, c->file);
    dsv4_golden g = {.shape = {.ratio = c->ratio,
                               .width = width,
                               .overlap = csa,
                               .start_token = c->start,
                               .blocks = c->blocks,
                               .start_abs_pos = c->position,
                               .rope_dim = width == 512 ? 64 : 0,
                               .rope_last = true,
                               .eps = 1e-6},
                     .tokens = c->tokens,
                     .max_pos = max_pos,
                     .bound = DSV4_RAW_BOUND};
    snprintf(g.name, sizeof g.name, "%s %s", c->file, c->out);
    g.proj = get(file, c->prefix, c->proj, c->tokens * width * (csa ? 4 : 2));
    g.b_a = get(file, c->prefix, csa ? "Ba" : "B", c->ratio * width);
    if (csa) g.b_b = get(file, c->prefix, "Bb", c->ratio * width);
    if (c->prev) g.prev_b = get(file, c->prefix, "prev", c->ratio * 2 * width);
    if (width == 512) g.cos_sin = get(file, "", "cos_sin", max_pos * 64);
    g.out = get(file, c->out, "out", c->blocks * width);
    if (width == 512) g.pooled_tail = get(file, c->out, "pooled", c->blocks * 64);
    quern_safetensors_close(file);
    return g;
}

/* Columns from ... from + width - 1 of a projection x W^T, W [out, in], into columns at ... of y. */
static void project(const double *x, const double *w, int64_t tokens, int64_t in, int64_t from, int64_t width,
                    double *y, int64_t columns, int64_t at)
{
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t ch = 0; ch < width; ch++) {
            double sum = 0;
            for (int64_t i = 0; i < in; i++) sum += x[t * in + i] * w[(from + ch) * in + i];
            y[t * columns + at + ch] = sum;
        }
    }
}

/* Sequence b of a tiny layer: the main compressor's entries, or the indexer's keys. The checkpoint's first
 * columns are the series that the next block reads. */
static dsv4_golden read_tiny(const char *directory, bool csa, bool indexer, int64_t b)
{
    enum { HIDDEN = 64, TOKENS = 45, ROPE = 8 };
    const int64_t width = indexer ? 16 : 32, ratio = csa ? 4 : 8, blocks = TOKENS / ratio,
                  series = csa ? 2 : 1, columns = 2 * series * width;
    const char *prefix = indexer ? "w.compressor.indexer." : "w.compressor.";
    quern_safetensors *file = golden_open(directory, csa ? "v4_tiny_csa" : "v4_tiny_hca");
    dsv4_golden g = {
        .shape =
            {.ratio = ratio, .width = width, .overlap = csa, .blocks = blocks, .rope_dim = ROPE, .eps = 1e-6},
        .tokens = TOKENS,
        .max_pos = TOKENS,
        .bound = DSV4_TINY_BOUND};
    snprintf(g.name, sizeof g.name, "v4_tiny_%s %s %lld", csa ? "csa" : "hca",
             indexer ? "idx.k" : "compressed", (long long)b);
    double *hidden = get(file, "", "hidden", 2 * TOKENS * HIDDEN),
           *ape = get(file, prefix, "position_bias", ratio * series * width);
    double *wkv = get(file, prefix, "kv_proj.weight", series * width * HIDDEN),
           *wgate = get(file, prefix, "gate_proj.weight", series * width * HIDDEN);
    double *cosines = get(file, "rope.compress.", "cos", TOKENS * ROPE / 2),
           *sines = get(file, "rope.compress.", "sin", TOKENS * ROPE / 2);
    double *out = get(file, "", indexer ? "idx.k" : "compressed", 2 * blocks * width);
    g.proj = test_doubles(TOKENS * columns);
    g.b_a = test_doubles(ratio * width);
    g.b_b = csa ? test_doubles(ratio * width) : NULL;
    for (int64_t s = 0; s < series; s++) { /* s 0: series a, the last columns of the checkpoint */
        const int64_t from = (series - 1 - s) * width;
        project(hidden + b * TOKENS * HIDDEN, wkv, TOKENS, HIDDEN, from, width, g.proj, columns,
                2 * s * width);
        project(hidden + b * TOKENS * HIDDEN, wgate, TOKENS, HIDDEN, from, width, g.proj, columns,
                (2 * s + 1) * width);
        for (int64_t j = 0; j < ratio; j++)
            memcpy((s == 0 ? g.b_a : g.b_b) + j * width, ape + j * series * width + from,
                   (size_t)width * sizeof *ape);
    }
    g.norm_weight = get(file, prefix, "kv_norm.weight", width);
    g.cos_sin = test_doubles(TOKENS * ROPE);
    for (int64_t t = 0; t < TOKENS; t++) {
        memcpy(g.cos_sin + t * ROPE, cosines + t * ROPE / 2, ROPE / 2 * sizeof *cosines);
        memcpy(g.cos_sin + t * ROPE + ROPE / 2, sines + t * ROPE / 2, ROPE / 2 * sizeof *sines);
    }
    g.out = test_doubles(blocks * width);
    memcpy(g.out, out + b * blocks * width, (size_t)(blocks * width) * sizeof *out);
    free(hidden), free(ape), free(wkv), free(wgate), free(cosines), free(sines), free(out);
    quern_safetensors_close(file);
    return g;
}

dsv4_golden dsv4_golden_case(const char *directory, int i)
{
    if (i < RAW_CASES) return read_raw(directory, &raw_cases[i]);
    i -= RAW_CASES;
    return read_tiny(directory, i < 4, i == 2 || i == 3, i % 2);
}

void dsv4_golden_free(dsv4_golden *g)
{
    free(g->proj), free(g->b_a), free(g->b_b), free(g->prev_b), free(g->norm_weight), free(g->cos_sin),
        free(g->out), free(g->pooled_tail);
}
