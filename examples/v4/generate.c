/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* generate.c - the verbs: prompts go in, logits or new tokens come out. */
#include "v4.h"

#include <quern/file.h>
#include <quern/safetensors.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Prompts of B sequences, in rows of `most` tokens. */
typedef struct prompts {
    quern_safetensors *file;
    const int32_t *tokens, *lengths; /* lengths NULL: one sequence of `most` */
    int64_t batch, most;
} prompts;

static int64_t length_of(const prompts *p, int64_t b)
{
    return p->lengths != NULL ? p->lengths[b] : p->most;
}

static bool read_prompts(const char *path, bool batch, prompts *p)
{
    quern_tensor t, n;
    *p = (prompts){.batch = 1};
    if (!done(quern_safetensors_open(path, &p->file))) return false;
    if (quern_safetensors_get(p->file, "tokens", &t) != QUERN_OK || t.dtype != QUERN_I32 ||
        t.ndim != (batch ? 2 : 1) || t.shape[0] < 1 || t.shape[t.ndim - 1] < 1)
        return fail("%s: `tokens`, I32 %s, is accepted", path, batch ? "[B, N]" : "[N]");
    p->tokens = t.data;
    p->most = t.shape[t.ndim - 1];
    if (!batch) return true;
    p->batch = t.shape[0];
    if (quern_safetensors_get(p->file, "lengths", &n) != QUERN_OK || n.dtype != QUERN_I32 || n.ndim != 1 ||
        n.shape[0] != p->batch)
        return fail("%s: `lengths` of the sequences, I32 [B], is accepted", path);
    p->lengths = n.data;
    for (int64_t b = 0; b < p->batch; b++)
        if (p->lengths[b] < 1 || p->lengths[b] > p->most)
            return fail("%s: lengths[%lld] is %d: 1 to %lld is accepted", path, (long long)b, p->lengths[b],
                        (long long)p->most);
    return true;
}

static bool open_model(const v4_options *o, v4_model *m, prompts *p)
{
    if (!read_prompts(o->batch != NULL ? o->batch : o->tokens, o->batch != NULL, p)) return false;
    const int64_t most = p->most + o->max_new;
    if (most >= INT32_MAX / 2) return fail("%lld tokens: fewer than 2^30 are accepted", (long long)most);
    if (!model_open(m, o, p->batch, most)) return false;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0; i < length_of(p, b); i++) {
            const int32_t token = p->tokens[b * p->most + i];
            if (token < 0 || token >= m->config.vocab)
                return fail("token %lld of sequence %lld is %d: 0 to %lld is accepted", (long long)i,
                            (long long)b, token, (long long)m->config.vocab - 1);
        }
    return true;
}

/* Tokens first ... end - 1 of a sequence, a chunk at a time. Logits: of all, or after the last one. */
static bool prefill(v4_model *m, const prompts *p, int64_t b, int64_t first, int64_t end, bool all,
                    float *logits)
{
    const double start = seconds();
    for (int64_t at = first, n; at < end; at += n) {
        n = end - at < m->cache.params.step ? end - at : m->cache.params.step;
        note(m, true, "sequence %lld: token %lld of %lld, %.1f a second", (long long)b, (long long)at,
             (long long)end, at > first ? (double)(at - first) / (seconds() - start) : 0.0);
        if (!model_step(m, b, 1, p->tokens + b * p->most + at, n, all ? n : at + n == end, logits))
            return false;
        if (all) logits += n * m->config.vocab;
    }
    return true;
}

static bool write_logits(v4_model *m, const v4_options *o, const prompts *p)
{
    const int64_t shape[] = {p->most, m->config.vocab};
    float *logits = malloc((size_t)(shape[0] * shape[1]) * sizeof *logits);
    const quern_tensor t = quern_tensor_contiguous(logits, QUERN_F32, 2, shape);
    const bool ok = (logits != NULL || fail("no memory for %lld rows of logits", (long long)p->most)) &&
                    prefill(m, p, 0, 0, p->most, true, logits) &&
                    done(quern_safetensors_save(o->out, &(quern_safetensors_item){"logits", &t}, 1, NULL, 0));
    free(logits);
    return ok;
}

