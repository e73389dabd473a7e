/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_struct.c - the size rule of the structs that callers fill. */
#include "core/op.h"

#include "core/error.h"

#include <string.h>

/* How many bytes of a newer struct's tail are read. A larger size means uninitialised memory. */
enum { TAIL_MOST = 4096 };

quern_status op_struct(void *known, const void *given, const char *name, const char *init)
{
    size_t mine, theirs;
    if (given == NULL) return error_argument("%s is NULL: use %s", name, init);
    memcpy(&mine, known, sizeof mine);
    memcpy(&theirs, given, sizeof theirs);
    if (theirs < sizeof theirs || theirs % sizeof theirs != 0 || theirs > mine + TAIL_MOST)
        return error_argument("%s.size is %zu: a multiple of %zu from %zu to %zu is accepted (use %s)", name,
                              theirs, sizeof theirs, sizeof theirs, mine + TAIL_MOST, init);
    for (size_t i = mine; i < theirs; i++)
        if (((const char *)given)[i] != 0)
            return error_argument("%s.size is %zu and its byte %zu is set: past the %zu bytes that quern %s "
                                  "knows, zeros are accepted",
                                  name, theirs, i, mine, quern_version());
    memcpy(known, given, theirs < mine ? theirs : mine);
    memcpy(known, &mine, sizeof mine);
    return QUERN_OK;
}

void op_struct_give(void *given, const void *known)
{
    size_t mine, theirs;
    memcpy(&mine, known, sizeof mine);
    memcpy(&theirs, given, sizeof theirs);
    memcpy(given, known, theirs < mine ? theirs : mine);
    memcpy(given, &theirs, sizeof theirs);
}

quern_status op_exec(const quern_exec *given, quern_exec *exec)
{
    *exec = (quern_exec)QUERN_EXEC_INIT;
    return given != NULL ? op_struct(exec, given, "exec", "QUERN_EXEC_INIT") : QUERN_OK;
}
