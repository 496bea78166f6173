#include "speedups.h"

typedef struct {
    PyObject *token;
    long id;
    double odds;
} Candidate;

typedef struct { /* what BestFirstTree.growing is given, and knows */
    PyObject *proposers, *steps, *offsets, *odds, *times, *least, *cut;
    double floor, ask_ms, calibration, cheapest, most_odds, likely;
    Py_ssize_t room;
    int chain;
    /* lookahead.draft.best_first._Best */
    double speed, best_expected, best_time, spent;
    Py_ssize_t best_count, asks;
    Heap heap;
    Candidate *found;
    Py_ssize_t found_count, found_room;
} Growth;

static inline double
number(PyObject *list, Py_ssize_t at)
{
    PyObject *value = PyList_GET_ITEM(list, at);
    return PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : PyFloat_AsDouble(value);
}

static void
spend(Growth *growth, double ms)
{
    growth->spent += ms;
    growth->speed = growth->best_expected / (growth->best_time + growth->spent);
}

/* best_first._odds: a source's candidates into `found`, beside those of the sources before it. */
static int
count_odds(Growth *growth, PyObject *candidates, long offset)
{
    PyObject *list = PySequence_Fast(candidates, "a source proposes a sequence");
    if (list == NULL)
        return -1;
    Py_ssize_t before = growth->found_count, count = PySequence_Fast_GET_SIZE(list);
    if (before + count > growth->found_room) {
        Candidate *larger = PyMem_Realloc(growth->found, 2 * (before + count) * sizeof(Candidate));
        if (larger == NULL) {
            Py_DECREF(list);
            PyErr_NoMemory();
            return -1;
        }
        growth->found = larger;
        growth->found_room = 2 * (before + count);
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *candidate = PySequence_Fast_GET_ITEM(list, at);
        if (!PyTuple_Check(candidate) || PyTuple_GET_SIZE(candidate) < 2) {
            PyErr_SetString(PyExc_TypeError, "a candidate is a tuple of a token and a kind");
            break;
        }
        long id = PyLong_AsLong(PyTuple_GET_ITEM(candidate, 0)), kind = PyLong_AsLong(PyTuple_GET_ITEM(candidate, 1));
        Py_ssize_t slot = offset + 2 * kind, place = 0;
        if (PyErr_Occurred() || slot < 0 || slot + 1 >= PyList_GET_SIZE(growth->odds)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "a candidate of a kind without a prior");
            break;
        }
        while (place < growth->found_count && growth->found[place].id != id)
            place++;
        if (place < before) {
            double agreeing = growth->found[place].odds * number(growth->odds, slot + 1);
            growth->found[place].odds = agreeing < growth->most_odds ? agreeing : growth->most_odds;
        } else {
            growth->found[place] = (Candidate){PyTuple_GET_ITEM(candidate, 0), id, number(growth->odds, slot)};
            growth->found_count += place == growth->found_count;
        }
    }
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

/* Ask all sources about a node, and let its candidates wait that are worth more than `worth`. What they propose; the
 * node's states are left in `states`. */
static PyObject *
ask(Growth *growth, PyObject **states, PyObject *token, int node, double value, double worth)
{
    Py_ssize_t count = PyList_GET_SIZE(growth->proposers);
    PyObject *proposed = PyList_New(count);
    if (proposed != NULL && node) {
        PyObject *stepped = PyList_New(count);
        for (Py_ssize_t part = 0; stepped != NULL && part < count; part++) {
            PyObject *given[] = {PyList_GET_ITEM(*states, part), token};
            PyObject *state = PyObject_Vectorcall(PyList_GET_ITEM(growth->steps, part), given, 2, NULL);
            if (state == NULL)
                Py_CLEAR(stepped);
            else
                PyList_SET_ITEM(stepped, part, state);
        }
        Py_SETREF(*states, stepped);
    }
    growth->found_count = 0;
    for (Py_ssize_t part = 0; proposed != NULL && *states != NULL && part < count; part++) {
        PyObject *candidates =
            PyObject_CallOneArg(PyList_GET_ITEM(growth->proposers, part), PyList_GET_ITEM(*states, part));
        if (candidates == NULL) {
            Py_CLEAR(proposed);
            break;
        }
        PyList_SET_ITEM(proposed, part, candidates);
        long offset = PyLong_AsLong(PyList_GET_ITEM(growth->offsets, part));
        if (count_odds(growth, candidates, offset) < 0)
            Py_CLEAR(proposed);
    }
    if (proposed == NULL || *states == NULL) {
        Py_XDECREF(proposed);
        return NULL;
    }
    growth->asks++;
    spend(growth, growth->ask_ms);
    double sum = 0.0;
    for (Py_ssize_t place = 0; place < growth->found_count; place++)
        sum += growth->found[place].odds;
    double share = value / (1.0 + sum);
    for (Py_ssize_t place = 0; place < growth->found_count; place++) {
        Waiting entry = {growth->found[place].odds * share, node, (int)place, growth->found[place].token, *states};
        if (entry.value > worth && heap_push(&growth->heap, entry) < 0) {
            Py_DECREF(proposed);
            return NULL;
        }
    }
    return proposed;
}

