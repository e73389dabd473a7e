/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_case.c - dense attention under test. */
#include "attention_case.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_tensor make(const oracle_dense *a, quern_dtype dtype, int64_t n, int64_t heads, int64_t dim,
                        test_layout layout, test_random *random)
{
    const int64_t shape[] = {a->batch, n, heads, dim};
    const int32_t varlen = a->cu_q != NULL;
    return test_tensor_make(random, dtype, 4 - varlen, shape + varlen, layout);
}

static test_tensor integers(const int32_t *values, int64_t count, test_layout layout, test_random *random)
{
    if (values == NULL) return (test_tensor){0};
    test_tensor t = test_tensor_make(random, QUERN_I32, 1, &count, layout);
    test_tensor_set_i32(&t, values);
    return t;
}

void attention_case_make(attention_case *c, const oracle_dense *a, quern_dtype dtype, test_layout layout,
                         test_random *random)
{
    memset(c, 0, sizeof *c);
    c->dense = *a;
    c->dtype = dtype;
    c->q = make(a, dtype, a->nq, a->h, a->d, layout, random);
    c->k = make(a, dtype, a->nkv, a->hkv, a->d, layout, random);
    c->v = make(a, dtype, a->nkv, a->hkv, a->dv, layout, random);
    c->o = make(a, dtype, a->nq, a->h, a->dv, layout, random);
    c->d_o = make(a, dtype, a->nq, a->h, a->dv, layout, random);
    c->d_q = make(a, dtype, a->nq, a->h, a->d, layout, random);
    c->d_k = make(a, dtype, a->nkv, a->hkv, a->d, layout, random);
    c->d_v = make(a, dtype, a->nkv, a->hkv, a->dv, layout, random);
    const int64_t lse[] = {a->batch, a->h, a->nq};
    const int32_t varlen = a->cu_q != NULL;
    c->lse = test_tensor_make(random, QUERN_F32, 3 - varlen, lse + varlen, layout);
    c->cu_q = integers(a->cu_q, a->batch + 1, layout, random);
    c->cu_kv = integers(a->cu_kv, a->batch + 1, layout, random);
    test_tensor_normal(&c->q, random, 1);
    test_tensor_normal(&c->k, random, 1);
    test_tensor_normal(&c->v, random, 1);
    test_tensor_normal(&c->d_o, random, 1);

    c->params = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    c->params.causal = a->causal;
    c->params.window = a->window;
    c->params.query_offset = a->query_offset;
    c->params.scale = (float)a->scale;
    op_case_bind("attention", c->t, ATTENTION_TENSORS, OP_CASE_ALL, &c->tensors);
}

void attention_case_make_exact(attention_case *c, const oracle_dense *a, test_layout layout,
                               test_random *random)
{
    const double least = 0x1p-17; /* f16 cannot hold the eight significant bits of a smaller bf16 number */
    attention_case_make(c, a, QUERN_BF16, layout, random);
    test_tensor *const inputs[] = {&c->q, &c->k, &c->v, &c->d_o};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        double *values = test_tensor_get(inputs[i]);
        for (int64_t j = 0; j < test_tensor_count(inputs[i]); j++)
            if (fabs(values[j]) < least) values[j] = 0;
        test_tensor_set(inputs[i], values);
        free(values);
    }
}

/* Copies values, and fails the test where the dtype does not hold one. */
static void copy_exactly(test_tensor *to, const test_tensor *from)
{
    double *values = test_tensor_get(from);
    test_tensor_set(to, values);
    double *stored = test_tensor_get(to);
    for (int64_t i = 0; i < test_tensor_count(from); i++)
        if (stored[i] != values[i])
            fail_msg("%s does not hold %a", quern_dtype_name(to->view.dtype), values[i]);
    free(values);
    free(stored);
}

void attention_case_make_like(attention_case *c, const attention_case *exact, quern_dtype dtype,
                              test_layout layout, test_random *random)
{
    attention_case_make(c, &exact->dense, dtype, layout, random);
    copy_exactly(&c->q, &exact->q);
    copy_exactly(&c->k, &exact->k);
    copy_exactly(&c->v, &exact->v);
    copy_exactly(&c->d_o, &exact->d_o);
}

