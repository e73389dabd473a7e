/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint.c - a run as one safetensors file: weights, optimizer state, configuration and position. */
#include "lm.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <quern/safetensors.h>

enum { STATES = 3, FIELDS = 14, PAIRS = FIELDS + 3 };
static const char *const suffixes[STATES] = {"", ".first", ".second"};

static float *state_of(const lm_param *p, int which)
{
    return which == 0 ? p->value : which == 1 ? p->first : p->second;
}

/* The run as numbers under names, one table for both directions. */
static void fields(lm_config *c, int64_t *step, lm_run *run, const char *names[FIELDS],
                   int64_t values[FIELDS], bool read)
{
    int32_t *const ints[] = {&c->width,   &c->layers, &c->heads,    &c->kv_heads, &c->inner,
                             &c->context, &c->block,  &c->selected, &c->window};
    const char *const all[FIELDS] = {"width",   "layers", "heads",    "kv_heads",    "inner",
                                     "context", "block",  "selected", "window",      "sparse",
                                     "step",    "steps",  "seed",     "corpus_bytes"};
    for (int i = 0; i < FIELDS; i++) names[i] = all[i];
    for (int i = 0; i < 9; i++) {
        if (read) *ints[i] = (int32_t)values[i];
        else values[i] = *ints[i];
    }
    if (read) {
        c->sparse = values[9] != 0;
        *step = values[10];
        run->steps = values[11];
        run->seed = (uint64_t)values[12];
        run->corpus_bytes = values[13];
    } else {
        values[9] = c->sparse;
        values[10] = *step;
        values[11] = run->steps;
        values[12] = (int64_t)run->seed;
        values[13] = run->corpus_bytes;
    }
}

/* Prints an error and returns false where one of the values is NaN or infinite. */
static bool all_finite(const float *values, int64_t count, const char *path, const char *name)
{
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return failure("%s: tensor %s holds %g as element %" PRId64 ": finite weights are needed", path,
                           name, (double)values[i], i) == 0;
    return true;
}

bool checkpoint_save(const lm_model *m, const char *path, const lm_run *run)
{
    const size_t most = (size_t)m->param_count * STATES;
    quern_tensor *views = malloc(most * sizeof *views);
    quern_safetensors_item *items = malloc(most * sizeof *items);
    char(*names)[64] = malloc(most * sizeof *names);
    size_t count = 0;
    bool ok = (views != NULL && items != NULL && names != NULL) ||
              failure("no memory for the table of %zu arrays", most) == 0;
    for (int32_t i = 0; ok && i < m->param_count; i++) {
        const lm_param *p = &m->params[i];
        for (int s = 0; s < STATES; s++) {
            if (state_of(p, s) == NULL) continue;
            snprintf(names[count], sizeof *names, "%s%s", p->name, suffixes[s]);
            if (!all_finite(state_of(p, s), p->rows * p->cols, path, names[count])) {
                free(views), free(items), free(names);
                return false;
            }
            views[count] =
                quern_tensor_contiguous(state_of(p, s), QUERN_F32, 2, (const int64_t[]){p->rows, p->cols});
            items[count] = (quern_safetensors_item){names[count], &views[count]};
            count++;
        }
    }
    lm_config config = m->config;
    lm_run copy = *run;
    int64_t step = m->step, values[FIELDS];
    const char *keys[FIELDS];
    char text[FIELDS + 2][32];
    quern_safetensors_pair pairs[PAIRS];
    fields(&config, &step, &copy, keys, values, false);
    for (int i = 0; i < FIELDS; i++) {
        snprintf(text[i], sizeof *text, "%" PRId64, values[i]);
        pairs[i] = (quern_safetensors_pair){keys[i], text[i]};
    }
    snprintf(text[FIELDS], sizeof *text, "%a", (double)run->rates.muon);
    snprintf(text[FIELDS + 1], sizeof *text, "%a", (double)run->rates.adam);
    pairs[FIELDS] = (quern_safetensors_pair){"muon", text[FIELDS]};
    pairs[FIELDS + 1] = (quern_safetensors_pair){"adam", text[FIELDS + 1]};
    pairs[FIELDS + 2] = (quern_safetensors_pair){"corpus_sha256", run->corpus_digest};
    if (ok && quern_safetensors_save(path, items, count, pairs, PAIRS) != QUERN_OK)
        ok = failure("%s", quern_last_error(NULL)) == 0;
    free(views), free(items), free(names);
    return ok;
}

