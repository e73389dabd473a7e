/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * eval.c - held-out bits per byte, in one shot or, with --chunk n, from the layers' caches.
 *
 * The proof that caches lose nothing goes layer by layer. What a layer's attention took in one shot goes
 * through a cache in chunks, and the outputs are compared. Both are within Quern's bound of exact arithmetic,
 * 2e-6 of the outputs' norm, so they differ by at most twice that. Queries must select the same blocks or
 * entries. The bits per byte of the whole model, decoded, are then compared, less sharply: rounding in one
 * layer may change what the next one selects.
 */
#include "decode.h"
#include "options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double BOUND = 4e-6, BITS = 1e-3; /* of a layer's outputs, of the bits per byte */

bool held_out_fits(const lm_corpus *corpus, int64_t n)
{
    const int64_t size = corpus->size - corpus->train;
    return size > n ||
           failure("the held-out 5%% of the corpus has %lld bytes: more than the context of %lld are needed",
                   (long long)size, (long long)n) == 0;
}

/* Nats per byte of a held-out piece; negative after an error message. */
static double checked(double nats)
{
    if (isnan(nats) || isinf(nats))
        return failure("the held-out loss is %g: the model's weights are too large", nats) * -1.0;
    return nats;
}

double evaluate(lm_model *m, const lm_corpus *corpus, int64_t pieces)
{
    const int32_t n = m->config.context;
    double nats = 0.0;
    int64_t count = 0;
    for (int64_t at; (at = corpus_held_out(corpus, n, count, pieces)) >= 0; count++) {
        const double loss = checked(model_loss(m, corpus->bytes + at, n, false));
        if (loss < 0.0) return -1.0;
        nats += loss;
    }
    return count > 0 ? nats / (double)count / 0.69314718055994531 : -1.0;
}

/* What chunks showed. */
typedef struct proof {
    double worst;             /* relative L2 error of a layer's outputs */
    int64_t selected, moved;  /* indices that queries selected, those that were other ones in chunks */
    double one_shot, chunked; /* bits per byte */
} proof;

/* Indices of a chunk's queries that differ from those in one shot. */
static void compare_choice(const lm_config *c, const lm_attention *a, const lm_cache *cache, int64_t context,
                           int64_t first, int64_t n, proof *p)
{
    const bool nsa = cache->kind == KIND_NSA;
    const int64_t heads = nsa ? c->kv_heads : 1, k = nsa ? c->selected : c->index_top;
    for (int64_t h = 0; a->chosen != NULL && h < heads; h++)
        for (int64_t i = 0; i < n * k; i++) {
            p->moved += cache->chosen[h * n * k + i] != a->chosen[(h * context + first) * k + i];
            p->selected++;
        }
}

/* The attention of a layer again, from what it took in one shot, in chunks. */
static bool prove_layer(lm_model *m, int32_t layer, int64_t chunk, proof *p)
{
    const lm_config *c = &m->config;
    const lm_attention *a = &m->layer[layer].attention;
    const int64_t w = c->width;
    float *o = m->scratch[0];
    lm_cache cache;
    double error = 0.0, norm = 0.0;
    bool ok = cache_open(m, layer, c->context, chunk, &cache);
    for (int64_t first = 0; ok && first < c->context; first += chunk) {
        const int64_t n = chunk < c->context - first ? chunk : c->context - first;
        ok = cache_extend(m, layer, &cache, first, n, o);
        if (ok && first + n >= config_ratio(c, cache.kind))
            compare_choice(c, a, &cache, c->context, first, n, p);
        for (int64_t i = 0; ok && i < n * w; i++) {
            const double x = (double)a->o[first * w + i], d = (double)o[i] - x;
            error += d * d;
            norm += x * x;
        }
    }
    cache_close(&cache);
    const double relative = norm > 0.0 ? sqrt(error / norm) : sqrt(error);
    p->worst = relative > p->worst || isnan(relative) ? relative : p->worst;
    return ok;
}

/* Nats per byte of text[1 ... n] from caches. */
static double chunked_loss(lm_model *m, const uint8_t *text, int32_t n, int64_t chunk)
{
    lm_decoder d;
    double nats = 0.0;
    bool ok = decoder_open(&d, m, n);
    while (ok && d.position < n) {
        const int64_t first = d.position, size = chunk < n - first ? chunk : n - first;
        ok = decoder_extend(&d, text, size);
        if (ok) nats += cross_entropy(m->logits, text + first + 1, size, false) * (double)size;
    }
    decoder_close(&d);
    return ok ? nats / (double)n : -1.0;
}

