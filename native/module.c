/* The extension module ``kafka_marshal._native``. Its functions take and return
 * what their twins in Python do. */

#include "native.h"

/* Builds with another number than ``kafka_marshal/native.py`` are not used. */
#define REVISION 13

static PyMethodDef METHODS[] = {
    {"address_of", address_of, METH_O, NULL},
    {"export_records", export_records, METH_VARARGS, NULL},
    {"fold_beats", (PyCFunction)(void (*)(void))fold_beats,
     METH_VARARGS | METH_KEYWORDS, NULL},
    {"fold_packed", (PyCFunction)(void (*)(void))fold_packed,
     METH_VARARGS | METH_KEYWORDS, NULL},
    {"find_entries", find_entries, METH_VARARGS, NULL},
    {"find_later", find_later, METH_VARARGS, NULL},
    {"index_entries", index_entries, METH_VARARGS, NULL},
    {"index_records", index_records, METH_VARARGS, NULL},
    {"make_records", make_records, METH_VARARGS, NULL},
    {"read_column", read_column, METH_VARARGS, NULL},
    {"read_entries", read_entries, METH_VARARGS, NULL},
    {"to_columns", to_columns, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_size = -1, /* one module per process: it has global names of attributes */
    .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (init_beats() < 0) return NULL;
    init_crc32c();
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && (add_receiver(module) < 0 ||
                           PyModule_AddIntConstant(module, "REVISION", REVISION) < 0))
        Py_CLEAR(module);
    return module;
}
