#include "speedups.h"

typedef struct { /* a candidate, of which nothing but the token and, as value, the odds are known yet; or a node */
    double value;
    long token;
    int parent, place, depth;
    PyObject *states, *offered; /* references: a node's states, and what sources propose there; NULL if none is asked */
} Node;

typedef struct { Node *all; Py_ssize_t count, room; } Nodes;

typedef struct { /* what BestFirstTree.growing is given, and knows */
    PyObject *proposers, *steps, *offsets, *states; /* tuples; the last: states at the root */
    Array arrays[3];
    const double *odds, *times, *least;
    double floor, ask_ms, calibration, most_odds, likely, token_ms, again_ms, cheapest;
    Py_ssize_t sources, room, most;
    int chain;
    double speed, best_expected, best_time, spent; /* lookahead.draft.best_first._Best */
    Py_ssize_t best_count, asks;
    Nodes found, waiting, nodes; /* below the node that is asked about; those that wait, best last; the tree's */
} Growth;

static void
spend(Growth *growth, double ms)
{
    growth->spent += ms;
    growth->speed = growth->best_expected / (growth->best_time + growth->spent);
}

static int
add(Nodes *nodes, Node node)
{
    if (nodes->count == nodes->room) {
        Py_ssize_t room = 2 * nodes->room + 64;
        Node *larger = PyMem_Realloc(nodes->all, room * sizeof(Node));
        if (larger == NULL)
            return PyErr_NoMemory(), -1;
        nodes->all = larger;
        nodes->room = room;
    }
    nodes->all[nodes->count++] = node;
    return 0;
}

/* The order of lookahead.draft.best_first's heap: falling values, and of equals the one found first. */
static inline int
comes_before(const Node *one, const Node *other)
{
    if (one->value != other->value)
        return one->value > other->value;
    return one->parent != other->parent ? one->parent < other->parent : one->place < other->place;
}

/* Let a candidate wait. It comes from what was the best, so few that wait are better. */
static int
let_wait(Nodes *waiting, Node entry)
{
    if (add(waiting, entry) < 0)
        return -1;
    Node *at = waiting->all + waiting->count - 1;
    for (; at > waiting->all && comes_before(at - 1, &entry); at--)
        *at = at[-1];
    *at = entry;
    return 0;
}

/* best_first._odds: a candidate into `found`, where those of the sources before its own stand `before` the others. */
static int
count_candidate(Growth *growth, PyObject *candidate, long offset, Py_ssize_t before)
{
    if (!PyTuple_Check(candidate) || PyTuple_GET_SIZE(candidate) < 2)
        return PyErr_Format(PyExc_TypeError, "a candidate is a tuple of a token and a kind"), -1;
    long token = PyLong_AsLong(PyTuple_GET_ITEM(candidate, 0));
    long kind = token == -1 && PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GET_ITEM(candidate, 1));
    Py_ssize_t last = growth->arrays->length - 2, place = 0;
    Nodes *found = &growth->found;
    if (kind < 0 || offset < 0 || offset > last || kind > (last - offset) / 2) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "a candidate of a kind without a prior");
        return -1;
    }
    while (place < found->count && found->all[place].token != token)
        place++;
    double odds = growth->odds[offset + 2 * kind + (place < before)];
    if (place == found->count)
        return add(found, (Node){odds, token});
    found->all[place].value = place < before ? fmin(found->all[place].value * odds, growth->most_odds) : odds;
    return 0;
}

