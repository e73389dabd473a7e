/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/view.h"

#include "core/error.h"
#include "core/plugin.h"

#include <stdio.h>
#include <string.h>

quern_tensor view_or_absent(const quern_tensor *t)
{
    return t != NULL ? *t : (quern_tensor){0};
}

quern_tensor view_with_batch(const quern_tensor *t)
{
    if (t == NULL) return (quern_tensor){0};
    quern_tensor v = *t;
    v.ndim++;
    v.shape[0] = 1;
    v.strides[0] = 0;
    for (int32_t i = 0; i < t->ndim; i++) v.shape[i + 1] = t->shape[i], v.strides[i + 1] = t->strides[i];
    return v;
}

quern_tensor view_on(const quern_tensor *like, void *data, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor v = quern_tensor_contiguous(data, dtype, ndim, shape);
    v.device = like->device;
    v.device_id = like->device_id;
    return v;
}

void view_narrow(quern_tensor *t, int32_t dim, int64_t first, int64_t count)
{
    if (t->ndim == 0) return;
    t->shape[dim] = count;
    if (t->data != NULL) t->data = (char *)t->data + first * t->strides[dim] * (int64_t)quern_dtype_size(t->dtype);
}

int64_t view_elements(const quern_tensor *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static const char *dtype_list(uint32_t dtypes, char text[64])
{
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; quern_dtype_size((quern_dtype)d) > 0; d++)
        if (dtypes & 1u << d)
            used += (size_t)snprintf(text + used, 64 - used, "%s%s", used > 0 ? " or " : "", quern_dtype_name((quern_dtype)d));
    return text;
}

/* Bytes from `data` to the lowest and past the highest element; false on 64-bit overflow. */
static bool span(const quern_tensor *t, int64_t *low, int64_t *high)
{
    int64_t lo = 0, hi = 0, elements = 1, reach;
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    *low = *high = 0;
    for (int32_t i = 0; i < t->ndim; i++)
        if (__builtin_mul_overflow(elements, t->shape[i] > 0 ? t->shape[i] : 1, &elements)) return false;
    if (__builtin_mul_overflow(elements, size, &elements)) return false;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) return true;
        if (t->shape[i] == 1) continue;
        if (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &reach)) return false;
        if (reach < 0 ? __builtin_add_overflow(lo, reach, &lo) : __builtin_add_overflow(hi, reach, &hi)) return false;
    }
    if (__builtin_add_overflow(hi, 1, &hi)) return false;
    return !__builtin_mul_overflow(lo, size, low) && !__builtin_mul_overflow(hi, size, high);
}

/* Whether two elements of t share memory: walking the strides from small to large, each must step over all
 * that stands within. (Layouts that interleave without nesting are refused too.) */
static bool overlaps_itself(const quern_tensor *t)
{
    int64_t reach = 0;
    bool done[QUERN_MAX_DIMS] = {false};
    for (int32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return false;
    for (int32_t n = 0; n < t->ndim; n++) {
        int32_t least = -1;
        for (int32_t i = 0; i < t->ndim; i++) {
            if (done[i]) continue;
            const int64_t s = t->strides[i] < 0 ? -t->strides[i] : t->strides[i];
            const int64_t best = least < 0 ? 0 : t->strides[least] < 0 ? -t->strides[least] : t->strides[least];
            if (least < 0 || s < best) least = i;
        }
        done[least] = true;
        if (t->shape[least] == 1) continue;
        const int64_t s = t->strides[least] < 0 ? -t->strides[least] : t->strides[least];
        if (s <= reach) return true;
        reach += (t->shape[least] - 1) * s;
    }
    return false;
}

quern_status view_check(const view_rule *rule, const quern_tensor *like, bool run)
{
    const quern_tensor *t = rule->tensor;
    const char *name = rule->name;
    char text[64];
    if (t == NULL) {
        if (rule->optional) return QUERN_OK;
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", name);
    }
    if (t->device != QUERN_CPU && t->device != QUERN_CUDA)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: device %d: 0 (cpu) or 1 (cuda) is accepted", name, (int)t->device);
    if (like != NULL && (t->device != like->device || t->device_id != like->device_id))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is on device %d:%d: all tensors of a call share one device, here %d:%d", name,
                         (int)t->device, t->device_id, (int)like->device, like->device_id);
    if ((unsigned)t->dtype >= 32 || !(rule->dtypes & 1u << t->dtype))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: dtype %s: %s is accepted", name, quern_dtype_name(t->dtype),
                         dtype_list(rule->dtypes, text));
    if (t->ndim != rule->ndim)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %d dimensions: %d are accepted", name, t->ndim, rule->ndim);
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.shape[%d] is %lld: 0 or more is accepted", name, i, (long long)t->shape[i]);
        if (rule->shape[i] != VIEW_ANY && t->shape[i] != rule->shape[i])
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.shape[%d] is %lld: %lld is accepted", name, i, (long long)t->shape[i],
                             (long long)rule->shape[i]);
    }
    int64_t low, high;
    if (!span(t, &low, &high))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: shape times strides overflows 64 bits: at most 2^63 - 1 bytes are accepted", name);
    const int32_t last = t->ndim - 1;
    if (last >= 0 && t->shape[last] > 1 && t->strides[last] != 1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.strides[%d] is %lld: 1 is accepted for the last dimension", name, last,
                         (long long)t->strides[last]);
    if (rule->output && overlaps_itself(t))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: its strides let elements share memory: an output's may not", name);
    if (high == 0 || !run) return QUERN_OK;
    if (t->data == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.data is NULL: memory is needed for its elements", name);
    const size_t size = quern_dtype_size(t->dtype);
    if ((uintptr_t)t->data % size != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.data is %p: a multiple of the element's %zu bytes is accepted", name, t->data, size);
    return QUERN_OK;
}

quern_status view_check_head_dim(const char *name, int64_t dim)
{
    if (dim >= 8 && dim <= 256 && dim % 8 == 0) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: head dim %lld: a multiple of 8 from 8 to 256 is accepted", name, (long long)dim);
}

quern_status view_check_heads(int64_t heads, int64_t kv_heads)
{
    if (kv_heads < 1 ? heads == 0 : heads > 0 && heads % kv_heads == 0) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "q has %lld heads: a positive multiple of k's %lld is accepted", (long long)heads,
                     (long long)kv_heads);
}

