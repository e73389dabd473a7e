/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* modules.c - tensors by module, and modules by what loaders fuse. */
#include "quantize/modules.h"

#include "quantize/stored.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A tensor and what its name says, to be sorted by module. */
typedef struct named_tensor {
    const model_tensor *tensor;
    checkpoint_name name;
} named_tensor;

static int by_text(const char *a, size_t n, const char *b, size_t m)
{
    const int order = memcmp(a, b, n < m ? n : m);
    return order != 0 ? order : (n > m) - (n < m);
}

static int by_module(const void *a, const void *b)
{
    const named_tensor *x = a, *y = b;
    const int order = by_text(x->tensor->name, x->name.module, y->tensor->name, y->name.module);
    if (order != 0) return order;
    return (int)x->name.role - (int)y->name.role;
}

static bool same_module(const named_tensor *a, const named_tensor *b)
{
    return by_text(a->tensor->name, a->name.module, b->tensor->name, b->name.module) == 0;
}

/* The tensors of one module make a stored weight, or none. */
static void add_stored(module_list *list, const named_tensor *first, size_t count, bool gpt_oss)
{
    stored_weight s = {.experts = 1};
    for (size_t i = 0; i < count; i++) s.of[first[i].name.role] = first[i].tensor;
    s.tensor = s.of[NAME_WEIGHT] != NULL          ? s.of[NAME_WEIGHT]
               : s.of[NAME_WEIGHT_PACKED] != NULL ? s.of[NAME_WEIGHT_PACKED]
               : s.of[NAME_BLOCKS] != NULL        ? s.of[NAME_BLOCKS]
                                                  : s.of[NAME_OTHER];
    if (s.tensor == NULL) return;
    s.name = checkpoint_name_read(s.tensor->name);
    if (!stored_read(&s, gpt_oss)) return;
    for (size_t i = 0; i < count; i++)
        list->stored_of[first[i].tensor - list->model->tensors] = list->stored_count;
    list->stored[list->stored_count++] = s;
}

bool modules_find(const model_files *model, bool gpt_oss, module_list *list)
{
    const size_t count = model->count;
    named_tensor *all = calloc(count + 1, sizeof *all);
    *list = (module_list){.model = model,
                          .stored = calloc(count + 1, sizeof *list->stored),
                          .stored_of = malloc((count + 1) * sizeof *list->stored_of)};
    const bool good = all != NULL && list->stored != NULL && list->stored_of != NULL;
    for (size_t i = 0; i < count && good; i++) {
        all[i] = (named_tensor){&model->tensors[i], checkpoint_name_read(model->tensors[i].name)};
        list->stored_of[i] = SIZE_MAX;
    }
    if (good) qsort(all, count, sizeof *all, by_module);
    for (size_t i = 0, n = 0; i < count && good; i += n) {
        for (n = 1; i + n < count && same_module(&all[i], &all[i + n]); n++) continue;
        add_stored(list, &all[i], n, gpt_oss);
    }
    free(all);
    return good;
}

/* ---- modules ---- */

static char *expert_name(const stored_weight *s, int64_t expert, const char *projection)
{
    char *name = NULL;
    return asprintf(&name, "%.*s%lld.%s", (int)s->name.parent, s->tensor->name, (long long)expert,
                    projection) < 0
               ? NULL
               : name;
}

/* The expert's matrix, or one of the two that its rows make. */
static matrix part_of(const stored_weight *s, int64_t expert, bool up)
{
    matrix m = s->first;
    m.data += expert * s->expert_bytes;
    if (m.scales != NULL) m.scales += expert * s->expert_scale_bytes;
    if (s->split == SPLIT_NONE) return m;
    m.rows /= 2;
    const int64_t skip = s->split == SPLIT_HALVES ? m.rows : 1;
    if (up) m.data += skip * m.row_bytes;
    if (up && m.scales != NULL) m.scales += skip * m.scales_row_bytes;
    if (s->split == SPLIT_EVEN_ODD) {
        m.row_bytes *= 2;
        m.scales_row_bytes *= 2;
    }
    return m;
}

