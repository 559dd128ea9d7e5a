/* A thread that receives large responses, without the interpreter lock.
 *
 * It copies them from the socket while the application computes, whether that holds the
 * lock or not. If the application still computes then, the thread also checks and indexes
 * the batches.
 */

#include "responses.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

/* A wait for bytes ends after this time, to see whether the receiver was closed. */
#define WAIT_MS 1000
/* Wake up only after this many of the missing bytes have arrived. */
#define WAKEUP_BYTES (1 << 20)
#define HEAD_BYTES 4 /* the size of what follows, as brokers send it */

typedef struct {
    PyObject_HEAD
    pid_t owner;   /* the process that has the thread; a forked child has none */
    int sock;      /* a duplicate, so that nobody else closes its number */
    int done[2];   /* a pipe, which has a byte once the thread has finished */
    int is_open;
    pthread_t thread;
    Py_buffer head, body; /* for the application's thread; without an object if idle */
    Py_ssize_t start;     /* where the thread begins in the body */
    int version;          /* of a Fetch response; -1 for any other */
    Response response;    /* for the thread, while it uses the buffer */
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    int is_closing, is_running; /* whether the thread uses the buffer */
    int is_received;            /* whether it has finished receiving */
    Py_ssize_t taken;           /* bytes that it received */
    atomic_int is_wanted;       /* whether the application waits for it; needs no lock */
} Receiver;

/* --- the thread ------------------------------------------------------------------------ */

static int is_closing(Receiver *self) {
    pthread_mutex_lock(&self->lock);
    int found = self->is_closing;
    pthread_mutex_unlock(&self->lock);
    return found;
}

/* Make poll() return only once many of the missing bytes have arrived. On systems without
 * such a mark, or where it may be larger than the socket's buffer, do nothing. */
static void limit_wakeups(int sock, Py_ssize_t left) {
#ifdef __linux__
    int count = (int)(left < WAKEUP_BYTES ? left : WAKEUP_BYTES);
    (void)setsockopt(sock, SOL_SOCKET, SO_RCVLOWAT, &count, sizeof count);
#else
    (void)sock;
    (void)left;
#endif
}

/* Receive until the buffer is full, the connection ends or fails, or the receiver is
 * closed; return the number of bytes. The next read of the socket meets an error again. */
static Py_ssize_t receive_all(Receiver *self, unsigned char *at, Py_ssize_t size) {
    Py_ssize_t left = size;
    while (left > 0) {
        ssize_t count = recv(self->sock, at, (size_t)left, MSG_DONTWAIT);
        if (count > 0) {
            at += count;
            left -= count;
        } else if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK &&
                                  errno != EINTR)) {
            break;
        } else {
            struct pollfd each = {.fd = self->sock, .events = POLLIN};
            limit_wakeups(self->sock, left);
            if (poll(&each, 1, WAIT_MS) == 0 && is_closing(self)) break;
        }
    }
    limit_wakeups(self->sock, 1);
    return size - left;
}

/* Receive a head, then its content if the body has about the announced size. Without a
 * head, receive the rest of the body. ``response`` gets the response if it is complete,
 * else nothing. Return the number of bytes. */
static Py_ssize_t receive_response(Receiver *self, Reader *response) {
    const unsigned char *head = self->head.buf;
    unsigned char *body = self->body.buf;
    Py_ssize_t size = self->body.len;
    *response = (Reader){body, body};
    if (self->head.len > 0) {
        Py_ssize_t count = receive_all(self, self->head.buf, self->head.len);
        if (count < self->head.len) return count;
        size = (int32_t)((uint32_t)head[0] << 24 | head[1] << 16 | head[2] << 8 | head[3]);
        if (size < self->body.len / 2 || size > self->body.len) return count;
    }
    Py_ssize_t count = receive_all(self, body + self->start, size - self->start);
    if (count == size - self->start) response->end = body + size;
    return self->head.len + count;
}

