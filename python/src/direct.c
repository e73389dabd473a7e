/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "direct.h"

#include <quern/dsv4.h>

#include <stdlib.h>
#include <string.h>

static const char *const formats[] = {"rows", "fp8", "fp8_power", "fp4", "row584", NULL};
static const char *const store_tensors[] = {"x", "slots", "cache", NULL};
static const quern_dsv4_store_params store_defaults = QUERN_DSV4_STORE_PARAMS_INIT;
#define AT(member) offsetof(quern_dsv4_store_params, member)
static const direct_param store_params[] = {{"format", AT(format), DIRECT_CHOICE, formats},
                                            {"page", AT(page), DIRECT_INTEGER, NULL},
                                            {NULL, 0, DIRECT_INTEGER, NULL}};
#undef AT

static quern_status store_workspace(quern_context *ctx, const void *params, const void *tensors,
                                    size_t *bytes)
{
    return quern_dsv4_store_workspace(ctx, params, tensors, bytes);
}

static quern_status store_run(quern_context *ctx, const quern_exec *exec, const void *params,
                              const void *tensors, void *workspace, size_t bytes)
{
    return quern_dsv4_store(ctx, exec, params, tensors, workspace, bytes);
}

/* ---- the list ---- */

static const direct_op operations[] = {
    {"v4-store", store_tensors, store_params, &store_defaults, sizeof store_defaults, store_workspace,
     store_run},
};

const direct_op *direct_at(size_t i)
{
    return i < sizeof operations / sizeof *operations ? &operations[i] : NULL;
}

int32_t direct_tensor_count(const direct_op *op)
{
    int32_t count = 0;
    while (op->tensors[count] != NULL) count++;
    return count;
}

bool direct_set(const direct_op *op, void *params, const char *name, const char *text)
{
    const direct_param *p = op->params;
    char *end = NULL;
    while (p->name != NULL && strcmp(p->name, name) != 0) p++;
    if (p->name == NULL) return false;
    void *to = (char *)params + p->offset;
    if (p->kind == DIRECT_INTEGER) {
        *(int64_t *)to = strtoll(text, &end, 10);
        return end != text && *end == '\0';
    }
    int32_t word = 0;
    while (p->words[word] != NULL && strcmp(p->words[word], text) != 0) word++;
    if (p->words[word] == NULL) return false;
    memcpy(to, &word, sizeof word); /* an enum */
    return true;
}