/* A source's candidates into `found`, beside those of the sources before it. */
static int
count_odds(Growth *growth, PyObject *candidates, long offset)
{
    PyObject *list = PySequence_Fast(candidates, "a source proposes a sequence");
    Py_ssize_t before = growth->found.count;
    int failed = list == NULL;
    for (Py_ssize_t at = 0; !failed && at < PySequence_Fast_GET_SIZE(list); at++) {
        PyObject *candidate = Py_NewRef(PySequence_Fast_GET_ITEM(list, at)); /* what reads it may change the list */
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
    PyObject *all = PyTuple_New(growth->sources);
    for (Py_ssize_t part = 0; all != NULL && part < growth->sources; part++) {
        PyObject *given[] = {PyTuple_GET_ITEM(states, part), token};
        PyObject *found = PyObject_Vectorcall(PyTuple_GET_ITEM(functions, part), given, token == NULL ? 1 : 2, NULL);
        PyTuple_SET_ITEM(all, part, found);
        long offset = found == NULL ? -1 : PyLong_AsLong(PyTuple_GET_ITEM(growth->offsets, part));
        if (PyErr_Occurred() || (token == NULL && count_odds(growth, found, offset) < 0))
            Py_CLEAR(all);
    }
    return all;
}

/* Ask all sources about a node, and let its candidates wait that are worth more than `worth`. */
static int
ask(Growth *growth, int node, double worth)
{
    Node *asked = growth->nodes.all + node;
    Nodes *found = &growth->found;
    if (node) {
        PyObject *token = PyLong_FromLong(asked->token), *above = growth->nodes.all[asked->parent].states;
        asked->states = token == NULL ? NULL : ask_all(growth, growth->steps, above, token);
        Py_XDECREF(token);
    } else
        asked->states = Py_NewRef(growth->states);
    found->count = 0;
    asked->offered = asked->states == NULL ? NULL : ask_all(growth, growth->proposers, asked->states, NULL);
    growth->asks++;
    spend(growth, growth->ask_ms);
    double sum = 0.0;
    for (Py_ssize_t place = 0; place < found->count; place++)
        sum += found->all[place].value;
    double share = asked->value / (1.0 + sum);
    int failed = asked->offered == NULL;
    for (int place = 0; !failed && place < found->count; place++) {
        Node entry = {found->all[place].value * share, found->all[place].token, node, place, asked->depth + 1};
        failed = entry.value > worth && let_wait(&growth->waiting, entry) < 0;
    }
    return failed ? -1 : 0;
}

/* Take nodes until none pays any more, or there is an error: BestFirstTree.growing. Those that wait and will never be
 * taken, because no place is left for them, are worth no more than `rest`. */
static void
take_nodes(Growth *growth, long root)
{
    Nodes *nodes = &growth->nodes, *waiting = &growth->waiting;
    Py_ssize_t look = growth->most;
    double chance = 1.0, expected = 1.0, rest = 0.0, calibration = growth->calibration;
    Node taken = {1.0, root, -1};
    for (;;) {
        int node = (int)nodes->count;
        double worth = fmax(fmax(growth->floor, growth->speed * growth->cheapest / calibration), rest);
        double least = growth->least[node], value = taken.value;
        double pays = growth->speed * (least + growth->ask_ms) / calibration;
        int asks = taken.depth < growth->room &&
                   (!node || (value > worth && value * fmax(chance, growth->likely) > fmax(pays, rest)));
        if (add(nodes, taken) < 0 || (asks && ask(growth, node, worth) < 0))
            break;
        Py_ssize_t left = growth->most - nodes->count;
        if (!waiting->count || left <= 0)
            break;
        if (left <= look && left <= waiting->count && !growth->chain) {
            rest = waiting->all[waiting->count - left].value;
            look = left / 2;
        }
        taken = waiting->all[--waiting->count];
        if (growth->chain)
            waiting->count = 0;
        value = taken.value;
        chance = taken.parent ? value / nodes->all[taken.parent].value : value;
        if (value * calibration <= growth->speed * least)
            break;
        expected += value * calibration;
        double whole = fmin(1.0, value * calibration), time = growth->times[nodes->count];
        time += growth->token_ms * fmax(0.0, expected - whole * (nodes->count + 1)) + growth->again_ms * (1.0 - whole);
        double speed = expected / (time + growth->spent);
        if (speed >= growth->speed) {
            growth->best_expected = expected;
            growth->best_time = time;
            growth->speed = speed;
            growth->best_count = nodes->count + 1;
        }
    }
}

/* How many nodes were asked about, and the tree as far as it pays: tokens, parents, depths, children, values of all but
 * the root, and what was offered below each. */
static PyObject *
grown(const Growth *growth)
{
    PyObject *found = Py_BuildValue("n[][][][][][]", growth->asks);
    for (Py_ssize_t node = 0; found != NULL && node < growth->best_count; node++) {
        PyObject *const *lists = &PyTuple_GET_ITEM(found, 1), *number = PyLong_FromSsize_t(node);
        const Node *each = growth->nodes.all + node;
        if (append(lists[5], each->offered == NULL ? PyTuple_New(0) : Py_NewRef(each->offered)) < 0 || number == NULL ||
            append(lists[0], PyLong_FromLong(each->token)) < 0 || append(lists[1], PyLong_FromLong(each->parent)) < 0 ||
            append(lists[2], PyLong_FromLong(each->depth)) < 0 || append(lists[3], PyDict_New()) < 0 ||
            (node && append(lists[4], PyFloat_FromDouble(each->value)) < 0) ||
            (node && PyDict_SetItem(PyList_GET_ITEM(lists[3], each->parent), PyList_GET_ITEM(lists[0], node), number)))
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

/* grow(root, states, proposers, steps, offsets, odds, times, least,
 *      (floor, gain, ask_ms, beside_ms, calibration, most_odds, likely, token_ms, again_ms), (room, chain)):
 * (asks, tokens, parents, depths, children, values, offered). */
PyObject *
grow(PyObject *module, PyObject *args)
{
    Growth growth = {.arrays = {{"odds", "d", 8, 1}, {"times", "d", 8, 1}, {"least", "d", 8, 1}}, .best_count = 1};
    Array *odds = growth.arrays, *times = odds + 1, *least = odds + 2;
    PyTypeObject *tuple = &PyTuple_Type;
    PyObject *found = NULL;
    long root;
    if (!PyArg_ParseTuple(args, "lO!O!O!O!O&O&O&(ddddddddd)(np):grow", &root, tuple, &growth.states, tuple,
                          &growth.proposers, tuple, &growth.steps, tuple, &growth.offsets, open_array, odds, open_array,
                          times, open_array, least, &growth.floor, &growth.best_expected, &growth.ask_ms, &growth.spent,
                          &growth.calibration, &growth.most_odds, &growth.likely, &growth.token_ms, &growth.again_ms,
                          &growth.room, &growth.chain))
        return NULL;
    growth.odds = (const double *)odds->data;
    growth.times = (const double *)times->data;
    growth.least = (const double *)least->data;
    growth.most = times->length;
    growth.cheapest = INFINITY;
    for (Py_ssize_t at = 0; at < least->length; at++)
        growth.cheapest = fmin(growth.cheapest, growth.least[at]);
    growth.best_time = growth.most ? growth.times[0] : NAN;
    spend(&growth, 0.0);
    growth.sources = PyTuple_GET_SIZE(growth.states);
    if (PyTuple_GET_SIZE(growth.proposers) != growth.sources || PyTuple_GET_SIZE(growth.steps) != growth.sources ||
        PyTuple_GET_SIZE(growth.offsets) != growth.sources || least->length != growth.most ||
        !(growth.speed >= 0.0 && growth.speed < INFINITY && growth.calibration > 0.0 &&
          growth.floor + growth.ask_ms + growth.token_ms + growth.again_ms >= 0.0))
        PyErr_SetString(PyExc_ValueError, "every source has a state, and every size a cost and a slope above 0");
    else
        take_nodes(&growth, root);
    if (!PyErr_Occurred())
        found = grown(&growth);
    for (Node *node = growth.nodes.all; node < growth.nodes.all + growth.nodes.count; node++) {
        Py_XDECREF(node->states);
        Py_XDECREF(node->offered);
    }
    PyMem_Free(growth.waiting.all);
    PyMem_Free(growth.found.all);
    PyMem_Free(growth.nodes.all);
    close_arrays(growth.arrays, 3);
    return found;
}