static void *run(void *given) {
    Receiver *self = given;
    pthread_mutex_lock(&self->lock);
    while (!self->is_closing) {
        if (!self->is_running) {
            pthread_cond_wait(&self->changed, &self->lock);
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        Reader response;
        Py_ssize_t taken = receive_response(self, &response);
        pthread_mutex_lock(&self->lock);
        self->is_received = 1;
        self->taken = taken;
        pthread_mutex_unlock(&self->lock);
        while (write(self->done[1], "", 1) < 0 && errno == EINTR) continue;
        read_response(&self->response, response, self->version, &self->is_wanted);
        pthread_mutex_lock(&self->lock);
        self->is_running = 0;
        pthread_cond_signal(&self->changed);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* --- the application's thread ---------------------------------------------------------- */

static PyObject *raise_errno(int code) {
    errno = code;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *raise_unusable(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

/* Start the thread, without the signals of the process; 0, or an error number. */
static int start_thread(Receiver *self) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&self->thread, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int set_flags(int number) {
    int flags = fcntl(number, F_GETFL);
    return flags < 0 || fcntl(number, F_SETFL, flags | O_NONBLOCK) < 0 ||
           fcntl(number, F_SETFD, FD_CLOEXEC) < 0;
}

static void close_files(Receiver *self) {
    if (self->sock >= 0) (void)close(self->sock);
    for (int i = 0; i < 2; i++)
        if (self->done[i] >= 0) (void)close(self->done[i]);
    self->sock = self->done[0] = self->done[1] = -1;
}

static PyObject *new_receiver(PyTypeObject *type, PyObject *args, PyObject *named) {
    int sock, error;
    if (named != NULL && PyDict_Size(named) > 0)
        return raise_unusable("Receiver() takes no named arguments");
    if (!PyArg_ParseTuple(args, "i:Receiver", &sock)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Receiver *self = (Receiver *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->owner = getpid();
    self->done[0] = self->done[1] = -1;
    self->sock = fcntl(sock, F_DUPFD_CLOEXEC, 0);
    if (self->sock < 0 || pipe(self->done) < 0 || set_flags(self->done[0]) ||
        set_flags(self->done[1])) {
        error = errno;
        Py_DECREF(self);
        return raise_errno(error);
    }
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    error = start_thread(self);
    if (error) {
        Py_DECREF(self);
        return raise_errno(error);
    }
    self->is_open = 1;
    return (PyObject *)self;
}

static void release_buffers(Receiver *self) {
    if (self->head.obj != NULL) PyBuffer_Release(&self->head);
    if (self->body.obj != NULL) PyBuffer_Release(&self->body);
}

/* End the thread. If it is receiving, shut down the connection, which is useless then. */
static void close_receiver(Receiver *self) {
    if (self->is_open && self->owner == getpid()) {
        pthread_mutex_lock(&self->lock);
        self->is_closing = 1;
        atomic_store(&self->is_wanted, 1);
        if (self->is_running) (void)shutdown(self->sock, SHUT_RDWR);
        pthread_cond_signal(&self->changed);
        pthread_mutex_unlock(&self->lock);
        Py_BEGIN_ALLOW_THREADS
        pthread_join(self->thread, NULL);
        Py_END_ALLOW_THREADS
        pthread_cond_destroy(&self->changed);
        pthread_mutex_destroy(&self->lock);
        /* Not in a forked child: the thread may have changed it during the fork. */
        free_response(&self->response);
    }
    self->is_open = 0;
    close_files(self);
    release_buffers(self);
}

static void free_receiver(PyObject *given) {
    PyTypeObject *type = Py_TYPE(given);
    close_receiver((Receiver *)given);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(given);
    Py_DECREF(type);
}

static PyObject *receiver_close(PyObject *given, PyObject *unused) {
    (void)unused;
    close_receiver((Receiver *)given);
    Py_RETURN_NONE;
}

static PyObject *receiver_fileno(PyObject *given, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((Receiver *)given)->done[0]);
}

static int require_open(const Receiver *self, int is_busy) {
    if (!self->is_open || self->owner != getpid())
        raise_unusable("the receiver is closed");
    else if ((self->body.obj != NULL) != is_busy)
        raise_unusable(is_busy ? "nothing is being received"
                               : "a response is being received");
    else
        return 1;
    return 0;
}

static PyObject *receiver_start(PyObject *given, PyObject *args) {
    Receiver *self = (Receiver *)given;
    PyObject *head, *body;
    Py_ssize_t start;
    int version;
    const char *why = NULL;
    if (!PyArg_ParseTuple(args, "OOni:start", &head, &body, &start, &version) ||
        !require_open(self, 0))
        return NULL;
    if (PyObject_GetBuffer(head, &self->head, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(body, &self->body, PyBUF_WRITABLE) < 0) {
        release_buffers(self);
        return NULL;
    }
    if (self->head.len != 0 && self->head.len != HEAD_BYTES)
        why = "a head has four bytes, or none";
    else if (start < 0 || start > (self->head.len ? 0 : self->body.len))
        why = "a response begins within its body, with a head at its begin";
    if (why != NULL) {
        release_buffers(self);
        return raise_unusable(why);
    }
    self->start = start;
    self->version = version;
    pthread_mutex_lock(&self->lock);
    self->is_running = 1;
    self->is_received = 0;
    atomic_store(&self->is_wanted, 0);
    pthread_cond_signal(&self->changed);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

/* Wait until the thread no longer uses the buffer: it stops after the current batch. */
static void wait_for_thread(Receiver *self) {
    atomic_store(&self->is_wanted, 1);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    while (self->is_running) pthread_cond_wait(&self->changed, &self->lock);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
}

static PyObject *receiver_finish(PyObject *given, PyObject *unused) {
    Receiver *self = (Receiver *)given;
    char byte;
    (void)unused;
    if (!require_open(self, 1)) return NULL;
    pthread_mutex_lock(&self->lock);
    int is_received = self->is_received;
    Py_ssize_t taken = self->taken;
    pthread_mutex_unlock(&self->lock);
    if (!is_received) Py_RETURN_NONE;
    wait_for_thread(self);
    while (read(self->done[0], &byte, 1) < 0 && errno == EINTR) continue;
    PyObject *indexes = new_indexes(&self->response);
    free_response(&self->response);
    release_buffers(self);
    return indexes == NULL ? NULL : Py_BuildValue("nN", taken, indexes);
}

static PyMethodDef METHODS[] = {
    {"close", receiver_close, METH_NOARGS, NULL},
    {"fileno", receiver_fileno, METH_NOARGS, NULL},
    {"finish", receiver_finish, METH_NOARGS, NULL},
    {"start", receiver_start, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, new_receiver},
    {Py_tp_dealloc, free_receiver},
    {Py_tp_methods, METHODS},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "kafka_marshal._native.Receiver",
    .basicsize = sizeof(Receiver),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = SLOTS,
};

int add_receiver(PyObject *module) {
    PyObject *type = PyType_FromSpec(&SPEC);
    if (type == NULL) return -1;
    int result = PyModule_AddObjectRef(module, "Receiver", type);
    Py_DECREF(type);
    return result;
}
