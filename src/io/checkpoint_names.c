/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_names.c - the tables of suffixes and projections, and the walk over a name's words. */
#include "io/checkpoint_names.h"

#include <string.h>

static const char *const suffixes[NAME_ROLES] = {
    [NAME_OTHER] = "",
    [NAME_WEIGHT] = ".weight",
    [NAME_BIAS] = ".bias",
    [NAME_WEIGHT_PACKED] = ".weight_packed",
    [NAME_WEIGHT_SCALE] = ".weight_scale",
    [NAME_WEIGHT_SCALE_2] = ".weight_scale_2",
    [NAME_WEIGHT_GLOBAL_SCALE] = ".weight_global_scale",
    [NAME_WEIGHT_SCALE_INV] = ".weight_scale_inv",
    [NAME_SCALE] = ".scale",
    [NAME_INPUT_SCALE] = ".input_scale",
    [NAME_INPUT_GLOBAL_SCALE] = ".input_global_scale",
    [NAME_BLOCKS] = "_blocks",
    [NAME_SCALES] = "_scales",
};

/* The last word of a module's name. */
static const struct projection {
    const char *word;
    name_part part;
    bool stack; /* right under "experts" it holds all of them */
} projections[] = {
    {"q_proj", NAME_Q, false},
    {"k_proj", NAME_K, false},
    {"v_proj", NAME_V, false},
    {"query", NAME_Q, false},
    {"key", NAME_K, false},
    {"value", NAME_V, false},
    {"wq", NAME_Q, false},
    {"wk", NAME_K, false},
    {"wv", NAME_V, false},
    {"attn_q", NAME_Q, false},
    {"attn_k", NAME_K, false},
    {"attn_v", NAME_V, false},
    {"gate_proj", NAME_GATE, false},
    {"up_proj", NAME_UP, false},
    {"down_proj", NAME_DOWN, true},
    {"gate_up_proj", NAME_GATE_UP, true},
    {"w1", NAME_GATE, false},
    {"w3", NAME_UP, false},
    {"w2", NAME_DOWN, false},
    {"ffn_gate", NAME_GATE, false},
    {"ffn_up", NAME_UP, false},
    {"ffn_down", NAME_DOWN, false},
    {"ffn_gate_shexp", NAME_GATE, false},
    {"ffn_up_shexp", NAME_UP, false},
    {"ffn_down_shexp", NAME_DOWN, false},
    {"ffn_gate_exps", NAME_GATE, false},
    {"ffn_up_exps", NAME_UP, false},
    {"ffn_down_exps", NAME_DOWN, false},
    {"ffn_gate_up_exps", NAME_GATE_UP, false},
};

const char *checkpoint_name_suffix(name_role role)
{
    return suffixes[role];
}

static bool is_word(const char *text, size_t size, const char *word)
{
    return strlen(word) == size && memcmp(text, word, size) == 0;
}

static bool ends_with(const char *text, size_t size, const char *end)
{
    const size_t n = strlen(end);
    return size >= n && memcmp(text + size - n, end, n) == 0;
}

/* The number that the word is; -1 where it is none. */
static int64_t number_of(const char *word, size_t size)
{
    int64_t value = 0;
    if (size == 0 || size > 9) return -1;
    for (size_t i = 0; i < size; i++) {
        if (word[i] < '0' || word[i] > '9') return -1;
        value = value * 10 + (word[i] - '0');
    }
    return value;
}

static bool counts_layers(const char *word, size_t size)
{
    static const char *const words[] = {"layers", "layer", "blk", "h", "mtp"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (is_word(word, size, words[i])) return true;
    return false;
}

/* Reads layer, expert, parent and part from the module's words. */
static void read_words(const char *name, checkpoint_name *n)
{
    const char *before = "", *end = name + n->module;
    size_t before_size = 0;
    bool under_experts = false; /* the word before is "experts" */
    n->mtp = strncmp(name, "mtp.", 4) == 0;
    for (const char *word = name; word < end;) {
        const char *dot = memchr(word, '.', (size_t)(end - word));
        const size_t size = (size_t)((dot != NULL ? dot : end) - word);
        const int64_t number = number_of(word, size);
        under_experts = is_word(before, before_size, "experts");
        n->in_experts = n->in_experts || is_word(word, size, "experts");
        n->shared = n->shared || is_word(word, size, "shared_expert") ||
                    is_word(word, size, "shared_experts") || ends_with(word, size, "_shexp");
        if (number >= 0 && under_experts) n->expert = number;
        else if (number >= 0 && n->layer < 0 && counts_layers(before, before_size)) n->layer = number;
        n->parent = (size_t)(word - name);
        before = word;
        before_size = size;
        word += size + (dot != NULL);
    }
    for (size_t i = 0; i < sizeof projections / sizeof *projections; i++) {
        if (!is_word(before, before_size, projections[i].word)) continue;
        n->part = projections[i].part;
        n->stacked = (projections[i].stack && under_experts) || ends_with(before, before_size, "_exps");
    }
    n->in_experts = n->in_experts || n->stacked;
}

checkpoint_name checkpoint_name_read(const char *name)
{
    const size_t length = strlen(name);
    checkpoint_name n = {.role = NAME_OTHER, .module = length, .layer = -1, .expert = -1};
    for (int role = NAME_OTHER + 1; role < NAME_ROLES; role++) {
        if (!ends_with(name, length, suffixes[role]) || strlen(suffixes[role]) == length) continue;
        n.role = (name_role)role;
        n.module = length - strlen(suffixes[role]);
    }
    read_words(name, &n);
    if (n.role == NAME_OTHER && ends_with(name, length, "_proj_bias")) {
        n.role = NAME_BIAS;
        n.module = length - strlen("_bias");
        read_words(name, &n);
    }
    return n;
}

static bool both_of(const checkpoint_name *a, const checkpoint_name *b, name_part first, name_part last)
{
    return a->part >= first && a->part <= last && b->part >= first && b->part <= last;
}

bool checkpoint_names_fused(const char *a, const checkpoint_name *of_a, const char *b,
                            const checkpoint_name *of_b)
{
    return of_a->parent == of_b->parent && memcmp(a, b, of_a->parent) == 0 &&
           (both_of(of_a, of_b, NAME_Q, NAME_V) || both_of(of_a, of_b, NAME_GATE, NAME_UP));
}

bool checkpoint_name_is_embedding(const char *name)
{
    return strcasestr(name, "embed") != NULL || strstr(name, "wte.") != NULL ||
           strstr(name, "wpe.") != NULL || strstr(name, "token_embd") != NULL ||
           strcmp(name, "shared.weight") == 0; /* the last is T5's */
}

bool checkpoint_name_is_norm(const char *name)
{
    return strcasestr(name, "norm") != NULL || strstr(name, ".ln_") != NULL;
}

bool checkpoint_name_is_router(const char *name)
{
    return ends_with(name, strlen(name), "gate.weight") || strstr(name, "router") != NULL ||
           strstr(name, "ffn_gate_inp.") != NULL;
}

bool checkpoint_name_is_head(const char *name)
{
    return strstr(name, "lm_head") != NULL || strcmp(name, "head.weight") == 0 ||
           strcmp(name, "output.weight") == 0;
}
