/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * v4.c - examples/v4 on a made model of DeepSeek-V4 Flash's widths: layers window, CSA, HCA, CSA, 32 experts
 * of which a token takes 6, 2.1 GB. Decoding of one sequence behind 8192 tokens: the time that a step's bytes
 * need at read bandwidth, over the step's time. A prompt of 2048 tokens: the time of its products at bf16-dot
 * peak, over its time. Ceilings are measured between the runs.
 *
 * On a GPU these layers twice, 4.2 GB, and steps of 1 and of 64 sequences, of the rate of a copy; what 64
 * sequences have in common, weights and the 8191 tokens before their last one, counts once.
 *
 * usage: accept_v4 BUILD_DIRECTORY [cuda]. Prints JSON.
 */
#include "ceilings.h"

#include <quern/cuda.h>
#include <quern/safetensors.h>

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

enum { WIDTH = 4096, HEADS = 64, DIM = 512, Q_LORA = 1024, O_GROUPS = 8, O_LORA = 1024, INNER = 2048 };
enum {
    INDEX_HEADS = 64,
    INDEX_DIM = 128,
    INDEX_TOP = 512,
    WINDOW = 128,
    COPIES = 4,
    MIXES = 24,
    VOCABULARY = 2048
};
enum {
    KINDS = 4,
    EXPERTS = 32,
    TOP = 6,
    CONTEXT = 8192,
    PROMPT = 2048,
    NEW = 24,
    ROUNDS = 5,
    TENSORS = 2048,
    SEQUENCES = 64,
    NEW_CUDA = 512
};
static const int ratios[KINDS] = {0, 4, 128, 4};
static int layers = KINDS; /* of these kinds in turn */

static char folder[32] = "/dev/shm/quern-v4.XXXXXX"; /* a disk would decide how long it takes */
static quern_safetensors_item items[TENSORS];
static quern_tensor views[TENSORS];
static char names[TENSORS][128];
static size_t count;
static uint64_t state = 88172645463325252u;
/* Of a step of one token, of all experts that it does not take, and of a token's products (two operations a
 * multiply-add). */
static double step_bytes, other_bytes, products;

static void clean(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) fprintf(stderr, "cannot remove %s\n", folder);
}

static void __attribute__((noreturn, format(printf, 1, 2))) stop(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    exit(4);
}

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void *add(const char *prefix, const char *suffix, quern_dtype dtype, int64_t a, int64_t b)
{
    const int64_t shape[] = {a, b};
    const size_t bytes = (size_t)(a * (b > 0 ? b : 1)) * quern_dtype_size(dtype);
    void *data = malloc(bytes + 8);
    if (data == NULL || count == TENSORS) stop("no memory for the model\n");
    snprintf(names[count], sizeof names[count], "%s%s", prefix, suffix);
    views[count] = quern_tensor_contiguous(data, dtype, b > 0 ? 2 : 1, shape);
    items[count] = (quern_safetensors_item){names[count], &views[count]};
    count++;
    return data;
}

