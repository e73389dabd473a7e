/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm.c - the one file that knows oneDNN (its C API, version 2.6 and 3).
 *
 * A product runs on the calling thread; the caller cuts the work into tiles by shape and hands them to its
 * team. oneDNN's primitives are made for one thread, because its own division of work over threads would make
 * the bits depend on their number. Sums are cut at GEMM_DEPTH.
 *
 * oneDNN takes full tiles at the machine's best level, where its AVX-512 kernels (named brg...) accept the
 * operands as they stand: A and C without gaps, B plain, or in panels of 64 columns, which are its formats
 * BA16a64b and BA16a64b2a. Its other kernels are not used: they allocate memory, or are references a thousand
 * times slower. At lower levels, for tails and without oneDNN the micro-kernel of attention runs instead: B
 * by panels of 64 columns and 128 rows (32 KiB, in L1 while the rows of A pass), C added to once per 128.
 *
 * Limit: FMA. One core of a Zen 5, tile 256 x 128 x 512: oneDNN 0.98 of the f32 and 0.99 of the bf16 peak,
 * the micro-kernel 0.99 and 0.98.
 */
#include "cpu/gemm.h"
#include "cpu/levels.h"

static const int64_t block_depth = 128;

static void own_product(const gemm *g, int64_t m, int64_t n, int64_t k, const char *a, const float *b,
                        float *c, bool accumulate)
{
    const gemm_shape *s = &g->shape;
    const attention_kernels *kernels = g->kernels;
    const bool pairs = s->dtype == QUERN_BF16;
    const int64_t words = pairs ? k / 2 : k, lda = pairs ? s->lda / 2 : s->lda;
    const int64_t a_row = s->a_transposed ? 1 : lda, a_k = s->a_transposed ? lda : 1;
    mm_kernel *mm = pairs ? kernels->mm_bf16 : kernels->mm_f32;
    for (int64_t p = 0; p == 0 || p < words; p += block_depth) {
        const int64_t depth = words - p < block_depth ? words - p : block_depth;
        for (int64_t j = 0; j < n; j += kernels->panel)
            mm(m, n - j < kernels->panel ? n - j : kernels->panel, depth,
               (const float *)(const void *)a + p * a_k, a_row, a_k,
               b + j / kernels->panel * s->panel_stride + p * s->ldb, s->ldb, c + j, s->ldc,
               accumulate || p > 0);
    }
}

#ifdef QUERN_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#include <omp.h>

#include <stdlib.h>
#include <string.h>

/* NULL in a static program that was linked without oneDNN. */
#pragma weak dnnl_get_effective_cpu_isa

typedef struct gemm_primitive {
    struct gemm_primitive *next;
    gemm_shape shape;
    bool add;
    dnnl_primitive_desc_t description; /* owns the layouts below */
    dnnl_primitive_t primitive;        /* NULL: oneDNN has no good kernel for the shape */
    dnnl_engine_t engine;
    size_t scratch_bytes;
} gemm_primitive;

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t layout_view;

static bool make_layout(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                        const dnnl_dims_t strides)
{
    return dnnl_memory_desc_create_with_strides(md, 2, dims, type, strides) == dnnl_success;
}

static bool make_panels(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                        dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_create_with_tag(md, 2, dims, type, tag) == dnnl_success;
}

static void free_layouts(dnnl_memory_desc_t md[3])
{
    for (int i = 0; i < 3; i++)
        if (md[i] != NULL) dnnl_memory_desc_destroy(md[i]);
}

static bool describe(gemm_primitive *p, const dnnl_memory_desc_t md[3], const_dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(&p->description, p->engine, md[0], md[1], NULL, md[2], attr) ==
           dnnl_success;
}

static bool append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef) == dnnl_success;
}
#else
typedef const dnnl_memory_desc_t *layout_view;

static bool make_layout(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                        const dnnl_dims_t strides)
{
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides) == dnnl_success;
}

static bool make_panels(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                        dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_init_by_tag(md, 2, dims, type, tag) == dnnl_success;
}

static void free_layouts(dnnl_memory_desc_t md[3])
{
    (void)md;
}

static bool describe(gemm_primitive *p, const dnnl_memory_desc_t md[3], const_dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t product;
    return dnnl_matmul_desc_init(&product, &md[0], &md[1], NULL, &md[2]) == dnnl_success &&
           dnnl_primitive_desc_create(&p->description, &product, attr, p->engine, NULL) == dnnl_success;
}

