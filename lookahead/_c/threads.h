#ifndef LOOKAHEAD_THREADS_H
#define LOOKAHEAD_THREADS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct { Py_ssize_t next, count; int failed; } Work; /* parts: the first that is free, all; if one failed */

/* The threads of torch, where its library is found; others would wait beside them. */
int torch_threads(void);

/* Let each of torch's threads do some of the work, which whatever it is given begins with; not 0 if one has failed. */
int share_out(Work *work, void (*part)(void *));

#ifdef __GNUC__
/* A part that no thread has taken before; `count` or more when all are taken. */
static inline Py_ssize_t
next_part(Work *work)
{
    return __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
}
#endif
#endif
