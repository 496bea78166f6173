#include "speedups.h"

typedef struct { /* a candidate, of which nothing but the token and, as value, the odds are known yet; or a node */
    double value;
    long token;
    int parent, place, depth;
    PyObject *held; /* a reference: to its parent's states while it waits, then to what sources propose below it */
} Node;

typedef struct { /* what BestFirstTree.growing is given, and knows; sources may change the lists while they are asked */
    PyObject *proposers, *steps, *offsets, *odds, *times, *least;
    double floor, ask_ms, calibration, most_odds, likely, token_ms, again_ms, cheapest;
    Py_ssize_t sources, room;
    int chain;
    /* lookahead.draft.best_first._Best */
    double speed, best_expected, best_time, spent;
    Py_ssize_t best_count, asks;
    Node *found, *waiting, *nodes; /* below the node that is asked about; those that wait, best last; the tree's */
    Py_ssize_t found_count, found_room, waiting_count, waiting_room, count, nodes_room;
} Growth;

/* A number of a list; NaN and an error if it is none. */
static double
number(PyObject *list, Py_ssize_t at)
{
    PyObject *item = PyList_GetItem(list, at);
    if (item == NULL)
        return NAN;
    double value = PyFloat_Check(item) ? PyFloat_AS_DOUBLE(item) : PyLong_Check(item) ? PyLong_AsDouble(item) : NAN;
    if (value != value && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "odds, costs and slopes are numbers, got %.100s", Py_TYPE(item)->tp_name);
    return value;
}

static void
spend(Growth *growth, double ms)
{
    growth->spent += ms;
    growth->speed = growth->best_expected / (growth->best_time + growth->spent);
}

/* The order of lookahead.draft.best_first's heap: falling values, and of equals the one found first. */
static inline int
comes_before(const Node *one, const Node *other)
{
    if (one->value != other->value)
        return one->value > other->value;
    return one->parent != other->parent ? one->parent < other->parent : one->place < other->place;
}

/* Let a candidate wait, with a reference of its own. It comes from what was the best, so few that wait are better. */
static int
let_wait(Growth *growth, Node entry)
{
    growth->waiting = with_room(growth->waiting, &growth->waiting_room, growth->waiting_count + 1, sizeof(Node));
    if (growth->waiting_count == growth->waiting_room)
        return -1;
    Node *at = growth->waiting + growth->waiting_count++;
    for (; at > growth->waiting && comes_before(at - 1, &entry); at--)
        *at = at[-1];
    *at = entry;
    Py_INCREF(entry.held);
    return 0;
}

/* Keep the best that wait. */
static void
keep_waiting(Growth *growth, Py_ssize_t count)
{
    Py_ssize_t others = growth->waiting_count - count;
    for (Py_ssize_t at = 0; at < others; at++)
        Py_DECREF(growth->waiting[at].held);
    if (others > 0 && count)
        memmove(growth->waiting, growth->waiting + others, count * sizeof(Node));
    growth->waiting_count = count;
}

/* best_first._odds: a candidate into `found`, where those of the sources before its own stand `before` the others. */
static int
count_candidate(Growth *growth, PyObject *candidate, long long offset, Py_ssize_t before)
{
    if (!PyTuple_Check(candidate) || PyTuple_GET_SIZE(candidate) < 2) {
        PyErr_SetString(PyExc_TypeError, "a candidate is a tuple of a token and a kind");
        return -1;
    }
    long token = PyLong_AsLong(PyTuple_GET_ITEM(candidate, 0));
    long kind = token == -1 && PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GET_ITEM(candidate, 1));
    Py_ssize_t last = PyList_GET_SIZE(growth->odds) - 2, place = 0;
    if (kind < 0 || offset < 0 || offset > last || kind > (last - offset) / 2) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "a candidate of a kind without a prior");
        return -1;
    }
    while (place < growth->found_count && growth->found[place].token != token)
        place++;
    growth->found = with_room(growth->found, &growth->found_room, place + 1, sizeof(Node));
    double odds = number(growth->odds, (Py_ssize_t)offset + 2 * kind + (place < before));
    if (place == growth->found_room || odds != odds)
        return -1;
    if (place < before)
        odds = fmin(growth->found[place].value * odds, growth->most_odds);
    growth->found[place] = (Node){odds, token, 0, 0, 0, NULL};
    growth->found_count += place == growth->found_count;
    return 0;
}

