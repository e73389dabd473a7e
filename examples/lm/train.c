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
    "  --attention nsa|dense   native sparse attention (default) or dense\n"
    "  --corpus PATH           a file or folder (default: the C headers of linux-libc-dev and libc6-dev)\n"
    "  --checkpoint FILE       write the run here, every --save-every steps and at the end\n"
    "  --resume FILE           go on from a checkpoint, bit by bit as if never stopped: on the same corpus, "
    "with the\n"
    "                          model, --steps, rates and seed of the checkpoint (naming one of them is an "
    "error)\n"
    "  --steps N (390)  --until N   length of the schedule; stop early at step N\n"
    "  --curve FILE.svg        draw the loss (gnuplot; a warning without it)      --json FILE  write the "
    "result\n"
    "                          (files that cannot be written are found before the training)\n"
    "  --width 128 --layers 4 --heads 4 --inner 384 --context 4096   the model (one key/value head)\n"
    "  --block 32 --selected 8 --window 256                          native sparse attention\n"
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

bool held_out_fits(const lm_corpus *corpus, int64_t n)
{
    const int64_t size = corpus->size - corpus->train;
    return size > n ||
           failure("the held-out 5%% of the corpus has %lld bytes: more than the context of %lld are needed",
                   (long long)size, (long long)n) == 0;
}

double evaluate(lm_model *m, const lm_corpus *corpus, int64_t pieces)
{
    const int32_t n = m->config.context;
    double nats = 0.0;
    int64_t count = 0;
    for (int64_t at; (at = corpus_held_out(corpus, n, count, pieces)) >= 0; count++) {
        const double loss = model_loss(m, corpus->bytes + at, n, false);
        if (isnan(loss) || isinf(loss))
            return failure("the held-out loss is %g: the model's weights are too large", loss) * -1.0;
        if (loss < 0.0) return -1.0;
        nats += loss;
    }
    return count > 0 ? nats / (double)count / 0.69314718055994531 : -1.0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int verb_train(int argc, char **argv)
{
    lm_options o;
    if (!options_parse(argc, argv, help, &o)) return 2;
    if (!output_check(o.checkpoint) || !output_check(o.curve) || !output_check(o.json)) return 3;
    lm_model m = {0};
    lm_corpus corpus;
    if (!corpus_load(o.corpus, &corpus)) return 3;
    lm_run run = o.run;
    bool ok =
        o.resume != NULL ? checkpoint_load(&m, o.resume, &run) : model_create(&m, &o.config, o.run.seed);
    if (ok && o.resume != NULL &&
        (run.corpus_bytes != corpus.size || strcmp(run.corpus_digest, corpus.digest) != 0))
        ok = failure("%s: it learned from a corpus of %lld bytes, SHA-256 of those to train on %.12s...; "
                     "this corpus has %lld bytes, %.12s...: "
                     "only the same one is accepted",
                     o.resume, (long long)run.corpus_bytes, run.corpus_digest, (long long)corpus.size,
                     corpus.digest) == 0;
    run.corpus_bytes = corpus.size;
    memcpy(run.corpus_digest, corpus.digest, sizeof run.corpus_digest);
    const int32_t n = m.config.context;
    if (ok && corpus.train <= n)
        ok = failure("the corpus has %lld bytes to train on: more than the context of %d are needed",
                     (long long)corpus.train, n) == 0;
    const int64_t last = o.until > 0 && o.until < run.steps ? o.until : run.steps, first = m.step;
    ok = ok && held_out_fits(&corpus, n);
    double *loss = calloc((size_t)run.steps + 1, sizeof *loss),
           *times = calloc((size_t)run.steps + 1, sizeof *times), start = seconds();
    const bool terminal = isatty(STDERR_FILENO);
    if (loss == NULL || times == NULL) {
        failure("no memory for the losses of %lld steps", (long long)run.steps);
        ok = false;
    }
    while (ok && m.step < last) {
        const double before = seconds();
        const int64_t step = m.step;
        const int64_t at = corpus_piece(&corpus, n, run.seed, step);
        const double nats = at >= 0 ? model_loss(&m, corpus.bytes + at, n, true) : -1.0;
        if (isnan(nats) || isinf(nats))
            failure("the loss of step %lld is %g: the rates or the weights are too large; no checkpoint is "
                    "written of it",
                    (long long)step + 1, nats);
        if (!(ok = nats >= 0.0 && isfinite(nats) && optimizer_step(&m, schedule(step, run.steps), run.rates)))
            break;
        times[step - first] = seconds() - before;
        loss[step] = nats / 0.69314718055994531;
        const double rate = (double)n * (double)(m.step - first) / (seconds() - start),
                     left = (double)(last - m.step) * (double)n / rate;
        if (terminal || m.step % 50 == 0 || m.step == last)
            fprintf(stderr, "%s%s step %lld/%lld  %.3f bits/byte  %.0f tokens/s  %d:%02d left %s",
                    terminal ? "\r" : "", m.config.sparse ? "nsa" : "dense", (long long)m.step,
                    (long long)run.steps, loss[step], rate, (int)left / 60, (int)left % 60,
                    terminal && m.step < last ? "" : "\n");
        if (o.checkpoint != NULL && o.save_every > 0 && m.step % o.save_every == 0 && m.step < last)
            ok = checkpoint_save(&m, o.checkpoint, &run);
    }
    if (ok && o.checkpoint != NULL) ok = checkpoint_save(&m, o.checkpoint, &run);
    const bool drawn =
        !ok || o.curve == NULL ||
        curve_draw(o.curve, loss, run.steps, m.config.sparse ? "native sparse attention" : "dense attention");
    if (ok) {
        const double bits = evaluate(&m, &corpus, o.pieces);
        qsort(times, (size_t)(m.step - first), sizeof *times, by_value);
        const double median = m.step > first ? times[(m.step - first) / 2] : 0.0;
        ok = bits >= 0.0;
        if (ok)
            printf("%s: %.4f held-out bits per byte after %lld steps of %d tokens; %.1f ms a step (median)\n",
                   m.config.sparse ? "nsa" : "dense", bits, (long long)m.step, n, 1e3 * median);
        ok = ok && json_write(o.json,
                              "{\"attention\": \"%s\", \"bits_per_byte\": %.6f, \"steps\": %lld, "
                              "\"tokens_per_step\": %d, \"ms_step_median\": %.3f}\n",
                              m.config.sparse ? "nsa" : "dense", bits, (long long)m.step, n, 1e3 * median);
    }
    free(loss), free(times);
    model_destroy(&m);
    corpus_free(&corpus);
    return ok && drawn ? 0 : 3;
}
