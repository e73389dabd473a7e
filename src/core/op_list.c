/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_list.c - the operations as a list: names, tensors, parameters as text. */
#include "core/error.h"
#include "core/op_entry.h"
#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const op_family *op_family_of(const quern_op *op)
{
    for (size_t f = 0; quern_families[f] != NULL; f++)
        for (int32_t i = 0; i < quern_families[f]->entry_count; i++)
            if (op == &quern_families[f]->entries[i]) return quern_families[f];
    return NULL;
}

quern_status op_need(const quern_op *op, const op_family **family)
{
    *family = op_family_of(op);
    return *family != NULL ? QUERN_OK : error_argument("op is no operation: quern_op_named() finds one");
}

quern_status op_need_pointer(const void *p, const char *name)
{
    return p != NULL ? QUERN_OK : error_argument("%s is NULL: a pointer is needed", name);
}

const quern_op *quern_op_at(size_t i)
{
    for (size_t f = 0; quern_families[f] != NULL; f++) {
        const size_t count = (size_t)quern_families[f]->entry_count;
        if (i < count) return &quern_families[f]->entries[i];
        i -= count;
    }
    return NULL;
}

const quern_op *quern_op_named(const char *name)
{
    const quern_op *op = NULL;
    for (size_t i = 0; name != NULL && (op = quern_op_at(i)) != NULL; i++)
        if (strcmp(op->name, name) == 0) return op;
    return NULL;
}

static const char *renamed(const quern_op *op, const char *field)
{
    for (const op_rename *r = op->renames; r != NULL && r->field != NULL; r++)
        if (r->when == NULL && strcmp(r->field, field) == 0) return r->name;
    return NULL;
}

/* Its name where a flag is set; NULL: there is no such flag. */
static const op_rename *renamed_when(const quern_op *op, const char *field)
{
    for (const op_rename *r = op->renames; r != NULL && r->field != NULL; r++)
        if (r->when != NULL && strcmp(r->field, field) == 0) return r;
    return NULL;
}

quern_status quern_op_get(const quern_op *op, quern_op_info *info)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status == QUERN_OK) status = op_need_pointer(info, "info");
    if (status != QUERN_OK) return status;
    *info = (quern_op_info){.name = op->name,
                            .help = op->help,
                            .group = family->group != NULL ? family->group : family->entries->name,
                            .forward = (quern_operation)((int32_t)family->first + op->forward),
                            .tensor_count = family->tensor_count,
                            .param_count = family->param_count,
                            .varlen_by = family->varlen_by > 0 ? family->varlen_by : OP_NONE,
                            .tensors_size = sizeof(size_t) + (size_t)family->tensor_count * sizeof(void *),
                            .aside = op->aside,
                            .aside_valued = op->aside_valued};
    if (op->backward > 0) info->backward = (quern_operation)((int32_t)family->first + op->backward);
    memcpy(&info->params_size, family->defaults, sizeof info->params_size);
    memcpy(info->asked, op->asked, sizeof info->asked);
    return QUERN_OK;
}

/* ---- tensors ---- */

size_t op_symbol_name(const op_family *family, int32_t symbol, const char **name)
{
    const char *word = family->symbols;
    for (; symbol > 1 && *word != '\0'; symbol--) {
        word += strcspn(word, " ");
        word += *word == ' ';
    }
    *name = word;
    return strcspn(word, " ");
}

static void shape_text(const op_family *family, const uint8_t *symbols, char *text, size_t bytes)
{
    static const char *const parts[] = {"", "/2", "/16", "/128"};
    size_t used = 0;
    *text = '\0';
    for (int32_t i = 0; i < QUERN_MAX_DIMS && symbols[i] != 0 && used < bytes; i++) {
        const int32_t list = symbols[i] - OP_LEAD;
        const char *name = family->leads != NULL && list >= 0 ? family->leads[list] : "...";
        const size_t length =
            list < 0 ? op_symbol_name(family, symbols[i] % OP_SYMBOLS_MAX, &name) : strlen(name);
        const int n = snprintf(text + used, bytes - used, "%s%.*s%s", i > 0 ? " " : "", (int)length, name,
                               list < 0 ? parts[symbols[i] / OP_SYMBOLS_MAX] : "");
        used += n > 0 ? (size_t)n : 0;
    }
}

