/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* train.c - the training loop, its progress line and its loss curve. */
#include "options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
    "lm train - train a byte-level language model\n\n"
    "  --attention nsa|dense|csa|hca|hybrid   native sparse attention (default), dense, DeepSeek-V4's "
    "compressed\n"
    "                          attentions, or a window layer and then csa and hca in turn\n"
    "  --experts N (0)  --top 2   a mixture of N experts beside a shared one; a byte goes to `top` of them\n"
    "  --corpus PATH           a file or folder (default: the C headers of linux-libc-dev and libc6-dev)\n"
    "  --checkpoint FILE       write the run here, every --save-every steps and at the end\n"
    "  --resume FILE           go on from a checkpoint, bit by bit as if never stopped: on the same corpus, "
    "with the\n"
    "                          model, --steps, rates and seed of the checkpoint (naming one of them is an "
    "error)\n"
    "  --steps N (280)  --until N   length of the schedule; stop early at step N\n"
    "  --curve FILE.svg        draw the loss (gnuplot; a warning without it)      --json FILE  write the "
    "result\n"
    "  --losses FILE           write the losses; --beside FILE, up to 8 times, draws those of another run in "
    "the\n"
    "                          same chart\n"
    "                          (files that cannot be written are found before the training)\n"
    "  --width 128 --layers 4 --heads 4 --kv-heads 1 --inner 384 --context 4096   the model; --inner is "
    "shared\n"
    "                          equally by the top + 1 networks of a byte where there are experts\n"
    "  --block 32 --selected 8     nsa: bytes of a block, blocks that a query selects; --window 256 of all "
    "but "
    "dense\n"
    "  --index-top 64 --ratio 128  csa: entries that a query selects; hca: bytes of an entry\n"
    "  --muon 0.02 --adam 0.02 --seed 1 --pieces 48 (held-out pieces of one context each)\n\n"
    "examples:\n"
    "  lm train --checkpoint nsa.safetensors --curve nsa.svg\n"
    "  lm train --attention dense --corpus ~/books --steps 2000 --checkpoint books.safetensors\n"
    "  lm train --resume books.safetensors --checkpoint books.safetensors\n\n"
    "exit codes: 0 done, 2 wrong usage, 3 failed: a file, memory, or a loss or weight that is no finite "
    "number;\n"
    "130, 143 ended by SIGINT, SIGTERM\n";

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Warms up for 10 steps, holds, and falls to 0 over the last 60%. */
static float schedule(int64_t step, int64_t steps)
{
    const float warm = step < 10 ? (float)(step + 1) / 10.0f : 1.0f,
                left = (float)(steps - step) / (0.6f * (float)steps);
    return warm * (left < 1.0f ? left : 1.0f);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct training {
    lm_model model;
    lm_corpus corpus;
    lm_run run;
    const lm_options *options;
    int64_t first, last; /* steps that this call makes */
    double *loss;        /* of every step, 0 where another call made it; bits per byte */
    double *times;       /* of the steps that this call makes */
    lm_curve beside[BESIDE_MOST];
} training;

/* Model, corpus and run fit together, and every file that is read is there. */
static bool start(training *t)
{
    const lm_options *o = t->options;
    lm_run *run = &t->run;
    *run = o->run;
    for (int i = 0; i < o->beside_count; i++)
        if (!curve_load(o->beside[i], &t->beside[i])) return false;
    if (!corpus_load(o->corpus, &t->corpus)) return false;
    const lm_corpus *corpus = &t->corpus;
    if (!(o->resume != NULL ? checkpoint_load(&t->model, o->resume, run)
                            : model_create(&t->model, &o->config, run->seed)))
        return false;
    if (o->resume != NULL &&
        (run->corpus_bytes != corpus->size || strcmp(run->corpus_digest, corpus->digest) != 0))
        return failure("%s: it learned from a corpus of %lld bytes, SHA-256 of those to train on %.12s...; "
                       "this corpus has %lld bytes, %.12s...: "
                       "only the same one is accepted",
                       o->resume, (long long)run->corpus_bytes, run->corpus_digest, (long long)corpus->size,
                       corpus->digest) == 0;
    run->corpus_bytes = corpus->size;
    memcpy(run->corpus_digest, corpus->digest, sizeof run->corpus_digest);
    const int32_t n = t->model.config.context;
    if (corpus->train <= n)
        return failure("the corpus has %lld bytes to train on: more than the context of %d are needed",
                       (long long)corpus->train, n) == 0;
    t->first = t->model.step;
    t->last = o->until > 0 && o->until < run->steps ? o->until : run->steps;
    t->loss = calloc((size_t)run->steps + 1, sizeof *t->loss);
    t->times = calloc((size_t)run->steps + 1, sizeof *t->times);
    return held_out_fits(corpus, n) &&
           ((t->loss != NULL && t->times != NULL) ||
            failure("no memory for the losses of %lld steps", (long long)run->steps) == 0);
}

static void say_progress(const training *t, double begun)
{
    const lm_model *m = &t->model;
    const bool terminal = isatty(STDERR_FILENO), last = m->step == t->last;
    const double rate = (double)m->config.context * (double)(m->step - t->first) / (seconds() - begun),
                 left = (double)(t->last - m->step) * (double)m->config.context / rate;
    if (terminal || m->step % 50 == 0 || last)
        fprintf(stderr, "%s%s step %lld/%lld  %.3f bits/byte  %.0f tokens/s  %d:%02d left %s",
                terminal ? "\r" : "", config_title(&m->config), (long long)m->step, (long long)t->run.steps,
                t->loss[m->step - 1], rate, (int)left / 60, (int)left % 60, terminal && !last ? "" : "\n");
}

static bool make_step(training *t)
{
    lm_model *m = &t->model;
    const double before = seconds();
    const int64_t step = m->step, at = corpus_piece(&t->corpus, m->config.context, t->run.seed, step);
    const double nats = at >= 0 ? model_loss(m, t->corpus.bytes + at, m->config.context, true) : -1.0;
    if (isnan(nats) || isinf(nats))
        failure("the loss of step %lld is %g: the rates or the weights are too large; no checkpoint is "
                "written of it",
                (long long)step + 1, nats);
    if (!(nats >= 0.0 && isfinite(nats)) || !optimizer_step(m, schedule(step, t->run.steps), t->run.rates))
        return false;
    t->times[step - t->first] = seconds() - before;
    t->loss[step] = nats / 0.69314718055994531;
    return true;
}

/* The losses as text, and in a chart with those of other runs. */
static bool write_losses(const training *t)
{
    const lm_options *o = t->options;
    lm_curve curves[BESIDE_MOST + 1] = {{.loss = t->loss, .count = t->run.steps}};
    snprintf(curves[0].name, sizeof curves[0].name, "%s", config_title(&t->model.config));
    memcpy(curves + 1, t->beside, sizeof t->beside);
    return curve_save(o->losses, &curves[0]) && curves_draw(o->curve, curves, 1 + o->beside_count);
}

static bool report(training *t)
{
    lm_model *m = &t->model;
    const lm_options *o = t->options;
    const int64_t count = m->step - t->first;
    const double bits = evaluate(m, &t->corpus, o->pieces);
    qsort(t->times, (size_t)count, sizeof *t->times, by_value);
    const double ms = count > 0 ? 1e3 * t->times[count / 2] : 0.0;
    if (bits < 0.0) return false;
    printf("%s: %.4f held-out bits per byte after %lld steps of %d tokens; %.1f ms a step (median)\n",
           config_title(&m->config), bits, (long long)m->step, m->config.context, ms);
    return json_write(o->json,
                      "{\"attention\": \"%s\", \"experts\": %d, \"bits_per_byte\": %.6f, \"steps\": %lld, "
                      "\"tokens_per_step\": %d, \"ms_step_median\": %.3f}\n",
                      lm_attentions[m->config.attention].name, m->config.experts, bits, (long long)m->step,
                      m->config.context, ms);
}

int verb_train(int argc, char **argv)
{
    lm_options o;
    training t = {.options = &o};
    if (!options_parse(argc, argv, help, &o)) return 2;
    if (!output_check(o.checkpoint) || !output_check(o.curve) || !output_check(o.losses) ||
        !output_check(o.json))
        return 3;
    bool ok = start(&t);
    lm_model *m = &t.model;
    const double begun = seconds();
    while (ok && m->step < t.last) {
        ok = make_step(&t);
        if (ok) say_progress(&t, begun);
        if (ok && o.checkpoint != NULL && o.save_every > 0 && m->step % o.save_every == 0 && m->step < t.last)
            ok = checkpoint_save(m, o.checkpoint, &t.run);
    }
    if (ok && o.checkpoint != NULL) ok = checkpoint_save(m, o.checkpoint, &t.run);
    const bool written = !ok || write_losses(&t);
    ok = ok && report(&t) && written;
    for (int i = 0; i < o.beside_count; i++) free(t.beside[i].loss);
    free(t.loss), free(t.times);
    model_destroy(m);
    corpus_free(&t.corpus);
    return ok ? 0 : 3;
}