/* Of equals the lowest. */
static int32_t likeliest(const float *logits, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    return (int32_t)best;
}

/* What the prompts begin with goes through the model once, or comes from the session, and the other sequences
 * are forked from it. */
static bool read_all(v4_model *m, const v4_options *o, const prompts *p, float *logits)
{
    const int64_t vocab = m->config.vocab;
    int64_t shared = length_of(p, 0), have = 0;
    for (int64_t b = 1; b < p->batch; b++) {
        shared = shared < length_of(p, b) ? shared : length_of(p, b);
        for (int64_t i = 0; i < shared; i++)
            if (p->tokens[b * p->most + i] != p->tokens[i]) shared = i;
    }
    bool ok = o->session == NULL || session_load(m, o->session, p->tokens, shared, &have, logits);
    ok = ok && prefill(m, p, 0, have, shared, false, logits);
    if (o->session != NULL && shared > have)
        ok = ok && session_save(m, o->session, p->tokens, shared, logits);
    for (int64_t b = 1; ok && b < p->batch; b++) {
        memcpy(logits + b * vocab, logits, (size_t)vocab * sizeof *logits);
        ok = done(quern_ledger_fork(m->cache.ledger, 0, b));
    }
    for (int64_t b = 0; ok && b < p->batch; b++)
        ok = prefill(m, p, b, shared, length_of(p, b), false, logits + b * vocab);
    return ok;
}

/* Appends the likeliest tokens to every sequence: made [count, batch]. */
static bool go_on(v4_model *m, int64_t batch, int64_t count, float *logits, int32_t *made)
{
    for (int64_t i = 0; i < count; i++, made += batch) {
        note(m, true, "token %lld of %lld", (long long)i, (long long)count);
        if (i > 0 && !model_step(m, 0, batch, made - batch, 1, batch, logits)) return false;
        for (int64_t b = 0; b < batch; b++)
            made[b] = likeliest(logits + b * m->config.vocab, m->config.vocab);
    }
    return true;
}

static void print(const v4_options *o, int64_t batch, const int32_t *made)
{
    const bool several = o->batch != NULL, json = o->json;
    if (json) printf("{\"tokens\": %s", several ? "[" : "");
    for (int64_t b = 0; b < batch; b++) {
        printf("%s%s", b == 0 ? "" : json ? ", " : "\n", json ? "[" : "");
        for (int64_t i = 0; i < o->max_new; i++)
            printf("%s%d", i == 0 ? "" : json ? ", " : " ", made[i * batch + b]);
        if (json) putchar(']');
    }
    puts(!json ? "" : several ? "]}" : "}");
}

static bool generate(v4_model *m, const v4_options *o, const prompts *p)
{
    const size_t rows = (size_t)p->batch, new = rows *(size_t)o->max_new;
    float *logits = malloc(rows * (size_t)m->config.vocab * sizeof *logits);
    int32_t *made = malloc((new + 1) * sizeof *made);
    int64_t read = 0;
    const double start = seconds();
    bool ok = (logits != NULL && made != NULL) || fail("no memory for %zu sequences", rows);
    ok = ok && read_all(m, o, p, logits);
    const double middle = seconds();
    ok = ok && go_on(m, p->batch, o->max_new, logits, made);
    const double end = seconds();
    for (int64_t b = 0; b < p->batch; b++) read += length_of(p, b);
    if (ok) {
        print(o, p->batch, made);
        note(m, false,
             "prompts of %lld tokens in %.2f s (%.1f a second), %zu new ones in %.2f s (%.1f a second)",
             (long long)read, middle - start, (double)read / (middle - start), new, end - middle,
             (double)new / (end - middle));
    }
    free(logits);
    free(made);
    return ok;
}

bool run(const v4_options *o)
{
    const char *written = o->out != NULL ? o->out : o->session;
    v4_model m = {0};
    prompts p = {0};
    const bool ok = (written == NULL || done(quern_file_check(written))) && open_model(o, &m, &p) &&
                    (o->out != NULL ? write_logits(&m, o, &p) : generate(&m, o, &p));
    model_close(&m);
    quern_safetensors_close(p.file);
    return ok;
}