/* Numbers in -scale ... scale, around mean. */
static void floats(const char *prefix, const char *suffix, quern_dtype dtype, int64_t a, int64_t b,
                   double scale, double mean)
{
    void *data = add(prefix, suffix, dtype, a, b);
    for (int64_t i = 0; i < a * (b > 0 ? b : 1); i++) {
        const float x = (float)(mean + scale * (2 * (double)(draw() >> 40) * 0x1p-24 - 1));
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (dtype == QUERN_F32) ((float *)data)[i] = x;
        else ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
}

/* A linear in the released files' FP8 or FP4. */
static void linear(const char *prefix, const char *suffix, int64_t n, int64_t k, int64_t fp4)
{
    char module[96];
    snprintf(module, sizeof module, "%s%s", prefix, suffix);
    const int64_t bytes = fp4 ? n * k / 2 : n * k;
    uint8_t *codes = add(module, ".weight", fp4 ? QUERN_I8 : QUERN_E4M3, n, fp4 ? k / 2 : k);
    for (int64_t i = 0; i < bytes; i += 8) { /* of e4m3 no NaN, and no more than 30 */
        const uint64_t r = fp4 ? draw() : draw() & 0xdfdfdfdfdfdfdfdfu;
        memcpy(codes + i, &r, 8);
    }
    const int64_t rows = fp4 ? n : (n + 127) / 128, columns = fp4 ? k / 32 : (k + 127) / 128;
    memset(add(module, ".scale", QUERN_E8M0, rows, columns), fp4 ? 119 : 120, (size_t)(rows * columns));
}

/* Projections that every token takes. */
static void always(const char *prefix, const char *suffix, int64_t n, int64_t k)
{
    linear(prefix, suffix, n, k, false);
    step_bytes += (double)(n * k);
    products += 2.0 * (double)(n * k);
}

static void matrix(const char *prefix, const char *suffix, int64_t n, int64_t k)
{
    floats(prefix, suffix, QUERN_BF16, n, k, 0.02, 0);
    step_bytes += 2.0 * (double)(n * k);
    products += 2.0 * (double)(n * k);
}

static void compressor(const char *prefix, int ratio, int64_t width)
{
    const int64_t columns = ratio == 4 ? 2 * width : width;
    matrix(prefix, "wkv.weight", columns, WIDTH);
    matrix(prefix, "wgate.weight", columns, WIDTH);
    floats(prefix, "ape", QUERN_F32, ratio, columns, 1, 0);
    floats(prefix, "norm.weight", QUERN_BF16, width, 0, 0.1, 1);
}

static void hyper(const char *prefix, int64_t rows, int64_t scales)
{
    floats(prefix, "_fn", QUERN_F32, rows, COPIES * WIDTH, 0.01, 0);
    floats(prefix, "_base", QUERN_F32, rows, 0, 0.5, 0);
    floats(prefix, "_scale", QUERN_F32, scales, 0, 0.3, 1);
    step_bytes += 4.0 * (double)(rows * COPIES * WIDTH);
    products += 2.0 * (double)(rows * COPIES * WIDTH);
}

static void attention(const char *layer, int ratio)
{
    char a[48], c[80];
    snprintf(a, sizeof a, "%sattn.", layer);
    always(a, "wq_a", Q_LORA, WIDTH);
    always(a, "wq_b", HEADS * DIM, Q_LORA);
    always(a, "wkv", DIM, WIDTH);
    always(a, "wo_a", O_GROUPS * O_LORA, HEADS / O_GROUPS * DIM);
    always(a, "wo_b", WIDTH, O_GROUPS * O_LORA);
    floats(a, "q_norm.weight", QUERN_BF16, Q_LORA, 0, 0.1, 1);
    floats(a, "kv_norm.weight", QUERN_BF16, DIM, 0, 0.1, 1);
    floats(a, "attn_sink", QUERN_F32, HEADS, 0, 1, 0);
    const int64_t entries = ratio == 4 ? INDEX_TOP : ratio > 0 ? CONTEXT / ratio : 0;
    step_bytes += 2.0 * (double)((WINDOW + entries) * DIM);
    products += 4.0 * HEADS * DIM * (WINDOW + (ratio == 4 ? INDEX_TOP : ratio > 0 ? PROMPT / ratio / 2 : 0));
    snprintf(c, sizeof c, "%scompressor.", a);
    if (ratio > 0) compressor(c, ratio, DIM);
    if (ratio != 4) return;
    snprintf(c, sizeof c, "%sindexer.", a);
    always(c, "wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA);
    matrix(c, "weights_proj.weight", INDEX_HEADS, WIDTH);
    snprintf(c, sizeof c, "%sindexer.compressor.", a);
    compressor(c, ratio, INDEX_DIM);
    step_bytes += 2.0 * CONTEXT / 4 * INDEX_DIM;
    products += 2.0 * INDEX_HEADS * INDEX_DIM * PROMPT / 8;
}

static void experts(const char *layer)
{
    static const char *const parts[] = {"w1", "w2", "w3"};
    char f[48], e[80];
    snprintf(f, sizeof f, "%sffn.", layer);
    matrix(f, "gate.weight", EXPERTS, WIDTH);
    floats(f, "gate.bias", QUERN_F32, EXPERTS, 0, 0.1, 0);
    for (int i = 0; i <= EXPERTS; i++)
        for (int p = 0; p < 3; p++) {
            const int64_t n = p == 1 ? WIDTH : INNER, k = p == 1 ? INNER : WIDTH;
            if (i < EXPERTS) snprintf(e, sizeof e, "%sexperts.%d.%s", f, i, parts[p]);
            else snprintf(e, sizeof e, "%sshared_experts.%s", f, parts[p]);
            if (i < EXPERTS) linear(e, "", n, k, true);
            else always(e, "", n, k);
        }
    step_bytes += 3.0 * WIDTH * INNER; /* quern_moe_forward() takes the shared expert in bf16 */
    const double weights = 3.0 * WIDTH * INNER * TOP;
    step_bytes += weights * 0.5625; /* codes and NVFP4's scales */
    other_bytes += weights * 0.5625 * (EXPERTS - TOP) / TOP;
    products += 2.0 * weights;
}

static void make_model(void)
{
    char path[256];
    floats("embed.weight", "", QUERN_BF16, VOCABULARY, WIDTH, 1, 0);
    matrix("head.weight", "", VOCABULARY, WIDTH);
    floats("norm.weight", "", QUERN_BF16, WIDTH, 0, 0.1, 1);
    hyper("hc_head", COPIES, 1);
    products -= 2.0 * VOCABULARY * WIDTH; /* only the prompt's last token has logits */
    for (int i = 0; i < layers; i++) {
        char layer[32], name[64];
        snprintf(layer, sizeof layer, "layers.%d.", i);
        floats(layer, "attn_norm.weight", QUERN_BF16, WIDTH, 0, 0.1, 1);
        floats(layer, "ffn_norm.weight", QUERN_BF16, WIDTH, 0, 0.1, 1);
        snprintf(name, sizeof name, "%shc_attn", layer);
        hyper(name, MIXES, 3);
        snprintf(name, sizeof name, "%shc_ffn", layer);
        hyper(name, MIXES, 3);
        attention(layer, ratios[i % KINDS]);
        experts(layer);
    }
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (quern_safetensors_save(path, items, count, NULL, 0) != QUERN_OK) stop("%s\n", quern_last_error(NULL));
    for (size_t i = 0; i < count; i++) free(views[i].data);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    if (f == NULL) stop("cannot write %s\n", path);
    fprintf(
        f,
        "{\"model_type\": \"deepseek_v4\", \"vocab_size\": %d, \"hidden_size\": %d, \"num_hidden_layers\": "
        "%d, "
        "\"num_attention_heads\": %d, \"head_dim\": %d, \"qk_rope_head_dim\": 64, \"q_lora_rank\": %d, "
        "\"o_groups\": %d, \"o_lora_rank\": %d, \"moe_intermediate_size\": %d, \"n_routed_experts\": %d, "
        "\"n_shared_experts\": 1, \"num_experts_per_tok\": %d, "
        "\"scoring_func\": \"sqrtsoftplus\", "
        "\"routed_scaling_factor\": 1.5, \"index_n_heads\": %d, \"index_head_dim\": %d, \"index_topk\": %d, "
        "\"sliding_window\": %d, \"swiglu_limit\": 10, \"hc_mult\": %d, \"hc_sinkhorn_iters\": 20, "
        "\"hc_eps\": 1e-6, \"rms_norm_eps\": 1e-6, \"rope_scaling\": {\"factor\": 16}, "
        "\"compress_ratios\": [",
        VOCABULARY, WIDTH, layers, HEADS, DIM, Q_LORA, O_GROUPS, O_LORA, INNER, EXPERTS, TOP, INDEX_HEADS,
        INDEX_DIM, INDEX_TOP, WINDOW, COPIES);
    for (int i = 0; i < layers; i++) fprintf(f, "%s%d", i > 0 ? ", " : "", ratios[i % KINDS]);
    fputs("]}\n", f);
    if (fclose(f) != 0) stop("cannot write %s\n", path);
}

static void make_prompt(const char *name, int64_t n)
{
    static int32_t tokens[CONTEXT];
    char path[256];
    for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(draw() % VOCABULARY);
    const quern_tensor t = quern_tensor_contiguous(tokens, QUERN_I32, 1, &n);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (quern_safetensors_save(path, &(quern_safetensors_item){"tokens", &t}, 1, NULL, 0) != QUERN_OK)
        stop("%s\n", quern_last_error(NULL));
}

/* Prompts that begin alike and end with tokens of their own. */
static void make_batch(const char *name)
{
    static int32_t tokens[SEQUENCES * CONTEXT], lengths[SEQUENCES];
    const int64_t shape[] = {SEQUENCES, CONTEXT};
    char path[256];
    for (int64_t i = 0; i < CONTEXT; i++) tokens[i] = (int32_t)(draw() % VOCABULARY);
    for (int b = 0; b < SEQUENCES; b++) {
        lengths[b] = CONTEXT;
        if (b > 0) memcpy(tokens + (ptrdiff_t)b * CONTEXT, tokens, sizeof *tokens * (CONTEXT - 1));
        tokens[(b + 1) * CONTEXT - 1] = b;
    }
    const quern_tensor t = quern_tensor_contiguous(tokens, QUERN_I32, 2, shape),
                       n = quern_tensor_contiguous(lengths, QUERN_I32, 1, shape);
    const quern_safetensors_item both[] = {{"tokens", &t}, {"lengths", &n}};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (quern_safetensors_save(path, both, 2, NULL, 0) != QUERN_OK) stop("%s\n", quern_last_error(NULL));
}

/* Seconds that the example says it read prompts, and made tokens. */
static void run(const char *build, const char *arguments, double *reading, double *making)
{
    char command[2048], line[1024];
    snprintf(command, sizeof command,
             "cd '%s' && env -u OMP_WAIT_POLICY '%s/v4' generate . --activations bf16 --chunk 1024 --cache "
             "experts %s 2>&1 >/dev/null",
             folder, build, arguments);
    FILE *f = popen(command, "r");
    bool found = false;
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "v4: prompts of %*d tokens in %lf s (%*f a second), %*d new ones in %lf s", reading,
                   making) == 2)
            found = true;
        else fputs(line, stderr);
    if (f == NULL || pclose(f) != 0 || !found) stop("failed: %s\n", command);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values)
{
    qsort(values, ROUNDS, sizeof *values, by_value);
    return values[ROUNDS / 2];
}

