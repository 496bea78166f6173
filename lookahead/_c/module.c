#include "speedups.h"

const void *
line_of(PyObject *view, Py_ssize_t line, Py_ssize_t size)
{
    if (!PyMemoryView_Check(view)) {
        PyErr_Format(PyExc_TypeError, "expected a memoryview, got %.100s", Py_TYPE(view)->tp_name);
        return NULL;
    }
    const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    if (buffer->itemsize != size || buffer->strides[buffer->ndim - 1] != size) {
        PyErr_Format(PyExc_TypeError, "expected an array of %zd bytes each, side by side", size);
        return NULL;
    }
    return (const char *)buffer->buf + line * (buffer->ndim > 1 ? buffer->strides[0] : 0);
}

int
takes(const char *name, Py_ssize_t count, Py_ssize_t given)
{
    if (count != given)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, count, given);
    return count == given;
}

int
append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

PyObject *
pair(long one, long other)
{
    PyObject *found = PyTuple_New(2), *first = PyLong_FromLong(one), *second = PyLong_FromLong(other);
    if (found == NULL || first == NULL || second == NULL) {
        Py_XDECREF(found);
        Py_XDECREF(first);
        Py_XDECREF(second);
        return NULL;
    }
    PyTuple_SET_ITEM(found, 0, first);
    PyTuple_SET_ITEM(found, 1, second);
    return found;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(grow),    METHOD(put),         METHOD(ranked), METHOD(heard),
    METHOD(best_of), METHOD(exponential), METHOD(drawn),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lookahead._speedups", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__speedups(void)
{
    return PyModule_Create(&definition);
}