/* A source's candidates into `found`, beside those of the sources before it. */
static int
count_odds(Growth *growth, PyObject *candidates, long long offset)
{
    PyObject *list = PySequence_Fast(candidates, "a source proposes a sequence");
    Py_ssize_t before = growth->found_count;
    int failed = list == NULL;
    for (Py_ssize_t at = 0; !failed && at < PySequence_Fast_GET_SIZE(list); at++) {
        PyObject *candidate = Py_NewRef(PySequence_Fast_GET_ITEM(list, at));
        failed = count_candidate(growth, candidate, offset, before) < 0;
        Py_DECREF(candidate);
    }
    Py_XDECREF(list);
    return failed ? -1 : 0;
}

/* What functions of the sources make of their states, and of a token if there is one; `odds` are counted of it. */
static PyObject *
ask_all(Growth *growth, PyObject *functions, PyObject *states, PyObject *token)
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t part = 0; all != NULL && part < growth->sources; part++) {
        PyObject *function = item_of(functions, part), *given[] = {function ? item_of(states, part) : NULL, token};
        PyObject *found = given[0] == NULL ? NULL : PyObject_Vectorcall(function, given, token == NULL ? 1 : 2, NULL);
        int failed = found == NULL;
        if (!failed && token == NULL) {
            long long offset = integer_of(growth->offsets, part);
            failed = (offset < 0 && PyErr_Occurred()) || count_odds(growth, found, offset) < 0;
        }
        if (append(all, found) < 0 || failed)
            Py_CLEAR(all);
        Py_XDECREF(given[0]);
        Py_XDECREF(function);
    }
    return all;
}

/* Ask all sources about a node, and let its candidates wait that are worth more than `worth`. What they propose; the
 * node's states are left in `states`. */
static PyObject *
ask(Growth *growth, PyObject **states, int node, double worth)
{
    if (node) {
        PyObject *token = PyLong_FromLong(growth->nodes[node].token);
        Py_SETREF(*states, token == NULL ? NULL : ask_all(growth, growth->steps, *states, token));
        Py_XDECREF(token);
    }
    growth->found_count = 0;
    PyObject *proposed = *states == NULL ? NULL : ask_all(growth, growth->proposers, *states, NULL);
    growth->asks++;
    spend(growth, growth->ask_ms);
    double sum = 0.0;
    for (Py_ssize_t place = 0; place < growth->found_count; place++)
        sum += growth->found[place].value;
    double share = growth->nodes[node].value / (1.0 + sum);
    for (int place = 0; proposed != NULL && place < growth->found_count; place++) {
        double value = growth->found[place].value * share;
        Node entry = {value, growth->found[place].token, node, place, growth->nodes[node].depth + 1, *states};
        if (value > worth && let_wait(growth, entry) < 0)
            Py_CLEAR(proposed);
    }
    return proposed;
}

/* Take nodes until none pays any more, or there is an error: BestFirstTree.growing. */
static void
take_nodes(Growth *growth, long root, PyObject *states)
{
    Py_ssize_t most = PyList_GET_SIZE(growth->times), look = most;
    double chance = 1.0, expected = 1.0, rest = 0.0;
    Node taken = {1.0, root, -1, 0, 0, NULL};
    Py_INCREF(states);
    for (;;) {
        int node = (int)growth->count++;
        double worth = fmax(fmax(growth->floor, growth->speed * growth->cheapest / growth->calibration), rest);
        double least = number(growth->least, node), value = taken.value;
        double pays = growth->speed * (least + growth->ask_ms) / growth->calibration;
        int asks = taken.depth < growth->room &&
                   (!node || (value > worth && value * fmax(chance, growth->likely) > fmax(pays, rest)));
        growth->nodes[node] = taken;
        growth->nodes[node].held = NULL;
        PyObject *proposed = least != least ? NULL : asks ? ask(growth, &states, node, worth) : PyTuple_New(0);
        growth->nodes[node].held = proposed;
        Py_ssize_t left = most - growth->count;
        if (proposed == NULL || !growth->waiting_count || left <= 0)
            break;
        if (left <= look && left <= growth->waiting_count && !growth->chain) {
            keep_waiting(growth, left);
            rest = growth->waiting[0].value;
            look = left / 2;
        }
        taken = growth->waiting[--growth->waiting_count];
        if (growth->chain)
            keep_waiting(growth, 0);
        value = taken.value;
        chance = taken.parent ? value / growth->nodes[taken.parent].value : value;
        Py_SETREF(states, taken.held);
        if (value * growth->calibration <= growth->speed * least)
            break;
        expected += value * growth->calibration;
        double whole = fmin(1.0, value * growth->calibration), time = number(growth->times, growth->count);
        if (time != time)
            break;
        time += growth->token_ms * fmax(0.0, expected - whole * (growth->count + 1)) + growth->again_ms * (1.0 - whole);
        double speed = expected / (time + growth->spent);
        if (speed >= growth->speed) {
            growth->best_expected = expected;
            growth->best_time = time;
            growth->speed = speed;
            growth->best_count = growth->count + 1;
        }
    }
    Py_XDECREF(states);
}