/* Whether `delta` = sum_i d_i strides_i for some |d_i| < shape_i, strides nested as overlaps_itself() wants:
 * the widest stride leaves at most two choices of d. */
static bool reachable(const quern_tensor *t, int64_t delta, uint32_t used)
{
    int32_t widest = -1;
    for (int32_t i = 0; i < t->ndim; i++)
        if (!(used & 1u << i) && t->shape[i] > 1 && (widest < 0 || t->strides[i] > t->strides[widest])) widest = i;
    if (widest < 0) return delta == 0;
    const int64_t s = t->strides[widest];
    int64_t d = delta / s;
    if (delta % s < 0) d--;
    for (int64_t x = d; x <= d + 1; x++)
        if (x > -t->shape[widest] && x < t->shape[widest] && reachable(t, delta - x * s, used | 1u << widest)) return true;
    return false;
}

static bool share_memory(const quern_tensor *a, const quern_tensor *b)
{
    int64_t a_low, a_high, b_low, b_high;
    span(a, &a_low, &a_high);
    span(b, &b_low, &b_high);
    if (a_high == 0 || b_high == 0 || a->data == NULL || b->data == NULL) return false;
    const intptr_t pa = (intptr_t)a->data, pb = (intptr_t)b->data;
    if (pa + a_high <= pb + b_low || pb + b_high <= pa + a_low) return false;
    /* Views of one buffer may interleave without meeting (the gradients of a fused QKV tensor): with equal
     * positive strides that is decided exactly, otherwise meeting ranges count as shared. */
    const int64_t size = (int64_t)quern_dtype_size(a->dtype);
    if (a->dtype != b->dtype || a->ndim != b->ndim || (pb - pa) % size != 0 || overlaps_itself(a)) return true;
    quern_tensor both = *a;
    for (int32_t i = 0; i < a->ndim; i++) {
        if (b->shape[i] > both.shape[i]) both.shape[i] = b->shape[i];
        if (both.shape[i] > 1 && (a->strides[i] != b->strides[i] || a->strides[i] <= 0)) return true;
    }
    return reachable(&both, (pb - pa) / size, 0);
}

quern_status view_check_all(const view_rule *rules, int32_t count, const quern_tensor *like, bool run)
{
    for (int32_t i = 0; i < count; i++) {
        const quern_status status = view_check(&rules[i], like, run);
        if (status != QUERN_OK) return status;
    }
    if (!run) return QUERN_OK;
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < count; j++)
            if (i != j && rules[i].output && rules[i].tensor != NULL && rules[j].tensor != NULL && (!rules[j].output || j < i) &&
                share_memory(rules[i].tensor, rules[j].tensor))
                return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s shares memory with %s: outputs need memory of their own", rules[i].name,
                                 rules[j].name);
    for (int32_t i = 0; i < count; i++) {
        const quern_tensor *t = rules[i].tensor;
        if (t == NULL || t->data == NULL || view_elements(t) == 0) continue;
        const quern_status status = plugin_check_pointer(t->data, t->device, t->device_id, rules[i].name);
        if (status != QUERN_OK) return status;
    }
    return QUERN_OK;
}

quern_status view_check_workspace(const void *workspace, size_t given, size_t needed, const quern_tensor *like)
{
    if (given < needed) return error_set(QUERN_ERR_WORKSPACE, "workspace_bytes is %zu: at least %zu are accepted", given, needed);
    if (needed == 0) return QUERN_OK;
    if (workspace == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "workspace is NULL: %zu bytes are needed", needed);
    return plugin_check_pointer(workspace, like->device, like->device_id, "workspace");
}

quern_status view_check_borders(const quern_tensor *cu, const char *name, int64_t total)
{
    const int32_t *p = cu->data;
    if (cu->device != QUERN_CPU) return QUERN_OK; /* device contents are bounded in the kernels */
    if (p[0] != 0) return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s[0] is %d: 0 is accepted", name, p[0]);
    for (int64_t i = 0; i + 1 < cu->shape[0]; i++)
        if (p[i + 1] < p[i])
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s[%lld] is %d after %d: it may not fall", name, (long long)i + 1, p[i + 1], p[i]);
    if (p[cu->shape[0] - 1] > total)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s ends at %d: at most the %lld packed rows are accepted", name, p[cu->shape[0] - 1],
                         (long long)total);
    return QUERN_OK;
}
