/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * arena.h - carves a caller's workspace. The same function that carves also computes the size: with
 * base NULL nothing is handed out and only `used` grows.
 *
 *     size_t size_or_carve(arena *a, ...) { plan->scores = arena_take(a, bytes); ... }
 */
#ifndef QUERN_CORE_ARENA_H
#define QUERN_CORE_ARENA_H

#include <stddef.h>
#include <stdint.h>

enum { ARENA_ALIGN = 64 };

typedef struct arena {
    char *base; /* NULL while sizing */
    size_t used;
} arena;

/* An arena for sizing (workspace NULL) or carving. The caller's pointer may have any alignment: sizes
 * from arena_size() leave room to align it. */
static inline arena arena_on(void *workspace)
{
    uintptr_t p = ((uintptr_t)workspace + ARENA_ALIGN - 1) & ~(uintptr_t)(ARENA_ALIGN - 1);
    return (arena){(char *)p, 0};
}

/* `bytes` bytes at a multiple of 64, or NULL while sizing. */
static inline void *arena_take(arena *a, size_t bytes)
{
    /* A caller checks arena_size() before memory is touched, so this may lie past a workspace that is too
     * small. */
    void *p = a->base != NULL ? (void *)((uintptr_t)a->base + a->used) : NULL;
    a->used += (bytes + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    return p;
}

/* What a caller must hand over for what was taken so far. */
static inline size_t arena_size(const arena *a)
{
    return a->used > 0 ? a->used + ARENA_ALIGN - 1 : 0;
}

#endif