typedef struct {
    PyObject *tokens, *parents, *depths, *children, *values, *offered;
} Grown;

/* TokenTree.add, of a token that its parent has not yet. */
static int
add_node(Grown *tree, Py_ssize_t parent, PyObject *token, double value)
{
    PyObject *number = PyLong_FromSsize_t(PyList_GET_SIZE(tree->tokens));
    long depth = PyLong_AsLong(PyList_GET_ITEM(tree->depths, parent));
    int failed = number == NULL || PyDict_SetItem(PyList_GET_ITEM(tree->children, parent), token, number) < 0;
    Py_XDECREF(number);
    return failed || PyList_Append(tree->tokens, token) < 0 || append(tree->parents, PyLong_FromSsize_t(parent)) < 0 ||
                   append(tree->depths, PyLong_FromLong(depth + 1)) < 0 || append(tree->children, PyDict_New()) < 0 ||
                   append(tree->values, PyFloat_FromDouble(value)) < 0
               ? -1
               : 0;
}

/* Take nodes until none pays any more: BestFirstTree.growing. */
static int
grow_all(Growth *growth, Grown *tree, PyObject *states)
{
    Heap *heap = &growth->heap;
    Py_ssize_t most = PyList_GET_SIZE(growth->times), look = most, node = 0;
    double value = 1.0, chance = 1.0, expected = 1.0, rest = 0.0;
    PyObject *token = NULL;
    Py_INCREF(states);
    for (;;) {
        double worth = fmax(fmax(growth->floor, growth->speed * growth->cheapest / growth->calibration), rest);
        double pays = growth->speed * (number(growth->least, node) + growth->ask_ms) / growth->calibration;
        PyObject *proposed = NULL;
        if (PyLong_AsLong(PyList_GET_ITEM(tree->depths, node)) < growth->room &&
            (!node || (value > worth && value * fmax(chance, growth->likely) > fmax(pays, rest)))) {
            proposed = ask(growth, &states, token, (int)node, value, worth);
            if (proposed == NULL)
                goto failed;
        }
        if (append(tree->offered, proposed == NULL ? PyTuple_New(0) : proposed) < 0)
            goto failed;
        Py_ssize_t left = most - PyList_GET_SIZE(tree->tokens);
        if (!heap->count || left <= 0)
            break;
        if (left <= look && left <= heap->count && !growth->chain) {
            rest = heap_cut(heap, left);
            look = left / 2;
        }
        Waiting taken = heap_pop(heap);
        if (growth->chain)
            heap_drop(heap, 0);
        value = taken.value;
        chance = taken.parent ? value / number(tree->values, taken.parent - 1) : value;
        Py_XSETREF(states, taken.states);
        Py_XSETREF(token, taken.token);
        if (value * growth->calibration <= growth->speed * number(growth->least, node))
            break;
        node = PyList_GET_SIZE(tree->tokens);
        if (add_node(tree, taken.parent, token, value) < 0)
            goto failed;
        expected += value * growth->calibration;
        double time = number(growth->times, node);
        if (growth->cut != Py_None) {
            double whole = fmin(1.0, value * growth->calibration);
            PyObject *cost = PyObject_CallMethod(growth->cut, "cost", "ddn", expected, whole, node + 1);
            if (cost == NULL)
                goto failed;
            time += PyFloat_AsDouble(cost);
            Py_DECREF(cost);
        }
        double speed = expected / (time + growth->spent);
        if (speed >= growth->speed) {
            growth->best_expected = expected;
            growth->best_time = time;
            growth->speed = speed;
            growth->best_count = node + 1;
        }
    }
    Py_XDECREF(token);
    Py_XDECREF(states);
    return PyErr_Occurred() ? -1 : 0;
failed:
    Py_XDECREF(token);
    Py_XDECREF(states);
    return -1;
}

