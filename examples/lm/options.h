/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* options.h - the options of the verbs, parsed by getopt_long. */
#ifndef LM_OPTIONS_H
#define LM_OPTIONS_H

#include "lm.h"

enum { BESIDE_MOST = 8 };

typedef struct lm_options {
    const char *corpus, *checkpoint, *resume, *curve, *losses, *prompt, *json;
    const char *beside[BESIDE_MOST]; /* losses of other runs, for the chart */
    int beside_count;
    lm_config config;
    lm_expert_weights expert_weights;
    lm_run run;
    int64_t until, save_every, pieces, bytes, chunk;
    double temperature, top_p, muon, adam;
} lm_options;

/* Parses into defaults; prints help and exits 0 on --help, returns false (usage error, said) otherwise. With
 * --resume, an option that the checkpoint decides is a usage error. */
bool options_parse(int argc, char **argv, const char *help, lm_options *options);

#endif