static bool prove(lm_model *m, const lm_corpus *corpus, int64_t pieces, int64_t chunk, proof *p)
{
    const int32_t n = m->config.context;
    int64_t count = 0;
    *p = (proof){0};
    for (int64_t at; (at = corpus_held_out(corpus, n, count, pieces)) >= 0; count++) {
        const double whole = checked(model_loss(m, corpus->bytes + at, n, false));
        bool ok = whole >= 0.0;
        for (int32_t l = 0; ok && l < m->config.layers; l++) ok = prove_layer(m, l, chunk, p);
        const double parts = ok ? checked(chunked_loss(m, corpus->bytes + at, n, chunk)) : -1.0;
        if (parts < 0.0) return false;
        p->one_shot += whole / 0.69314718055994531;
        p->chunked += parts / 0.69314718055994531;
    }
    p->one_shot /= (double)count;
    p->chunked /= (double)count;
    return true;
}

static bool eval_chunks(lm_model *m, const lm_corpus *corpus, const lm_options *o)
{
    proof p;
    if (o->chunk > m->config.context)
        return failure("--chunk %lld: 1 to the context of %d is accepted", (long long)o->chunk,
                       m->config.context) == 0;
    if (!prove(m, corpus, o->pieces, o->chunk, &p)) return false;
    printf(
        "%s in chunks of %lld: %.6f held-out bits per byte, in one shot %.6f; a layer's outputs differ by at "
        "most %.2g of their norm, %lld of %lld selected indices\n",
        config_title(&m->config), (long long)o->chunk, p.chunked, p.one_shot, p.worst, (long long)p.moved,
        (long long)p.selected);
    if (!json_write(o->json,
                    "{\"bits_per_byte\": %.8f, \"bits_one_shot\": %.8f, \"worst_layer\": %.3g, \"moved\": "
                    "%lld}\n",
                    p.chunked, p.one_shot, p.worst, (long long)p.moved))
        return false;
    return (p.worst <= BOUND && p.moved == 0 && fabs(p.chunked - p.one_shot) <= BITS * p.one_shot) ||
           failure("chunks differ from one shot: %g of the outputs, no index and %g of the bits per byte are "
                   "accepted",
                   BOUND, BITS) == 0;
}

int verb_eval(int argc, char **argv)
{
    static const char text[] =
        "lm eval --checkpoint FILE [--corpus PATH] [--pieces 48] [--json FILE] - held-out bits per byte\n"
        "  --expert-weights f32|bf16|nvfp4   of a mixture: as trained (default), or as a server holds them\n"
        "  --chunk N   also from caches in chunks of N bytes; fails where a layer's outputs then differ\n\n"
        "examples:\n"
        "  lm eval --checkpoint nsa.safetensors --pieces 90\n"
        "  lm eval --checkpoint csa.safetensors --chunk 7 --pieces 4\n"
        "  lm eval --checkpoint experts.safetensors --expert-weights nvfp4\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    if (o.checkpoint == NULL) return failure("--checkpoint FILE is needed") * 2;
    if (!output_check(o.json)) return 3;
    lm_model m = {0};
    lm_corpus corpus;
    lm_run run;
    if (!corpus_load(o.corpus, &corpus)) return 3;
    bool ok = checkpoint_load(&m, o.checkpoint, &run) && held_out_fits(&corpus, m.config.context) &&
              served_create(&m, o.expert_weights);
    if (ok && o.chunk > 0) {
        ok = eval_chunks(&m, &corpus, &o);
    } else if (ok) {
        const double bits = evaluate(&m, &corpus, o.pieces);
        ok = bits >= 0.0;
        if (ok)
            printf("%.4f held-out bits per byte (%s, step %lld)\n", bits, config_title(&m.config),
                   (long long)m.step);
        ok = ok && json_write(o.json, "{\"bits_per_byte\": %.6f}\n", bits);
    }
    model_destroy(&m);
    corpus_free(&corpus);
    return ok ? 0 : 3;
}
