/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "scenario.h"

#include <string.h>

const scenario *const scenarios[] = {&scenario_csa_compress,
                                     &scenario_hca_compress,
                                     &scenario_nsa_decode,
                                     &scenario_attention_decode,
                                     &scenario_v4_attention,
                                     &scenario_v4_layer,
                                     NULL};

const scenario *scenario_named(const char *name)
{
    for (size_t i = 0; scenarios[i] != NULL; i++)
        if (strcmp(scenarios[i]->name, name) == 0) return scenarios[i];
    return NULL;
}

static bool has_row(const scenario *s, const char *name)
{
    for (size_t i = 0; i < s->row_count; i++)
        if (strcmp(s->rows[i].name, name) == 0) return true;
    return false;
}

static bool left_out(const scenario *s, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = s->without; at != NULL && (at = strstr(at, name)) != NULL; at += length)
        if ((at == s->without || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
    return false;
}

size_t scenario_params(const scenario *s, const operation *op, option_row *to)
{
    size_t n = 0;
    for (size_t i = 0; op != NULL && i < op->option_count; i++)
        if (s == NULL || (!has_row(s, op->options[i].name) && !left_out(s, op->options[i].name)))
            to[n++] = op->options[i];
    return n;
}
