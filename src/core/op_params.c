/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_params.c - parameters of any operation, by name and as text. */
#include "core/error.h"
#include "core/op_entry.h"
#include "core/text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t op_param_value(const op_param *p, const void *params)
{
    const char *at = (const char *)params + p->offset;
    int64_t whole = 0;
    int32_t choice = 0;
    uint32_t set = 0;
    switch (p->kind) {
    case OP_INTEGER: memcpy(&whole, at, sizeof whole); return whole;
    case OP_FLAG: return *(const unsigned char *)at; /* a caller may have set other bits */
    case OP_CHOICE: memcpy(&choice, at, sizeof choice); return choice;
    case OP_SET: memcpy(&set, at, sizeof set); return set;
    default: return 0;
    }
}

void op_param_store(const op_param *p, void *params, int64_t value)
{
    char *at = (char *)params + p->offset;
    const int32_t choice = (int32_t)value;
    const uint32_t set = (uint32_t)value;
    switch (p->kind) {
    case OP_INTEGER: memcpy(at, &value, sizeof value); break;
    case OP_FLAG: *(bool *)at = value != 0; break;
    case OP_CHOICE: memcpy(at, &choice, sizeof choice); break;
    case OP_SET: memcpy(at, &set, sizeof set); break;
    default: break;
    }
}

/* Words have dashes, fields underscores; either may be written for the other. */
static bool same_word(const char *a, const char *b, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (a[i] == '\0' || (a[i] != b[i] && !(a[i] == '_' && b[i] == '-') && !(a[i] == '-' && b[i] == '_')))
            return false;
    return a[length] == '\0';
}

static int64_t word_index(const char *const *words, const char *text, size_t length)
{
    for (int64_t i = 0; words[i] != NULL; i++)
        if (same_word(words[i], text, length)) return i;
    return -1;
}

/* "all", or a comma list. */
static bool parse_set(const op_param *p, const char *text, int64_t *value)
{
    *value = strcmp(text, "all") == 0 ? p->most : 0;
    for (bool more = *value == 0; more; text++) {
        const size_t length = strcspn(text, ",");
        const int64_t bit = word_index(p->choices, text, length);
        if (bit < 0) return false;
        *value |= (int64_t)1 << bit;
        text += length;
        more = *text == ',';
    }
    return true;
}

/* A whole number, a flag, a word or a set. */
static bool parse_value(const op_param *p, const char *text, int64_t *value)
{
    static const char *const flags[] = {"false", "true", NULL}, *const digits[] = {"0", "1", NULL};
    char *end;
    if (p->kind == OP_SET) return parse_set(p, text, value);
    if (p->kind == OP_INTEGER) {
        errno = 0;
        *value = strtoll(text, &end, 10);
        return end != text && *end == '\0' && errno == 0;
    }
    *value = word_index(p->choices != NULL ? p->choices : flags, text, strlen(text));
    if (*value < 0 && p->kind == OP_FLAG && p->choices == NULL)
        *value = word_index(digits, text, strlen(text));
    return *value >= 0;
}

static const op_param *param_named(const op_family *family, const quern_op *op, const char *name)
{
    for (const op_rename *r = op->renames; r != NULL && r->field != NULL; r++)
        if (strcmp(r->name, name) == 0) name = r->field;
    for (int32_t i = 0; i < family->param_count; i++)
        if (same_word(family->params[i].field, name, strlen(name))) return &family->params[i];
    return NULL;
}

quern_status quern_op_set(const quern_op *op, void *params, const char *name, const char *text)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status != QUERN_OK || (status = op_need_pointer(params, "params")) != QUERN_OK ||
        (status = op_need_pointer(name, "name")) != QUERN_OK ||
        (status = op_need_pointer(text, "text")) != QUERN_OK)
        return status;
    const op_param *p = param_named(family, op, name);
    if (p == NULL) return error_argument("%s has no parameter '%s'", op->name, TEXT_NAME(name));
    bool accepted;
    int64_t value = 0;
    if (p->kind == OP_ROOT || p->kind == OP_POSITIVE || p->kind == OP_LIMIT || p->kind == OP_NUMBER) {
        char *end;
        const float x = strtof(text, &end);
        accepted = end != text && *end == '\0' && isfinite(x);
        if (accepted) memcpy((char *)params + p->offset, &x, sizeof x);
    } else {
        accepted = parse_value(p, text, &value);
        if (accepted) op_param_store(p, params, value);
    }
    return accepted
               ? QUERN_OK
               : error_argument("'%s' for %s: a value that it takes is accepted", TEXT_NAME(text), p->field);
}

static void set_text(const op_param *p, int64_t value, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "%s", value == p->most ? "all" : "");
    for (int32_t b = 0; value != p->most && p->choices[b] != NULL && used < bytes; b++) {
        if (!(value & (int64_t)1 << b)) continue;
        const int n = snprintf(text + used, bytes - used, "%s%s", used > 0 ? "," : "", p->choices[b]);
        used += n > 0 ? (size_t)n : 0;
    }
}

quern_status quern_op_text(const quern_op *op, const void *params, int32_t param, char *text, size_t bytes)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status != QUERN_OK || (status = op_need_pointer(params, "params")) != QUERN_OK ||
        (status = op_need_pointer(text, "text")) != QUERN_OK)
        return status;
    if (param < 0 || param >= family->param_count)
        return error_argument("param is %d: 0 to %d is accepted", param, family->param_count - 1);
    const op_param *p = &family->params[param];
    const int64_t value = op_param_value(p, params);
    float x;
    memcpy(&x, (const char *)params + p->offset, sizeof x);
    switch (p->kind) {
    case OP_INTEGER: snprintf(text, bytes, "%" PRId64, value); break;
    case OP_FLAG:
        snprintf(text, bytes, "%s",
                 p->choices != NULL ? p->choices[value != 0]
                 : value != 0       ? "true"
                                    : "false");
        break;
    case OP_CHOICE:
        if (value >= 0 && value <= p->most) snprintf(text, bytes, "%s", p->choices[value]);
        else snprintf(text, bytes, "%" PRId64, value);
        break;
    case OP_SET: set_text(p, value, text, bytes); break;
    case OP_ROOT:
    case OP_POSITIVE:
    case OP_LIMIT:
    case OP_NUMBER: snprintf(text, bytes, "%g", (double)x); break;
    }
    return QUERN_OK;
}

quern_status quern_op_defaults(const quern_op *op, void *params)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status != QUERN_OK || (status = op_need_pointer(params, "params")) != QUERN_OK) return status;
    size_t size;
    memcpy(&size, family->defaults, sizeof size);
    memcpy(params, family->defaults, size);
    if (op->fixed != NULL) op_param_store(param_named(family, op, op->fixed), params, op->fixed_to);
    return QUERN_OK;
}

quern_status quern_op_preset(const quern_op *op, void *params, const char *preset)
{
    const op_family *family;
    quern_status status = op_need(op, &family);
    if (status != QUERN_OK || (status = op_need_pointer(params, "params")) != QUERN_OK ||
        (status = op_need_pointer(preset, "preset")) != QUERN_OK)
        return status;
    if (family->preset == NULL)
        return error_argument("preset '%s': %s has none", TEXT_NAME(preset), op->name);
    (void)quern_op_defaults(op, params);
    return family->preset(params, preset);
}