static bool add_module(module_list *list, size_t stored, char *name, matrix weight)
{
    if (name == NULL) return false;
    module *m = &list->modules[list->count++];
    *m = (module){.name = name,
                  .parsed = checkpoint_name_read(name),
                  .stored = stored,
                  .weight = weight,
                  .codes_at = -1,
                  .scales_at = -1,
                  .values_at = -1};
    return true;
}

static bool expand(module_list *list, size_t index, bool keep_stacks)
{
    static const char *const words[] = {[NAME_NO_PART] = "weight", [NAME_Q] = "q_proj",
                                        [NAME_K] = "k_proj",       [NAME_V] = "v_proj",
                                        [NAME_GATE] = "gate_proj", [NAME_UP] = "up_proj",
                                        [NAME_DOWN] = "down_proj", [NAME_GATE_UP] = "gate_up_proj"};
    stored_weight *s = &list->stored[index];
    s->first_module = list->count;
    if (keep_stacks) s->split = SPLIT_NONE;
    bool good = true;
    if (!s->stack) good = add_module(list, index, strndup(s->tensor->name, s->name.module), s->first);
    for (int64_t e = 0; s->stack && e < s->experts && good; e++) {
        if (s->split == SPLIT_NONE) {
            good = add_module(list, index, expert_name(s, e, words[s->name.part]), part_of(s, e, false));
            continue;
        }
        good = add_module(list, index, expert_name(s, e, "gate_proj"), part_of(s, e, false)) &&
               add_module(list, index, expert_name(s, e, "up_proj"), part_of(s, e, true));
    }
    s->module_count = list->count - s->first_module;
    return good;
}

bool modules_expand(module_list *list, bool keep_stacks)
{
    size_t most = 0;
    for (size_t i = 0; i < list->stored_count; i++)
        if (list->stored[i].chosen) most += 2 * (size_t)list->stored[i].experts;
    list->modules = calloc(most + 1, sizeof *list->modules);
    bool good = list->modules != NULL;
    for (size_t i = 0; i < list->stored_count && good; i++)
        if (list->stored[i].chosen) good = expand(list, i, keep_stacks);
    return good;
}

/* ---- groups ---- */

static const module *module_at(const module_list *list, const void *index)
{
    return &list->modules[*(const size_t *)index];
}

/* Modules that loaders fuse come next to each other. */
static int by_parent(const void *a, const void *b, void *arg)
{
    const module *x = module_at(arg, a), *y = module_at(arg, b);
    const int order = by_text(x->name, x->parsed.parent, y->name, y->parsed.parent);
    if (order != 0) return order;
    if (x->parsed.part != y->parsed.part) return (int)x->parsed.part - (int)y->parsed.part;
    return strcmp(x->name, y->name);
}

bool modules_group(module_list *list)
{
    list->members = calloc(list->count + 1, sizeof *list->members);
    list->groups = calloc(list->count + 1, sizeof *list->groups);
    if (list->members == NULL || list->groups == NULL) return false;
    for (size_t i = 0; i < list->count; i++) list->members[i] = i;
    qsort_r(list->members, list->count, sizeof *list->members, by_parent, list);
    for (size_t i = 0; i < list->count; i++) {
        module *m = &list->modules[list->members[i]];
        const module *before = i > 0 ? &list->modules[list->members[i - 1]] : NULL;
        const bool alone =
            before == NULL || list->stored[m->stored].as_values || list->stored[before->stored].as_values;
        if (alone || !checkpoint_names_fused(before->name, &before->parsed, m->name, &m->parsed))
            list->groups[list->group_count++] = (module_group){.first = i, .largest = -1};
        list->groups[list->group_count - 1].count++;
        m->group = list->group_count - 1;
    }
    return true;
}

void modules_free(module_list *list)
{
    for (size_t i = 0; i < list->count; i++) free(list->modules[i].name);
    free(list->stored);
    free(list->stored_of);
    free(list->modules);
    free(list->members);
    free(list->groups);
}
