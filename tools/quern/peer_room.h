/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* peer_room.h - whether a peer of oneDNN may run. oneDNN ends the process where it gets no memory or no
 * thread. */
#ifndef QUERN_TOOLS_PEER_ROOM_H
#define QUERN_TOOLS_PEER_ROOM_H

#include "team.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>

/* Whether there are so many threads, and for each what oneDNN takes of the address space, and 128 MiB. */
static inline bool peer_has_room(int threads)
{
    const size_t bytes = (size_t)(threads + 2) << 26;
    if (openmp_team(threads) != threads) return false;
    void *room = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, bytes) == 0;
}

#endif
