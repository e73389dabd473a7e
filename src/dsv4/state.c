/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* state.c - streaming states in the caller's memory: initialising, rolling back, copying and saving them. */
#include "dsv4/dsv4.h"

#include "core/error.h"

#include <math.h>
#include <string.h>

enum { STATE_ALIGN = 64 };
static const uint32_t state_magic = 0x34565351; /* "QSV4" */
static const uint32_t state_version = 1;

/* Fills the header of an empty state. */
static quern_status header_of(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                              pool_state *header)
{
    quern_dsv4_compress_params p;
    *header = (pool_state){.magic = 0};
    const quern_status status = dsv4_params(params, &p);
    if (status != QUERN_OK) return status;
    if (width < 1 || width > DSV4_WIDTH_MOST)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "width is %lld: 1 to %d are accepted", (long long)width,
                         DSV4_WIDTH_MOST);
    if (ring < 0 || ring > DSV4_RING_MOST)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ring is %lld: 0 to %d rows are accepted",
                         (long long)ring, DSV4_RING_MOST);
    *header = (pool_state){.magic = state_magic,
                           .version = state_version,
                           .ratio = (int32_t)p.ratio,
                           .overlap = p.kind == QUERN_DSV4_CSA,
                           .width = width,
                           .ring = ring,
                           .origin = p.start_abs_pos,
                           .position = p.start_abs_pos};
    return QUERN_OK;
}

static size_t packed_bytes(const pool_state *header)
{
    return sizeof *header + (size_t)pool_floats_of(header) * sizeof(float);
}

/* The aligned state in the caller's memory; NULL, with the error set, if the memory is NULL or too small. */
static pool_state *place(const pool_state *header, void *memory, size_t bytes)
{
    const size_t needed = packed_bytes(header) + STATE_ALIGN - 1;
    if (memory == NULL) error_set(QUERN_ERR_INVALID_ARGUMENT, "memory is NULL: %zu bytes are needed", needed);
    else if (bytes < needed)
        error_set(QUERN_ERR_WORKSPACE, "memory has %zu bytes: at least %zu are accepted", bytes, needed);
    else return (pool_state *)(((uintptr_t)memory + STATE_ALIGN - 1) & ~(uintptr_t)(STATE_ALIGN - 1));
    return NULL;
}

void dsv4_state_advance(pool_state *state, int64_t tokens, bool after_block)
{
    state->position += tokens;
    state->held = state->held + tokens < state->ring ? state->held + tokens : state->ring;
    if (tokens > 0 || after_block) state->begun = 1;
}

quern_status dsv4_state_check(const quern_dsv4_state *state, const char *name)
{
    const pool_state *s = (const pool_state *)state;
    if (s == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a state is needed", name);
    if (s->magic != state_magic || s->version != state_version)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%s is no state: one of quern_dsv4_state_create() is accepted", name);
    return QUERN_OK;
}

quern_status quern_dsv4_state_size(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                                   size_t *bytes)
{
    pool_state header;
    const quern_status status = header_of(params, width, ring, &header);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = packed_bytes(&header) + STATE_ALIGN - 1;
    return QUERN_OK;
}

quern_status quern_dsv4_state_create(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                                     void *memory, size_t bytes, quern_dsv4_state **state)
{
    pool_state header;
    const quern_status status = header_of(params, width, ring, &header);
    if (status != QUERN_OK) return status;
    if (state == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "state is NULL: a place for the state is needed");
    pool_state *at = place(&header, memory, bytes);
    if (at == NULL) return error_status();
    *at = header;
    float *data = pool_state_data(at);
    memset(data, 0, (size_t)pool_floats_of(at) * sizeof *data);
    for (int64_t i = 0; i < pool_sums_floats(at->overlap != 0, width);
         i += 3 * width) /* the largest logit of each accumulator */
        for (int64_t c = 0; c < width; c++) data[i + c] = -INFINITY;
    *state = (quern_dsv4_state *)at;
    return QUERN_OK;
}

quern_status quern_dsv4_state_position(const quern_dsv4_state *state, int64_t *position, int64_t *held)
{
    const quern_status status = dsv4_state_check(state, "state");
    if (status != QUERN_OK) return status;
    if (position != NULL) *position = ((const pool_state *)state)->position;
    if (held != NULL) *held = ((const pool_state *)state)->held;
    return QUERN_OK;
}

quern_status quern_dsv4_state_rollback(quern_dsv4_state *state, int64_t n)
{
    pool_state *s = (pool_state *)state;
    const quern_status status = dsv4_state_check(state, "state");
    if (status != QUERN_OK) return status;
    if (n < 0 || n > s->held)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "n is %lld: 0 to %lld tokens, those in the ring, are accepted", (long long)n,
                         (long long)s->held);
    s->position -= n;
    s->held -= n;
    return QUERN_OK;
}

