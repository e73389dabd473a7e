/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "ops.h"

#include "command.h"

#include <stdlib.h>
#include <string.h>

/* False without memory. */
static bool read_operation(operation *o)
{
    if (quern_op_get(o->op, &o->info) != QUERN_OK || o->info.tensor_count > QUERN_OP_TENSORS_MAX ||
        o->info.param_count > QUERN_OP_PARAMS_MAX || quern_op_get_tensors(o->op, o->tensors) != QUERN_OK ||
        quern_op_get_params(o->op, o->params) != QUERN_OK)
        return false;
    o->name = o->info.name;
    for (int32_t i = 0; i < o->info.param_count; i++) {
        const quern_op_param *p = &o->params[i];
        if (!p->option) continue;
        const char **words = o->words[o->option_count];
        words[0] = o->name;
        words[1] = p->value;
        o->options[o->option_count++] = (option_row){p->name, OPTION_PARAM, (size_t)i, words, p->help};
    }
    return true;
}

const operation *operation_named(const char *name)
{
    static operation *known;
    for (const operation *o = known; o != NULL; o = o->next)
        if (strcmp(o->name, name) == 0) return o;
    const quern_op *op = quern_op_named(name);
    if (op == NULL) return NULL;
    operation *o = need_memory(sizeof *o);
    memset(o, 0, sizeof *o);
    o->op = op;
    if (!read_operation(o)) exit(fail_status(QUERN_ERR_OUT_OF_MEMORY));
    o->next = known;
    known = o;
    return o;
}

int tensor_named(const operation *op, const char *name)
{
    for (int32_t i = 0; i < op->info.tensor_count; i++)
        if (strcmp(op->tensors[i].name, name) == 0) return i;
    return -1;
}

bool has_option(const operation *op, const char *name)
{
    for (size_t i = 0; i < op->option_count; i++)
        if (strcmp(op->options[i].name, name) == 0) return true;
    return false;
}

any_params params_init(const operation *op)
{
    any_params p;
    memset(&p, 0, sizeof p);
    if (op != NULL) (void)quern_op_defaults(op->op, &p);
    return p;
}

any_tensors tensors_init(const operation *op)
{
    any_tensors t;
    memset(&t, 0, sizeof t);
    t.size = op->info.tensors_size;
    return t;
}

int params_preset(const operation *op, any_params *params, const char *preset)
{
    if (quern_op_preset(op->op, params, preset) == QUERN_OK) return EXIT_DONE;
    return fail(EXIT_USAGE, "--profile: %s", quern_last_error(NULL));
}
