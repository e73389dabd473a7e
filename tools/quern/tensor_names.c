/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tensor_names.c - the library's sentences with the names that tensors have in files. The library knows a
 * tensor by its field ("k_index"), who runs the command by its name in the file ("k_I"). */
#include "tensor_names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static const operation *op;
static const any_params *params;

void tensor_names_of(const operation *subject, const any_params *given)
{
    op = subject;
    params = given;
}

static bool in_name(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Whether a sentence speaks of a tensor where this follows its field. "a" is a field, and an article. */
static bool of_a_tensor(const char *rest)
{
    static const char *const follow[] = {"[", ":", " is ", " has ", " and ", " shares ", " ends "};
    if (*rest == '.') return isalpha((unsigned char)rest[1]);
    for (size_t i = 0; i < sizeof follow / sizeof *follow; i++)
        if (strncmp(rest, follow[i], strlen(follow[i])) == 0) return true;
    return false;
}

/* The name in files of the tensor whose field these characters are; NULL if there is none. */
static const char *file_name(const char *field, size_t length)
{
    for (int32_t i = 0; i < op->info.tensor_count; i++)
        if (strncmp(op->tensors[i].field, field, length) == 0 && op->tensors[i].field[length] == '\0')
            return quern_op_tensor_name(op->op, params, i);
    return NULL;
}

void tensor_names_put(const char *sentence, char *text, size_t bytes)
{
    size_t used = 0;
    for (const char *at = sentence; *at != '\0' && used + 1 < bytes;) {
        size_t length = 0;
        while (in_name(at[length])) length++;
        const bool begins = at == sentence || at[-1] == ' ' || at[-1] == '(';
        const char *name =
            length > 0 && begins && op != NULL && of_a_tensor(at + length) ? file_name(at, length) : NULL;
        const int n =
            length == 0 ? snprintf(text + used, bytes - used, "%c", *at)
                        : snprintf(text + used, bytes - used, "%.*s",
                                   name != NULL ? (int)strlen(name) : (int)length, name != NULL ? name : at);
        used += (size_t)n;
        at += length > 0 ? length : 1;
    }
    text[used < bytes ? used : bytes - 1] = '\0';
}