void attention_case_give(attention_case *c, const double *sink, const int32_t *kv_first,
                         const int32_t *kv_count, test_layout layout, test_random *random)
{
    c->kv_first = integers(kv_first, c->dense.batch, layout, random);
    c->kv_count = integers(kv_count, c->dense.batch, layout, random);
    c->extras = (oracle_dense_extras){NULL, kv_first, kv_count};
    if (sink != NULL) {
        c->sink = test_tensor_make(random, QUERN_F32, 1, &c->dense.h, layout);
        c->d_sink = test_tensor_make(random, QUERN_F32, 1, &c->dense.h, layout);
        test_tensor_set(&c->sink, sink);
        c->sinks = test_tensor_get(&c->sink);
    }
    op_case_bind("attention", c->t, ATTENTION_TENSORS, OP_CASE_ALL, &c->tensors);
}

void attention_case_free(attention_case *c)
{
    free(c->sinks);
    for (int i = 0; i < ATTENTION_TENSORS; i++) test_tensor_free(&c->t[i]);
}

void attention_case_reset(attention_case *c)
{
    test_tensor *const outputs[] = {&c->o, &c->lse, &c->d_q, &c->d_k, &c->d_v, &c->d_sink};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
        if (outputs[i]->buffer != NULL) test_tensor_reset(outputs[i]);
}

static void call(attention_case *c, quern_context *ctx, quern_op_pass pass)
{
    op_case_run(ctx, "attention", pass, &c->params, &c->tensors, c->t, ATTENTION_TENSORS);
}

void attention_case_forward(attention_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_FORWARD);
}

void attention_case_backward(attention_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_BACKWARD);
}

static double *doubles(const test_tensor *t)
{
    double *p = calloc((size_t)test_tensor_count(t) + 1, sizeof *p);
    if (p == NULL) fail_msg("the test is out of memory");
    return p;
}

static bool sees_one_at_most(const attention_case *c)
{
    for (int64_t b = 0; b < c->dense.batch; b++) {
        const oracle_range range = oracle_dense_range(&c->dense, &c->extras, b);
        for (int64_t t = 0; t < range.nq; t++) {
            int64_t seen = 0;
            for (int64_t j = 0; j < range.nkv && seen < 2; j++) seen += oracle_range_sees(&range, 0, t, j);
            if (seen > 1) return false;
        }
    }
    return true;
}

/* The norm of the entries that are finite. */
static double norm(const double *x, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += isfinite(x[i]) ? x[i] * x[i] : 0;
    return sqrt(sum);
}

/* Of queries that see one key each: the lse of squared queries and keys under the squared scale are the sums
 * of the squares of the dot products' terms. Overwrites q and k. */
static double lse_terms(const attention_case *c, double *q, double *k, const double *v)
{
    oracle_dense a = c->dense;
    const double scale = a.scale != 0 ? a.scale : 1 / sqrt((double)a.d);
    double *o = doubles(&c->o), *sums = doubles(&c->lse), all = 0;
    for (int64_t i = 0; i < test_tensor_count(&c->q); i++) q[i] *= q[i];
    for (int64_t i = 0; i < test_tensor_count(&c->k); i++) k[i] *= k[i];
    a.scale = scale * scale;
    oracle_dense_forward_with(&a, &c->extras, q, k, v, o, sums);
    for (int64_t i = 0; i < test_tensor_count(&c->lse); i++) all += isfinite(sums[i]) ? sums[i] : 0;
    free(o);
    free(sums);
    return sqrt(all);
}

attention_reference attention_case_reference(const attention_case *c)
{
    attention_reference r = {doubles(&c->o),
                             doubles(&c->lse),
                             doubles(&c->d_q),
                             doubles(&c->d_k),
                             doubles(&c->d_v),
                             test_doubles(c->dense.h),
                             test_doubles(c->dense.h),
                             c->sinks == NULL && sees_one_at_most(c),
                             0};
    const oracle_sinks sinks = {c->sinks, r.d_sink, r.d_sink_size};
    oracle_dense_extras extras = c->extras;
    if (c->sinks != NULL) extras.sinks = &sinks;
    double *q = test_tensor_get(&c->q), *k = test_tensor_get(&c->k), *v = test_tensor_get(&c->v);
    double *d_o = test_tensor_get(&c->d_o);
    oracle_dense_forward_with(&c->dense, &extras, q, k, v, r.o, r.lse);
    oracle_dense_backward_with(&c->dense, &extras, q, k, v, d_o, r.d_q, r.d_k, r.d_v);
    if (r.cancels) r.lse_terms = lse_terms(c, q, k, v);
    free(q);
    free(k);
    free(v);
    free(d_o);
    return r;
}

