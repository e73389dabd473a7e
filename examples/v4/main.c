/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* main.c - v4 logits | generate: prompts go in, logits or new tokens come out. Last the command line. */
#include "v4.h"

#include <quern/file.h>
#include <quern/safetensors.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Prompts of B sequences, in rows of `most` tokens. */
typedef struct prompts {
    quern_safetensors *file;
    const int32_t *tokens, *lengths;
    int64_t batch, most;
    int32_t length; /* of one sequence */
} prompts;

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
    p->length = (int32_t)p->most;
    p->lengths = &p->length;
    if (!batch) return;
    if (quern_safetensors_get(p->file, "lengths", &n) != QUERN_OK || n.dtype != QUERN_I32 || n.ndim != 1 ||
        n.shape[0] != p->batch)
        fail("%s: `lengths` of the sequences, I32 [B], is accepted", path);
    p->lengths = n.data;
    for (int64_t b = 0; b < p->batch; b++)
        if (p->lengths[b] < 1 || p->lengths[b] > p->most)
            fail("%s: lengths[%lld] is %d, out of 1 to N", path, (long long)b, p->lengths[b]);
}

/* Tokens first ... end - 1 of a sequence, a chunk at a time. Logits: of all, or after the last one. */
static void prefill(v4_model *m, const prompts *p, int64_t b, int64_t first, int64_t end, bool all,
                    float *logits)
{
    for (int64_t at = first, n; at < end; at += n, logits += all ? n * m->config.vocab : 0) {
        n = end - at < m->cache.params.step ? end - at : m->cache.params.step;
        note(m, true, "sequence %lld: token %lld of %lld", (long long)b, (long long)at, (long long)end);
        model_step(m, b, 1, p->tokens + b * p->most + at, n, all ? n : at + n == end, logits);
    }
}

static void write_logits(v4_model *m, const char *path, const prompts *p)
{
    float *logits = host_take((size_t)(p->most * m->config.vocab) * sizeof *logits);
    const quern_tensor t = quern_tensor_contiguous(logits, QUERN_F32, 2, SHAPE(p->most, m->config.vocab));
    prefill(m, p, 0, 0, p->most, true, logits);
    check(quern_safetensors_save(path, &(quern_safetensors_item){"logits", &t}, 1, NULL, 0));
    free(logits);
}

static int32_t likeliest(const float *logits, int64_t n)
{
    int64_t best = 0;
    float most = -INFINITY; /* a copy, so that no comparison waits for a look-up */
    for (int64_t i = 0; i < n; i++)
        if (logits[i] > most) most = logits[best = i];
    return (int32_t)best;
}

/* What the prompts begin with goes through the model once, or comes from the session, and the other sequences
 * are forked from it. */
static void read_all(v4_model *m, const char *session, const prompts *p, float *logits)
{
    const int64_t vocab = m->config.vocab;
    int64_t shared = p->lengths[0];
    for (int64_t b = 1; b < p->batch; b++) {
        shared = shared < p->lengths[b] ? shared : p->lengths[b];
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
    for (int64_t b = 0; b < p->batch; b++) prefill(m, p, b, shared, p->lengths[b], false, logits + b * vocab);
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
    float *logits = host_take((size_t)(batch * vocab + new) * sizeof *logits);
    int32_t *made = (int32_t *)(void *)(logits + batch * vocab), *next = made; /* [max_new, B] */
    int64_t read = 0;
    for (int64_t b = 0; b < batch; b++) read += p->lengths[b];
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
}

static void run(const v4_options *o)
{
    const char *written = o->out != NULL ? o->out : o->session;
    static v4_model m;
    static prompts p;
    if (written != NULL) check(quern_file_check(written));
    read_prompts(o->batch != NULL ? o->batch : o->tokens, o->batch != NULL, &p);
    const int64_t most = p.most + (o->out != NULL ? 0 : o->max_new);
    if (most >= INT32_MAX / 2) fail("%lld tokens: fewer than 2^30 are accepted", (long long)most);
    model_open(&m, o, p.batch, most);
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t i = 0; i < p.lengths[b]; i++)
            if (p.tokens[b * p.most + i] < 0 || p.tokens[b * p.most + i] >= m.config.vocab)
                fail("token %lld of sequence %lld is %d, beyond the vocabulary of %lld", (long long)i,
                     (long long)b, p.tokens[b * p.most + i], (long long)m.config.vocab);
    if (o->out != NULL) write_logits(&m, o->out, &p);
    else generate(&m, o, &p);
}

