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
    Rows found = {{{"entries", "IL", 4, 3, WRITTEN}, {"before", "IL", 4, 2, WRITTEN}, {"tokens", "hHil", 0, 2},
                   {"logits", FLOAT32, 2}}};
    const Array *entries = found.arrays + ENTRIES, *before = found.arrays + BEFORE, *tokens = found.arrays + TOKENS;
    if (!takes("rows", ARRAYS, count) || open_arrays(found.arrays, args, ARRAYS) < 0)
        return NULL;
    found.capacity = found.arrays[LOGITS].lines;
    found.width = found.arrays[LOGITS].length;
    if (!entries->lines || entries->lines & (entries->lines - 1) || entries->length != 2 * WAYS || !found.capacity ||
        found.capacity & (found.capacity - 1) || before->lines != found.capacity || before->length != 3 ||
        tokens->lines != found.capacity || tokens->length != found.width)
        PyErr_SetString(PyExc_ValueError, "expected entries [2^n, 2, 8], before [2^n, 3], tokens, logits [2^n, rank]");
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
read_context(PyObject *given, uint64_t *context)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a context is a tuple of three tokens");
        return -1;
    }
    for (int at = 0; at < 3 && !PyErr_Occurred(); at++)
        context[at] = (uint64_t)PyLong_AsLongLong(PyTuple_GET_ITEM(given, at));
    return PyErr_Occurred() ? -1 : 0;
}

/* The bucket of a context in a place, its tag, and in which way its entry is; WAYS: in none. */
static uint32_t *
entry_of(const Rows *rows, const uint64_t *context, int place, uint32_t *tag, int *way)
{
    const uint64_t *factors = FACTORS[place];
    uint64_t hash = context[0] * factors[0] + context[1] * factors[1] + context[2] * factors[2] + place;
    hash = (hash ^ hash >> 32) * 0xFF51AFD7ED558CCD;
    const Array *entries = rows->arrays + ENTRIES;
    uint32_t *bucket = line_of(entries, (Py_ssize_t)(hash >> 32) & (entries->lines - 1));
    *tag = (uint32_t)hash;
    for (*way = 0; *way < WAYS && bucket[*way] != *tag; ++*way)
        ;
    return bucket;
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

int
last_rows(const Rows *rows, PyObject *given, int most, int one, int *orders, long *found)
{
    uint64_t context[3];
    uint32_t tag, *bucket;
    int count = 0, way;
    if (read_context(given, context) < 0)
        return -1;
    for (int order = 3; order >= 0 && !(count && (one || (!order && orders[0] > 1))); order--) {
        bucket = entry_of(rows, context, place_of_order(order), &tag, &way);
        uint32_t number = way < WAYS ? bucket[WAYS + way] : 0, age = age_of(rows, number), before;
        int known = rows->width && way < WAYS && age <= rows->capacity, enough = count + (order ? most : 1);
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

typedef struct {
    uint64_t context[3];
    struct {
        uint32_t *bucket, tag, before;
        int way;
    } entries[PLACES];
} Row;

/* What stands after each node of a tree, of which the first has the context `root`. */
static int
read_tree(PyObject *root, PyObject *parents, PyObject *tokens, Row *made, Py_ssize_t count)
{
    if (read_context(root, made[0].context) < 0)
        return -1;
    for (Py_ssize_t node = 1; node < count; node++) {
        long long parent = integer_of(parents, node), token = parent < 0 ? -1 : integer_of(tokens, node);
        if (!PyErr_Occurred() && (parent < 0 || parent >= node))
            PyErr_SetString(PyExc_ValueError, "a parent stands before its children");
        if (PyErr_Occurred())
            return -1;
        memcpy(made[node].context, made[parent].context + 1, 2 * sizeof(uint64_t));
        made[node].context[2] = (uint64_t)token;
    }
    return 0;
}

/* Where a row's entries are, or else take the place of the oldest ones. */
static void
find(const Rows *rows, Row *row, uint32_t number)
{
    for (int place = 0; place < PLACES; place++) {
        uint32_t *bucket = entry_of(rows, row->context, place, &row->entries[place].tag, &row->entries[place].way);
        int way = row->entries[place].way;
        row->entries[place].bucket = bucket;
        row->entries[place].before = way < WAYS ? bucket[WAYS + way] : number;
        if (way < WAYS)
            continue;
        for (int other = way = 0; other < WAYS; other++)
            if (age_of(rows, bucket[WAYS + other]) > age_of(rows, bucket[WAYS + way]))
                way = other;
        row->entries[place].way = way;
    }
}

/* Write a row's entries, and which rows its contexts had before. */
static void
enter(const Rows *rows, const Row *row, uint32_t number)
{
    for (int place = 0; place < PLACES; place++) {
        uint32_t *bucket = row->entries[place].bucket;
        if (place < PLACES - 1)
            before_of(rows, number)[place] = row->entries[place].before;
        bucket[row->entries[place].way] = row->entries[place].tag;
        bucket[WAYS + row->entries[place].way] = number;
    }
}

/* put(rows, written, root, parents, tokens): SuccessorTable._put. */
PyObject *
put(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (!takes("put", 5, count))
        return NULL;
    if (!PyList_Check(args[3]) || !PyList_Check(args[4]) || PyList_GET_SIZE(args[3]) != PyList_GET_SIZE(args[4]) ||
        !PyList_GET_SIZE(args[3]))
        return PyErr_Format(PyExc_TypeError, "parents and tokens are lists, of as many nodes, and one at least");
    Py_ssize_t nodes = PyList_GET_SIZE(args[3]);
    Row *made = PyMem_New(Row, nodes);
    if (made == NULL)
        return PyErr_NoMemory();
    Rows *rows = read_tree(args[2], args[3], args[4], made, nodes) < 0 ? NULL : rows_of(args[0], args[1]);
    for (Py_ssize_t start = 0, end; rows != NULL && start < nodes; start = end) {
        end = nodes < start + TOGETHER ? nodes : start + TOGETHER;
        uint32_t first = rows->written;
        for (Py_ssize_t at = start; at < end; at++)
            find(rows, made + at, first + (uint32_t)(at - start));
        for (Py_ssize_t at = start; at < end; at++)
            enter(rows, made + at, rows->written++);
    }
    PyMem_Free(made);
    return rows == NULL ? NULL : Py_NewRef(Py_None);
}