quern_status quern_dsv4_state_fork(const quern_dsv4_state *state, void *memory, size_t bytes,
                                   quern_dsv4_state **copy)
{
    const quern_status status = dsv4_state_check(state, "state");
    if (status != QUERN_OK) return status;
    if (copy == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "copy is NULL: a place for the state is needed");
    pool_state *at = place((const pool_state *)state, memory, bytes);
    if (at == NULL) return error_status();
    memmove(at, state, packed_bytes((const pool_state *)state));
    *copy = (quern_dsv4_state *)at;
    return QUERN_OK;
}

uint64_t dsv4_checksum(const unsigned char *bytes, size_t count, size_t at)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ (i >= at && i < at + sizeof(uint64_t) ? 0 : bytes[i])) * 0x100000001b3u;
    return hash;
}

static uint64_t checksum_of(const void *bytes, size_t count)
{
    return dsv4_checksum(bytes, count, offsetof(pool_state, checksum));
}

quern_status quern_dsv4_state_save(const quern_dsv4_state *state, void *to, size_t *bytes)
{
    const pool_state *s = (const pool_state *)state;
    const quern_status status = dsv4_state_check(state, "state");
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "bytes is NULL: the size of `to`, or a place for it, is needed");
    const size_t needed = packed_bytes(s);
    if (to != NULL && *bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "bytes is %zu: at least %zu are accepted", *bytes, needed);
    *bytes = needed;
    if (to == NULL) return QUERN_OK;
    memcpy(to, s, needed);
    const uint64_t sum = checksum_of(to, needed);
    memcpy((char *)to + offsetof(pool_state, checksum), &sum, sizeof sum);
    return QUERN_OK;
}

/* Whether a saved header is valid; the bytes may hold any numbers. */
static bool is_sound(const pool_state *s)
{
    if (s->origin < 0 || s->position < s->origin || s->position > INT32_MAX) return false;
    const int64_t rows = s->position - s->origin;
    return s->held >= 0 && s->held <= s->ring && s->held <= rows && (s->begun == 0 || s->begun == 1) &&
           (s->begun == 1 || rows == 0);
}

/* Checks saved bytes against the header of an empty state. */
static quern_status check_saved(const pool_state *wanted, const void *from, size_t from_bytes)
{
    pool_state saved;
    if (from_bytes < sizeof saved)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: a saved state has at least %zu", from_bytes,
                         sizeof saved);
    memcpy(&saved, from, sizeof saved);
    if (saved.magic != state_magic)
        return error_set(QUERN_ERR_FORMAT, "from starts with %08x: a saved state starts with %08x",
                         saved.magic, state_magic);
    if (saved.version != state_version)
        return error_set(QUERN_ERR_FORMAT, "from has version %u: version %u is accepted", saved.version,
                         state_version);
    if (saved.ratio != wanted->ratio || saved.overlap != wanted->overlap || saved.width != wanted->width ||
        saved.ring != wanted->ring)
        return error_set(QUERN_ERR_FORMAT,
                         "from is a state of ratio %d, %s, width %lld, ring %lld: ratio %d, %s, width %lld, "
                         "ring %lld are accepted",
                         saved.ratio, saved.overlap ? "CSA" : "HCA", (long long)saved.width,
                         (long long)saved.ring, wanted->ratio, wanted->overlap ? "CSA" : "HCA",
                         (long long)wanted->width, (long long)wanted->ring);
    if (from_bytes != packed_bytes(wanted))
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: %zu are accepted", from_bytes,
                         packed_bytes(wanted));
    if (checksum_of(from, from_bytes) != saved.checksum || !is_sound(&saved))
        return error_set(QUERN_ERR_FORMAT, "from is damaged: its checksum is not that of its %zu bytes",
                         from_bytes);
    return QUERN_OK;
}

quern_status dsv4_state_check_saved(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                                    const void *from, size_t from_bytes, int64_t position, int64_t held)
{
    pool_state wanted, saved;
    quern_status status = header_of(params, width, ring, &wanted);
    if (status == QUERN_OK) status = check_saved(&wanted, from, from_bytes);
    if (status != QUERN_OK) return status;
    memcpy(&saved, from, sizeof saved);
    if (saved.origin == 0 && saved.position == position && saved.held >= held) return QUERN_OK;
    return error_set(QUERN_ERR_FORMAT,
                     "from has a state at position %lld that can take back %lld tokens: position %lld and at "
                     "least %lld are accepted",
                     (long long)saved.position, (long long)saved.held, (long long)position, (long long)held);
}

quern_status quern_dsv4_state_restore(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                                      const void *from, size_t from_bytes, void *memory, size_t bytes,
                                      quern_dsv4_state **state)
{
    pool_state wanted;
    quern_status status = header_of(params, width, ring, &wanted);
    if (status != QUERN_OK) return status;
    if (state == NULL || from == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: %s is needed",
                         state == NULL ? "state" : "from",
                         state == NULL ? "a place for the state" : "a saved state");
    pool_state *at = place(&wanted, memory, bytes);
    if (at == NULL) return error_status();
    if ((status = check_saved(&wanted, from, from_bytes)) != QUERN_OK) return status;
    memmove(at, from, from_bytes);
    at->checksum = 0;
    *state = (quern_dsv4_state *)at;
    return QUERN_OK;
}
