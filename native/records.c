/* Makes the records of ``kafka_io/packed_records.py`` that ``batches.c`` has found in a
 * fetch: some of them, or single fields of them.
 */

#include "records.h"

int read_record(Reader *in, const Batch *batch, Record *record) {
    int64_t size, delta_ms, delta;
    if (!read_varint(in, &size) || size < 1 || size > in->end - in->at) return NOT_READ;
    Reader body = {in->at, in->at + size};
    in->at += size;
    if (*body.at++ > 127) return NOT_READ; /* attributes; no producer sets any */
    if (!read_varint(&body, &delta_ms) || !read_varint(&body, &delta) || delta < 0 ||
        delta >= batch->next - batch->base)
        return NOT_READ;
    record->offset = batch->base + delta;
    if (batch->attributes & APPENDED)
        record->time_ms = batch->max_ms;
    else if (__builtin_add_overflow(batch->first_ms, delta_ms, &record->time_ms))
        return NOT_READ;
    if (!read_part(&body, -1, &record->key) || !read_part(&body, -1, &record->value) ||
        !read_varint(&body, &record->header_count) || record->header_count < 0)
        return NOT_READ;
    record->headers = body.at;
    Part ignored;
    for (int64_t left = record->header_count; left > 0; left--)
        if (!read_part(&body, 0, &ignored) || !read_part(&body, -1, &ignored))
            return NOT_READ;
    return body.at == body.end ? READ : NOT_READ;
}

PyObject *new_part(const Part *part) {
    if (part->size < 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)part->at, (Py_ssize_t)part->size);
}

/* --- columns --------------------------------------------------------------------------- */

/* Return pairs of name and value; U+FFFD replaces bytes of a name that are no text. */
static PyObject *new_headers(const Record *record, const unsigned char *end) {
    PyObject *found = PyTuple_New((Py_ssize_t)record->header_count);
    Reader in = {record->headers, end};
    for (Py_ssize_t i = 0; found != NULL && i < record->header_count; i++) {
        Part name, value;
        PyObject *pair = NULL;
        if (read_part(&in, 0, &name) && read_part(&in, -1, &value))
            pair = Py_BuildValue(
                "NN",
                PyUnicode_DecodeUTF8((const char *)name.at, (Py_ssize_t)name.size,
                                     "replace"),
                new_part(&value));
        if (pair == NULL || PyTuple_SetItem(found, i, pair) < 0) Py_CLEAR(found);
    }
    return found;
}

int find_record(const Fetch *fetch, Py_ssize_t number, Batch *batch, Record *record) {
    if (read_place(fetch, number, batch, record)) return 0;
    PyErr_SetString(PyExc_ValueError, "the records are not those of the index");
    return -1;
}

int get_records(PyObject *data, PyObject *places, Py_ssize_t start, Py_ssize_t stop,
                Fetch *fetch) {
    if (get_fetch(data, places, fetch) < 0) return -1;
    if (0 <= start && start <= stop && stop <= fetch->count) return 0;
    PyErr_SetString(PyExc_IndexError, "there are no such records");
    PyBuffer_Release(&fetch->data);
    return -1;
}

/* Make the field of a record; NULL on an error. */
static PyObject *new_field(const Record *record, int field) {
    if (field == TIMES) return PyLong_FromLongLong(record->time_ms);
    return new_part(field == KEYS ? &record->key : &record->value);
}

PyObject *read_column(PyObject *module, PyObject *args) {
    PyObject *data, *places;
    Py_ssize_t start, stop;
    Fetch fetch;
    Batch batch = {0};
    int field;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnni:read_column", &data, &places, &start, &stop,
                          &field) ||
        get_records(data, places, start, stop, &fetch) < 0)
        return NULL;
    PyObject *made = PyList_New(stop - start);
    for (Py_ssize_t i = start; made != NULL && i < stop; i++) {
        Record record;
        PyObject *each = NULL;
        if (find_record(&fetch, i, &batch, &record) == 0)
            each = new_field(&record, field);
        if (each == NULL || PyList_SetItem(made, i - start, each) < 0) Py_CLEAR(made);
    }
    PyBuffer_Release(&fetch.data);
    return made;
}

/* --- records --------------------------------------------------------------------------- */

/* Arguments of a record, in the order of ``ParsedRecord``. */
enum { OFFSET, VALUE, TOKEN, KEY, TIME, KIND, PAIRS, ORIGIN };

/* Set an argument, and steal the reference to it; -1 on an error. */
static int set_argument(PyObject *arguments, Py_ssize_t at, PyObject *made) {
    return made == NULL ? -1 : PyTuple_SetItem(arguments, at, made);
}

/* Make a record. The arguments are used again: a call leaves no reference to them. */
static PyObject *new_record(PyObject *type, PyObject *arguments, const Record *record,
                            int fields, const unsigned char *end) {
    if (set_argument(arguments, OFFSET, PyLong_FromLongLong(record->offset)) < 0 ||
        set_argument(arguments, VALUE, new_part(&record->value)) < 0 ||
        set_argument(arguments, TIME, PyLong_FromLongLong(record->time_ms)) < 0)
        return NULL;
    if (fields & KEYS && set_argument(arguments, KEY, new_part(&record->key)) < 0)
        return NULL;
    if (fields & HEADERS &&
        set_argument(arguments, PAIRS, new_headers(record, end)) < 0)
        return NULL;
    return PyObject_Call(type, arguments, NULL);
}

/* Fill a list with the records from ``start`` on; -1 on an error. */
static int fill_records(PyObject *made, PyObject *type, PyObject *arguments,
                        const Fetch *fetch, Py_ssize_t start, int fields) {
    Py_ssize_t size = PyList_Size(made);
    Batch batch = {0};
    for (Py_ssize_t i = 0; i < size; i++) {
        Record record;
        const unsigned char *known = batch.records;
        if (find_record(fetch, start + i, &batch, &record) < 0) return -1;
        int kind = batch.attributes & APPENDED ? 1 : 0;
        if (batch.records != known &&
            set_argument(arguments, KIND, PyLong_FromLong(kind)) < 0)
            return -1;
        PyObject *each = new_record(type, arguments, &record, fields, fetch->end);
        if (each == NULL || PyList_SetItem(made, i, each) < 0) return -1;
    }
    return 0;
}

PyObject *make_records(PyObject *module, PyObject *args) {
    PyObject *type, *data, *places, *token, *origin;
    Py_ssize_t start, stop;
    Fetch fetch;
    int fields;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnniOO:make_records", &type, &data, &places, &start,
                          &stop, &fields, &token, &origin) ||
        get_records(data, places, start, stop, &fetch) < 0)
        return NULL;
    PyObject *arguments = Py_BuildValue("OOOOOONO", Py_None, Py_None, token, Py_None,
                                        Py_None, Py_None, PyTuple_New(0), origin);
    PyObject *made = arguments == NULL ? NULL : PyList_New(stop - start);
    if (made != NULL &&
        fill_records(made, type, arguments, &fetch, start, fields) < 0)
        Py_CLEAR(made);
    Py_XDECREF(arguments);
    PyBuffer_Release(&fetch.data);
    return made;
}