static bool append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f) == dnnl_success;
}
#endif

/* Sets the number of threads, which oneDNN reads, to one. Returns the previous number, to restore it. */
static int one_thread(void)
{
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    return threads;
}

static layout_view layout_of(const gemm_primitive *p, dnnl_query_t what)
{
    return dnnl_primitive_desc_query_md(p->description, what, 0);
}

static bool describe_operands(const gemm_shape *s, dnnl_memory_desc_t md[3])
{
    const dnnl_data_type_t type = s->dtype == QUERN_BF16 ? dnnl_bf16 : dnnl_f32;
    const dnnl_dims_t a = {s->m, s->k}, b = {s->k, s->n}, c = {s->m, s->n};
    const dnnl_dims_t a_strides = {s->a_transposed ? 1 : s->lda, s->a_transposed ? s->lda : 1},
                      b_strides = {s->ldb, 1}, c_strides = {s->ldc, 1};
    const int64_t pairs = s->dtype == QUERN_BF16 ? 2 : 1;
    const bool panels =
        s->ldb == 64 && s->panel_stride * pairs == 64 * s->k && s->n % 64 == 0 && s->k % (16 * pairs) == 0;
    if (!panels && (pairs == 2 || s->panel_stride != 64)) return false;
    return make_layout(&md[0], a, type, a_strides) && make_layout(&md[2], c, dnnl_f32, c_strides) &&
           (panels ? make_panels(&md[1], b, type, pairs == 2 ? dnnl_BA16a64b2a : dnnl_BA16a64b)
                   : make_layout(&md[1], b, type, b_strides));
}

static void make_primitive(gemm_primitive *p)
{
    dnnl_memory_desc_t md[3];
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t ops = NULL;
    const char *name = "";
    memset(md, 0, sizeof md);
    bool ok = describe_operands(&p->shape, md) && dnnl_primitive_attr_create(&attr) == dnnl_success &&
              dnnl_post_ops_create(&ops) == dnnl_success &&
              dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) == dnnl_success;
    if (ok && p->add) ok = append_sum(ops) && dnnl_primitive_attr_set_post_ops(attr, ops) == dnnl_success;
    ok = ok && describe(p, md, attr) &&
         dnnl_primitive_desc_query(p->description, dnnl_query_impl_info_str, 0, &name) == dnnl_success;
    if (ok && strncmp(name, "brg", 3) == 0 &&
        dnnl_primitive_create(&p->primitive, p->description) == dnnl_success)
        p->scratch_bytes = dnnl_memory_desc_get_size(layout_of(p, dnnl_query_scratchpad_md));
    if (ops != NULL) dnnl_post_ops_destroy(ops);
    if (attr != NULL) dnnl_primitive_attr_destroy(attr);
    free_layouts(md);
}

static bool same_shape(const gemm_shape *x, const gemm_shape *y)
{
    return x->dtype == y->dtype && x->m == y->m && x->n == y->n && x->k == y->k && x->lda == y->lda &&
           x->a_transposed == y->a_transposed && x->ldb == y->ldb && x->panel_stride == y->panel_stride &&
           x->ldc == y->ldc;
}

/* Finds or makes the primitive of a shape. The caller holds the lock. */
static const gemm_primitive *primitive_for(gemm_cache *cache, const gemm_shape *shape, bool add)
{
    gemm_primitive *p = cache->first;
    while (p != NULL && (p->add != add || !same_shape(&p->shape, shape))) p = p->next;
    if (p == NULL && (p = calloc(1, sizeof *p)) != NULL) {
        p->shape = *shape;
        p->add = add;
        p->engine = cache->engine;
        make_primitive(p);
        p->next = cache->first;
        cache->first = p;
    }
    return p != NULL && p->primitive != NULL ? p : NULL;
}