static const char *dtype_word(op_dtype dtype)
{
    static const char *const words[] = {[OP_ACTIVATION] = "act",
                                        [OP_WEIGHT] = "weight",
                                        [OP_FLOAT] = "float",
                                        [OP_F32] = "f32",
                                        [OP_I32] = "i32",
                                        [OP_I64] = "i64",
                                        [OP_U8] = "u8",
                                        [OP_SCALE] = "scale",
                                        [OP_CODES] = "codes",
                                        [OP_STORED] = "stored",
                                        [OP_STORED_2] = "stored",
                                        [OP_ANY] = "any",
                                        [OP_EXPONENT] = "exponent",
                                        [OP_SOURCE] = "act",
                                        [OP_LIKE] = "same",
                                        [OP_GLOBAL] = "f32",
                                        [OP_INDEX] = "index",
                                        [OP_SOURCE_OR_F32] = "weight"};
    return words[dtype];
}

/* usual: at default parameters, beside no tensor; needs_stay: at default parameters. */
static void note_roles(op_call *call, quern_op_pass pass, bool usual, bool needs_stay,
                       quern_op_tensor *tensors)
{
    memset(call->role, OP_UNUSED, sizeof call->role);
    call->varlen = call->family->varlen_by > 0 && call->given[call->family->varlen_by] != NULL;
    call->family->roles(call);
    for (int32_t i = 0; i < call->family->tensor_count; i++) {
        const uint8_t role = call->role[i];
        const bool updated = role == OP_UPDATED, input = role == OP_NEEDED || role == OP_OPTIONAL || updated;
        if (pass == QUERN_OP_FORWARD) tensors[i].input = tensors[i].input || input;
        else tensors[i].trigger = tensors[i].trigger || input;
        if (role == OP_RESULT || role == OP_OPTIONAL_RESULT || updated) tensors[i].result[pass] = true;
        if (updated) tensors[i].updated = true;
        if (usual && pass == QUERN_OP_FORWARD) tensors[i].needed = role == OP_NEEDED || updated;
        if (role == OP_REFUSED && needs_stay) tensors[i].needed = false; /* another stands for it */
    }
}

/* A value other than the default that may give tensors other roles; false past the last. */
static bool other_value(const op_param *p, int32_t i, int64_t *value)
{
    switch (p->kind) {
    case OP_INTEGER:
    case OP_FLAG: *value = i; return i < 2;
    case OP_CHOICE: *value = i; return i <= p->most;
    case OP_SET: *value = i + 1; return i < p->most;
    default: return false;
    }
}

/* Collects the roles of tensors at the parameters and at those that differ from them in one parameter,
 * beside all tensors and beside none. */
static void note_around(op_call *call, quern_op_pass pass, int32_t from, quern_op_tensor *tensors,
                        const char *fixed)
{
    static const quern_tensor *const nothing[OP_TENSORS_MAX];
    static const quern_tensor something = {0};
    const quern_tensor *all[OP_TENSORS_MAX];
    const op_family *family = call->family;
    char *params = (char *)call + family->params_at;
    for (int32_t i = 0; i < OP_TENSORS_MAX; i++) all[i] = &something;
    for (int32_t k = from; k < family->param_count; k++) {
        const op_param *p = &family->params[k];
        const int64_t before = op_param_value(p, params);
        int64_t value;
        if (fixed != NULL && strcmp(p->field, fixed) == 0) continue;
        for (int32_t i = 0; other_value(p, i, &value); i++) {
            op_param_store(p, params, value);
            call->given = all;
            note_roles(call, pass, false, false, tensors);
            call->given = nothing;
            note_roles(call, pass, false, false, tensors);
            if (from == 0) note_around(call, pass, k + 1, tensors, fixed); /* pairs */
        }
        op_param_store(p, params, before);
    }
}

static void note_pass(op_call *call, const quern_op *op, quern_op_pass pass, quern_op_tensor *tensors)
{
    const op_family *family = call->family;
    static const quern_tensor something = {0};
    const quern_tensor *one[OP_TENSORS_MAX] = {NULL};
    call->operation = pass == QUERN_OP_FORWARD ? op->forward : op->backward;
    quern_op_defaults(op, (char *)call + family->params_at);
    call->given = one;
    note_roles(call, pass, true, true, tensors);
    for (int32_t i = 0; i < family->tensor_count; i++) {
        one[i] = &something;
        note_roles(call, pass, false, true, tensors);
        one[i] = NULL;
    }
    note_around(call, pass, 0, tensors, op->fixed);
}

