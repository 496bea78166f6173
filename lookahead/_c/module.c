#include "speedups.h"

/* Whether an array is what it has to be: the items of its lines lie side by side, and can be read as they are. */
static int
fits(const Array *array)
{
    const Py_buffer *buffer = &array->buffer;
    Py_ssize_t size = buffer->itemsize, last = array->axes - 1;
    if (buffer->ndim != array->axes || buffer->format == NULL || !*buffer->format || buffer->format[1] ||
        strchr(array->formats, *buffer->format) == NULL || (array->size ? size != array->size : size != 2 && size != 4))
        return 0;
    int sound = !((uintptr_t)buffer->buf & (size - 1)) && buffer->shape[0] <= INT32_MAX &&
                buffer->shape[last] <= INT32_MAX && (buffer->shape[last] < 2 || buffer->strides[last] == size);
    if (last && buffer->shape[0] > 1) /* lines that are written lie apart */
        sound &= !(buffer->strides[0] & (size - 1)) &&
                 buffer->strides[0] >= (array->flags & WRITTEN ? buffer->shape[last] * size : 0);
    return sound || buffer->len == 0;
}

static int
open_array(Array *array, PyObject *given)
{
    Py_buffer *buffer = &array->buffer;
    if (given == Py_None && array->flags & OPTIONAL)
        return 0;
    if (PyObject_GetBuffer(given, buffer, array->flags & WRITTEN ? PyBUF_RECORDS : PyBUF_RECORDS_RO) < 0)
        return -1;
    Py_ssize_t size = buffer->itemsize;
    if (!fits(array)) {
        PyErr_Format(PyExc_TypeError, "%s: expected %d axes of '%.1s', %zd bytes each; got %d of '%.9s', %zd bytes",
                     array->name, array->axes, array->formats, array->size, buffer->ndim, buffer->format, size);
        return -1;
    }
    array->data = buffer->buf;
    array->size = size;
    array->lines = array->axes > 1 ? buffer->shape[0] : 1;
    array->stride = array->axes > 1 ? buffer->strides[0] : 0;
    array->length = buffer->shape[array->axes - 1];
    array->end = array->data + (buffer->len ? (array->lines - 1) * array->stride + array->length * array->size : 0);
    return 0;
}

int
open_arrays(Array *arrays, PyObject *const *given, int count)
{
    for (int at = 0; at < count; at++) {
        int failed = open_array(arrays + at, given[at]) < 0;
        for (Array *one = arrays, *other = arrays + at; one < other && !failed; one++)
            if ((one->flags | other->flags) & WRITTEN && one->data < other->end && other->data < one->end) {
                PyErr_Format(PyExc_ValueError, "%s and %s share memory", one->name, other->name);
                failed = 1;
            }
        if (failed) {
            close_arrays(arrays, count);
            return -1;
        }
    }
    return 0;
}

void
close_arrays(Array *arrays, int count)
{
    for (int at = 0; at < count; at++)
        PyBuffer_Release(&arrays[at].buffer);
}

int
takes(const char *name, Py_ssize_t count, Py_ssize_t given)
{
    if (count != given)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, count, given);
    return count == given;
}

int
read_tuple(PyObject *given, const char *format, ...)
{
    if (!PyTuple_Check(given)) {
        PyErr_Format(PyExc_TypeError, "%s: got no tuple but %.100s", strchr(format, ';') + 1, Py_TYPE(given)->tp_name);
        return 0;
    }
    va_list parts;
    va_start(parts, format);
    int read = PyArg_VaParse(given, format, parts);
    va_end(parts);
    return read;
}

int
append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL},

static PyMethodDef methods[] = {EACH(METHOD){NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lookahead._speedups", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__speedups(void)
{
    return PyModule_Create(&definition);
}