static void need(quern_status status)
{
    if (status != QUERN_OK) stop("%s\n", quern_last_error(NULL));
}

/* Bytes a second, read and written, of a copy within the GPU's memory. */
static double copy_rate(void)
{
    enum { COPIES_TIMED = 10 };
    const size_t bytes = (size_t)1 << 30;
    void *from, *to, *begin, *end;
    double ms;
    need(quern_cuda_allocate(0, bytes, &from));
    need(quern_cuda_allocate(0, bytes, &to));
    need(quern_cuda_event_create(0, &begin));
    need(quern_cuda_event_create(0, &end));
    need(quern_cuda_fill(0, from, 1, bytes, NULL));
    for (int i = 0; i <= COPIES_TIMED; i++) {
        need(quern_cuda_copy(0, to, from, bytes, NULL));
        if (i == 0) need(quern_cuda_event_record(0, begin, NULL));
    }
    need(quern_cuda_event_record(0, end, NULL));
    need(quern_cuda_event_elapsed(0, begin, end, &ms));
    need(quern_cuda_free(0, from));
    need(quern_cuda_free(0, to));
    return 2e3 * COPIES_TIMED * (double)bytes / ms;
}

/* The rate at which a step's bytes pass, of the copy's. */
static double share(const char *build, const char *what, double bytes, int sequences, double copy)
{
    char arguments[128];
    double reading, making;
    snprintf(arguments, sizeof arguments, "--device cuda %s --max-new %d", what, NEW_CUDA + 1);
    run(build, arguments, &reading, &making);
    const double step = making / NEW_CUDA, is = bytes / step / copy;
    fprintf(stderr,
            "%d sequences: a step of %.0f MB in %.0f us, %.0f tokens a second, %.3f of a copy's %.2f TB/s\n",
            sequences, bytes / 1e6, step * 1e6, sequences / step, is, copy / 1e12);
    return is;
}

