/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4_golden.h"

#include "cmocka_c11.h"
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const prefixes[ORACLE_PROFILES] = {"rne", "seed", "modelopt", "ct"};

nvfp4_golden_file nvfp4_golden_open(const char *directory, const char *name)
{
    return (nvfp4_golden_file){golden_open(directory, name), 0, 0};
}

void nvfp4_golden_close(nvfp4_golden_file *file)
{
    quern_safetensors_close(file->file);
}

static float *widened(const quern_tensor *t, int64_t count)
{
    float *x = malloc(sizeof *x * (size_t)(count + 1));
    if (x == NULL) fail_msg("the test is out of memory");
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        if (t->dtype == QUERN_BF16) bits = (uint32_t)((const uint16_t *)t->data)[i] << 16;
        else memcpy(&bits, (const char *)t->data + 4 * i, 4);
        memcpy(&x[i], &bits, 4);
    }
    return x;
}

static quern_tensor named(const nvfp4_golden_file *f, const char *profile, const char *kind, const char *name)
{
    char full[200];
    quern_tensor t;
    snprintf(full, sizeof full, "%s.%s.%s", profile, kind, name);
    if (quern_safetensors_get(f->file, full, &t) != QUERN_OK)
        fail_msg("%s: %s", full, quern_last_error(NULL));
    return t;
}

bool nvfp4_golden_next(nvfp4_golden_file *f, nvfp4_golden *g)
{
    const char *full;
    for (; (full = quern_safetensors_name(f->file, f->index)) != NULL; f->index++, f->profile = 0) {
        if (strncmp(full, "in.", 3) != 0) continue;
        for (; f->profile < ORACLE_PROFILES; f->profile++) {
            char global[200];
            snprintf(global, sizeof global, "%s.gscale.%s", prefixes[f->profile], full + 3);
            if (!quern_safetensors_has(f->file, global)) continue;
            *g = (nvfp4_golden){.name = full + 3, .profile = (oracle_profile)f->profile, .count = 1};
            if (quern_safetensors_get(f->file, full, &g->in) != QUERN_OK)
                fail_msg("%s: %s", full, quern_last_error(NULL));
            for (int32_t i = 0; i < g->in.ndim; i++) g->count *= g->in.shape[i];
            g->columns = g->in.shape[g->in.ndim - 1];
            g->rows = g->count / g->columns;
            g->x = widened(&g->in, g->count);
            const char *profile = prefixes[f->profile++];
            memcpy(&g->global, named(f, profile, "gscale", g->name).data, 4);
            g->codes = named(f, profile, "codes", g->name).data;
            g->scales = named(f, profile, "scales", g->name).data;
            return true;
        }
    }
    return false;
}

void nvfp4_golden_free(nvfp4_golden *g)
{
    free(g->x);
}

const uint8_t *nvfp4_golden_bytes(const nvfp4_golden_file *f, const char *prefix, const char *name,
                                  int64_t *bytes)
{
    char full[200];
    quern_tensor t;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    if (quern_safetensors_get(f->file, full, &t) != QUERN_OK)
        fail_msg("%s: %s", full, quern_last_error(NULL));
    *bytes = 1;
    for (int32_t i = 0; i < t.ndim; i++) *bytes *= t.shape[i];
    return t.data;
}
