/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "tool/v4_case.h"

#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

made_model v4_made;
const char *v4_command = V4_COMMAND;
static char folder[] = "/tmp/v4_test_XXXXXX";

const char *v4_folder(void)
{
    return folder;
}

static const char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

int v4_set_up(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(folder));
    v4_make(&v4_made, 7, false);
    v4_write(&v4_made, path_of("model"), NULL, NULL);
    return 0;
}

int v4_tear_down(void **state)
{
    char command[128];
    (void)state;
    made_free(&v4_made);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

void v4_tokens(int32_t *tokens, int count)
{
    uint32_t state = 5;
    for (int i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        tokens[i] = (int32_t)((state >> 16) % V4_VOCABULARY);
    }
}

void v4_put(const char *name, const int32_t *tokens, const int32_t *lengths, int64_t count)
{
    const quern_tensor t = quern_tensor_contiguous((void *)tokens, QUERN_I32, lengths != NULL ? 2 : 1,
                                                   (const int64_t[]){count, V4_MOST}),
                       n = quern_tensor_contiguous((void *)lengths, QUERN_I32, 1, &count);
    const quern_safetensors_item items[] = {{"tokens", &t}, {"lengths", &n}};
    assert_int_equal(quern_safetensors_save(path_of(name), items, lengths != NULL ? 2 : 1, NULL, 0),
                     QUERN_OK);
}

static int run(const char *format, va_list args)
{
    char arguments[1024], command[2048];
    vsnprintf(arguments, sizeof arguments, format, args);
    snprintf(command, sizeof command, "cd '%s' && '%s' %s --quiet >out 2>err", folder, v4_command, arguments);
    const int how = system(command);
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

int v4_run(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int code = run(format, args);
    va_end(args);
    return code;
}

uint8_t *v4_read(const char *name, size_t *size)
{
    FILE *f = fopen(path_of(name), "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = calloc(*size + 1, 1);
    assert_int_equal(fread(bytes, 1, *size, f), *size);
    fclose(f);
    return bytes;
}

void v4_write_file(const char *name, const uint8_t *bytes, size_t size)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

bool v4_exists(const char *name)
{
    return access(path_of(name), F_OK) == 0;
}

int v4_ends(int code, int32_t *numbers, const char *format, ...)
{
    va_list args;
    size_t size;
    va_start(args, format);
    const int ended = run(format, args);
    va_end(args);
    char *errors = (char *)v4_read("err", &size), *out = (char *)v4_read("out", &size);
    int count = 0;
    if (ended != code) fail_msg("v4 %s: exit code %d, not %d: %s", format, ended, code, errors);
    if (code != 0) { /* one sentence, and nothing else */
        assert_true(errors[0] != '\0' && strchr(errors, '\n') == errors + strlen(errors) - 1);
        assert_int_equal(size, 0);
    }
    for (char *at = out; numbers != NULL && *at != '\0';) {
        at += strcspn(at, "0123456789");
        if (*at != '\0') numbers[count++] = (int32_t)strtol(at, &at, 10);
    }
    free(errors);
    free(out);
    return count;
}

void v4_says(const char *words)
{
    size_t size;
    char *errors = (char *)v4_read("err", &size);
    if (strstr(errors, words) == NULL) fail_msg("'%s' is not in: %s", words, errors);
    free(errors);
}

void v4_logits(const char *name, int64_t count, float *logits)
{
    quern_safetensors *file;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "logits", &t), QUERN_OK);
    assert_true(t.dtype == QUERN_F32 && t.ndim == 2 && t.shape[0] == count && t.shape[1] == V4_VOCABULARY);
    memcpy(logits, t.data, (size_t)(count * V4_VOCABULARY) * sizeof *logits);
    quern_safetensors_close(file);
}