static int accept_cuda(const char *build)
{
    make_prompt("long", CONTEXT);
    make_batch("batch");
    const double copy = copy_rate(), one = share(build, "--tokens long", step_bytes, 1, copy),
                 many = share(build, "--batch batch", step_bytes + other_bytes, SEQUENCES, copy);
    printf("{\"one\": %.3f, \"many\": %.3f}\n", one, many);
    return 0;
}

int main(int argc, char **argv)
{
    double decode[ROUNDS], prefill[ROUNDS], reading, making;
    char build[PATH_MAX], long_run[128], short_run[128]; /* realpath() takes no less */
    const bool cuda = argc == 3 && strcmp(argv[2], "cuda") == 0;
    struct statvfs about;
    if ((argc != 2 && !cuda) || realpath(argv[1], build) == NULL) {
        fprintf(stderr, "usage: accept_v4 BUILD_DIRECTORY [cuda]\n");
        return 2;
    }
    if (cuda) layers *= 2;
    if (cuda && (statvfs("/dev/shm", &about) != 0 || about.f_bsize * about.f_bavail >> 30 < 12))
        strcpy(folder, "/tmp/quern-v4.XXXXXX");
    if (mkdtemp(folder) == NULL) stop("no folder %s\n", folder);
    atexit(clean);
    make_model();
    if (cuda) return accept_cuda(build);
    make_prompt("long", CONTEXT);
    make_prompt("short", PROMPT);
    snprintf(long_run, sizeof long_run, "--threads 2 --tokens long --session s --max-new %d", NEW + 1);
    snprintf(short_run, sizeof short_run, "--threads 2 --tokens short --max-new 1");
    run(build, long_run, &reading, &making);
    for (int i = 0; i < ROUNDS; i++) {
        const double before = ceiling_measure(CEILING_READ, 2), peak = ceiling_measure(CEILING_BF16, 2);
        run(build, long_run, &reading, &making); /* the first new token comes from the session */
        decode[i] = step_bytes * NEW / making / 1e9 / ((before + ceiling_measure(CEILING_READ, 2)) / 2);
        run(build, short_run, &reading, &making);
        prefill[i] = products * PROMPT / reading / 1e9 / ((peak + ceiling_measure(CEILING_BF16, 2)) / 2);
        fprintf(stderr, "decode %.3f, prefill %.3f (%.1f tokens a second)\n", decode[i], prefill[i],
                PROMPT / reading);
    }
    printf("{\"step_mb\": %.1f, \"decode\": %.3f, \"prefill\": %.3f}\n", step_bytes / 1e6, median(decode),
           median(prefill));
    return 0;
}
