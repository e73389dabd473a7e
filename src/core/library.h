/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* library.h - where a shared library that is loaded at run time is looked for. C, and C++ in libquern_cuda.
 */
#ifndef QUERN_CORE_LIBRARY_H
#define QUERN_CORE_LIBRARY_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Opens the file that the environment variable `variable` names, and then no other. Where it is not set:
 * `name` beside the file that holds the address `inside`, else `name` where the loader looks. NULL: dlerror()
 * says why. */
static inline void *library_open(const char *name, const char *variable, const void *inside)
{
    const char *named = secure_getenv(variable);
    if (named != NULL && *named != '\0') return dlopen(named, RTLD_NOW | RTLD_LOCAL);
    Dl_info info;
    memset(&info, 0, sizeof info);
    const char *slash =
        dladdr(inside, &info) != 0 && info.dli_fname != NULL ? strrchr(info.dli_fname, '/') : NULL;
    if (slash != NULL) {
        char path[4096];
        const int n =
            snprintf(path, sizeof path, "%.*s/%s", (int)(slash - info.dli_fname), info.dli_fname, name);
        void *library = n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library != NULL) return library;
    }
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

#endif