/* With delta = d_o . o of the given o instead of the exact one, dS grows by P e, e = d_o . (exact - given),
 * row by row. So d_q grows by scale e (P K), the output of attention with K for V, and d_k by scale P^T (e
 * q), the value gradient for an output gradient of scale e q. */
void attention_reference_given_o(attention_reference *r, const attention_case *c)
{
    oracle_dense a = c->dense;
    const int64_t rows = (a.cu_q != NULL ? 1 : a.batch) * a.nq * a.h;
    const double scale = a.scale != 0 ? a.scale : 1 / sqrt((double)a.d);
    double *q = test_tensor_get(&c->q), *k = test_tensor_get(&c->k), *d_o = test_tensor_get(&c->d_o),
           *given = test_tensor_get(&c->o);
    double *pk = doubles(&c->q), *ignore_q = doubles(&c->q), *ignore_k = doubles(&c->k),
           *more_k = doubles(&c->k);
    a.dv = a.d;
    oracle_dense_forward(&a, q, k, k, pk, NULL);
    for (int64_t i = 0; i < rows; i++) {
        double e = 0;
        for (int64_t j = 0; j < c->dense.dv; j++)
            e += d_o[i * c->dense.dv + j] * (r->o[i * c->dense.dv + j] - given[i * c->dense.dv + j]);
        for (int64_t j = 0; j < a.d; j++) {
            r->d_q[i * a.d + j] += scale * e * pk[i * a.d + j];
            pk[i * a.d + j] = scale * e * q[i * a.d + j];
        }
    }
    oracle_dense_backward(&a, q, k, k, pk, ignore_q, ignore_k, more_k);
    for (int64_t i = 0; i < test_tensor_count(&c->k); i++) r->d_k[i] += more_k[i];
    double *const all[] = {q, k, d_o, given, pk, ignore_q, ignore_k, more_k};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

void attention_reference_free(attention_reference *r)
{
    free(r->o);
    free(r->lse);
    free(r->d_q);
    free(r->d_k);
    free(r->d_v);
    free(r->d_sink);
    free(r->d_sink_size);
}

static void check(const test_tensor *t, const double *reference, double bound, const char *name,
                  const char *label)
{
    char text[200];
    double *values = test_tensor_get(t);
    snprintf(text, sizeof text, "%s: %s", label, name);
    test_check(text, values, reference, test_tensor_count(t), bound);
    free(values);
}

/* A gradient that is 0 but for the rounding of P (dP - delta): its entries are sums of at most `count`
 * terms p (dp - delta) k with |dp| about sqrt(Dv), so rounding leaves a small multiple of the bound. */
static void check_cancelled(const test_tensor *t, const attention_case *c, const char *name,
                            const char *label)
{
    const double most = test_gradient_bound(c->dtype) * sqrt((double)(c->dense.dv * c->dense.h));
    double *values = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++)
        if (!(fabs(values[i]) <= most))
            fail_msg("%s: %s[%lld] is %g, 0 but for %g is right", label, name, (long long)i, values[i], most);
    free(values);
}

void attention_case_check_forward(const attention_case *c, const attention_reference *r, const char *label)
{
    check(&c->o, r->o, test_forward_bound(c->dtype), "o", label);
    /* A sum that cancels is measured by its terms. */
    const double own = norm(r->lse, test_tensor_count(&c->lse));
    check(&c->lse, r->lse, test_forward_bound(QUERN_F32) * (own > 0 ? fmax(1, r->lse_terms / own) : 1), "lse",
          label);
}

void attention_case_check_backward(const attention_case *c, const attention_reference *r, const char *label)
{
    const double bound = test_gradient_bound(c->dtype);
    if (r->cancels) {
        check_cancelled(&c->d_q, c, "d_q", label);
        check_cancelled(&c->d_k, c, "d_k", label);
    } else {
        check(&c->d_q, r->d_q, bound, "d_q", label);
        check(&c->d_k, r->d_k, bound, "d_k", label);
    }
    check(&c->d_v, r->d_v, bound, "d_v", label);
    if (c->sinks == NULL) return;
    /* Sums that may cancel, measured by their terms. */
    const double own = norm(r->d_sink, c->dense.h), size = norm(r->d_sink_size, c->dense.h);
    check(&c->d_sink, r->d_sink, bound * (own > 0 ? fmax(1, size / own) : 1), "d_sink", label);
}
