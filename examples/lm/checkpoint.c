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

enum { STATES = 3, NUMBERS = FIELDS + 4, TEXTS = 4, PAIRS = NUMBERS + TEXTS };
static const char *const suffixes[STATES] = {"", ".first", ".second"};

static float *state_of(const lm_param *p, int which)
{
    return which == 0 ? p->value : which == 1 ? p->first : p->second;
}

/* A number of the run under its name in the metadata. */
typedef struct number {
    const char *name;
    int64_t value, least, most;
} number;

static void numbers_of(lm_config *c, int64_t step, const lm_run *run, number list[NUMBERS])
{
    for (int i = 0; i < FIELDS; i++)
        list[i] = (number){lm_fields[i].name, *config_field(c, i), lm_fields[i].least, lm_fields[i].most};
    list[FIELDS] = (number){"step", step, 0, 1000000000};
    list[FIELDS + 1] = (number){"steps", run->steps, 0, 1000000000};
    list[FIELDS + 2] = (number){"seed", (int64_t)run->seed, 0, INT64_MAX};
    list[FIELDS + 3] = (number){"corpus_bytes", run->corpus_bytes, 0, INT64_MAX};
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
        for (int s = 0; s < STATES; s++) { /* an array without use has none */
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
    number list[NUMBERS];
    char text[NUMBERS + 2][32];
    quern_safetensors_pair pairs[PAIRS];
    numbers_of(&config, m->step, run, list);
    for (int i = 0; i < NUMBERS; i++) {
        snprintf(text[i], sizeof *text, "%" PRId64, list[i].value);
        pairs[i] = (quern_safetensors_pair){list[i].name, text[i]};
    }
    snprintf(text[NUMBERS], sizeof *text, "%a", (double)run->rates.muon);
    snprintf(text[NUMBERS + 1], sizeof *text, "%a", (double)run->rates.adam);
    pairs[NUMBERS] = (quern_safetensors_pair){"muon", text[NUMBERS]};
    pairs[NUMBERS + 1] = (quern_safetensors_pair){"adam", text[NUMBERS + 1]};
    pairs[NUMBERS + 2] = (quern_safetensors_pair){"corpus_sha256", run->corpus_digest};
    pairs[NUMBERS + 3] = (quern_safetensors_pair){"attention", lm_attentions[config.attention].name};
    if (ok && quern_safetensors_save(path, items, count, pairs, PAIRS) != QUERN_OK)
        ok = failure("%s", quern_last_error(NULL)) == 0;
    free(views), free(items), free(names);
    return ok;
}

/* Configuration, step and run from the metadata; otherwise it prints an error and returns false. */
static bool read_metadata(const quern_safetensors *f, const char *path, lm_config *c, int64_t *step,
                          lm_run *run)
{
    number list[NUMBERS];
    numbers_of(c, *step, run, list);
    for (int i = 0; i < NUMBERS; i++) {
        number *n = &list[i];
        const char *text = quern_safetensors_metadata(f, n->name);
        char *end = NULL;
        n->value = text != NULL ? strtoll(text, &end, 10) : 0;
        if (text == NULL || *end != '\0')
            return failure("%s: no '%s' in its metadata: a checkpoint of this program is accepted", path,
                           n->name) == 0;
        if (n->value < n->least || n->value > n->most)
            return failure("%s: %s is %" PRId64 ": %" PRId64 " to %" PRId64 " is accepted", path, n->name,
                           n->value, n->least, n->most) == 0;
        if (i < FIELDS) *config_field(c, i) = (int32_t)n->value;
    }
    *step = list[FIELDS].value;
    run->steps = list[FIELDS + 1].value;
    run->seed = (uint64_t)list[FIELDS + 2].value;
    run->corpus_bytes = list[FIELDS + 3].value;
    if (*step > run->steps)
        return failure("%s: step %" PRId64 " of %" PRId64 ": at most as many as its steps are accepted", path,
                       *step, run->steps) == 0;
    const char *const names[TEXTS] = {"muon", "adam", "corpus_sha256", "attention"}, *texts[TEXTS];
    for (int i = 0; i < TEXTS; i++) {
        texts[i] = quern_safetensors_metadata(f, names[i]);
        if (texts[i] == NULL || strlen(texts[i]) >= DIGEST_TEXT)
            return failure("%s: no '%s' in its metadata: a checkpoint of this program is accepted", path,
                           names[i]) == 0;
    }
    run->rates.muon = strtof(texts[0], NULL);
    run->rates.adam = strtof(texts[1], NULL);
    snprintf(run->corpus_digest, sizeof run->corpus_digest, "%s", texts[2]);
    c->attention = config_attention(texts[3]);
    if (c->attention < 0) return failure("%s: its attention '%s' is unknown", path, texts[3]) == 0;
    const char *fault = config_fault(c);
    return fault == NULL || failure("%s: %s", path, fault) == 0;
}

bool checkpoint_load(lm_model *m, const char *path, lm_run *run)
{
    quern_safetensors *f = NULL;
    if (quern_safetensors_open(path, &f) != QUERN_OK) return failure("%s", quern_last_error(NULL)) == 0;
    lm_config config = LM_CONFIG_DEFAULT;
    int64_t step = 0;
    bool ok = read_metadata(f, path, &config, &step, run) && model_create(m, &config, 0);
    if (ok) m->step = step;
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
