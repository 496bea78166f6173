#include "table.h"

#define TOGETHER 64 /* rows that are found before any of them is written */

static const uint64_t FACTORS[PLACES][3] = { /* of a context's tokens: successor_table._FACTORS */
    {0, 0, 0x9E3779B97F4A7C15},
    {0, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15},
    {0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0},
};

int
read_rows(PyObject *given, Rows *rows)
{
    PyObject *entries, *before, *tokens, *logits;
    unsigned int written;
    if (!PyArg_ParseTuple(given, "OOOOI;rows", &entries, &before, &tokens, &logits, &written))
        return -1;
    rows->size = PyMemoryView_Check(tokens) ? PyMemoryView_GET_BUFFER(tokens)->itemsize : 0;
    rows->entries = (uint32_t *)line_of(entries, 0, sizeof(uint32_t));
    rows->before = rows->entries == NULL ? NULL : (uint32_t *)line_of(before, 0, sizeof(uint32_t));
    rows->tokens = rows->before == NULL ? NULL : line_of(tokens, 0, rows->size == 2 ? 2 : 4);
    rows->logits = rows->tokens == NULL ? NULL : line_of(logits, 0, sizeof(float));
    if (rows->logits == NULL)
        return -1;
    rows->width = length_of(logits, 1);
    rows->capacity = (uint32_t)length_of(logits, 0);
    rows->buckets = (uint32_t)length_of(entries, 0);
    rows->written = written;
    return 0;
}

static int
read_context(PyObject *given, uint64_t *context)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a context is a tuple of three tokens");
        return -1;
    }
    for (int at = 0; at < 3; at++)
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
    uint32_t *bucket = rows->entries + (hash >> 32 & (rows->buckets - 1)) * 2 * WAYS;
    *tag = (uint32_t)hash;
    for (*way = 0; *way < WAYS && bucket[*way] != *tag; ++*way)
        ;
    return bucket;
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
        int known = way < WAYS && age <= rows->capacity, enough = count + (order ? most : 1);
        for (; known && count < enough; number = before, count++) {
            orders[count] = order;
            found[count] = number & (rows->capacity - 1);
            before = order ? rows->before[3 * found[count] + order - 1] : number;
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
        Py_ssize_t parent = PyLong_AsSsize_t(PyList_GET_ITEM(parents, node));
        if (parent < 0 || parent >= node) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a parent stands before its children");
            return -1;
        }
        memcpy(made[node].context, made[parent].context + 1, 2 * sizeof(uint64_t));
        made[node].context[2] = (uint64_t)PyLong_AsLongLong(PyList_GET_ITEM(tokens, node));
    }
    return PyErr_Occurred() ? -1 : 0;
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
            rows->before[3 * (number & (rows->capacity - 1)) + place] = row->entries[place].before;
        bucket[row->entries[place].way] = row->entries[place].tag;
        bucket[WAYS + row->entries[place].way] = number;
    }
}

/* put(rows, root, parents, tokens): SuccessorTable._put. */
PyObject *
put(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    if (!takes("put", 4, count) || read_rows(args[0], &rows) < 0)
        return NULL;
    if (!PyList_Check(args[2]) || !PyList_Check(args[3]) || PyList_GET_SIZE(args[2]) != PyList_GET_SIZE(args[3]) ||
        !PyList_GET_SIZE(args[2]))
        return PyErr_Format(PyExc_TypeError, "parents and tokens are lists, of as many nodes, and one at least");
    Py_ssize_t nodes = PyList_GET_SIZE(args[2]);
    Row *made = PyMem_Malloc(nodes * sizeof(Row));
    if (made == NULL)
        return PyErr_NoMemory();
    int failed = read_tree(args[1], args[2], args[3], made, nodes) < 0;
    for (Py_ssize_t start = 0, end; !failed && start < nodes; start = end) {
        end = nodes < start + TOGETHER ? nodes : start + TOGETHER;
        uint32_t first = rows.written;
        for (Py_ssize_t at = start; at < end; at++)
            find(&rows, made + at, first + (uint32_t)(at - start));
        for (Py_ssize_t at = start; at < end; at++)
            enter(&rows, made + at, rows.written++);
    }
    PyMem_Free(made);
    return failed ? NULL : Py_NewRef(Py_None);
}