quern_status quern_op_get_tensors(const quern_op *op, quern_op_tensor *tensors)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status == QUERN_OK) status = op_need_pointer(tensors, "tensors");
    if (status != QUERN_OK) return status;
    op_call *call = calloc(1, family->call_size);
    if (call == NULL) return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory to look at %s", op->name);
    call->family = family;
    for (int32_t i = 0; i < family->tensor_count; i++) {
        const op_tensor *t = &family->tensors[i];
        const op_tensor *source =
            t->dtype == OP_SOURCE || t->dtype == OP_SOURCE_OR_F32 ? &family->tensors[t->gradient_of] : t;
        const char *name = renamed(op, t->field);
        const op_rename *other = renamed_when(op, t->field);
        tensors[i] = (quern_op_tensor){.name = name != NULL ? name : t->name,
                                       .field = t->field,
                                       .dtype = dtype_word(source->dtype),
                                       .gradient_of = t->gradient_of};
        if (other != NULL) tensors[i].other_name = other->name;
        shape_text(family, t->fixed, tensors[i].fixed, sizeof tensors->fixed);
        shape_text(family, t->varlen, tensors[i].varlen, sizeof tensors->varlen);
    }
    note_pass(call, op, QUERN_OP_FORWARD, tensors);
    if (op->backward > 0) note_pass(call, op, QUERN_OP_BACKWARD, tensors);
    for (int32_t i = 0; i < family->tensor_count; i++)
        tensors[i].trigger = tensors[i].trigger && !tensors[i].input && !tensors[i].result[QUERN_OP_FORWARD];
    for (const int8_t *t = op->aside_tensors; t != NULL && *t != OP_NONE; t++) tensors[*t].aside = true;
    free(call);
    return QUERN_OK;
}

const char *quern_op_tensor_name(const quern_op *op, const void *params, int32_t tensor)
{
    const op_family *family = op_family_of(op);
    if (family == NULL || tensor < 0 || tensor >= family->tensor_count) return NULL;
    const op_tensor *t = &family->tensors[tensor];
    const op_rename *other = renamed_when(op, t->field);
    for (int32_t i = 0; params != NULL && other != NULL && i < family->param_count; i++)
        if (strcmp(family->params[i].field, other->when) == 0 &&
            op_param_value(&family->params[i], params) != 0)
            return other->name;
    const char *name = renamed(op, t->field);
    return name != NULL ? name : t->name;
}

/* ---- parameters ---- */

static void param_name(const quern_op *op, const op_param *p, char *text, size_t bytes)
{
    const char *name = renamed(op, p->field);
    snprintf(text, bytes, "%s", name != NULL ? name : p->field);
    for (char *c = text; name == NULL && *c != '\0'; c++)
        if (*c == '_') *c = '-';
}

static void words_text(const char *const *words, char between, const char *first, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "%s", first);
    for (int32_t i = 0; words[i] != NULL && used < bytes; i++) {
        const int n = snprintf(text + used, bytes - used, "%.*s%s", i > 0, &between, words[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

static bool is_option(const quern_op *op, const op_param *p)
{
    return p->help != NULL && (op->fixed == NULL || strcmp(op->fixed, p->field) != 0);
}

quern_status quern_op_get_params(const quern_op *op, quern_op_param *params)
{
    const op_family *family;
    char defaults[QUERN_OP_PARAMS_BYTES];
    quern_status status = op_need(op, &family);
    if (status == QUERN_OK) status = op_need_pointer(params, "params");
    if (status != QUERN_OK) return status;
    quern_op_defaults(op, defaults);
    for (int32_t i = 0; i < family->param_count; i++) {
        const op_param *p = &family->params[i];
        quern_op_param *to = &params[i];
        *to = (quern_op_param){
            .field = p->field, .help = p->help != NULL ? p->help : "", .option = is_option(op, p)};
        param_name(op, p, to->name, sizeof to->name);
        quern_op_text(op, defaults, i, to->initial, sizeof to->initial);
        if (p->kind == OP_SET) words_text(p->choices, ',', "all|", to->value, sizeof to->value);
        else if (p->choices != NULL) words_text(p->choices, '|', "", to->value, sizeof to->value);
        else
            snprintf(to->value, sizeof to->value, "%s",
                     p->kind == OP_INTEGER ? "INT"
                     : p->kind == OP_FLAG  ? "true|false"
                                           : "NUMBER");
    }
    return QUERN_OK;
}
