/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * convert.c - the rate of `quern quantize` from the page cache to tmpfs, 2 threads, the report included: of
 * bf16 weights by the scale choices rne and search, and of MXFP4 beside two processes of cp that take one
 * shard each.
 *
 * usage: accept_convert BUILD_DIRECTORY. Prints JSON. Each model has 1 GiB of weights in two shards.
 */
#include <quern/safetensors.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SHARDS = 2, ROUNDS = 7, TABLE = 1 << 16, NAME = 128 };
static const int64_t model_bytes = (int64_t)1 << 30;

static char source[] = "/tmp/quern-convert.XXXXXX", target[] = "/dev/shm/quern-convert.XXXXXX";

static void clean(void)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'", source, target);
    if (system(command) != 0) fprintf(stderr, "cannot remove %s\n", source);
}

static void __attribute__((noreturn, format(printf, 1, 2))) stop(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    exit(4);
}

static void *need(void *p)
{
    if (p == NULL) stop("no memory\n");
    return p;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds that the commands, run at once, take. */
static double seconds(const char *const *commands, int count)
{
    pid_t pid[SHARDS];
    const double begin = now();
    for (int i = 0; i < count; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            execl("/bin/sh", "sh", "-c", commands[i], (char *)NULL);
            _exit(127);
        }
    }
    for (int i = 0; i < count; i++) {
        int how;
        if (pid[i] < 0 || waitpid(pid[i], &how, 0) < 0 || how != 0) stop("failed: %s\n", commands[i]);
    }
    return now() - begin;
}

static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* bf16 of a normal distribution. */
static void fill_weights(uint16_t *to, int64_t count, uint64_t *state)
{
    static uint16_t table[TABLE];
    for (int i = 0; table[TABLE - 1] == 0 && i < TABLE; i++) {
        const double a = ((double)(draw(state) >> 11) + 1) * 0x1p-53,
                     b = (double)(draw(state) >> 11) * 0x1p-53;
        const float x = (float)(0.02 * sqrt(-2 * log(a)) * cos(6.283185307179586 * b));
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        table[i] = (uint16_t)(bits >> 16 | 1);
    }
    for (int64_t i = 0; i < count; i += 4) {
        const uint64_t r = draw(state);
        for (int k = 0; k < 4; k++) to[i + k] = table[r >> 16 * k & (TABLE - 1)];
    }
}

/* A shard of `count` matrices; MXFP4 with their exponents. */
static void write_shard(const char *folder, int shard, int count, bool mxfp4)
{
    const int64_t rows = 8192, columns = 4096, bytes = mxfp4 ? rows * columns / 2 : rows * columns * 2;
    uint64_t state = 88172645463325252u + (uint64_t)shard;
    uint8_t *data = need(malloc((size_t)bytes)), *exponents = need(malloc((size_t)(rows * columns / 32)));
    if (mxfp4)
        for (int64_t i = 0; i < bytes; i += 8) memcpy(data + i, &(uint64_t){draw(&state)}, 8);
    else fill_weights((uint16_t *)data, rows * columns, &state);
    for (int64_t i = 0; i < rows * columns / 32; i++) exponents[i] = (uint8_t)(112 + draw(&state) % 8);
    quern_tensor views[2] = {
        quern_tensor_contiguous(data, mxfp4 ? QUERN_I8 : QUERN_BF16, 2,
                                (const int64_t[]){rows, mxfp4 ? columns / 2 : columns}),
        quern_tensor_contiguous(exponents, QUERN_E8M0, 2, (const int64_t[]){rows, columns / 32})};
    const int kinds = mxfp4 ? 2 : 1;
    quern_safetensors_item *items = need(calloc((size_t)kinds * (size_t)count, sizeof *items));
    char(*names)[NAME] = need(calloc((size_t)kinds * (size_t)count, sizeof *names)), path[512];
    for (int i = 0; i < kinds * count; i++) {
        snprintf(names[i], NAME, mxfp4 ? "l.%d.experts.%d.w2.%s" : "l.%d.m%d.%s", shard, i / kinds,
                 i % kinds == 0 ? "weight" : "scale");
        items[i] = (quern_safetensors_item){names[i], &views[i % kinds]};
    }
    snprintf(path, sizeof path, "%s/%d.safetensors", folder, shard);
    if (quern_safetensors_save(path, items, (size_t)kinds * (size_t)count, NULL, 0) != QUERN_OK)
        stop("%s\n", quern_last_error(NULL));
    snprintf(path, sizeof path, "%s/%d.part", folder, shard);
    FILE *f = need(fopen(path, "w"));
    for (int i = 0; i < kinds * count; i++)
        fprintf(f, "%s\"%s\":\"%d.safetensors\"", shard + i > 0 ? "," : "", names[i], shard);
    if (fclose(f) != 0) stop("cannot write %s\n", path);
    free(data);
    free(exponents);
    free(items);
    free(names);
}

