#include "speedups.h"

/* The order of lookahead.draft.best_first's heap: falling values, and of equals the one found first. */
static inline int
comes_before(const Waiting *one, const Waiting *other)
{
    if (one->value != other->value)
        return one->value > other->value;
    if (one->parent != other->parent)
        return one->parent < other->parent;
    return one->place < other->place;
}

static int
compare(const void *one, const void *other)
{
    return comes_before(one, other) ? -1 : 1;
}

static void
sink(Heap *heap, Waiting entry)
{
    Py_ssize_t at = 0, child;
    while ((child = 2 * at + 1) < heap->count) {
        if (child + 1 < heap->count && comes_before(heap->entries + child + 1, heap->entries + child))
            child++;
        if (!comes_before(heap->entries + child, &entry))
            break;
        heap->entries[at] = heap->entries[child];
        at = child;
    }
    heap->entries[at] = entry;
}

int
heap_push(Heap *heap, Waiting entry)
{
    if (heap->count == heap->room) {
        Waiting *larger = PyMem_Realloc(heap->entries, (heap->room * 2 + 128) * sizeof(Waiting));
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        heap->entries = larger;
        heap->room = heap->room * 2 + 128;
    }
    Py_ssize_t at = heap->count++;
    for (; at && comes_before(&entry, heap->entries + (at - 1) / 2); at = (at - 1) / 2)
        heap->entries[at] = heap->entries[(at - 1) / 2];
    heap->entries[at] = entry;
    Py_INCREF(entry.token);
    Py_INCREF(entry.states);
    return 0;
}

void
heap_drop(Heap *heap, Py_ssize_t count)
{
    for (; heap->count > count; heap->count--) {
        Py_DECREF(heap->entries[heap->count - 1].token);
        Py_DECREF(heap->entries[heap->count - 1].states);
    }
}

Waiting
heap_pop(Heap *heap)
{
    Waiting best = heap->entries[0], last = heap->entries[--heap->count];
    if (heap->count)
        sink(heap, last);
    return best;
}

double
heap_cut(Heap *heap, Py_ssize_t count)
{
    qsort(heap->entries, heap->count, sizeof(Waiting), compare); /* what is sorted is a heap */
    heap_drop(heap, count);
    return heap->entries[count - 1].value;
}
