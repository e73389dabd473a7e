/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * float_state.h - the floating-point state of a thread while it computes for the library: round to nearest
 * even, keep subnormals, trap nothing. A caller may have set any other (a debugger's traps, an audio
 * program's flush to zero); its state, the sticky flags included, comes back as it was.
 */
#ifndef QUERN_CORE_FLOAT_STATE_H
#define QUERN_CORE_FLOAT_STATE_H

#if defined(__SSE2__)
#include <xmmintrin.h>

typedef unsigned float_state; /* MXCSR */

static inline float_state float_state_enter(void)
{
    enum { FLAGS = 0x3f, DEFAULTS = 0x1f80 };
    const float_state callers = _mm_getcsr();
    if ((callers & ~(float_state)FLAGS) != DEFAULTS) _mm_setcsr(DEFAULTS);
    return callers;
}

static inline void float_state_leave(const float_state *callers)
{
    _mm_setcsr(*callers);
}
#else
#include <fenv.h>

typedef fenv_t float_state;

static inline float_state float_state_enter(void)
{
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    return callers;
}

static inline void float_state_leave(const float_state *callers)
{
    fesetenv(callers);
}
#endif

/* From here to the end of the block. Stands first in every operation that computes. */
#define DEFAULT_FLOAT_STATE                                                                                  \
    const float_state callers_float_state __attribute__((cleanup(float_state_leave), unused)) =              \
        float_state_enter()

#endif
