/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* replays.h - the replays (backend.h) that a context keeps for ordinary calls: a call that is made again on
 * the same stream starts as a plan's run does. */
#ifndef QUERN_RUNTIME_REPLAYS_H
#define QUERN_RUNTIME_REPLAYS_H

#include <stdatomic.h>
#include <stdint.h>

struct op_call;

enum { REPLAYS_MAX = 64 };

typedef struct replays {
    struct {
        atomic_uint_fast64_t key;           /* a hash of a call that was seen; 0: none */
        _Atomic(struct kept_replay *) kept; /* NULL: the call was seen once. Never changes again. */
    } slot[REPLAYS_MAX];
} replays;

/* The replay of a prepared call, whose `given` and `replay` are NULL. Returns NULL where the backend has
 * none, at the first sight of such a call, and where all places are taken. */
void *replays_find(replays *all, const struct op_call *call, const void *stream);
/* No call may be running. */
void replays_close(replays *all);

#endif
