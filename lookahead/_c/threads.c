#include "threads.h"
#ifdef __gnu_linux__
#include <dlfcn.h>
#endif

int
torch_threads(void)
{
    int (*threads)(void) = NULL;
#ifdef __gnu_linux__
    *(void **)&threads = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
#endif
    return threads == NULL ? 1 : threads();
}

int
share_out(Work *work, void (*part)(void *))
{
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;
    const Py_ssize_t threads = Py_MIN(torch_threads(), work->count);
#ifdef __gnu_linux__
    if (threads > 1)
        *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
    parallel != NULL ? parallel(part, work, (unsigned)threads, 0) : part(work);
    return work->failed;
}
