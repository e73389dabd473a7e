/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* config.c - what a configuration holds under which names, and what fits together. */
#include "lm.h"

#include <stdio.h>
#include <string.h>

const lm_attention_row lm_attentions[ATTENTIONS] = {
    {"nsa", "native sparse attention", KIND_NSA, KIND_NSA, KIND_NSA},
    {"dense", "dense attention", KIND_DENSE, KIND_DENSE, KIND_DENSE},
};

#define AT(member) offsetof(lm_config, member)
const lm_field lm_fields[FIELDS] = {
    {"width", AT(width), 1, 4096},      {"layers", AT(layers), 1, MAX_LAYERS},
    {"heads", AT(heads), 1, 256},       {"kv-heads", AT(kv_heads), 1, 256},
    {"inner", AT(inner), 1, 65536},     {"context", AT(context), 1, 1 << 20},
    {"block", AT(block), 1, 1024},      {"selected", AT(selected), 1, 1024},
    {"window", AT(window), 1, 1 << 20}, {"index-top", AT(index_top), 1, 2048},
    {"ratio", AT(ratio), 1, 4096},      {"experts", AT(experts), 0, 256},
    {"top", AT(top), 1, 256},
};
#undef AT

int32_t *config_field(lm_config *config, int field)
{
    return (int32_t *)(void *)((char *)config + lm_fields[field].offset);
}

lm_kind config_kind(const lm_config *config, int32_t layer)
{
    const lm_attention_row *row = &lm_attentions[config->attention];
    return layer == 0 ? row->first : layer % 2 == 1 ? row->second : row->third;
}

int32_t config_expert_inner(const lm_config *c)
{
    return c->experts > 0 ? c->inner / (c->top + 1) : c->inner;
}

const char *config_title(const lm_config *c)
{
    static char title[64];
    snprintf(title, sizeof title, "%s%s", lm_attentions[c->attention].name,
             c->experts > 0 ? " with experts" : "");
    return title;
}

int32_t config_attention(const char *name)
{
    for (int32_t i = 0; i < ATTENTIONS; i++)
        if (strcmp(lm_attentions[i].name, name) == 0) return i;
    return -1;
}

const char *config_fault(const lm_config *c)
{
    static char text[160];
    const int32_t inner = config_expert_inner(c);
    *text = '\0';
    if (c->heads % c->kv_heads != 0 || c->width % c->heads != 0 || c->width / c->heads % 8 != 0 ||
        c->width / c->heads > 256)
        snprintf(text, sizeof text, "width %d, heads %d: heads of a multiple of 8 up to 256 are accepted",
                 c->width, c->heads);
    else if (c->experts > 0 && c->top > c->experts)
        snprintf(text, sizeof text, "top %d of %d experts: at most as many are accepted", c->top, c->experts);
    else if (c->experts > 0 && (c->inner % (c->top + 1) != 0 || inner % 16 != 0 || c->width % 16 != 0))
        snprintf(text, sizeof text,
                 "width %d, inner %d with experts: a width of a multiple of 16 and an inner width of a "
                 "multiple of 16 (top + 1) are accepted",
                 c->width, c->inner);
    return *text != '\0' ? text : NULL;
}
