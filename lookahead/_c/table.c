#include "speedups.h"

#define TOGETHER 64 /* rows that are found before any of them is written */
#define NAME "lookahead._speedups.rows"

static const uint64_t FACTORS[PLACES][3] = { /* of a context's tokens: successor_table._FACTORS */
    {0, 0, 0x9E3779B97F4A7C15},
    {0, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0},
};

static void
free_rows(PyObject *capsule)
{
    Rows *rows = PyCapsule_GetPointer(capsule, NAME);
    close_arrays(rows->arrays, ARRAYS);
    PyMem_Free(rows);
}

/* rows(entries, before, tokens, logits): SuccessorTable.rows. */
PyObject *
rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Rows found = {{{"entries", "IL", 4, 2, WRITTEN}, {"before", "IL", 4, 2, WRITTEN}, {"tokens", "hHil", 0, 2},
                   {"logits", FLOAT32, 2}}};
    const Array *entries = found.arrays + ENTRIES, *before = found.arrays + BEFORE, *tokens = found.arrays + TOKENS;
    if (!takes("rows", ARRAYS, count) || open_arrays(found.arrays, args, ARRAYS) < 0)
        return NULL;
    found.capacity = found.arrays[LOGITS].lines;
    found.width = found.arrays[LOGITS].length;
    if (!entries->lines || entries->lines & (entries->lines - 1) || entries->length != 2 * WAYS || !found.capacity ||
        found.capacity & (found.capacity - 1) || before->lines != found.capacity || before->length != 3 ||
        tokens->lines != found.capacity || tokens->length != found.width)
        PyErr_SetString(PyExc_ValueError, "expected entries [2^n, 16], before [2^n, 3], tokens, logits [2^n, rank]");
    Rows *held = PyErr_Occurred() ? NULL : PyMem_New(Rows, 1);
    PyObject *capsule = held == NULL ? NULL : PyCapsule_New(memcpy(held, &found, sizeof(Rows)), NAME, free_rows);
    if (capsule == NULL) {
        close_arrays(found.arrays, ARRAYS);
        PyMem_Free(held);
    }
    return capsule != NULL || PyErr_Occurred() ? capsule : PyErr_NoMemory();
}

Rows *
rows_of(PyObject *capsule, PyObject *written)
{
    Rows *rows = PyCapsule_GetPointer(capsule, NAME);
    unsigned long number = rows == NULL ? 0 : PyLong_AsUnsignedLongMask(written);
    if (PyErr_Occurred())
        return NULL;
    rows->written = (uint32_t)number;
    return rows;
}

static int
read_context(PyObject *given, long long *context)
{
    return read_tuple(given, "LLL;a context is a tuple of three tokens", context, context + 1, context + 2);
}

/* The numbers of the rows that its contexts had before the one of a number. */
static inline uint32_t *
before_of(const Rows *rows, uint32_t number)
{
    return line_of(rows->arrays + BEFORE, number & (rows->capacity - 1));
}

/* How many rows were written since, and with, the one of a number. */
static inline uint32_t
age_of(const Rows *rows, uint32_t number)
{
    return rows->written - number;
}

/* A context's entry in a place, and the tag that it has; if it has another one, it is the oldest of the bucket, whose
 * place the context would take. The row's number stands WAYS behind the tag. */
static uint32_t *
entry_of(const Rows *rows, const long long *context, int place, uint32_t *tag)
{
    const uint64_t *factors = FACTORS[place];
    uint64_t hash = context[0] * factors[0] + context[1] * factors[1] + context[2] * factors[2] + place;
    hash = (hash ^ hash >> 32) * 0xFF51AFD7ED558CCD;
    const Array *entries = rows->arrays + ENTRIES;
    uint32_t *bucket = line_of(entries, (Py_ssize_t)(hash >> 32) & (entries->lines - 1)), *oldest = bucket;
    *tag = (uint32_t)hash;
    for (uint32_t *entry = bucket; entry < bucket + WAYS; entry++) {
        if (*entry == *tag)
            return entry;
        if (age_of(rows, entry[WAYS]) > age_of(rows, oldest[WAYS]))
            oldest = entry;
    }
    return oldest;
}

int
last_rows(const Rows *rows, PyObject *given, int most, int *orders, long *found)
{
    long long context[3];
    uint32_t tag;
    int count = 0;
    if (!read_context(given, context))
        return -1;
    for (int order = 3; order >= 0 && !(count && !order && orders[0] > 1); order--) {
        const uint32_t *entry = entry_of(rows, context, place_of_order(order), &tag);
        uint32_t number = entry[WAYS], age = age_of(rows, number), before;
        int known = rows->width && *entry == tag && age <= rows->capacity, enough = count + (order ? most : 1);
        for (; known && count < enough; number = before, count++) {
            orders[count] = order;
            found[count] = (long)(number & (rows->capacity - 1));
            before = order ? before_of(rows, number)[order - 1] : number;
            known = age < age_of(rows, before) && age_of(rows, before) <= rows->capacity;
            age = age_of(rows, before);
        }
    }
    return count;
}

typedef struct { /* a row: its context, and in each place its entry, what that is to have, and the row before */
    long long context[3];
    uint32_t *entries[PLACES], tags[PLACES], before[PLACES];
} Row;

/* What stands after each node of a tree, of which the first has the context `root`; whether it is one. */
static int
read_tree(PyObject *root, const Array *tree, Row *made)
{
    const int32_t *parents = (int32_t *)tree[0].data, *tokens = (int32_t *)tree[1].data;
    int sound = tree[0].length && tree[0].length == tree[1].length;
    if (sound && !read_context(root, made[0].context))
        return 0;
    for (Py_ssize_t node = 1; sound && node < tree->length; node++) {
        if (!(sound = parents[node] >= 0 && parents[node] < node))
            break;
        memcpy(made[node].context, made[parents[node]].context + 1, 2 * sizeof(long long));
        made[node].context[2] = tokens[node];
    }
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "expected as many parents as tokens, each before its children");
    return sound;
}

/* put(rows, written, root, parents, tokens): SuccessorTable._put. */
PyObject *
put(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Array tree[] = {{"parents", INT32, 1}, {"tokens", INT32, 1}};
    if (!takes("put", 5, count) || open_arrays(tree, args + 3, 2) < 0)
        return NULL;
    Py_ssize_t nodes = tree->length;
    Row *made = PyMem_New(Row, nodes);
    if (made == NULL)
        PyErr_NoMemory();
    Rows *rows = made == NULL || !read_tree(args[2], tree, made) ? NULL : rows_of(args[0], args[1]);
    for (Py_ssize_t start = 0, end; rows != NULL && start < nodes; start = end) {
        end = nodes < start + TOGETHER ? nodes : start + TOGETHER;
        uint32_t first = rows->written;
        for (Py_ssize_t at = start; at < end; at++)
            for (int place = 0; place < PLACES; place++) {
                uint32_t *entry = entry_of(rows, made[at].context, place, made[at].tags + place);
                made[at].entries[place] = entry;
                made[at].before[place] = *entry == made[at].tags[place] ? entry[WAYS] : first + (uint32_t)(at - start);
            }
        for (Py_ssize_t at = start; at < end; at++, rows->written++)
            for (int place = 0; place < PLACES; place++) {
                uint32_t *entry = made[at].entries[place];
                *entry = made[at].tags[place];
                entry[WAYS] = rows->written;
                if (place < PLACES - 1)
                    before_of(rows, rows->written)[place] = made[at].before[place];
            }
    }
    PyMem_Free(made);
    close_arrays(tree, 2);
    return rows == NULL ? NULL : Py_NewRef(Py_None);
}
