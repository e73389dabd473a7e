/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CORPUS = 1,
    CHECKPOINT,
    RESUME,
    CURVE,
    LOSSES,
    BESIDE,
    JSON,
    PROMPT,
    EXPERT_WEIGHTS,
    UNTIL,
    SAVE,
    PIECES,
    LENGTH,
    TEMPERATURE,
    TOP_P,
    CHUNK,
    HELP,
    /* What a checkpoint decides. */
    ATTENTION,
    STEPS,
    SEED,
    MUON,
    ADAM,
    FIELD /* the fields of a configuration */
};

static const struct option verbs_options[] = {
    {"corpus", 1, NULL, CORPUS},
    {"checkpoint", 1, NULL, CHECKPOINT},
    {"resume", 1, NULL, RESUME},
    {"curve", 1, NULL, CURVE},
    {"losses", 1, NULL, LOSSES},
    {"beside", 1, NULL, BESIDE},
    {"json", 1, NULL, JSON},
    {"prompt", 1, NULL, PROMPT},
    {"expert-weights", 1, NULL, EXPERT_WEIGHTS},
    {"until", 1, NULL, UNTIL},
    {"save-every", 1, NULL, SAVE},
    {"pieces", 1, NULL, PIECES},
    {"bytes", 1, NULL, LENGTH},
    {"temperature", 1, NULL, TEMPERATURE},
    {"top-p", 1, NULL, TOP_P},
    {"chunk", 1, NULL, CHUNK},
    {"help", 0, NULL, HELP},
    {"attention", 1, NULL, ATTENTION},
    {"steps", 1, NULL, STEPS},
    {"seed", 1, NULL, SEED},
    {"muon", 1, NULL, MUON},
    {"adam", 1, NULL, ADAM},
};
enum { VERBS_OPTIONS = sizeof verbs_options / sizeof *verbs_options };

/* What a number sets, and what is accepted. */
static const struct {
    int option;
    double least, most;
    bool real;
    size_t offset; /* in lm_options: of a double, else of an int64_t */
} numbers[] = {
    {UNTIL, 1, 1e9, false, offsetof(lm_options, until)},
    {SAVE, 0, 1e9, false, offsetof(lm_options, save_every)},
    {PIECES, 1, 1e9, false, offsetof(lm_options, pieces)},
    {LENGTH, 1, 1e6, false, offsetof(lm_options, bytes)},
    {STEPS, 1, 1e9, false, offsetof(lm_options, run.steps)},
    {SEED, 0, 1e15, false, offsetof(lm_options, run.seed)},
    {CHUNK, 1, 1 << 20, false, offsetof(lm_options, chunk)},
    {TEMPERATURE, 0, 10, true, offsetof(lm_options, temperature)},
    {TOP_P, 0, 1, true, offsetof(lm_options, top_p)},
    {MUON, 0, 10, true, offsetof(lm_options, muon)},
    {ADAM, 0, 10, true, offsetof(lm_options, adam)},
};

static bool number(const char *name, const char *text, double least, double most, double *value)
{
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (*text != '\0' && *end == '\0' && errno == 0 && *value >= least && *value <= most) return true;
    failure("--%s %s: a number from %g to %g is accepted", name, text, least, most);
    return false;
}

/* An option with a number; one that is not in the list is a field of the configuration. */
static bool set_number(lm_options *o, int option, const char *name, const char *text)
{
    double x;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].option != option) continue;
        if (!number(name, text, numbers[i].least, numbers[i].most, &x)) return false;
        void *at = (char *)o + numbers[i].offset;
        if (numbers[i].real) *(double *)at = x;
        else *(int64_t *)at = (int64_t)x;
        return true;
    }
    const lm_field *f = &lm_fields[option - FIELD];
    if (!number(name, text, f->least, f->most, &x)) return false;
    *config_field(&o->config, option - FIELD) = (int32_t)x;
    return true;
}

/* An option with a name of a list that ends with NULL. */
static bool choose(const char *option, const char *text, const char *const *names, int32_t *chosen)
{
    char all[128] = "";
    for (int32_t i = 0; names[i] != NULL; i++) {
        if (strcmp(text, names[i]) == 0) {
            *chosen = i;
            return true;
        }
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s",
                 i == 0                 ? ""
                 : names[i + 1] != NULL ? ", "
                                        : " or ",
                 names[i]);
    }
    failure("--%s %s: %s is accepted", option, text, all);
    return false;
}

static bool set(lm_options *o, int option, const char *name, const char *text)
{
    static const char *const weights[] = {"f32", "bf16", "nvfp4", NULL};
    const char *attentions[ATTENTIONS + 1] = {NULL};
    int32_t chosen = 0;
    switch (option) {
    case CORPUS: o->corpus = text; return true;
    case CHECKPOINT: o->checkpoint = text; return true;
    case RESUME: o->resume = text; return true;
    case CURVE: o->curve = text; return true;
    case LOSSES: o->losses = text; return true;
    case JSON: o->json = text; return true;
    case PROMPT: o->prompt = text; return true;
    case BESIDE:
        if (o->beside_count == BESIDE_MOST)
            return failure("--beside %s: %d of them are accepted", text, BESIDE_MOST) == 0;
        o->beside[o->beside_count++] = text;
        return true;
    case ATTENTION:
        for (int32_t i = 0; i < ATTENTIONS; i++) attentions[i] = lm_attentions[i].name;
        return choose(name, text, attentions, &o->config.attention);
    case EXPERT_WEIGHTS:
        if (!choose(name, text, weights, &chosen)) return false;
        o->expert_weights = (lm_expert_weights)chosen;
        return true;
    default: return set_number(o, option, name, text);
    }
}

bool options_parse(int argc, char **argv, const char *help, lm_options *o)
{
    *o = (lm_options){.config = LM_CONFIG_DEFAULT,
                      .run = {.seed = 1, .steps = 280, .rates = LM_RATES_DEFAULT},
                      .pieces = 48,
                      .bytes = 400,
                      .temperature = 0.7,
                      .top_p = 1.0,
                      .save_every = 100};
    o->muon = (double)o->run.rates.muon;
    o->adam = (double)o->run.rates.adam;
    struct option table[VERBS_OPTIONS + FIELDS + 1] = {{0}};
    memcpy(table, verbs_options, sizeof verbs_options);
    for (int i = 0; i < FIELDS; i++)
        table[VERBS_OPTIONS + i] = (struct option){lm_fields[i].name, 1, NULL, FIELD + i};
    const char *decided = NULL;
    int index = 0;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "", table, &index)) != -1;) {
        if (c == HELP) {
            fputs(help, stdout);
            exit(output_finish(0));
        }
        if (c == '?') {
            failure("option '%s' is unknown, ambiguous or lacks its value: see --help", argv[optind - 1]);
            return false;
        }
        if (c >= ATTENTION) decided = table[index].name;
        if (!set(o, c, table[index].name, optarg)) return false;
    }
    o->run.rates = (lm_rates){(float)o->muon, (float)o->adam};
    if (optind < argc) {
        failure("'%s' is no option: see --help", argv[optind]);
        return false;
    }
    if (o->resume != NULL && decided != NULL) {
        failure("--%s with --resume: the checkpoint holds its value, and none beside it is accepted",
                decided);
        return false;
    }
    const char *fault = config_fault(&o->config);
    return fault == NULL || failure("%s", fault) == 0;
}
