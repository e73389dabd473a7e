/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* config.c - what a configuration holds under which names, and what fits together. */
#include "lm.h"

#include <stdio.h>
#include <string.h>

const lm_attention_row lm_attentions[ATTENTIONS] = {
    {"nsa", KIND_NSA, KIND_NSA, KIND_NSA},       {"dense", KIND_DENSE, KIND_DENSE, KIND_DENSE},
    {"csa", KIND_CSA, KIND_CSA, KIND_CSA},       {"hca", KIND_HCA, KIND_HCA, KIND_HCA},
    {"hybrid", KIND_WINDOW, KIND_CSA, KIND_HCA},
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

int64_t config_ratio(const lm_config *config, lm_kind kind)
{
    return kind == KIND_CSA ? 4 : kind == KIND_HCA ? config->ratio : 0;
}

int64_t config_rotated(const lm_config *c)
{
    const int64_t dim = c->width / c->heads;
    return config_kind(c, 0) >= KIND_WINDOW ? dim / 2 : dim;
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

static bool uses(const lm_config *c, lm_kind kind)
{
    bool any = false;
    for (int32_t l = 0; l < c->layers; l++) any = any || config_kind(c, l) == kind;
    return any;
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
    else if (config_kind(c, 0) >= KIND_WINDOW && c->kv_heads != 1)
        snprintf(text, sizeof text, "kv-heads %d: one is accepted with %s attention", c->kv_heads,
                 lm_attentions[c->attention].name);
    else if (uses(c, KIND_CSA) && c->context < config_ratio(c, KIND_CSA))
        snprintf(text, sizeof text, "context %d: at least an entry's 4 tokens are accepted", c->context);
    else if (uses(c, KIND_HCA) && c->context < c->ratio)
        snprintf(text, sizeof text, "ratio %d: at most the context of %d is accepted", c->ratio, c->context);
    else if (c->experts > 0 && c->top > c->experts)
        snprintf(text, sizeof text, "top %d of %d experts: at most as many are accepted", c->top, c->experts);
    else if (c->experts > 0 && (c->inner % (c->top + 1) != 0 || inner % 16 != 0 || c->width % 16 != 0))
        snprintf(text, sizeof text,
                 "width %d, inner %d with experts: a width of a multiple of 16 and an inner width of a "
                 "multiple of 16 (top + 1) are accepted",
                 c->width, c->inner);
    return *text != '\0' ? text : NULL;
}
