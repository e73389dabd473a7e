/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plugin.c - libquern_cuda at run time, and cuda.h over its table.
 *
 * The loaded table never changes, so a reader needs one atomic load. A failed attempt is not remembered: the
 * next call tries again. The library stays loaded until the process ends, for its kernels may be running.
 */
#include "runtime/plugin.h"

#include "runtime/build_id.h"
#include "core/error.h"
#include "core/library.h"
#include "core/op.h"

#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define LIBRARY "libquern_cuda.so.0"

enum { DEVICES_MAX = 64 };

static _Atomic(const quern_cuda_plugin *) loaded;
static atomic_bool usable[DEVICES_MAX]; /* devices that passed check_device */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char here = 0; /* an address inside this library */

/* Of the first object, which is the program: whether it names no loader. */
static int is_static(struct dl_phdr_info *program, size_t size, void *result)
{
    (void)size;
    bool interpreted = false;
    for (int i = 0; i < program->dlpi_phnum; i++) interpreted |= program->dlpi_phdr[i].p_type == PT_INTERP;
    *(bool *)result = !interpreted;
    return 1;
}

static const quern_cuda_plugin *load(void)
{
    bool static_program = false;
    (void)dl_iterate_phdr(is_static, &static_program);
    if (static_program) { /* the backend would bring a second C library into it */
        error_set(QUERN_ERR_DEVICE, "device cuda: this program is linked statically: one that is linked to "
                                    "shared libraries can load " LIBRARY);
        return NULL;
    }
    void *library = library_open(LIBRARY, "QUERN_CUDA_LIBRARY", &here);
    if (library == NULL) {
        const char *why = dlerror();
        error_set(QUERN_ERR_DEVICE,
                  "device cuda: no backend (%s): " LIBRARY
                  " beside libquern, or named by QUERN_CUDA_LIBRARY, is needed",
                  TEXT_NAME(why != NULL ? why : "not found"));
        return NULL;
    }
    quern_cuda_plugin_entry *entry = NULL;
    void *symbol = dlsym(library, QUERN_CUDA_PLUGIN_SYMBOL);
    memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from an object's to a function's pointer */
    const quern_cuda_plugin *plugin = entry != NULL ? entry(error_set) : NULL;
    if (plugin != NULL && plugin->build_id == build_id() && strcmp(plugin->version, quern_version()) == 0)
        return plugin;
    error_set(QUERN_ERR_DEVICE,
              "device cuda: the backend that was found is of another build (id %016llx): that of quern %s "
              "with id %016llx is needed",
              plugin != NULL ? (unsigned long long)plugin->build_id : 0, quern_version(),
              (unsigned long long)build_id());
    dlclose(library);
    return NULL;
}

static const quern_cuda_plugin *plugin_get(void)
{
    const quern_cuda_plugin *plugin = atomic_load_explicit(&loaded, memory_order_acquire);
    if (plugin != NULL) return plugin;
    pthread_mutex_lock(&lock);
    plugin = atomic_load_explicit(&loaded, memory_order_relaxed);
    if (plugin == NULL && (plugin = load()) != NULL)
        atomic_store_explicit(&loaded, plugin, memory_order_release);
    pthread_mutex_unlock(&lock);
    return plugin;
}

const quern_cuda_plugin *plugin_for(int32_t device)
{
    const quern_cuda_plugin *plugin = plugin_get();
    if (plugin == NULL) return NULL;
    const bool slot = device >= 0 && device < DEVICES_MAX;
    if (slot && atomic_load_explicit(&usable[device], memory_order_relaxed)) return plugin;
    if (plugin->check_device(device) != QUERN_OK) return NULL;
    if (slot) atomic_store_explicit(&usable[device], true, memory_order_relaxed);
    return plugin;
}

quern_status plugin_check_pointer(const void *p, quern_device device, int32_t device_id, const char *name)
{
    const quern_cuda_plugin *plugin = NULL;
    if (device != QUERN_CPU) {
        if ((plugin = plugin_for(device_id)) == NULL) return error_status();
    } else if ((plugin = atomic_load_explicit(&loaded, memory_order_acquire)) == NULL ||
               !atomic_load_explicit(&usable[0], memory_order_relaxed)) {
        return QUERN_OK;
    }
    return plugin->check_pointer(p, device, device_id, name);
}