static const char help[] =
    "v4 - runs DeepSeek-V4 from a folder in its released layout\n\n"
    "  v4 logits FOLDER TOKENS OUT                    the logits after every token\n"
    "  v4 generate FOLDER --tokens FILE --max-new N   continues a prompt\n"
    "  v4 generate FOLDER --batch FILE --max-new N    continues several, which may begin alike\n\n"
    "Token ids go in and come out; words are a tokeniser's. TOKENS and FILE are safetensors files\n"
    "with `tokens` I32 [N]; --batch takes `tokens` I32 [B, N] and `lengths` I32 [B]. OUT gets `logits`\n"
    "F32 [N, vocabulary].\n\n"
    "  --device cpu|cuda        where it computes (cpu)\n"
    "  --activations f32|bf16   what activations and cached rows are in (f32; on a GPU always bf16)\n"
    "  --chunk N                tokens of a step while prompts are read (512)\n"
    "  --cache FILE             keeps the repacked experts for later runs; one interrupted goes on\n"
    "  --session FILE           keeps the state after what all prompts begin with, for runs that do so\n"
    "  --greedy                 takes the likeliest token, of equals the lowest id, as without it\n"
    "  --threads N              threads of the CPU (OMP_NUM_THREADS, or all)\n"
    "  --json                   prints {\"tokens\": [...]}, with --batch a list of lists\n"
    "  --quiet                  says nothing of progress and speed\n\n"
    "Exit codes: 0 done, 2 wrong usage, 3 failed. Files are written whole or not at all, but for\n"
    "--cache, whose whole layers count.\n";

#define AT(member) offsetof(v4_options, member)
static const struct {
    const char *name;
    enum { TEXT, FLAG, CHOICE, NUMBER } kind;
    size_t at;
    const char *words[2]; /* of a choice: false, true */
    int64_t least, most;
} table[] = {
    {"tokens", TEXT, AT(tokens), {NULL}, 0, 0},
    {"batch", TEXT, AT(batch), {NULL}, 0, 0},
    {"session", TEXT, AT(session), {NULL}, 0, 0},
    {"cache", TEXT, AT(cache), {NULL}, 0, 0},
    {"device", CHOICE, AT(cuda), {"cpu", "cuda"}, 0, 0},
    {"activations", CHOICE, AT(bf16), {"f32", "bf16"}, 0, 0},
    {"json", FLAG, AT(json), {NULL}, 0, 0},
    {"quiet", FLAG, AT(quiet), {NULL}, 0, 0},
    {"greedy", FLAG, AT(greedy), {NULL}, 0, 0},
    {"chunk", NUMBER, AT(chunk), {NULL}, 1, 1 << 20},
    {"max-new", NUMBER, AT(max_new), {NULL}, 0, 1 << 30},
    {"threads", NUMBER, AT(threads), {NULL}, 0, 1024},
};
#undef AT

/* One option; true where it takes the next word, too. */
static bool set(v4_options *o, const char *name, const char *text)
{
    size_t i = 0;
    while (i < sizeof table / sizeof *table && strcmp(table[i].name, name) != 0) i++;
    if (i == sizeof table / sizeof *table) fail("option --%s is unknown: see --help", name);
    const char *const *words = table[i].words;
    const int64_t least = table[i].least, most = table[i].most;
    void *at = (char *)o + table[i].at;
    char *end;
    if (table[i].kind == FLAG) *(bool *)at = true;
    else if (text == NULL) fail("option --%s lacks its value: see --help", name);
    if (table[i].kind == TEXT) *(const char **)at = text;
    if (table[i].kind == CHOICE) {
        *(bool *)at = strcmp(text, words[1]) == 0;
        if (!*(bool *)at && strcmp(text, words[0]) != 0)
            fail("--%s %s: %s or %s is accepted", name, text, words[0], words[1]);
    } else if (table[i].kind == NUMBER) {
        const int64_t x = *(int64_t *)at = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || x < least || x > most)
            fail("--%s %s: %lld to %lld is accepted", name, text, (long long)least, (long long)most);
    }
    return table[i].kind != FLAG;
}

int main(int argc, char **argv)
{
    v4_options o = {.chunk = 512, .max_new = -1};
    const char *words[4] = {""};
    int given = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) return fputs(help, stdout) < 0 || fflush(stdout) != 0 ? 3 : 0;
        if (strncmp(argv[i], "--", 2) == 0) i += set(&o, argv[i] + 2, argv[i + 1]);
        else if (given < 4) words[given++] = argv[i];
        else fail("'%s' is one word too many: see --help", argv[i]);
    }
    const bool logits = strcmp(words[0], "logits") == 0;
    if (!logits && strcmp(words[0], "generate") != 0) fail("logits or generate is accepted: see --help");
    if (logits ? given != 4 || o.tokens != NULL || o.batch != NULL || o.session != NULL
               : given != 2 || (o.tokens == NULL) == (o.batch == NULL) || o.max_new < 0)
        fail("FOLDER TOKENS OUT, or FOLDER, --tokens or --batch, and --max-new: see --help");
    o.folder = words[1];
    if (logits) o.tokens = words[2], o.out = words[3];
    exit_code = 3;
    run(&o);
    if (fflush(stdout) != 0 || ferror(stdout)) fail("standard output cannot be written");
    return 0;
}