/* A model in its folder below `source`; in the page cache when this returns. */
static void make_model(const char *name, bool mxfp4)
{
    char folder[256], command[1024];
    snprintf(folder, sizeof folder, "%s/%s", source, name);
    snprintf(command, sizeof command, "mkdir '%s'", folder);
    seconds(&(const char *){command}, 1);
    const int count = (int)(model_bytes / SHARDS / ((int64_t)8192 * 4096 * (mxfp4 ? 1 : 4) / 2));
    for (int s = 0; s < SHARDS; s++) write_shard(folder, s, count, mxfp4);
    snprintf(command, sizeof command,
             "cd '%s' && (printf '{\"weight_map\":{'; cat 0.part 1.part; printf '}}') > "
             "model.safetensors.index.json && "
             "rm *.part && sync . && cat *.safetensors > /dev/null",
             folder);
    seconds(&(const char *){command}, 1);
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

/* Seconds of one conversion into an empty folder. */
static double convert(const char *build, const char *model, const char *scales)
{
    char command[1024], clear[256];
    snprintf(clear, sizeof clear, "rm -rf '%s/out'", target);
    seconds(&(const char *){clear}, 1);
    snprintf(command, sizeof command,
             "'%s/quern' quantize '%s/%s' '%s/out' --format modelopt --scales %s --threads 2 > /dev/null",
             build, source, model, target, scales);
    return seconds(&(const char *){command}, 1);
}

static double copy(const char *model)
{
    char commands[SHARDS][512], clear[256];
    const char *list[SHARDS];
    snprintf(clear, sizeof clear, "rm -rf '%s/out' && mkdir '%s/out'", target, target);
    seconds(&(const char *){clear}, 1);
    for (int s = 0; s < SHARDS; s++) {
        snprintf(commands[s], sizeof commands[s], "exec cp '%s/%s/%d.safetensors' '%s/out/'", source, model,
                 s, target);
        list[s] = commands[s];
    }
    return seconds(list, SHARDS);
}

int main(int argc, char **argv)
{
    double rne[ROUNDS], search[ROUNDS], over[ROUNDS];
    if (argc != 2) {
        fprintf(stderr, "usage: accept_convert BUILD_DIRECTORY\n");
        return 2;
    }
    if (mkdtemp(source) == NULL || mkdtemp(target) == NULL) stop("no folder in /tmp and /dev/shm\n");
    atexit(clean);
    make_model("bf16", false);
    make_model("mxfp4", true);
    for (int i = 0; i < ROUNDS; i++) {
        rne[i] = (double)model_bytes / convert(argv[1], "bf16", "rne") / 1e9;
        search[i] = (double)model_bytes / convert(argv[1], "bf16", "search") / 1e6;
        over[i] = copy("mxfp4") / convert(argv[1], "mxfp4", "rne");
    }
    printf("{\"rne_gbps\": %.3f, \"search_mbps\": %.1f, \"mxfp4_over_cp\": %.3f}\n", median(rne),
           median(search), median(over));
    return 0;
}
