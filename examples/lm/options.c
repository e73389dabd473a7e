/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CORPUS = 1,
    CHECKPOINT,
    RESUME,
    CURVE,
    JSON,
    PROMPT,
    ATTENTION,
    STEPS,
    UNTIL,
    SEED,
    WIDTH,
    LAYERS,
    HEADS,
    INNER,
    CONTEXT,
    BLOCK,
    SELECTED,
    WINDOW,
    MUON,
    ADAM,
    SAVE,
    PIECES,
    LENGTH,
    TEMPERATURE,
    HELP
};

static const struct option table[] = {
    {"corpus", 1, NULL, CORPUS},       {"checkpoint", 1, NULL, CHECKPOINT},
    {"resume", 1, NULL, RESUME},       {"curve", 1, NULL, CURVE},
    {"json", 1, NULL, JSON},           {"prompt", 1, NULL, PROMPT},
    {"attention", 1, NULL, ATTENTION}, {"steps", 1, NULL, STEPS},
    {"until", 1, NULL, UNTIL},         {"seed", 1, NULL, SEED},
    {"width", 1, NULL, WIDTH},         {"layers", 1, NULL, LAYERS},
    {"heads", 1, NULL, HEADS},         {"inner", 1, NULL, INNER},
    {"context", 1, NULL, CONTEXT},     {"block", 1, NULL, BLOCK},
    {"selected", 1, NULL, SELECTED},   {"window", 1, NULL, WINDOW},
    {"muon", 1, NULL, MUON},           {"adam", 1, NULL, ADAM},
    {"save-every", 1, NULL, SAVE},     {"pieces", 1, NULL, PIECES},
    {"bytes", 1, NULL, LENGTH},        {"temperature", 1, NULL, TEMPERATURE},
    {"help", 0, NULL, HELP},           {0}};

/* What a checkpoint decides. */
static bool in_checkpoint(int option)
{
    return option == ATTENTION || option == STEPS || option == SEED || (option >= WIDTH && option <= ADAM);
}

static bool number(const char *name, const char *text, double least, double most, double *value)
{
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (*text != '\0' && *end == '\0' && errno == 0 && *value >= least && *value <= most) return true;
    failure("--%s %s: a number from %g to %g is accepted", name, text, least, most);
    return false;
}

bool options_parse(int argc, char **argv, const char *help, lm_options *o)
{
    *o = (lm_options){.config = LM_CONFIG_DEFAULT,
                      .run = {1, 390, LM_RATES_DEFAULT},
                      .pieces = 48,
                      .bytes = 400,
                      .temperature = 0.7,
                      .save_every = 100};
    int32_t *const ints[] = {&o->config.width,   &o->config.layers, &o->config.heads,    &o->config.inner,
                             &o->config.context, &o->config.block,  &o->config.selected, &o->config.window};
    const double most[] = {4096, MAX_LAYERS, 256, 65536, 1 << 20, 1024, 1024, 1 << 20};
    const char *decided = NULL;
    int index = 0;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "", table, &index)) != -1;) {
        double x = 0.0;
        const char *name = c != '?' ? table[index].name : "";
        if (in_checkpoint(c)) decided = name;
        switch (c) {
        case CORPUS: o->corpus = optarg; break;
        case CHECKPOINT: o->checkpoint = optarg; break;
        case RESUME: o->resume = optarg; break;
        case CURVE: o->curve = optarg; break;
        case JSON: o->json = optarg; break;
        case PROMPT: o->prompt = optarg; break;
        case ATTENTION:
            o->config.sparse = strcmp(optarg, "nsa") == 0;
            if (!o->config.sparse && strcmp(optarg, "dense") != 0) {
                failure("--attention %s: nsa or dense is accepted", optarg);
                return false;
            }
            break;
        case STEPS:
            if (!number(name, optarg, 1, 1e9, &x)) return false;
            o->run.steps = (int64_t)x;
            break;
        case UNTIL:
            if (!number(name, optarg, 1, 1e9, &x)) return false;
            o->until = (int64_t)x;
            break;
        case SEED:
            if (!number(name, optarg, 0, 1e15, &x)) return false;
            o->run.seed = (uint64_t)x;
            break;
        case MUON:
            if (!number(name, optarg, 0, 10, &x)) return false;
            o->run.rates.muon = (float)x;
            break;
        case ADAM:
            if (!number(name, optarg, 0, 10, &x)) return false;
            o->run.rates.adam = (float)x;
            break;
        case SAVE:
            if (!number(name, optarg, 0, 1e9, &x)) return false;
            o->save_every = (int64_t)x;
            break;
        case PIECES:
            if (!number(name, optarg, 1, 1e9, &x)) return false;
            o->pieces = (int64_t)x;
            break;
        case LENGTH:
            if (!number(name, optarg, 1, 1e6, &x)) return false;
            o->bytes = (int64_t)x;
            break;
        case TEMPERATURE:
            if (!number(name, optarg, 0, 10, &x)) return false;
            o->temperature = x;
            break;
        case HELP: fputs(help, stdout); exit(output_finish(0));
        case '?':
            failure("option '%s' is unknown, ambiguous or lacks its value: see --help", argv[optind - 1]);
            return false;
        default:
            if (!number(name, optarg, 1, most[c - WIDTH], &x)) return false;
            *ints[c - WIDTH] = (int32_t)x;
        }
    }
    if (optind < argc) {
        failure("'%s' is no option: see --help", argv[optind]);
        return false;
    }
    if (o->resume != NULL && decided != NULL) {
        failure("--%s with --resume: the checkpoint holds its value, and none beside it is accepted",
                decided);
        return false;
    }
    const lm_config *c = &o->config;
    if (c->heads % c->kv_heads != 0 || c->width % c->heads != 0 || c->width / c->heads % 8 != 0 ||
        c->width / c->heads > 256) {
        failure("--width %d --heads %d: heads of a multiple of 8 up to 256 are accepted", c->width, c->heads);
        return false;
    }
    return true;
}
