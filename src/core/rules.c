/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rules.c - checks of a list of tensors, for operations that no family describes. */
#include "core/error.h"
#include "runtime/plugin.h"
#include "core/view.h"

static quern_status check(const view_rule *rule, const quern_tensor *like, bool run, view_span *span)
{
    int64_t shape[QUERN_MAX_DIMS];
    *span = (view_span){0, 0};
    if (rule->tensor == NULL)
        return rule->optional
                   ? QUERN_OK
                   : error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", rule->name);
    for (int32_t i = 0; i < rule->ndim; i++)
        shape[i] =
            rule->shape[i] != VIEW_ANY || rule->tensor->ndim != rule->ndim || rule->tensor->shape[i] < 0
                ? rule->shape[i]
                : rule->tensor->shape[i];
    const view_want want = {rule->name, rule->dtypes, rule->ndim, shape, rule->output, run};
    return view_check_one(&want, rule->tensor, like, span);
}

/* Checks that no output, of the `held` tensors that have elements, shares memory with another. */
static quern_status check_apart(const view_rule *rules, const view_span *spans, const int32_t *index,
                                int32_t held)
{
    for (int32_t n = 0; n < held; n++) {
        const int32_t i = index[n];
        if (!rules[i].output) continue;
        for (int32_t m = 0; m < held; m++) {
            const int32_t j = index[m];
            if (i != j && (!rules[j].output || j < i) &&
                view_share_memory(rules[i].tensor, &spans[i], rules[j].tensor, &spans[j]))
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "%s shares memory with %s: outputs need memory of their own", rules[i].name,
                                 rules[j].name);
        }
    }
    return QUERN_OK;
}

quern_status view_check_all(const view_rule *rules, int32_t count, const quern_tensor *like, bool run)
{
    enum { MOST = 32 };
    view_span spans[MOST];
    int32_t index[MOST], held = 0;
    if (count > MOST) return error_set(QUERN_ERR_INTERNAL, "%d rules: at most %d are accepted", count, MOST);
    for (int32_t i = 0; i < count; i++) {
        const quern_status status = check(&rules[i], like, run, &spans[i]);
        if (status != QUERN_OK) return status;
        if (spans[i].high != 0) index[held++] = i;
    }
    if (!run) return QUERN_OK;
    quern_status status = check_apart(rules, spans, index, held);
    for (int32_t n = 0; n < held && status == QUERN_OK; n++) {
        const quern_tensor *t = rules[index[n]].tensor;
        status = plugin_check_pointer(t->data, t->device, t->device_id, rules[index[n]].name);
    }
    return status;
}
