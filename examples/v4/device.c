/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* device.c - memory of the CPU or of a GPU, and tensors in it. */
#include "v4.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE = 2 << 20 };

static void *take(const v4_device *d, size_t bytes)
{
    void *p = NULL;
    bytes = bytes > 0 ? bytes : 1;
    if (d->cuda) return done(quern_cuda_allocate(0, bytes, &p)) ? p : NULL;
    const bool huge = bytes >= HUGE; /* rows of a projection are a page apart: large pages, fewer misses */
    if (posix_memalign(&p, huge ? HUGE : 64, bytes) == 0) {
        if (huge) (void)madvise(p, bytes, MADV_HUGEPAGE);
        return p;
    }
    fail("no memory for %.1f MB", (double)bytes / 1e6);
    return NULL;
}

static void give(const v4_device *d, void *p)
{
    if (p != NULL && d->cuda) (void)quern_cuda_free(0, p); /* the process ends, or a larger one follows */
    else free(p);
}

void device_close(v4_device *d)
{
    for (size_t i = 0; i < d->owned_count; i++) give(d, d->owned[i]);
    for (int i = 0; i < ROOMS; i++) give(d, d->room[i]);
    free(d->owned);
    quern_context_destroy(d->ctx);
}

void *device_take(v4_device *d, size_t bytes)
{
    void **owned = realloc(d->owned, (d->owned_count + 1) * sizeof *owned);
    if (owned == NULL) fail("no memory for a list of %zu arrays", d->owned_count + 1);
    d->owned = owned != NULL ? owned : d->owned;
    void *p = owned != NULL ? take(d, bytes) : NULL;
    if (p != NULL) d->owned[d->owned_count++] = p;
    return p;
}

bool device_copy(const v4_device *d, void *to, const void *from, size_t bytes)
{
    if (bytes == 0) return true;
    if (d->cuda)
        return done(quern_cuda_copy(0, to, from, bytes, NULL)) && done(quern_cuda_synchronize(0, NULL));
    memcpy(to, from, bytes);
    return true;
}

void *device_room(v4_device *d, int i, size_t bytes)
{
    if (d->room[i] != NULL && bytes <= d->room_bytes[i]) return d->room[i];
    give(d, d->room[i]);
    d->room[i] = take(d, bytes);
    d->room_bytes[i] = d->room[i] != NULL ? bytes : 0;
    return d->room[i];
}

quern_tensor view(const v4_device *d, const void *data, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous((void *)data, dtype, ndim, shape);
    t.device = d->cuda ? QUERN_CUDA : QUERN_CPU;
    return t;
}

size_t tensor_bytes(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

bool make(v4_device *d, quern_dtype dtype, int32_t ndim, const int64_t *shape, quern_tensor *t)
{
    *t = view(d, NULL, dtype, ndim, shape);
    t->data = device_take(d, tensor_bytes(t));
    return t->data != NULL;
}

quern_tensor room(v4_model *m, int i, int32_t ndim, const int64_t *shape)
{
    const quern_dtype dtype = i < IDS ? m->act : i < WIDE ? QUERN_I32 : QUERN_F32;
    quern_tensor t = view(&m->device, NULL, dtype, ndim, shape);
    t.data = device_room(&m->device, i, tensor_bytes(&t));
    return t;
}

float number(const void *data, quern_dtype dtype, int64_t i)
{
    float x;
    const uint32_t bits = dtype == QUERN_F32 ? ((const uint32_t *)data)[i]
                                             : (uint32_t)((const uint16_t *)data)[i] << 16; /* bf16 */
    memcpy(&x, &bits, sizeof x);
    return x;
}

bool widen(const v4_device *d, const quern_tensor *from, const quern_tensor *to)
{
    const size_t bytes = tensor_bytes(from), n = bytes / quern_dtype_size(from->dtype);
    float *values = malloc(n * sizeof *values + bytes);
    if (values == NULL) return fail("no memory for %zu numbers", n);
    bool ok = device_copy(d, values + n, from->data, bytes);
    for (size_t i = 0; ok && i < n; i++) values[i] = number(values + n, from->dtype, (int64_t)i);
    ok = ok && device_copy(d, to->data, values, n * sizeof *values);
    free(values);
    return ok;
}
