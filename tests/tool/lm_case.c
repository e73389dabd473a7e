/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "tool/lm_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int failure(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return 1;
}

lm_config small(const char *attention)
{
    const int32_t row = config_attention(attention);
    assert_true(row >= 0);
    return (lm_config){.width = 32,
                       .layers = 2,
                       .heads = 2,
                       .kv_heads = 1,
                       .inner = 48,
                       .context = 96,
                       .attention = row,
                       .block = 16,
                       .selected = 4,
                       .window = 32,
                       .index_top = 8,
                       .ratio = 16,
                       .top = 2};
}

void stir(lm_model *m)
{
    uint64_t state = 11;
    for (int32_t i = 0; i < m->param_count; i++)
        for (int64_t j = 0; j < m->params[i].rows * m->params[i].cols; j++)
            m->params[i].value[j] += 0.05f * random_normal(&state);
}

void fill(uint8_t *text, int n)
{
    uint64_t state = 7;
    for (int i = 0; i < n; i++) text[i] = (uint8_t)("abcdefgh"[random_next(&state) % 8]);
}

static void write_file(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

int make_places(void **state)
{
    places *p = calloc(1, sizeof *p);
    uint8_t text[CORPUS];
    assert_non_null(p);
    strcpy(p->folder, "/tmp/lm_test_XXXXXX");
    assert_non_null(mkdtemp(p->folder));
    snprintf(p->corpus, sizeof p->corpus, "%s/corpus", p->folder);
    snprintf(p->other, sizeof p->other, "%s/other", p->folder);
    fill(text, CORPUS);
    write_file(p->corpus, text, CORPUS);
    text[5000] ^= 1;
    write_file(p->other, text, CORPUS);
    *state = p;
    return 0;
}

int remove_places(void **state)
{
    const places *p = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", p->folder);
    const int code = system(command);
    free(*state);
    return code;
}

int program(const places *p, const char *environment, const char *arguments)
{
    char command[1024];
    snprintf(command, sizeof command, "cd '%s' && %s '%s' %s >out 2>err", p->folder, environment, LM_COMMAND,
             arguments);
    const int how = system(command);
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

/* What the program wrote to standard error, as far as it fits. */
static size_t read_errors(const places *p, char *text, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "%s/err", p->folder);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    const size_t n = fread(text, 1, size - 1, f);
    fclose(f);
    text[n] = '\0';
    return n;
}

void assert_ends(const places *p, const char *environment, const char *arguments, int code)
{
    char text[2048];
    const int ended = program(p, environment, arguments);
    if (ended == code) return;
    read_errors(p, text, sizeof text);
    fail_msg("%s lm %s: exit code %d, not %d: %s", environment, arguments, ended, code, text);
}

bool says(const places *p, const char *words)
{
    char text[2048];
    return read_errors(p, text, sizeof text) > 0 && strstr(text, words) != NULL;
}
