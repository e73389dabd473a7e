/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_random.h - random NSA problems over every legal combination of parameters. */
#ifndef QUERN_TEST_NSA_RANDOM_H
#define QUERN_TEST_NSA_RANDOM_H

#include "nsa_case.h"

/* The least num_selected that the forced blocks allow. */
int64_t nsa_least_selected(const quern_nsa_params *params);
/* A random configuration: about `tokens` tokens in all, heads and dims small. */
nsa_config nsa_config_random(test_random *random, int64_t tokens);
/* The same with lists and groups where the configuration hands them in: any order, repeated entries,
 * padding, blocks of the future. */
nsa_case *nsa_case_random(const nsa_config *config, test_random *random);
/* A random level of those that this machine has. */

#endif
