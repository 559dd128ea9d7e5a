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

PyObject *fold_beats(PyObject *module, PyObject *args, PyObject *named);
PyObject *to_columns(PyObject *module, PyObject *args);
int init_beats(void); /* before the first call; -1 on an error */

#endif