/* How many nodes were asked about, and the tree as far as it pays: tokens, parents, depths, children, values of all but
 * the root, and what was offered below each. */
static PyObject *
grown(const Growth *growth)
{
    PyObject *found = Py_BuildValue("n[][][][][][]", growth->asks), *lists[6];
    for (int at = 0; found != NULL && at < 6; at++)
        lists[at] = PyTuple_GET_ITEM(found, at + 1);
    for (Py_ssize_t node = 0; found != NULL && node < growth->best_count; node++) {
        const Node *each = growth->nodes + node;
        PyObject *token = PyLong_FromLong(each->token), *number = PyLong_FromSsize_t(node);
        int failed = token == NULL || number == NULL || PyList_Append(lists[0], token) < 0 ||
                     append(lists[1], PyLong_FromLong(each->parent)) < 0 ||
                     append(lists[2], PyLong_FromLong(each->depth)) < 0 || append(lists[3], PyDict_New()) < 0 ||
                     (node && PyDict_SetItem(PyList_GET_ITEM(lists[3], each->parent), token, number) < 0) ||
                     (node && append(lists[4], PyFloat_FromDouble(each->value)) < 0) ||
                     PyList_Append(lists[5], each->held) < 0;
        Py_XDECREF(token);
        Py_XDECREF(number);
        if (failed)
            Py_CLEAR(found);
    }
    return found;
}

/* grow(root, states, (proposers, steps, offsets, odds, times, least),
 *      (floor, gain, ask_ms, beside_ms, calibration, most_odds, likely, token_ms, again_ms), room, chain):
 * (asks, tokens, parents, depths, children, values, offered). */
PyObject *
grow(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Growth growth = {.best_count = 1};
    PyTypeObject *list = &PyList_Type;
    if (!takes("grow", 6, count) ||
        !read_tuple(args[2], "O!O!O!O!O!O!;sources", list, &growth.proposers, list, &growth.steps, list,
                    &growth.offsets, list, &growth.odds, list, &growth.times, list, &growth.least) ||
        !read_tuple(args[3], "ddddddddd;numbers", &growth.floor, &growth.best_expected, &growth.ask_ms, &growth.spent,
                    &growth.calibration, &growth.most_odds, &growth.likely, &growth.token_ms, &growth.again_ms))
        return NULL;
    long root = PyLong_AsLong(args[0]);
    growth.room = PyErr_Occurred() ? 0 : PyLong_AsSsize_t(args[4]);
    growth.chain = PyErr_Occurred() ? 0 : PyObject_IsTrue(args[5]);
    growth.sources = PyList_GET_SIZE(growth.proposers);
    Py_ssize_t sizes = PyList_GET_SIZE(growth.times);
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[1]) || PyList_GET_SIZE(args[1]) != growth.sources ||
        PyList_GET_SIZE(growth.steps) != growth.sources || PyList_GET_SIZE(growth.offsets) != growth.sources ||
        sizes < 1 || PyList_GET_SIZE(growth.least) != sizes)
        return PyErr_Format(PyExc_ValueError, "every source has a state, and every size a cost and a slope");
    growth.cheapest = INFINITY;
    for (Py_ssize_t at = 0; at < sizes && !PyErr_Occurred(); at++)
        growth.cheapest = fmin(growth.cheapest, number(growth.least, at));
    growth.best_time = number(growth.times, 0);
    spend(&growth, 0.0);
    if (!PyErr_Occurred() && !(growth.speed >= 0.0 && growth.speed < INFINITY && growth.calibration > 0.0 &&
                               growth.floor + growth.ask_ms + growth.token_ms + growth.again_ms >= 0.0))
        PyErr_SetString(PyExc_ValueError, "expected times and a calibration above 0");
    growth.nodes = with_room(NULL, &growth.nodes_room, sizes, sizeof(Node));
    if (!PyErr_Occurred())
        take_nodes(&growth, root, args[1]);
    PyObject *found = PyErr_Occurred() ? NULL : grown(&growth);
    while (growth.count)
        Py_XDECREF(growth.nodes[--growth.count].held);
    keep_waiting(&growth, 0);
    PyMem_Free(growth.waiting);
    PyMem_Free(growth.found);
    PyMem_Free(growth.nodes);
    return found;
}