static int
shorten(PyObject *list, Py_ssize_t count)
{
    return PyList_SetSlice(list, count, PyList_GET_SIZE(list), NULL);
}

/* TokenTree.truncate, of a tree and all that belongs to its nodes. */
static int
truncate_tree(Grown *tree, Py_ssize_t count)
{
    for (Py_ssize_t node = PyList_GET_SIZE(tree->tokens) - 1; node >= count; node--) {
        Py_ssize_t parent = PyLong_AsSsize_t(PyList_GET_ITEM(tree->parents, node));
        if (PyDict_DelItem(PyList_GET_ITEM(tree->children, parent), PyList_GET_ITEM(tree->tokens, node)) < 0)
            return -1;
    }
    return shorten(tree->tokens, count) < 0 || shorten(tree->parents, count) < 0 || shorten(tree->depths, count) < 0 ||
                   shorten(tree->children, count) < 0 || shorten(tree->values, count - 1) < 0 ||
                   (PyList_GET_SIZE(tree->offered) > count && shorten(tree->offered, count) < 0)
               ? -1
               : 0;
}

/* grow((tokens, parents, depths, children, values, offered), states,
 *      (proposers, steps, offsets, odds, times, least, cut),
 *      (floor, gain, ask_ms, beside_ms, calibration, most_odds, likely), room, chain):
 * how many nodes were asked about. */
PyObject *
grow(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Grown tree;
    Growth growth = {0};
    double gain;
    if (!takes("grow", 6, count) ||
        !PyArg_ParseTuple(args[0], "O!O!O!O!O!O!;tree", &PyList_Type, &tree.tokens, &PyList_Type, &tree.parents,
                          &PyList_Type, &tree.depths, &PyList_Type, &tree.children, &PyList_Type, &tree.values,
                          &PyList_Type, &tree.offered) ||
        !PyArg_ParseTuple(args[2], "O!O!O!O!O!O!O;sources", &PyList_Type, &growth.proposers, &PyList_Type,
                          &growth.steps, &PyList_Type, &growth.offsets, &PyList_Type, &growth.odds, &PyList_Type,
                          &growth.times, &PyList_Type, &growth.least, &growth.cut) ||
        !PyArg_ParseTuple(args[3], "ddddddd;numbers", &growth.floor, &gain, &growth.ask_ms, &growth.spent,
                          &growth.calibration, &growth.most_odds, &growth.likely))
        return NULL;
    growth.room = PyLong_AsSsize_t(args[4]);
    growth.chain = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t sources = PyList_GET_SIZE(growth.proposers), sizes = PyList_GET_SIZE(growth.times);
    if (!PyList_Check(args[1]) || PyList_GET_SIZE(args[1]) != sources || PyList_GET_SIZE(growth.steps) != sources ||
        PyList_GET_SIZE(growth.offsets) != sources || sizes < 1 || PyList_GET_SIZE(growth.least) != sizes)
        return PyErr_Format(PyExc_ValueError, "every source has a state, and every size a cost and a slope");
    growth.cheapest = number(growth.least, 0);
    for (Py_ssize_t at = 1; at < PyList_GET_SIZE(growth.least); at++)
        growth.cheapest = fmin(growth.cheapest, number(growth.least, at));
    growth.best_expected = gain;
    growth.best_time = number(growth.times, 0);
    growth.best_count = 1;
    spend(&growth, 0.0);
    int failed = grow_all(&growth, &tree, args[1]) < 0 || truncate_tree(&tree, growth.best_count) < 0;
    heap_drop(&growth.heap, 0);
    PyMem_Free(growth.heap.entries);
    PyMem_Free(growth.found);
    return failed ? NULL : PyLong_FromSsize_t(growth.asks);
}
