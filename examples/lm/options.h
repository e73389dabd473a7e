/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* options.h - the options of the verbs, parsed by getopt_long. */
#ifndef LM_OPTIONS_H
#define LM_OPTIONS_H

#include "lm.h"

typedef struct lm_options {
    const char *corpus, *checkpoint, *resume, *curve, *prompt, *json;
    lm_config config;
    lm_run run;
    int64_t until, save_every, pieces, bytes;
    double temperature;
} lm_options;

/* Parses into defaults; prints help and exits 0 on --help, returns false (usage error, said) otherwise. With
 * --resume, an option that the checkpoint decides is a usage error. */
bool options_parse(int argc, char **argv, const char *help, lm_options *options);

#endif
