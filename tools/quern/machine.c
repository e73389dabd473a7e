/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "machine.h"

#include <stdio.h>
#include <string.h>

#ifndef QUERN_COMMIT
#define QUERN_COMMIT "unknown"
#endif

void machine_cpu(char *text, size_t room)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(text, room, "unknown");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        snprintf(text, room, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (f != NULL) fclose(f);
}

const char *machine_commit(void)
{
    return QUERN_COMMIT;
}

json_t *machine_json(const quern_context *ctx)
{
    char cpu[128];
    machine_cpu(cpu, sizeof cpu);
    return json_pack("{s:s, s:s, s:i}", "cpu", cpu, "isa", quern_cpu_level_name(quern_context_cpu_level(ctx)),
                     "threads", (int)quern_context_threads(ctx));
}