static void find_primitives(const stage_exec *exec, gemm *g)
{
    gemm_cache *cache = exec->gemm;
    const unsigned wanted =
        g->shape.dtype == QUERN_BF16 ? dnnl_cpu_isa_avx512_core_bf16 : dnnl_cpu_isa_avx512_core;
    if (cache == NULL || dnnl_get_effective_cpu_isa == NULL || g->kernels->panel != 64 ||
        exec->cpu_level != quern_cpu_level_detect() ||
        ((unsigned)dnnl_get_effective_cpu_isa() & wanted) != wanted)
        return;
    gemm_shape shape = g->shape;
    if (shape.k > GEMM_DEPTH) shape.k = GEMM_DEPTH;
    if (shape.m < 1 || shape.n < 1 || shape.k < 1) return;
    pthread_mutex_lock(&cache->lock);
    const int threads = one_thread();
    dnnl_engine_t engine = cache->engine;
    if (engine != NULL || dnnl_engine_create(&engine, dnnl_cpu, 0) == dnnl_success) {
        cache->engine = engine;
        g->store = primitive_for(cache, &shape, false);
        g->add = primitive_for(cache, &shape, true);
    }
    omp_set_num_threads(threads);
    pthread_mutex_unlock(&cache->lock);
    const gemm_primitive *both[] = {g->store, g->add};
    for (int i = 0; i < 2; i++)
        if (both[i] != NULL && both[i]->scratch_bytes > g->scratch_bytes)
            g->scratch_bytes = both[i]->scratch_bytes;
}

static bool run_primitive(const gemm_primitive *p, void *const operands[4])
{
    static const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    static const dnnl_query_t queries[] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md,
                                           dnnl_query_scratchpad_md};
    dnnl_exec_arg_t args[4];
    dnnl_stream_t stream = NULL;
    const int threads = one_thread();
    int made = 0;
    bool ok = dnnl_stream_create(&stream, p->engine, dnnl_stream_default_flags) == dnnl_success;
    for (; made < 4 && ok; made += ok) {
        args[made].arg = names[made];
        ok = dnnl_memory_create(&args[made].memory, layout_of(p, queries[made]), p->engine, operands[made]) ==
             dnnl_success;
    }
    ok = ok && dnnl_primitive_execute(p->primitive, stream, 4, args) == dnnl_success &&
         dnnl_stream_wait(stream) == dnnl_success;
    while (made > 0) dnnl_memory_destroy(args[--made].memory);
    if (stream != NULL) dnnl_stream_destroy(stream);
    omp_set_num_threads(threads);
    return ok;
}

void gemm_cache_close(gemm_cache *cache)
{
    for (gemm_primitive *p = cache->first, *next; p != NULL; p = next) {
        next = p->next;
        if (p->primitive != NULL) dnnl_primitive_destroy(p->primitive);
        if (p->description != NULL) dnnl_primitive_desc_destroy(p->description);
        free(p);
    }
    if (cache->engine != NULL) dnnl_engine_destroy(cache->engine);
    pthread_mutex_destroy(&cache->lock);
}
#else
static void find_primitives(const stage_exec *exec, gemm *g)
{
    (void)exec, (void)g;
}

static bool run_primitive(const struct gemm_primitive *p, void *const operands[4])
{
    (void)p, (void)operands;
    return false;
}

void gemm_cache_close(gemm_cache *cache)
{
    pthread_mutex_destroy(&cache->lock);
}
#endif

void gemm_cache_open(gemm_cache *cache)
{
    *cache = (gemm_cache){.first = NULL};
    pthread_mutex_init(&cache->lock, NULL);
}

gemm gemm_plan(const stage_exec *exec, const gemm_shape *shape)
{
    gemm g = {.shape = *shape, .kernels = cpu_kernels_for(exec->cpu_level)->attention};
    find_primitives(exec, &g);
    return g;
}

void gemm_run(const gemm *g, int64_t m, int64_t n, int64_t k, const void *a, const void *b, float *c,
              bool accumulate, void *scratch)
{
    const gemm_shape *s = &g->shape;
    const int64_t full = s->k < GEMM_DEPTH ? s->k : GEMM_DEPTH, element = s->dtype == QUERN_BF16 ? 2 : 4;
    for (int64_t p = 0; p == 0 || p < k; p += GEMM_DEPTH) {
        const int64_t depth = k - p < GEMM_DEPTH ? k - p : GEMM_DEPTH;
        const char *rows = (const char *)a + p * element * (s->a_transposed ? s->lda : 1);
        const float *columns = (const float *)b + p * element / 4 * s->ldb;
        const struct gemm_primitive *primitive = accumulate || p > 0 ? g->add : g->store;
        if (primitive != NULL && m == s->m && n == s->n && depth == full &&
            run_primitive(primitive,
                          (void *[]){(void *)(uintptr_t)rows, (void *)(uintptr_t)columns, c, scratch}))
            continue;
        own_product(g, m, n, depth, rows, columns, c, accumulate || p > 0);
    }
}
