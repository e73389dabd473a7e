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

static void read_prompts(const char *path, bool batch, prompts *p)
{
    quern_tensor t, n;
    check(quern_safetensors_open(path, &p->file));
    if (quern_safetensors_get(p->file, "tokens", &t) != QUERN_OK || t.dtype != QUERN_I32 ||
        t.ndim != (batch ? 2 : 1) || t.shape[0] < 1 || t.shape[t.ndim - 1] < 1)
        fail("%s: `tokens`, I32 %s, is accepted", path, batch ? "[B, N]" : "[N]");
    p->tokens = t.data;
    p->batch = batch ? t.shape[0] : 1;
    p->most = t.shape[t.ndim - 1];
    if (!batch) return;
    if (quern_safetensors_get(p->file, "lengths", &n) != QUERN_OK || n.dtype != QUERN_I32 || n.ndim != 1 ||
        n.shape[0] != p->batch)
        fail("%s: `lengths` of the sequences, I32 [B], is accepted", path);
    p->lengths = n.data;
    for (int64_t b = 0; b < p->batch; b++)
        if (p->lengths[b] < 1 || p->lengths[b] > p->most)
            fail("%s: lengths[%lld] is %d: 1 to %lld is accepted", path, (long long)b, p->lengths[b],
                 (long long)p->most);
}

static void check_tokens(const prompts *p, int64_t vocab)
{
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0; i < length_of(p, b); i++) {
            const int32_t token = p->tokens[b * p->most + i];
            if (token < 0 || token >= vocab)
                fail("token %lld of sequence %lld is %d: 0 to %lld is accepted", (long long)i, (long long)b,
                     token, (long long)vocab - 1);
        }
}

/* Tokens first ... end - 1 of a sequence, a chunk at a time. Logits: of all, or after the last one. */
static void prefill(v4_model *m, const prompts *p, int64_t b, int64_t first, int64_t end, bool all,
                    float *logits)
{
    const double start = seconds();
    for (int64_t at = first, n; at < end; at += n) {
        n = end - at < m->cache.params.step ? end - at : m->cache.params.step;
        note(m, true, "sequence %lld: token %lld of %lld, %.1f a second", (long long)b, (long long)at,
             (long long)end, at > first ? (double)(at - first) / (seconds() - start) : 0.0);
        model_step(m, b, 1, p->tokens + b * p->most + at, n, all ? n : at + n == end, logits);
        if (all) logits += n * m->config.vocab;
    }
}

static void write_logits(v4_model *m, const char *path, const prompts *p)
{
    const int64_t shape[] = {p->most, m->config.vocab};
    float *logits = host_take((size_t)(shape[0] * shape[1]) * sizeof *logits);
    const quern_tensor t = quern_tensor_contiguous(logits, QUERN_F32, 2, shape);
    prefill(m, p, 0, 0, p->most, true, logits);
    check(quern_safetensors_save(path, &(quern_safetensors_item){"logits", &t}, 1, NULL, 0));
    free(logits);
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
static void read_all(v4_model *m, const char *session, const prompts *p, float *logits)
{
    const int64_t vocab = m->config.vocab;
    int64_t shared = length_of(p, 0);
    for (int64_t b = 1; b < p->batch; b++) {
        shared = shared < length_of(p, b) ? shared : length_of(p, b);
        for (int64_t i = 0; i < shared; i++)
            if (p->tokens[b * p->most + i] != p->tokens[i]) shared = i;
    }
    const int64_t have = session != NULL ? session_load(m, session, p->tokens, shared, logits) : 0;
    prefill(m, p, 0, have, shared, false, logits);
    if (session != NULL && shared > have) session_save(m, session, p->tokens, shared, logits);
    for (int64_t b = 1; b < p->batch; b++) {
        memcpy(logits + b * vocab, logits, (size_t)vocab * sizeof *logits);
        check(quern_ledger_fork(m->cache.ledger, 0, b));
    }
    for (int64_t b = 0; b < p->batch; b++)
        prefill(m, p, b, shared, length_of(p, b), false, logits + b * vocab);
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

static void generate(v4_model *m, const v4_options *o, const prompts *p)
{
    const int64_t batch = p->batch, new = batch * o->max_new, vocab = m->config.vocab;
    float *logits = host_take((size_t)(batch * vocab) * sizeof *logits);
    int32_t *made = host_take((size_t) new * sizeof *made), *next = made; /* [max_new, B] */
    int64_t read = 0;
    for (int64_t b = 0; b < batch; b++) read += length_of(p, b);
    const double start = seconds();
    read_all(m, o->session, p, logits);
    const double middle = seconds();
    for (int64_t i = 0; i < o->max_new; i++, next += batch) {
        note(m, true, "token %lld of %lld", (long long)i, (long long)o->max_new);
        if (i > 0) model_step(m, 0, batch, next - batch, 1, batch, logits);
        for (int64_t b = 0; b < batch; b++) next[b] = likeliest(logits + b * vocab, vocab);
    }
    const double end = seconds();
    print(o, batch, made);
    note(m, false,
         "prompts of %lld tokens in %.2f s (%.1f a second), %lld new ones in %.2f s (%.1f a second)",
         (long long)read, middle - start, (double)read / (middle - start), (long long)new, end - middle,
         (double)new / (end - middle));
    free(logits);
    free(made);
}

void run(const v4_options *o)
{
    const char *written = o->out != NULL ? o->out : o->session;
    static v4_model m;
    static prompts p;
    if (written != NULL) check(quern_file_check(written));
    read_prompts(o->batch != NULL ? o->batch : o->tokens, o->batch != NULL, &p);
    const int64_t most = p.most + o->max_new;
    if (most >= INT32_MAX / 2) fail("%lld tokens: fewer than 2^30 are accepted", (long long)most);
    model_open(&m, o, p.batch, most);
    check_tokens(&p, m.config.vocab);
    if (o->out != NULL) write_logits(&m, o->out, &p);
    else generate(&m, o, &p);
}
