/* Shared by the sources of ``kafka_marshal._native``.
 *
 * Only the stable ABI of CPython 3.11 is used, so one build serves all later releases.
 */

#ifndef KAFKA_MARSHAL_NATIVE_H
#define KAFKA_MARSHAL_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>

/* Results: not read, and left to Python; read; failed with an exception. */
enum { NOT_READ = 0, READ = 1, FAILED = -1 };

typedef struct {
    const unsigned char *at, *end;
} Reader;

/* Read a signed varint of at most 64 bits; 0 if there is none. */
static inline int read_varint(Reader *in, int64_t *found) {
    uint64_t number = 0;
    if (in->at < in->end && *in->at < 128) { /* most have one byte */
        number = *in->at++;
        *found = (int64_t)(number >> 1 ^ (0 - (number & 1)));
        return 1;
    }
    for (int shift = 0; shift < 64; shift += 7) {
        if (in->at >= in->end) return 0;
        unsigned char byte = *in->at++;
        if (shift == 63 && byte > 1) return 0;
        number |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *found = (int64_t)(number >> 1 ^ (0 - (number & 1)));
            return 1;
        }
    }
    return 0;
}

PyObject *address_of(PyObject *module, PyObject *data);
PyObject *export_records(PyObject *module, PyObject *args);
PyObject *fold_beats(PyObject *module, PyObject *args, PyObject *named);
PyObject *fold_packed(PyObject *module, PyObject *args, PyObject *named);
PyObject *find_entries(PyObject *module, PyObject *args);
PyObject *find_later(PyObject *module, PyObject *args);
PyObject *index_entries(PyObject *module, PyObject *args);
PyObject *index_records(PyObject *module, PyObject *args);
PyObject *make_records(PyObject *module, PyObject *args);
PyObject *read_column(PyObject *module, PyObject *args);
PyObject *read_entries(PyObject *module, PyObject *args);
PyObject *to_columns(PyObject *module, PyObject *args);
int add_receiver(PyObject *module); /* -1 on an error */
int init_beats(void); /* before the first call; -1 on an error */
void init_crc32c(void);
uint32_t crc32c(const unsigned char *at, const unsigned char *end);

#endif
