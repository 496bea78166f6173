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

int
open_array(PyObject *given, void *opened)
{
    Array *array = opened;
    Py_buffer *buffer = &array->buffer;
    if (given == NULL || (given == Py_None && array->flags & OPTIONAL)) {
        PyBuffer_Release(buffer);
        return Py_CLEANUP_SUPPORTED;
    }
    if (PyObject_GetBuffer(given, buffer, array->flags & WRITTEN ? PyBUF_RECORDS : PyBUF_RECORDS_RO) < 0)
        return 0;
    Py_ssize_t size = buffer->itemsize;
    if (!fits(array)) {
        PyErr_Format(PyExc_TypeError, "%s: expected %d axes of '%.1s', %zd bytes each; got %d of '%.9s', %zd bytes",
                     array->name, array->axes, array->formats, array->size, buffer->ndim, buffer->format, size);
        PyBuffer_Release(buffer);
        return 0;
    }
    array->data = buffer->buf;
    array->size = size;
    array->lines = array->axes > 1 ? buffer->shape[0] : 1;
    array->stride = array->axes > 1 ? buffer->strides[0] : 0;
    array->length = buffer->shape[array->axes - 1];
    array->end = array->data + (buffer->len ? (array->lines - 1) * array->stride + array->length * array->size : 0);
    return Py_CLEANUP_SUPPORTED;
}

void
close_arrays(Array *arrays, int count)
{
    for (int at = 0; at < count; at++)
        PyBuffer_Release(&arrays[at].buffer);
}

int
share_memory(Array *arrays, int count)
{
    for (Array *other = arrays; other < arrays + count; other++)
        for (Array *one = arrays; one < other; one++)
            if ((one->flags | other->flags) & WRITTEN && one->data < other->end && other->data < one->end) {
                PyErr_Format(PyExc_ValueError, "%s and %s share memory", one->name, other->name);
                close_arrays(arrays, count);
                return 1;
            }
    return 0;
}

int
append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

#define METHOD(name) {#name, name, METH_VARARGS, NULL},

static PyMethodDef methods[] = {EACH(METHOD){NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lookahead._speedups", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__speedups(void)
{
    return PyModule_Create(&definition);
}