bool checkpoint_load(lm_model *m, const char *path, lm_run *run)
{
    quern_safetensors *f = NULL;
    if (quern_safetensors_open(path, &f) != QUERN_OK) return failure("%s", quern_last_error(NULL)) == 0;
    lm_config config = LM_CONFIG_DEFAULT;
    int64_t step = 0, values[FIELDS];
    const char *keys[FIELDS];
    fields(&config, &step, run, keys, values, false);
    bool ok = true;
    for (int i = 0; i < FIELDS && ok; i++) {
        const char *text = quern_safetensors_metadata(f, keys[i]);
        char *end = NULL;
        values[i] = text != NULL ? strtoll(text, &end, 10) : 0;
        ok = (text != NULL && *end == '\0') ||
             failure("%s: no '%s' in its metadata: a checkpoint of this program is accepted", path,
                     keys[i]) == 0;
    }
    for (int i = 0; i < 9 && ok; i++)
        ok = (values[i] > 0 && values[i] <= 1 << 20) ||
             failure("%s: %s is %" PRId64 ": 1 to %d is accepted", path, keys[i], values[i], 1 << 20) == 0;
    if (ok)
        ok =
            (values[10] >= 0 && values[10] <= values[11] && values[11] <= 1000000000) ||
            failure("%s: step %" PRId64 " of %" PRId64 ": 0 to the number of steps, at most 1e9, is accepted",
                    path, values[10], values[11]) == 0;
    const char *const texts[] = {"muon", "adam", "corpus_sha256"}, *found[3];
    for (int i = 0; i < 3; i++) {
        found[i] = quern_safetensors_metadata(f, texts[i]);
        ok = ok && ((found[i] != NULL && strlen(found[i]) < DIGEST_TEXT) ||
                    failure("%s: no '%s' in its metadata: a checkpoint of this program is accepted", path,
                            texts[i]) == 0);
    }
    if (ok) {
        fields(&config, &step, run, keys, values, true);
        run->rates.muon = strtof(found[0], NULL);
        run->rates.adam = strtof(found[1], NULL);
        snprintf(run->corpus_digest, sizeof run->corpus_digest, "%s", found[2]);
        ok = (config.layers <= MAX_LAYERS && config.width % config.heads == 0 &&
              config.heads % config.kv_heads == 0) ||
             failure("%s: %d layers of %d heads and width %d do not fit together", path, config.layers,
                     config.heads, config.width) == 0;
        ok = ok && model_create(m, &config, 0);
        m->step = step;
    }
    for (int32_t i = 0; ok && i < m->param_count; i++) {
        lm_param *p = &m->params[i];
        for (int s = 0; s < STATES && ok; s++) {
            if (state_of(p, s) == NULL) continue;
            char name[64];
            quern_tensor t;
            snprintf(name, sizeof name, "%s%s", p->name, suffixes[s]);
            ok = quern_safetensors_get(f, name, &t) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
            ok = ok &&
                 ((t.dtype == QUERN_F32 && t.ndim == 2 && t.shape[0] == p->rows && t.shape[1] == p->cols) ||
                  failure("%s: tensor %s does not have the shape of this configuration", path, name) == 0);
            if (ok) memcpy(state_of(p, s), t.data, (size_t)(p->rows * p->cols) * 4);
            ok = ok && all_finite(state_of(p, s), p->rows * p->cols, path, name);
        }
    }
    quern_safetensors_close(f);
    return ok;
}
