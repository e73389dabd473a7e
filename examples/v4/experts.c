/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * experts.c - the layers' experts in the layout that quern_moe_forward() reads fastest, which can be kept in
 * a file that is mapped: a header with the sums of the layers that are there, then what
 * quern_checkpoint_experts() writes for each. A run goes on where one ended; a damaged file is refused.
 */
#include "v4.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALIGN = 4096 };
typedef struct header {
    char magic[8];
    uint64_t version, source, bytes; /* of repacked experts; which checkpoint and device; of the file */
    uint64_t sum[LAYERS_MOST];       /* 0: the layer is not there */
} header;

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Other checkpoints have other names, sizes or first bytes of experts. */
static uint64_t source_of(const v4_model *m)
{
    uint64_t sum = m->cuda;
    for (size_t i = 0; i < quern_checkpoint_count(m->checkpoint); i++) {
        quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
        if (quern_checkpoint_info(m->checkpoint, i, &t) != QUERN_OK) continue;
        sum = checksum(sum ^ t.bytes, t.name, strlen(t.name));
        if (strstr(t.name, ".experts.0.") != NULL || strstr(t.name, ".shared_experts.") != NULL)
            sum = checksum(sum, t.data, t.bytes < 64 ? t.bytes : 64);
    }
    return sum;
}

/* Lays the layer's experts out in memory, or finds them there. */
static void lay_out(v4_model *m, int layer, bool filled, void *memory, size_t bytes)
{
    const v4_config *c = &m->config;
    quern_checkpoint_moe *e = &m->layer[layer].experts;
    *e = (quern_checkpoint_moe)QUERN_CHECKPOINT_MOE_INIT;
    note(m, true, "experts of layer %d of %d", layer + 1, (int)c->layers);
    check((filled ? quern_checkpoint_experts_filled : quern_checkpoint_experts)(
        m->ctx, m->checkpoint, layer, QUERN_CPU, !m->cuda, memory, bytes, e));
    quern_moe_tensors *t = &e->tensors;
    const bool hash = layer < c->hash_layers; /* a table of experts by token instead of a bias */
    const quern_tensor *choice = hash ? t->tid2eid : t->bias;
    *(hash ? &t->bias : &t->tid2eid) = NULL;
    if (t->weight == NULL || choice == NULL || choice->shape[0] != (hash ? c->vocab : c->experts) ||
        (hash && choice->shape[1] != c->top))
        fail("layer %d: ffn.gate has no weight, or no %s", layer, hash ? "tid2eid" : "bias");
    if (e->experts != c->experts || e->hidden != c->width || e->intermediate != c->inner ||
        e->shared_intermediate != c->shared * c->inner)
        fail("layer %d has other experts than config.json says", layer);
}

static void repack(v4_model *m, const quern_tensor **codes, const quern_tensor **scales,
                   const quern_tensor **repacked, quern_tensor *to)
{
    int64_t bytes;
    if (*codes == NULL) return;
    check(quern_nvfp4_repacked_bytes(m->ctx, QUERN_CUDA, 0, (*codes)->shape[2], 2 * (*codes)->shape[1],
                                     &bytes));
    *to = make(m, QUERN_U8, SHAPE(m->config.experts, bytes));
    op_prepack(m, *codes, *scales, to);
    check(quern_cuda_free(0, (*codes)->data));
    check(quern_cuda_free(0, (*scales)->data));
    *codes = *scales = NULL;
    *repacked = to;
}

/* A GPU gets copies, and repacks the routed experts' codes there. */
static void upload(v4_model *m, v4_layer *l)
{
    quern_moe_tensors *t = &l->experts.tensors;
    for (quern_tensor *v = l->experts.views; v < l->experts.views + 24; v++)
        if (v->data != NULL) *v = place(m, *v);
    repack(m, &t->gate_up_codes, &t->gate_up_scales, &t->gate_up_repacked, &l->repacked[0]);
    repack(m, &t->down_codes, &t->down_scales, &t->down_repacked, &l->repacked[1]);
}

/* Memory for all: a file, made where there is none, or this process's own. */
static void map_all(v4_model *m, const char *path, size_t bytes, int *lock)
{
    const header want = {"quernv4", QUERN_MOE_PREPACK_VERSION, source_of(m), bytes, {0}}, none = {0};
    header have = {0};
    const int kind = path != NULL ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    struct stat about = {0};
    if (path != NULL) {
        const int fd = *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0 || flock(fd, LOCK_EX) != 0 || fstat(fd, &about) != 0)
            fail("%s cannot be opened: %s", path, strerror(errno));
        const bool regular = S_ISREG(about.st_mode), whole = (size_t)about.st_size == bytes;
        const bool blank = regular && (size_t)about.st_size <= bytes && /* new, or not yet at its size */
                           pread(fd, &have, sizeof have, 0) >= 0 && memcmp(&have, &none, sizeof have) == 0;
        const int error = blank ? posix_fallocate(fd, 0, (off_t)bytes) : 0;
        if (error != 0 && ftruncate(fd, 0) == 0)
            fail("%s cannot have %.1f GB: %s", path, (double)bytes / 1e9, strerror(error));
        if (!regular || (!blank && !whole)) fail("%s is damaged, or of another checkpoint", path);
    }
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, kind, *lock, 0);
    if (map == MAP_FAILED) fail("no memory for experts of %.1f GB: %s", (double)bytes / 1e9, strerror(errno));
    if (path == NULL) (void)madvise(map, bytes, MADV_HUGEPAGE);
    m->mapped = map;
    if (memcmp(map, &none, sizeof none) == 0) memcpy(map, &want, sizeof want);
    if (memcmp(map, &want, offsetof(header, sum)) != 0)
        fail("%s is damaged, or of another checkpoint, device or version", path);
}

static void open_layer(v4_model *m, const char *path, int layer, void *memory, size_t bytes)
{
    uint64_t *sum = &((header *)m->mapped)->sum[layer];
    const bool filled = *sum != 0;
    if (filled && (checksum(0, memory, bytes) | 1) != *sum) fail("%s is damaged in layer %d", path, layer);
    lay_out(m, layer, filled, memory, bytes);
    if (path != NULL && !filled) {
        if (msync(memory, bytes, MS_SYNC) != 0) fail("%s cannot be written: %s", path, strerror(errno));
        *sum = checksum(0, memory, bytes) | 1;
    }
    if (m->cuda) upload(m, &m->layer[layer]);
    if (m->cuda && path == NULL) (void)madvise(memory, bytes, MADV_DONTNEED); /* the GPU has them */
}

void experts_open(v4_model *m, const char *cache)
{
    size_t all = aligned(sizeof(header)), bytes[LAYERS_MOST];
    int lock = -1; /* the file, until all layers are there */
    for (int i = 0; i < m->config.layers; all += aligned(bytes[i++]))
        check(quern_checkpoint_experts_bytes(m->ctx, m->checkpoint, i, QUERN_CPU, !m->cuda, &bytes[i]));
    map_all(m, cache, all, &lock);
    char *at = (char *)m->mapped + aligned(sizeof(header));
    for (int i = 0; i < m->config.layers; at += aligned(bytes[i++])) open_layer(m, cache, i, at, bytes[i]);
    (void)mprotect(m->mapped, all, PROT_READ);
    if (lock >= 0) close(lock);
}
