/* Entries of the coordination log in a fetch: makes ``LogEntry`` objects of some, equal
 * to those that Python makes of kafka-python's records; finds others without objects.
 */

#include "records.h"

#include <string.h>

/* --- entries --------------------------------------------------------------------------- */

/* Set an argument of the constructor; steals the reference to the value. */
static int set_argument(PyObject *arguments, const char *name, PyObject *value) {
    int result = value == NULL ? -1 : PyDict_SetItemString(arguments, name, value);
    Py_XDECREF(value);
    return result;
}

static int add_entry(PyObject *entries, PyObject *type, PyObject *arguments,
                     const Batch *batch, const Record *record) {
    int kind = batch->attributes & APPENDED ? 1 : 0;
    if (set_argument(arguments, "leader_epoch", PyLong_FromLong(batch->epoch)) < 0 ||
        set_argument(arguments, "timestamp_type", PyLong_FromLong(kind)) < 0 ||
        set_argument(arguments, "offset", PyLong_FromLongLong(record->offset)) < 0 ||
        set_argument(arguments, "timestamp_ms", PyLong_FromLongLong(record->time_ms)) <
            0 ||
        set_argument(arguments, "value", new_part(&record->value)) < 0)
        return -1;
    PyObject *none = PyTuple_New(0);
    PyObject *entry = none == NULL ? NULL : PyObject_Call(type, none, arguments);
    int result = entry == NULL ? -1 : PyList_Append(entries, entry);
    Py_XDECREF(none);
    Py_XDECREF(entry);
    return result;
}

static void refuse_place(void) {
    PyErr_SetString(PyExc_ValueError, "the entries are not those of the index");
}

PyObject *read_entries(PyObject *module, PyObject *args) {
    PyObject *data, *places, *type, *entries = NULL;
    Py_ssize_t start, stop;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnnO:read_entries", &data, &places, &start, &stop,
                          &type) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    PyObject *arguments = PyDict_New();
    if (start < 0 || stop < start || stop > fetch.count)
        PyErr_SetString(PyExc_IndexError, "there are no such entries");
    else if (arguments != NULL)
        entries = PyList_New(0);
    for (Py_ssize_t at = start; entries != NULL && at < stop; at++) {
        int is_read = read_place(&fetch, at, &batch, &record);
        if (!is_read) refuse_place();
        if (!is_read || add_entry(entries, type, arguments, &batch, &record) < 0)
            Py_CLEAR(entries);
    }
    Py_XDECREF(arguments);
    PyBuffer_Release(&fetch.data);
    return entries;
}

PyObject *find_entries(PyObject *module, PyObject *args) {
    PyObject *data, *places, *found = NULL;
    const char *head;
    Py_ssize_t size;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#:find_entries", &data, &places, &head, &size) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    found = PyList_New(0);
    for (Py_ssize_t at = 0; found != NULL && at < fetch.count; at++) {
        if (!read_place(&fetch, at, &batch, &record)) {
            refuse_place();
            Py_CLEAR(found);
        } else if (record.value.size >= size &&
                   memcmp(record.value.at, head, (size_t)size) == 0) {
            PyObject *number = PyLong_FromSsize_t(at);
            if (number == NULL || PyList_Append(found, number) < 0) Py_CLEAR(found);
            Py_XDECREF(number);
        }
    }
    PyBuffer_Release(&fetch.data);
    return found;
}

PyObject *find_later(PyObject *module, PyObject *args) {
    PyObject *data, *places;
    long long time_ms;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOL:find_later", &data, &places, &time_ms) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    Py_ssize_t at = 0;
    int is_read = READ;
    for (; at < fetch.count; at++) {
        is_read = read_place(&fetch, at, &batch, &record);
        if (!is_read || (batch.attributes & APPENDED && record.time_ms > time_ms)) break;
    }
    PyBuffer_Release(&fetch.data);
    if (is_read) return PyLong_FromSsize_t(at);
    refuse_place();
    return NULL;
}
