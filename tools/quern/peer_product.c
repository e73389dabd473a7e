/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* peer_product.c - one matmul primitive of oneDNN; b is reordered when the peer is opened. Written for
 * oneDNN 2. */
#include "peer_product.h"

#include "ceilings.h"
#include "peer_room.h"

#include <stdlib.h>

#if defined(QUERN_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#endif

#if defined(QUERN_ONEDNN) && DNNL_VERSION_MAJOR == 2
#include <omp.h>

enum { A, B, C, PLAIN_B, MEMORIES };

struct peer_product {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t product;
    dnnl_memory_t memory[MEMORIES];
    void *c;
};

/* Copies b into the layout that the product asks for. */
static bool reorder(peer_product *p, const dnnl_memory_desc_t *from, const dnnl_memory_desc_t *to, void *data)
{
    dnnl_primitive_desc_t pd = NULL;
    dnnl_primitive_t primitive = NULL;
    bool ok = dnnl_memory_create(&p->memory[PLAIN_B], from, p->engine, data) == dnnl_success &&
              dnnl_memory_create(&p->memory[B], to, p->engine, DNNL_MEMORY_ALLOCATE) == dnnl_success &&
              dnnl_reorder_primitive_desc_create(&pd, from, p->engine, to, p->engine, NULL) == dnnl_success &&
              dnnl_primitive_create(&primitive, pd) == dnnl_success;
    if (ok) {
        const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, p->memory[PLAIN_B]}, {DNNL_ARG_TO, p->memory[B]}};
        ok = dnnl_primitive_execute(primitive, p->stream, 2, args) == dnnl_success &&
             dnnl_stream_wait(p->stream) == dnnl_success;
    }
    if (primitive != NULL) dnnl_primitive_destroy(primitive);
    if (pd != NULL) dnnl_primitive_desc_destroy(pd);
    return ok;
}

static bool prepare(peer_product *p, const quern_tensor *a, const quern_tensor *b)
{
    const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
    const dnnl_data_type_t type = a->dtype == QUERN_BF16 ? dnnl_bf16 : dnnl_f32;
    const dnnl_dims_t a_dims = {m, k}, b_dims = {k, n}, c_dims = {m, n};
    dnnl_memory_desc_t md[MEMORIES];
    dnnl_matmul_desc_t op;
    dnnl_primitive_desc_t pd = NULL;
    p->c = bench_allocate((size_t)(m * n) * sizeof(float));
    bool ok = p->c != NULL && dnnl_engine_create(&p->engine, dnnl_cpu, 0) == dnnl_success &&
              dnnl_stream_create(&p->stream, p->engine, dnnl_stream_default_flags) == dnnl_success &&
              dnnl_memory_desc_init_by_tag(&md[A], 2, a_dims, type, dnnl_ab) == dnnl_success &&
              dnnl_memory_desc_init_by_tag(&md[B], 2, b_dims, type, dnnl_format_tag_any) == dnnl_success &&
              dnnl_memory_desc_init_by_tag(&md[PLAIN_B], 2, b_dims, type, dnnl_ab) == dnnl_success &&
              dnnl_memory_desc_init_by_tag(&md[C], 2, c_dims, dnnl_f32, dnnl_ab) == dnnl_success &&
              dnnl_matmul_desc_init(&op, &md[A], &md[B], NULL, &md[C]) == dnnl_success &&
              dnnl_primitive_desc_create(&pd, &op, NULL, p->engine, NULL) == dnnl_success &&
              dnnl_primitive_create(&p->product, pd) == dnnl_success &&
              reorder(p, &md[PLAIN_B], dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0), b->data) &&
              dnnl_memory_create(&p->memory[A], &md[A], p->engine, a->data) == dnnl_success &&
              dnnl_memory_create(&p->memory[C], &md[C], p->engine, p->c) == dnnl_success;
    if (pd != NULL) dnnl_primitive_desc_destroy(pd);
    return ok;
}

peer_product *peer_product_open(const quern_tensor *a, const quern_tensor *b)
{
    peer_product *p = a->dtype != QUERN_F16 && peer_has_room(1) ? calloc(1, sizeof *p) : NULL;
    if (p == NULL || prepare(p, a, b)) return p;
    peer_product_close(p);
    return NULL;
}

bool peer_product_run(peer_product *p, int threads)
{
    const dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, p->memory[A]}, {DNNL_ARG_WEIGHTS, p->memory[B]}, {DNNL_ARG_DST, p->memory[C]}};
    omp_set_num_threads(threads);
    return dnnl_primitive_execute(p->product, p->stream, 3, args) == dnnl_success &&
           dnnl_stream_wait(p->stream) == dnnl_success;
}

void peer_product_close(peer_product *p)
{
    if (p == NULL) return;
    for (int i = 0; i < MEMORIES; i++)
        if (p->memory[i] != NULL) dnnl_memory_destroy(p->memory[i]);
    if (p->product != NULL) dnnl_primitive_destroy(p->product);
    if (p->stream != NULL) dnnl_stream_destroy(p->stream);
    if (p->engine != NULL) dnnl_engine_destroy(p->engine);
    free(p->c);
    free(p);
}
#else
peer_product *peer_product_open(const quern_tensor *a, const quern_tensor *b)
{
    (void)a, (void)b;
    return NULL;
}

bool peer_product_run(peer_product *p, int threads)
{
    (void)p, (void)threads;
    return false;
}

void peer_product_close(peer_product *p)
{
    (void)p;
}
#endif