/* ---- cuda.h ---- */

static quern_status need(const void *p, const char *name)
{
    return p != NULL ? QUERN_OK : error_argument("%s is NULL: a pointer is needed", name);
}

quern_status quern_cuda_check(int32_t device)
{
    return plugin_for(device) != NULL ? QUERN_OK : error_status();
}

quern_status quern_cuda_device_count(int32_t *count)
{
    const quern_status status = need(count, "count");
    if (status != QUERN_OK) return status;
    const quern_cuda_plugin *plugin = plugin_get();
    return plugin != NULL ? plugin->count(count) : error_status();
}

quern_status quern_cuda_device_get(int32_t device, quern_cuda_device *info)
{
    quern_cuda_device known = QUERN_CUDA_DEVICE_INIT;
    quern_status status = op_struct(&known, info, "info", "QUERN_CUDA_DEVICE_INIT");
    if (status != QUERN_OK) return status;
    const quern_cuda_plugin *plugin = plugin_for(device);
    status = plugin != NULL ? plugin->device(device, &known) : error_status();
    if (status == QUERN_OK) op_struct_give(info, &known);
    return status;
}

/* The rest: a pointer that may not be NULL, the device, the table's row. */
#define FORWARD(pointer, row, ...)                                                                           \
    const quern_status status = need(pointer, #pointer);                                                     \
    const quern_cuda_plugin *plugin = status == QUERN_OK ? plugin_for(device) : NULL;                        \
    return plugin != NULL ? plugin->row(device, __VA_ARGS__) : error_status()

quern_status quern_cuda_allocate(int32_t device, size_t bytes, void **p)
{
    FORWARD(p, allocate, bytes, p);
}

quern_status quern_cuda_free(int32_t device, void *p)
{
    if (p == NULL) return QUERN_OK;
    FORWARD(p, release, p);
}

quern_status quern_cuda_copy(int32_t device, void *to, const void *from, size_t bytes, void *stream)
{
    if (bytes == 0) return QUERN_OK;
    if (from == NULL) return error_argument("from is NULL: %zu bytes are to be read", bytes);
    FORWARD(to, copy, to, from, bytes, stream);
}

quern_status quern_cuda_fill(int32_t device, void *to, uint8_t value, size_t bytes, void *stream)
{
    if (bytes == 0) return QUERN_OK;
    FORWARD(to, fill, to, value, bytes, stream);
}

quern_status quern_cuda_stream_create(int32_t device, void **stream)
{
    FORWARD(stream, stream_create, stream);
}

quern_status quern_cuda_stream_destroy(int32_t device, void *stream)
{
    if (stream == NULL) return QUERN_OK;
    FORWARD(stream, stream_destroy, stream);
}

quern_status quern_cuda_synchronize(int32_t device, void *stream)
{
    const quern_cuda_plugin *plugin = plugin_for(device);
    return plugin != NULL ? plugin->synchronize(device, stream) : error_status();
}

quern_status quern_cuda_query(int32_t device, void *stream, bool *done)
{
    FORWARD(done, query, stream, done);
}

quern_status quern_cuda_event_create(int32_t device, void **event)
{
    FORWARD(event, event_create, event);
}

quern_status quern_cuda_event_destroy(int32_t device, void *event)
{
    if (event == NULL) return QUERN_OK;
    FORWARD(event, event_destroy, event);
}

quern_status quern_cuda_event_record(int32_t device, void *event, void *stream)
{
    FORWARD(event, event_record, event, stream);
}

quern_status quern_cuda_event_elapsed(int32_t device, void *from, void *to, double *ms)
{
    if (from == NULL || to == NULL)
        return error_argument("%s is NULL: an event is needed", from == NULL ? "from" : "to");
    FORWARD(ms, event_elapsed, from, to, ms);
}
