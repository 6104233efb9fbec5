"""Object tree <-> one frame of bytes.

`Codec.plan` walks a payload once and says how many bytes it needs, `Plan.pack_into` writes them, `Codec.decode`
reads them back. Rare types are left to the callbacks a `Codec` is made with (see ``codec.py``); this module never
imports NumPy or torch before a payload holds an array or a tensor. The frame's format is in ``docs/codec.md``.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.mman cimport MADV_HUGEPAGE, madvise

from msgspec import UNSET as _UNSET
from msgspec.msgpack import Encoder as _Encoder
from msgspec.msgpack import Ext as _Ext
from msgspec.msgpack import decode as _decode

from omni_fastshm.errors import CodecError, FastShmError, MetadataError

cdef extern from "ofs_copy.h" nogil:
    struct ofs_piece:
        void *target
        const void *source
        size_t size
    void ofs_copy(void *target, const void *source, size_t size)
    void ofs_copy_pieces(const ofs_piece *pieces, size_t count, size_t stream_from)
    enum:
        OFS_STREAM_FROM
        OFS_STREAM_SHARED_FROM

cdef extern from "ofs_pack.h":
    struct ofs_pack:
        uint8_t *bytes
        size_t size
    int ofs_pack_byte(ofs_pack *pack, uint8_t byte)
    int ofs_pack_signed(ofs_pack *pack, int64_t value)
    int ofs_pack_unsigned(ofs_pack *pack, uint64_t value)
    int ofs_pack_double(ofs_pack *pack, double value)
    int ofs_pack_raw(ofs_pack *pack, const void *bytes, size_t size)
    int ofs_pack_str(ofs_pack *pack, const char *utf8, size_t size)
    int ofs_pack_bin(ofs_pack *pack, const void *bytes, size_t size)
    int ofs_pack_list(ofs_pack *pack, size_t count)
    int ofs_pack_map(ofs_pack *pack, size_t count)
    uint8_t *ofs_pack_ext(ofs_pack *pack, int8_t code, size_t size)

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define ofs_finalizing Py_IsFinalizing
    #else
    #define ofs_finalizing _Py_IsFinalizing
    #endif
    """
    int ofs_finalizing() nogil

cdef extern from "Python.h":
    int PyUnicode_IS_COMPACT_ASCII(object)
    PyObject *PyDict_GetItemWithError(object, object) except? NULL
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL
    void *PyUnicode_1BYTE_DATA(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)
    int PyGILState_Check() nogil
    int Py_IsInitialized() nogil
    object PyLong_FromLongLong(long long)
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1
    unsigned long long PyLong_AsUnsignedLongLong(object) except? 0xFFFFFFFFFFFFFFFF
    double PyFloat_AS_DOUBLE(object)
    object PyFloat_FromDouble(double)
    object PyCapsule_New(void *, const char *, void (*)(PyObject *) noexcept)
    void *PyCapsule_GetPointer(PyObject *, const char *) except NULL
    int PyCapsule_IsValid(PyObject *, const char *)

# The part of an ndarray that NumPy's binary interface fixes (PyArrayObject_fields). Read directly, because asking
# for an address through the buffer protocol fails for dates and costs a microsecond for the others.
cdef struct ArrayFields:
    PyObject head
    char *data
    int nd
    Py_ssize_t *dimensions
    Py_ssize_t *strides
    PyObject *base
    PyObject *descr
    int flags

# DLPack, version 0: what torch takes in a capsule named "dltensor".
cdef struct DLDevice:
    int32_t device_type
    int32_t device_id
cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes
cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset
cdef struct DLManagedTensor:
    DLTensor tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept nogil


# DLPack, version 1, and the table of C functions that torch 2.10 and later have for it: no capsule, no arguments to parse.
cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor
cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void *manager_ctx
    void (*deleter)(DLManagedTensorVersioned *) noexcept nogil
    uint64_t flags
    DLTensor tensor
ctypedef int (*ExportTensor)(void *, DLTensor *) noexcept
ctypedef int (*ImportTensor)(DLManagedTensorVersioned *, void **) except -1
cdef struct DLPackExchange:
    DLPackVersion version
    DLPackExchange *previous
    void *allocate
    void *export_owned
    ImportTensor import_tensor
    ExportTensor export_tensor
    void *current_stream

# What a tensor made here owns: the buffer of a view, a hold on its source, or the memory right behind this struct.
cdef struct Owner:
    DLManagedTensorVersioned managed
    DLManagedTensor old  # the same for a torch that knows version 0 only
    Py_buffer buffer
    bint holds_buffer
    PyObject *source     # or what `quick_hold` gave the memory of; NULL for none
    bint *dropped        # to be told when this ends; NULL for nobody

cdef struct Step:
    PyObject *key
    Py_ssize_t index

cdef struct Piece:
    size_t offset
    const void *source
    size_t size

cdef enum:
    HUGE_FROM = 4194304  # private memory of that many bytes is asked for in huge pages, as NumPy asks for its own
    MAX_DIMS = 64
    STEPS = 256
    NO_STEP = -1     # in place of an index: a level of the frame that the payload does not have
    PREFIX = 16
    FORMAT = 1
    HOST_BIT = 0x80
    ALIGNED_BIT = 0x40
    VERSION_BITS = 0x3F
    LARGE = 4096
    KEY_BITS = 11
    KEY_SLOTS = 2048  # 2 ** KEY_BITS

COPY_BELOW = LARGE
MAX_DEPTH = STEPS
FORMAT_VERSION = FORMAT
# msgpack's own sizes are 32 bit; no part of a header comes near this, the payload's bytes are outside of it.
MAX_HEADER_BYTES = (1 << 32) - 1

cdef enum:
    # Extension codes. Numbers are part of the format.
    X_TENSOR = 1
    X_ARRAY = 2
    X_BLOB = 3
    X_NUMBERS = 4
    X_BIGINT = 5
    X_COMPLEX = 6
    X_SURROGATES = 7
    X_SCALAR = 8
    X_USER = 9
    X_BYTEARRAY = 10
    X_UNSET = 11
    X_MARK = 16
    # Kinds of marked lists: an X_MARK with one of these as the first item tells what the list stands for.
    M_TUPLE = 0
    M_SET = 1
    M_FROZENSET = 2
    M_DICT = 3
    M_SLICE = 4
    M_DATACLASS = 5
    M_STRUCT = 6
    M_NAMEDTUPLE = 7
    M_ENUM = 8
    M_STANDARD = 9
    M_CUSTOM = 10
    M_COUNT = 11
    # Flags of a leaf.
    F_EXTERNAL = 1
    F_RECARRAY = 2
    F_RECORD = 4
    F_TEXT = 8  # np.str_, np.bytes_: their dtype cannot tell an empty one, nor a zero at the end
    # Kinds of blobs.
    B_BYTES = 0
    B_BYTEARRAY = 1
    B_STR = 2
    B_PICKLE = 3
    # Kinds of types in the walk.
    K_NATIVE = 0
    K_TENSOR = 1
    K_ARRAY = 2
    K_SCALAR = 3
    K_DATACLASS = 4
    K_STRUCT = 5
    K_NAMEDTUPLE = 6
    K_ENUM = 7
    K_STANDARD = 8
    K_CUSTOM = 9
    K_REFUSED = 10
    K_AS = 11
    C_CONTIGUOUS = 1

KIND_NATIVE, KIND_TENSOR, KIND_ARRAY, KIND_SCALAR = K_NATIVE, K_TENSOR, K_ARRAY, K_SCALAR
KIND_DATACLASS, KIND_STRUCT, KIND_NAMEDTUPLE, KIND_ENUM = K_DATACLASS, K_STRUCT, K_NAMEDTUPLE, K_ENUM
KIND_STANDARD, KIND_CUSTOM, KIND_REFUSED, KIND_AS = K_STANDARD, K_CUSTOM, K_REFUSED, K_AS
MARK_DATACLASS, MARK_STRUCT, MARK_NAMEDTUPLE, MARK_ENUM = M_DATACLASS, M_STRUCT, M_NAMEDTUPLE, M_ENUM
MARK_STANDARD, MARK_CUSTOM = M_STANDARD, M_CUSTOM

cdef bytes MAGIC = b"OFS" + bytes([FORMAT])
cdef str STATE = "state"
cdef object Ext = _Ext
cdef object UNSET = _UNSET


def _stray(value):
    raise CodecError(f"{type(value).__name__} changed while the payload was being encoded")


cdef object decode_header = _decode
cdef object encode_header = _Encoder(enc_hook=_stray).encode


# ---------------------------------------------------------------------------------------------- torch and NumPy

# Position = the number on the wire. Append only.
TORCH_DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16",
    "complex32", "complex64", "complex128", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
)

cdef enum:
    DTYPES = 64

cdef object torch = None
cdef object from_dlpack = None
cdef object to_dlpack = None
cdef object strided = None
cdef dict dtype_codes = {}
cdef list dtypes = [None] * DTYPES
cdef size_t itemsizes[DTYPES]
cdef DLDataType dl_types[DTYPES]
cdef bint dl_direct[DTYPES]
cdef ExportTensor export_tensor = NULL  # NULL: by capsules
cdef ImportTensor import_tensor = NULL

cdef enum:
    DL_KINDS = 32
    DL_SIZES = 5  # 1, 2, 4, 8 and 16 bytes
    DL_NOBODY = -1
    DL_SEVERAL = -2

cdef int dl_codes[DL_KINDS][DL_SIZES]  # the number on the wire of what DLPack calls that, or one of the two above

# The class of most sources, which gives its memory without an object for each view.
cdef object quick_source = None
cdef Hold quick_hold = NULL
cdef Drop quick_drop = NULL


cdef int know_source(kind, Hold hold, Drop drop) except -1:
    global quick_source, quick_hold, quick_drop
    quick_source, quick_hold, quick_drop = kind, hold, drop
    return 0


cdef object numpy = None
cdef object ndarray = None
cdef object np_empty = None
cdef object recarray = None


cdef int need_torch() except -1:
    """Fill the dtype tables; how this torch speaks DLPack is asked of torch itself, dtype by dtype."""
    global torch, from_dlpack, to_dlpack, strided
    if torch is not None:
        return 0
    try:
        import torch as module
    except ImportError as error:
        raise CodecError("the payload holds a tensor, but torch cannot be imported here") from error
    from_dlpack = module._C._from_dlpack
    to_dlpack = module._C._to_dlpack
    strided = module.strided
    cdef int code
    for code, name in enumerate(TORCH_DTYPES):
        dtype = getattr(module, name, None)
        if dtype is not None:
            dtypes[code] = dtype
            dtype_codes[dtype] = code
            itemsizes[code] = dtype.itemsize
    memset(dl_codes, 0xFF, sizeof(dl_codes))
    # Bytes are how all others are made that have no way of their own: known even where a mode of the caller's keeps the
    # questions below from being answered.
    dl_types[1].code, dl_types[1].bits, dl_types[1].lanes = 1, 8, 1
    for dtype in {each for each in vars(module).values() if type(each) is module.dtype}:
        probe_dtype(module, dtype)
    find_exchange(module)
    torch = module
    return 0


cdef inline int dl_size(const DLDataType *dtype) noexcept:
    """Which of the sizes; -1 for any other."""
    cdef int size
    for size in range(DL_SIZES):
        if dtype.lanes == 1 and dtype.bits == 8 << size:
            return size
    return -1


cdef int code_of(t, const DLDataType *dtype) except -2:
    """The number on the wire of a tensor's dtype; -1 for one that does not travel as DLPack calls it."""
    cdef int size = dl_size(dtype)
    cdef int code = DL_SEVERAL if size < 0 or dtype.code >= DL_KINDS else dl_codes[dtype.code][size]
    if code == DL_SEVERAL:
        code = dtype_codes.get(t.dtype, DL_NOBODY)
    return code if 0 <= code < DTYPES and dl_direct[code] else DL_NOBODY


cdef int probe_dtype(module, dtype) except -1:
    """What DLPack calls it, and whether that comes back as the same dtype."""
    cdef int code = dtype_codes.get(dtype, DTYPES)
    cdef DLManagedTensor *managed
    cdef DLDataType seen
    cdef int size
    try:
        # Viewed, not made as this dtype: torch warns when some are made.
        capsule = to_dlpack(module.empty(dtype.itemsize, dtype=module.uint8, device="cpu").view(dtype))
        managed = <DLManagedTensor *> PyCapsule_GetPointer(<PyObject *> capsule, "dltensor")
        seen = managed.tensor.dtype
        size = dl_size(&seen)
        if size >= 0 and seen.code < DL_KINDS:  # int7 and int8, say, have one name
            dl_codes[seen.code][size] = code if dl_codes[seen.code][size] == DL_NOBODY else DL_SEVERAL
        if code < DTYPES:
            dl_types[code] = seen
            direct = seen.bits * seen.lanes == itemsizes[code] * 8
            dl_direct[code] = direct and managed.tensor.ndim == 1 and from_dlpack(capsule).dtype is dtype
    except Exception:
        pass  # not known to this torch's DLPack: made as bytes and viewed as the dtype
    return 0


cdef int find_exchange(module) except -1:
    """Use torch's table where it has one that does here what capsules do."""
    global export_tensor, import_tensor
    cdef DLPackExchange *table
    capsule = getattr(module.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(<PyObject *> capsule, "dlpack_exchange_api"):
        return 0
    table = <DLPackExchange *> PyCapsule_GetPointer(<PyObject *> capsule, "dlpack_exchange_api")
    while table != NULL and table.version.major != 1:
        table = table.previous
    if table == NULL or table.import_tensor == NULL or table.export_tensor == NULL:
        return 0
    import_tensor = table.import_tensor
    cdef DLTensor seen
    cdef Owner *owner
    cdef int64_t shape[2]
    cdef int code
    shape[0], shape[1] = 3, 2
    try:
        for code in range(DTYPES):
            if not dl_direct[code]:
                continue
            owner = new_owner(2, 6 * itemsizes[code])
            memset(owner.managed.tensor.data, 0, 6 * itemsizes[code])
            made = tensor_of(owner, code, 2, shape, 6)
            if (
                type(made) is not module.Tensor or made.dtype is not dtypes[code] or tuple(made.shape) != (3, 2)
                or table.export_tensor(<void *> made, &seen) != 0 or seen.data != owner.managed.tensor.data
                or seen.byte_offset or seen.ndim != 2 or seen.shape[0] != 3 or seen.strides[0] != 2
                or memcmp(&seen.dtype, &dl_types[code], sizeof(DLDataType))
            ):
                raise BufferError(f"a tensor of {dtypes[code]} comes back as another")
    except Exception:
        import_tensor = NULL
        return 0
    export_tensor = table.export_tensor
    return 0


cdef int need_numpy() except -1:
    global numpy, ndarray, np_empty, recarray
    if numpy is not None:
        return 0
    try:
        import numpy as module
    except ImportError as error:
        raise CodecError("the payload holds an array, but numpy cannot be imported here") from error
    cdef object probe = module.arange(6, dtype="u1").reshape(2, 3)
    cdef ArrayFields *fields = <ArrayFields *> <PyObject *> probe
    if (
        fields.nd != 2 or fields.dimensions[0] != 2 or fields.dimensions[1] != 3
        or <PyObject *> probe.dtype != fields.descr or not fields.flags & C_CONTIGUOUS
        or <size_t> fields.data != <size_t> probe.__array_interface__["data"][0]
    ):
        raise CodecError(f"NumPy {module.__version__} lays out its arrays in a way this build does not know")
    ndarray = module.ndarray
    np_empty = module.empty
    recarray = module.recarray
    numpy = module
    return 0


cdef void drop_owner(Owner *owner) noexcept nogil:
    """A tensor's storage died. Any thread may get here, with or without the GIL, also while Python shuts down."""
    if owner.dropped != NULL:
        owner.dropped[0] = True
    if not owner.holds_buffer and owner.source == NULL:
        free(owner)
        return
    if not PyGILState_Check() and (ofs_finalizing() or not Py_IsInitialized()):
        return  # taking the GIL now would hang or end this thread; the process is going away anyway
    with gil:
        if owner.source != NULL:
            quick_drop(owner.source)
        else:
            PyBuffer_Release(&owner.buffer)
        PyMem_Free(owner)


cdef void drop_managed(DLManagedTensorVersioned *managed) noexcept nogil:
    drop_owner(<Owner *> managed.manager_ctx)


cdef void drop_old(DLManagedTensor *managed) noexcept nogil:
    drop_owner(<Owner *> managed.manager_ctx)


cdef void drop_capsule(PyObject *capsule) noexcept:
    """Only a capsule that torch did not take still has its first name."""
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManagedTensor *> PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef Owner *new_owner(int ndim, size_t room) except NULL:
    """Struct, shape and strides, then (64-byte aligned) `room` bytes; `tensor.data` points at these."""
    cdef size_t head = sizeof(Owner) + <size_t> (ndim + 1) * 16
    # One with a buffer is freed under the GIL, so that it may come from Python's pools, which take half the time.
    cdef Owner *owner = <Owner *> (malloc(head + room + 64) if room else PyMem_Malloc(head + 64))
    if owner == NULL:
        raise MemoryError(f"no memory for a tensor of {room} bytes")
    if room >= HUGE_FROM:
        # Advice: fresh memory in pages of 4 KiB takes faults that cost many times the copy into it.
        madvise(<void *> ((<size_t> owner + 4095) & ~<size_t> 4095), room & ~<size_t> 4095, MADV_HUGEPAGE)
    memset(owner, 0, sizeof(Owner))
    owner.managed.version.major = 1
    owner.managed.manager_ctx = owner
    owner.managed.deleter = drop_managed
    owner.managed.tensor.shape = <int64_t *> (<char *> owner + sizeof(Owner))
    owner.managed.tensor.strides = owner.managed.tensor.shape + ndim + 1
    owner.managed.tensor.data = <void *> ((<size_t> owner + head + 63) & ~<size_t> 63)
    owner.managed.tensor.device.device_type = 1
    return owner


cdef object tensor_of(Owner *owner, int code, int ndim, const int64_t *shape, size_t count):
    """Give `owner` to torch; from here on it is dropped with the tensor, or with the capsule on failure."""
    cdef DLTensor *tensor = &owner.managed.tensor
    cdef int64_t stride = 1
    cdef int i
    if dl_direct[code]:
        tensor.ndim = ndim
        tensor.dtype = dl_types[code]
        for i in range(ndim - 1, -1, -1):
            tensor.shape[i] = shape[i]
            tensor.strides[i] = stride
            stride *= shape[i]
        return imported(owner)
    tensor.ndim = 1
    tensor.dtype = dl_types[1]
    tensor.shape[0] = count * itemsizes[code]
    tensor.strides[0] = 1
    return imported(owner).view(dtypes[code]).reshape([shape[i] for i in range(ndim)])


cdef object imported(Owner *owner):
    cdef void *made = NULL
    cdef bint dropped = False
    if import_tensor == NULL:
        owner.old.tensor = owner.managed.tensor
        owner.old.manager_ctx = owner
        owner.old.deleter = drop_old
        return from_dlpack(PyCapsule_New(&owner.old, "dltensor", drop_capsule))
    # Whoever fails there may have dropped it already or not: DLPack says that it is taken, not when.
    owner.dropped = &dropped
    try:
        import_tensor(&owner.managed, &made)
    except BaseException:
        if not dropped:
            owner.dropped = NULL
            drop_owner(owner)
        raise
    owner.dropped = NULL
    out = <object> <PyObject *> made
    Py_DECREF(out)  # the reference that came with it
    return out


cdef object tensor_over(object view, int code, int ndim, const int64_t *shape, size_t count):
    cdef size_t nbytes = count * itemsizes[code]
    cdef Owner *owner = new_owner(ndim, 0)
    # Read-only exports are taken, too: torch has no read-only tensors, the caller decided that this is wanted.
    try:
        PyObject_GetBuffer(view, &owner.buffer, PyBUF_SIMPLE)
    except BaseException:
        PyMem_Free(owner)
        raise
    owner.holds_buffer = True
    if <size_t> owner.buffer.len < nbytes:
        have = owner.buffer.len
        drop_owner(owner)
        raise MetadataError(f"a tensor of {nbytes} bytes over a view of {have} bytes")
    owner.managed.tensor.data = owner.buffer.buf
    return tensor_of(owner, code, ndim, shape, count)


cdef object tensor_over_source(source, size_t at, int code, int ndim, const int64_t *shape, size_t count):
    """`tensor_over` a view of the source, without an object for the view."""
    cdef Owner *owner = new_owner(ndim, 0)
    try:
        owner.managed.tensor.data = quick_hold(source, at, count * itemsizes[code])
    except BaseException:
        PyMem_Free(owner)
        raise
    owner.source = <PyObject *> source
    return tensor_of(owner, code, ndim, shape, count)


cdef object half_pairs(object t):
    """The parts of a complex32 tensor, side by side: torch warns when it makes a complex32 tensor of its own."""
    if not t.is_conj():
        return torch.view_as_real(t).contiguous()
    pairs = torch.view_as_real(t.conj()).clone(memory_format=torch.contiguous_format)
    pairs[..., 1].neg_()
    return pairs


cdef object empty_tensor(object shape, object dtype):
    # Viewed, not made as this dtype: torch warns when some are made.
    return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).reshape(shape)


def tensor_view(buffer, shape, dtype):
    """A tensor over the bytes of `buffer`, which it keeps alive.

    Args:
        buffer: anything with the buffer protocol, of at least the size needed. Whether it is read-only is not
            looked at: torch has no read-only tensors.
        shape: sizes, none of them negative.
        dtype: a ``torch.dtype``.

    Returns:
        The tensor. The buffer's export is given back when the last tensor over it dies.

    Raises:
        CodecError: the dtype cannot be carried.
        MetadataError: the buffer is too short, or the shape impossible.
    """
    need_torch()
    code = dtype_codes.get(dtype)
    if code is None:
        raise CodecError(f"no tensor of dtype {dtype!r} can be made over memory")
    cdef int64_t dims[MAX_DIMS]
    cdef size_t count = 1
    cdef int ndim = len(shape)
    if ndim > MAX_DIMS:
        raise MetadataError(f"a shape has {ndim} dimensions, more than {MAX_DIMS}")
    for i, size in enumerate(shape):
        dims[i] = size
        if dims[i] < 0 or (dims[i] and count > (<size_t> 1 << 58) // <size_t> dims[i]):
            raise MetadataError(f"{tuple(shape)} is not the shape of a tensor")
        count *= dims[i]
    if count == 0:
        return empty_tensor(tuple(shape), dtype)
    return tensor_over(buffer, code, ndim, dims, count)


@cython.final
cdef class Window:
    """Bytes at an address through the buffer protocol, for `tensor_view`; keeps what owns them.

    Args:
        address: of the first byte.
        nbytes: how many; all of them must be there as long as `owner` lives.
        owner: what keeps them there.
    """

    cdef readonly size_t address
    cdef readonly Py_ssize_t nbytes
    cdef object owner

    def __cinit__(self, size_t address, Py_ssize_t nbytes, owner):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef PyObject *first = <PyObject *> buffer.obj  # Cython puts a reference to None there, which the call writes over
        PyBuffer_FillInfo(buffer, self, <void *> self.address, self.nbytes, False, flags)
        if first == <PyObject *> None:
            Py_DECREF(None)

    def __reduce__(self):
        raise TypeError("a Window holds an address of this process and cannot be pickled")


# ---------------------------------------------------------------------------------------------- encoding

@cython.final
cdef class Kind:
    """How objects of one type travel; made by the classify callback, once per type.

    Args:
        code: one of the KIND numbers.
        name: the name on the wire, or the reason for a refusal.
        extract: what takes the object apart (a function, or a tuple of field names or descriptors).
    """

    cdef readonly int code
    cdef readonly object name
    cdef readonly object extract

    def __cinit__(self, int code, name=None, extract=None):
        self.code = code
        self.name = name
        self.extract = extract


@cython.final
cdef class Plan:
    """One payload, taken apart and measured, its source objects kept alive until this is dropped.

    Attributes:
        size: serialized size in bytes: header and all buffers, external ones included.
        frame_size: bytes that `pack_into` writes.
        external: some buffer stays where it is (a loan) and is only referred to.
        deferred: some tensor's bytes are on a device still: `take_deferred` leaves them to the caller, all else brings
            them, waiting for the device.
    """

    cdef readonly size_t size
    cdef readonly size_t frame_size
    cdef readonly bint external
    cdef readonly bint deferred
    cdef bint taken    # the caller copies what was deferred
    cdef list waiting  # (number of the piece, its bytes on their device), what is deferred
    cdef Codec codec
    cdef dict kinds
    cdef bint host
    cdef bint allow_pickle
    cdef object loans
    cdef list lent
    cdef ofs_pack head  # the frame's header
    cdef list keep
    cdef size_t area
    cdef size_t start
    cdef size_t outside
    cdef size_t align
    cdef Piece *pieces
    cdef size_t count
    cdef size_t room
    cdef Step *steps
    cdef int depth
    cdef int deepest

    def __dealloc__(self):
        free(self.pieces)
        free(self.head.bytes)

    def __reduce__(self):
        raise TypeError("a Plan holds addresses of this process and cannot be pickled")

    # -- places and paths

    cdef int refuse(self, object what, object why) except -1:
        raise CodecError(f"{self.path()}: {what} cannot be carried: {why}")

    cdef object path(self):
        text = ""
        cdef int i
        cdef Step step
        for i in range(min(self.depth, self.deepest)):
            if 8 <= i < self.depth - 4 and self.depth > 16:
                text += "[...]" if i == 8 else ""
                continue
            step = self.steps[i]
            if step.key == NULL:
                text += f"[{step.index}]" if step.index != NO_STEP else ""
                continue
            key = <object> step.key
            if type(key) is str and key.isidentifier():
                text += f".{key}" if text else key
            else:
                text += f"[{key!r}]"
        return text or "payload"

    cdef int enter(self, int depth, object o) except -1:
        self.depth = depth
        if depth >= STEPS:
            self.refuse(
                type(o).__name__, f"it is nested deeper than {STEPS} levels, or a container holds itself"
            )
        return 0

    cdef inline void at_key(self, int depth, object key) noexcept:
        Py_INCREF(key)  # a dict that another thread changes, or one made for this walk, may be gone when `path` is asked
        self.at(depth, <PyObject *> key, 0)

    cdef inline void at_index(self, int depth, Py_ssize_t index) noexcept:
        self.at(depth, NULL, index)

    cdef inline void at(self, int depth, PyObject *key, Py_ssize_t index) noexcept:
        cdef PyObject *old
        while self.deepest <= depth:
            self.steps[self.deepest].key = NULL
            self.deepest += 1
        old = self.steps[depth].key
        self.steps[depth].key = key
        self.steps[depth].index = index
        Py_XDECREF(old)

    cdef void forget_path(self) noexcept:
        cdef int i
        for i in range(self.deepest):
            Py_XDECREF(self.steps[i].key)
        self.deepest = 0
        self.depth = 0
        self.steps = NULL

    cdef size_t place(self, const void *source, size_t size, object owner) except? 0xFFFFFFFFFFFFFFFF:
        """Reserve a place for one leaf; returns its offset from the start of the data area."""
        cdef size_t align = 64 if size > LARGE else 8
        cdef size_t offset = (self.area + align - 1) & ~(align - 1)
        cdef Piece *grown
        if size == 0:
            return self.area
        if self.count == self.room:
            self.room = self.room * 2 if self.room else 16
            grown = <Piece *> realloc(self.pieces, self.room * sizeof(Piece))
            if grown == NULL:
                raise MemoryError("no memory for the list of buffers")
            self.pieces = grown
        self.pieces[self.count].offset = offset
        self.pieces[self.count].source = source
        self.pieces[self.count].size = size
        self.count += 1
        self.keep.append(owner)
        self.area = offset + size
        if align > self.align:
            self.align = align
        return offset

    # -- the walk: what it comes across is written behind what it came across before

    cdef inline int kept(self, int rc) except -1:
        """What an `ofs_pack` function said."""
        if rc:
            raise MemoryError("no memory for the header")
        return 0

    cdef inline int marked(self, int mark, size_t count) except -1:
        """A list that stands for something else; `count` items follow."""
        cdef uint8_t *at
        self.kept(ofs_pack_list(&self.head, 1 + count))
        at = self.extension(X_MARK, 1)
        at[0] = mark
        return 0

    cdef inline uint8_t *extension(self, int code, size_t size) except NULL:
        """Its `size` bytes are the caller's to write, before anything else is."""
        cdef uint8_t *at = ofs_pack_ext(&self.head, code, size)
        if at == NULL:
            raise MemoryError("no memory for the header")
        return at

    cdef int extension_of(self, int code, bytes data) except -1:
        memcpy(self.extension(code, PyBytes_GET_SIZE(data)), PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        return 0

    cdef int as_msgspec(self, object o) except -1:
        """A value that msgpack has a form for, and this module does not know."""
        cdef bytes written = encode_header(o)
        return self.kept(ofs_pack_raw(&self.head, PyBytes_AS_STRING(written), PyBytes_GET_SIZE(written)))

    cdef int walk(self, object o, int depth) except -1:
        t = type(o)
        if t is str:
            return self.walk_str(o, depth)
        if t is int:
            return self.walk_int(o, depth)
        if t is float:
            return self.kept(ofs_pack_double(&self.head, PyFloat_AS_DOUBLE(o)))
        if o is None:
            return self.kept(ofs_pack_byte(&self.head, 0xC0))
        if t is bool:
            return self.kept(ofs_pack_byte(&self.head, 0xC3 if o is True else 0xC2))
        if t is dict:
            return self.walk_dict(o, depth)
        if t is list:
            return self.walk_list(o, depth)
        if t is tuple:
            return self.walk_tuple(o, depth)
        if t is bytes:
            if PyBytes_GET_SIZE(o) <= LARGE:
                return self.kept(ofs_pack_bin(&self.head, PyBytes_AS_STRING(o), PyBytes_GET_SIZE(o)))
            return self.blob(B_BYTES, PyBytes_AS_STRING(o), PyBytes_GET_SIZE(o), o)
        return self.walk_other(o, t, depth)

    cdef int walk_str(self, str o, int depth) except -1:
        cdef Py_ssize_t size
        cdef const char *text
        if PyUnicode_IS_COMPACT_ASCII(o) and PyUnicode_GET_LENGTH(o) <= LARGE:
            return self.kept(ofs_pack_str(&self.head, <char *> PyUnicode_1BYTE_DATA(o), PyUnicode_GET_LENGTH(o)))
        try:
            text = PyUnicode_AsUTF8AndSize(o, &size)
        except UnicodeEncodeError:
            if self.host:
                self.depth = depth
                self.refuse("str", "it holds lone surrogates, which UTF-8 has no form for")
            return self.extension_of(X_SURROGATES, o.encode("utf-8", "surrogatepass"))
        if size <= LARGE:
            return self.kept(ofs_pack_str(&self.head, text, size))
        return self.blob(B_STR, text, size, o)

    cdef int walk_int(self, object o, int depth) except -1:
        cdef int overflow = 0
        cdef long long value = PyLong_AsLongLongAndOverflow(o, &overflow)
        if overflow == 0:
            return self.kept(ofs_pack_signed(&self.head, value))
        if overflow > 0 and o <= 0xFFFFFFFFFFFFFFFF:
            return self.kept(ofs_pack_unsigned(&self.head, PyLong_AsUnsignedLongLong(o)))
        if self.host:
            self.depth = depth
            self.refuse("int", "the host's format has integers from -2**63 to 2**64 - 1 only")
        return self.extension_of(X_BIGINT, o.to_bytes(o.bit_length() // 8 + 1, "little", signed=True))

    cdef int changed(self, object o, int depth) except -1:
        self.depth = depth
        self.refuse(type(o).__name__, "it changed while the payload was being encoded")

    cdef int walk_list(self, list o, int depth) except -1:
        cdef Py_ssize_t i
        cdef Py_ssize_t count = PyList_GET_SIZE(o)
        self.enter(depth, o)
        if count >= 16 and self.pack_numbers(o, count, False):
            return 0
        self.kept(ofs_pack_list(&self.head, count))
        for i in range(count):
            if PyList_GET_SIZE(o) != count:
                break
            self.at_index(depth, i)
            self.walk(<object> PyList_GET_ITEM(o, i), depth + 1)
        if PyList_GET_SIZE(o) != count:
            self.changed(o, depth)
        self.depth = depth
        return 0

    cdef int walk_tuple(self, tuple o, int depth) except -1:
        cdef Py_ssize_t count = PyTuple_GET_SIZE(o)
        self.enter(depth, o)
        if count >= 16 and self.pack_numbers(o, count, True):
            return 0
        if self.host:
            self.kept(ofs_pack_list(&self.head, count))
        else:
            self.marked(M_TUPLE, count)
        return self.walk_parts(o, depth)

    cdef int walk_parts(self, tuple o, int depth) except -1:
        """The items of a tuple, whose number was written."""
        cdef Py_ssize_t i
        for i in range(PyTuple_GET_SIZE(o)):
            self.at_index(depth, i)
            self.walk(<object> PyTuple_GET_ITEM(o, i), depth + 1)
        self.depth = depth
        return 0

    cdef int walk_items(self, object o, int depth) except -1:
        """The items of a set or another iterable, whose number was written."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t count = len(o)
        self.enter(depth, o)
        for item in o:
            if i == count:
                self.changed(o, depth)
            self.at_index(depth, i)
            self.walk(item, depth + 1)
            i += 1
        if i != count:
            self.changed(o, depth)
        self.depth = depth
        return 0

    cdef int walk_dict(self, dict o, int depth) except -1:
        cdef PyObject *key_ptr
        cdef PyObject *value_ptr
        cdef Py_ssize_t position = 0
        cdef Py_ssize_t count = len(o)
        cdef Py_ssize_t left = count
        cdef size_t expected = 0
        cdef size_t seen = 0
        self.enter(depth, o)
        while PyDict_Next(o, &position, &key_ptr, NULL):
            if not plain_key(<object> key_ptr):
                return self.walk_odd_dict(o, depth)
            expected = expected * 31 + <size_t> key_ptr
        self.kept(ofs_pack_map(&self.head, count))
        position = 0
        while PyDict_Next(o, &position, &key_ptr, &value_ptr):
            key = <object> key_ptr
            value = <object> value_ptr
            # Others may come in place of those that go: the number alone does not tell.
            seen = seen * 31 + <size_t> key_ptr
            left -= 1
            if left < 0 or not plain_key(key):  # put there since
                self.changed(o, depth)
            self.at_key(depth, key)
            if type(key) is str:
                self.walk_str(key, depth)
            else:
                self.walk_int(key, depth)
            self.walk(value, depth + 1)
            if len(o) != count:
                self.changed(o, depth)
        if seen != expected:
            self.changed(o, depth)
        self.depth = depth
        return 0

    cdef int walk_odd_dict(self, dict o, int depth) except -1:
        """A dict whose keys msgpack would change, or whose keys themselves need care."""
        cdef list pairs = list(o.items())
        if self.host:
            return self.walk_host_dict(pairs, depth)
        self.marked(M_DICT, 2 * len(pairs))
        for key, value in pairs:
            self.at_key(depth, key)
            self.walk(key, depth + 1)
            self.walk(value, depth + 1)
        if len(o) != len(pairs):
            self.changed(o, depth)
        self.depth = depth
        return 0

    cdef int walk_host_dict(self, list pairs, int depth) except -1:
        cdef set keys = set()
        cdef list as_sent = []
        for key, _ in pairs:
            self.at_key(depth, key)
            sent = self.host_key(key, depth + 1)
            keys.add(sent)
            as_sent.append(sent)
        if len(keys) != len(pairs):
            self.depth = depth
            self.refuse("dict", "two of its keys are the same in the host's format")
        self.kept(ofs_pack_map(&self.head, len(pairs)))
        for sent, (key, value) in zip(as_sent, pairs):
            self.at_key(depth, key)
            self.as_msgspec(sent)
            self.walk(value, depth + 1)
        self.depth = depth
        return 0

    cdef object host_key(self, object key, int depth):
        t = type(key)
        self.enter(depth, key)
        if t is str:
            if not plain_text(key):
                self.refuse("str", "a key with lone surrogates")
            return key
        if t is int:
            if not -0x8000000000000000 <= key <= 0xFFFFFFFFFFFFFFFF:
                self.refuse("int", "the host's format has integers from -2**63 to 2**64 - 1 only")
            return key
        if t is float or t is bool or t is bytes or key is None:
            return key
        if t is tuple:
            sent = []
            for i, item in enumerate(<tuple> key):
                self.at_index(depth, i)
                sent.append(self.host_key(item, depth + 1))
            return tuple(sent)
        kind = self.kind_of(t)
        if kind.code == K_AS and kind.name == "enum":
            self.at_index(depth, NO_STEP)
            return self.host_key(key.value, depth + 1)
        if kind.code != K_NATIVE:
            self.refuse(t.__name__, "not as a key of a dict in the host's format")
        return decode_header(encode_header(key))  # as text: two keys that become one must be seen here

    cdef bint pack_numbers(self, object o, Py_ssize_t count, bint is_tuple) except -1:
        """A long run of ints or floats as one buffer; False where the items are of several kinds."""
        cdef Py_ssize_t i
        cdef int overflow = 0
        cdef long long value
        cdef long long low = 0
        cdef long long high = 0
        cdef int width = 8
        first = type(o[0])
        if first is not int and first is not float:
            return False
        cdef bytes packed = PyBytes_FromStringAndSize(NULL, count * 8)
        cdef char *raw = PyBytes_AS_STRING(packed)
        if first is float:
            for i in range(count):
                item = <object> (PyTuple_GET_ITEM(o, i) if is_tuple else PyList_GET_ITEM(o, i))
                if type(item) is not float:
                    return False
                (<double *> raw)[i] = PyFloat_AS_DOUBLE(item)
            return self.numbers(9, is_tuple, raw, 8, count, packed)
        for i in range(count):
            item = <object> (PyTuple_GET_ITEM(o, i) if is_tuple else PyList_GET_ITEM(o, i))
            if type(item) is not int:
                return False
            value = PyLong_AsLongLongAndOverflow(item, &overflow)
            if overflow:
                return False
            (<long long *> raw)[i] = value
            if value < low:
                low = value
            elif value > high:
                high = value
        if -128 <= low and high <= 127:
            width = 1
            for i in range(count):
                (<int8_t *> raw)[i] = <int8_t> (<int64_t *> raw)[i]
        elif -32768 <= low and high <= 32767:
            width = 2
            for i in range(count):
                (<int16_t *> raw)[i] = <int16_t> (<int64_t *> raw)[i]
        elif -2147483648 <= low and high <= 2147483647:
            width = 4
            for i in range(count):
                (<int32_t *> raw)[i] = <int32_t> (<int64_t *> raw)[i]
        return self.numbers(width, is_tuple, raw, width, count, packed)

    cdef bint numbers(self, int code, bint is_tuple, char *raw, int width, Py_ssize_t count, bytes owner) except -1:
        return self.buffer(X_NUMBERS, code, is_tuple and not self.host, raw, <size_t> count * width, count, owner)

    cdef int blob(self, int kind, const char *source, size_t size, object owner) except -1:
        self.buffer(X_BLOB, kind, 0, source, size, size, owner)
        return 0

    cdef bint buffer(self, int code, int kind, int flag, const char *source, size_t size, size_t count,
                     object owner) except -1:
        """kind (1 byte) · flag (1) · zeros (6) · offset (8) · count (8)."""
        cdef uint64_t[2] numbers
        cdef uint8_t *at
        numbers[0] = self.place(source, size, owner)
        numbers[1] = count
        at = self.extension(code, 24)
        memset(at, 0, 8)
        at[0] = kind
        at[1] = flag
        memcpy(at + 8, numbers, 16)
        return True

    cdef Kind kind_of(self, object t):
        kind = self.kinds.get(t)
        if kind is None:
            kind = self.codec.classify(t, self.host)
            if len(self.kinds) > 4096:
                self.kinds.clear()  # classes made on the fly must not be kept alive for ever
            self.kinds[t] = kind
        return kind

    cdef int walk_other(self, object o, object t, int depth) except -1:
        cdef PyObject *known = PyDict_GetItemWithError(self.kinds, t)
        cdef Kind kind
        self.depth = depth  # what fails below without a path of its own failed here
        if known != NULL:
            kind = <Kind> <object> known  # held: what takes the object apart may register a type, which empties `kinds`
            return self.walk_kind(o, t, kind, depth)
        if t is set or t is frozenset:
            self.begin_items(M_SET if t is set else M_FROZENSET, len(o))
            return self.walk_items(o, depth)
        if t is slice:
            self.begin_items(M_SLICE, 3)
            return self.walk_items((o.start, o.stop, o.step), depth)
        if t is bytearray:
            return self.walk_bytearray(o)
        if t is Ext:
            return self.extension_of(X_USER, int(o.code).to_bytes(1, "little", signed=True) + bytes(o.data))
        if t is complex and not self.host:
            return self.walk_complex(o)
        if o is UNSET and not self.host:
            self.extension(X_UNSET, 0)
            return 0
        return self.walk_kind(o, t, self.kind_of(t), depth)

    cdef int begin_items(self, int mark, size_t count) except -1:
        """A list of the host's, or a marked one."""
        return self.kept(ofs_pack_list(&self.head, count)) if self.host else self.marked(mark, count)

    cdef int named(self, int mark, Kind kind, size_t count) except -1:
        """A marked list of a class's; `count` more items follow the name."""
        self.marked(mark, 1 + count)
        return self.walk_str(kind.name, self.depth)

    cdef int walk_kind(self, object o, object t, Kind kind, int depth) except -1:
        cdef int code = kind.code
        if code == K_TENSOR:
            return self.walk_tensor(o, depth)
        if code == K_ARRAY:
            return self.walk_array(o, depth)
        self.enter(depth, o)
        if code == K_NATIVE:
            return self.as_msgspec(o)
        if code == K_SCALAR:
            return self.walk_scalar(o)
        if code == K_REFUSED:
            if self.allow_pickle:
                return self.pickled(o)
            self.refuse(t.__name__, kind.name)
        new = self.taken_apart(o, kind)
        if code == K_NAMEDTUPLE:
            self.named(M_NAMEDTUPLE, kind, PyTuple_GET_SIZE(o))
            return self.walk_parts(<tuple> o, depth)  # its class may have an `__iter__` that gives something else
        if code == K_ENUM or code == K_DATACLASS or code == K_STRUCT:
            self.at_index(depth, NO_STEP)
        if code == K_ENUM:
            self.named(M_ENUM, kind, 1)
            return self.walk(new, depth + 1)
        if code == K_DATACLASS or code == K_STRUCT:
            self.check_names(o, new)
            self.named(M_DATACLASS if code == K_DATACLASS else M_STRUCT, kind, 1)
            return self.walk_dict(new, depth + 1)
        # In the host's format, which has no type of its own for some (K_AS), another object stands for this one.
        if code == K_STANDARD or code == K_CUSTOM:
            self.named(M_STANDARD if code == K_STANDARD else M_CUSTOM, kind, 1)
        elif type(new) is dict:
            return self.walk_dict(new, depth)
        self.at_key(depth, STATE)
        self.walk(new, depth + 1)
        self.depth = depth
        return 0

    cdef int check_names(self, object o, dict state) except -1:
        """Attributes that were put straight into an object's `__dict__` may have any key; no receiver takes these."""
        cdef PyObject *key
        cdef Py_ssize_t position = 0
        while PyDict_Next(state, &position, &key, NULL):
            if type(<object> key) is not str:
                self.refuse(type(o).__name__, f"the name of one of its attributes is no text but {<object> key!r}")
        return 0

    cdef object taken_apart(self, object o, Kind kind):
        try:
            return kind.extract(o)
        except Exception as error:
            self.refuse(type(o).__name__, f"{type(error).__name__}: {error}")

    cdef int pickled(self, object o) except -1:
        import pickle

        try:
            data = pickle.dumps(o, 5)
        except Exception as error:
            self.refuse(type(o).__name__, f"pickling it failed with {type(error).__name__}: {error}")
        return self.blob(B_PICKLE, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), data)

    cdef int walk_bytearray(self, o) except -1:
        if len(o) > LARGE:
            # The export forbids a resize, which would move the bytes away, until the plan is dropped.
            return self.blob(B_BYTES if self.host else B_BYTEARRAY, PyByteArray_AS_STRING(o), len(o), memoryview(o))
        if self.host:
            return self.kept(ofs_pack_bin(&self.head, PyByteArray_AS_STRING(o), len(o)))
        return self.extension_of(X_BYTEARRAY, bytes(o))

    cdef int walk_complex(self, o) except -1:
        cdef double parts[2]
        parts[0] = o.real
        parts[1] = o.imag
        memcpy(self.extension(X_COMPLEX, 16), parts, 16)
        return 0

    cdef int walk_scalar(self, o) except -1:
        need_numpy()
        try:
            described = self.codec.describe_dtype(o.dtype)
        except Exception as error:
            self.refuse(type(o).__name__, str(error))
        flags = F_RECORD if o.dtype.type is not numpy.void and o.dtype.names is not None else 0
        data = None
        if isinstance(o, (numpy.str_, numpy.bytes_)):
            flags = F_TEXT
            data = str.encode(o, "utf-8", "surrogatepass") if isinstance(o, numpy.str_) else bytes(o)
        head = bytes([flags, 0]) + len(described).to_bytes(2, "little")
        return self.extension_of(X_SCALAR, head + described + (o.tobytes() if data is None else data))

    cdef bint walk_plain_tensor(self, t) except -1:
        """The short way for a contiguous CPU tensor: DLPack tells in one call what takes six others. False if it is not
        one; then `walk_tensor` finds out why."""
        cdef DLTensor here
        cdef DLTensor *tensor = &here
        cdef int64_t dims[MAX_DIMS]
        cdef int64_t stride = 1
        cdef uint8_t head[4]
        cdef int i, code
        if export_tensor != NULL:
            if export_tensor(<void *> t, tensor):
                PyErr_Clear()
                return False
        else:
            try:
                capsule = to_dlpack(t)
            except Exception:
                return False
            tensor = &(<DLManagedTensor *> PyCapsule_GetPointer(<PyObject *> capsule, "dltensor")).tensor
        code = code_of(t, &tensor.dtype)
        if code < 0 or tensor.device.device_type != 1 or tensor.ndim > MAX_DIMS or tensor.data == NULL:
            return False
        for i in range(tensor.ndim - 1, -1, -1):
            if tensor.shape[i] != 1 and tensor.strides[i] != stride:
                return False
            dims[i] = tensor.shape[i]
            stride *= dims[i]
        if (10 <= code <= 12 and t.is_conj()) or t.is_neg():
            return False
        head[0], head[1], head[2], head[3] = code, 0, tensor.ndim, 0
        self.leaf(X_TENSOR, head, <char *> tensor.data + tensor.byte_offset, stride * itemsizes[code], dims, tensor.ndim,
                  b"", t)
        return True

    cdef int walk_tensor(self, t, int depth) except -1:
        need_torch()
        self.depth = depth
        if self.walk_plain_tensor(t):
            return 0
        code_object = dtype_codes.get(t.dtype)
        if code_object is None:
            if self.allow_pickle:
                return self.pickled(t)
            self.refuse("Tensor", f"its dtype is {t.dtype}; send the parts it is made of")
        cdef int code = code_object
        if t.layout is not strided or t.is_nested:
            if self.allow_pickle:
                return self.pickled(t)
            layout = "nested" if t.is_nested else t.layout
            self.refuse("Tensor", f"it is {layout}, not dense; send the dense tensors it is made of")
        if not t.is_cpu:
            flat = self.codec.devices.flatten(t)
            if flat is not None:
                return self.walk_device_tensor(t, flat, code)
            if t.device.type == "meta":
                self.refuse("Tensor", "it is on the meta device and has no data")
            t = t.detach().cpu()
        cdef object shape = t.shape
        if code == 10 and (t.is_conj() or not t.is_contiguous()):
            t = half_pairs(t.detach())
        if 11 <= code <= 12 and t.is_conj():
            t = t.detach().resolve_conj()
        if t.is_neg():
            t = t.detach().resolve_neg()
        if not t.is_contiguous():
            try:
                t = t.detach().contiguous()
            except NotImplementedError:
                # torch has no copy for its youngest dtypes; an integer of the same size has the same bytes
                t = t.detach().view((torch.uint8, torch.int16)[itemsizes[code] - 1]).contiguous()
        cdef size_t address = t.data_ptr()
        cdef Py_ssize_t ndim = PyTuple_GET_SIZE(shape)
        cdef int64_t dims[MAX_DIMS]
        cdef size_t count = 1
        cdef Py_ssize_t i
        if ndim > MAX_DIMS:
            self.refuse("Tensor", f"it has {ndim} dimensions, more than {MAX_DIMS}")
        for i in range(ndim):
            dims[i] = <object> PyTuple_GET_ITEM(shape, i)
            count *= dims[i]
        count *= itemsizes[code]
        if count and not address:
            t = t.clone()  # a tensor that stands for zeros without storing them
            address = t.data_ptr()
            if not address:
                self.refuse("Tensor", "it has no memory of its own")
        cdef uint8_t head[4]
        head[0] = code
        head[1] = 0
        head[2] = ndim
        head[3] = 0
        return self.leaf(X_TENSOR, head, <void *> address, count, dims, ndim, b"", t)

    cdef int walk_device_tensor(self, t, flat, int code) except -1:
        """Its place in the frame is reserved now; its bytes follow when the frame is written."""
        cdef object shape = t.shape
        cdef Py_ssize_t ndim = PyTuple_GET_SIZE(shape)
        cdef int64_t dims[MAX_DIMS]
        cdef uint8_t head[4]
        cdef size_t size = itemsizes[code]
        cdef Py_ssize_t i
        if ndim > MAX_DIMS:
            self.refuse("Tensor", f"it has {ndim} dimensions, more than {MAX_DIMS}")
        for i in range(ndim):
            dims[i] = <object> PyTuple_GET_ITEM(shape, i)
            size *= dims[i]
        if size:
            if self.waiting is None:
                self.waiting = []
            self.waiting.append((self.count, flat))
            self.deferred = True
        head[0], head[1], head[2], head[3] = code, 0, ndim, 0
        return self.leaf(X_TENSOR, head, NULL, size, dims, ndim, b"", flat)

    cdef int walk_array(self, o, int depth) except -1:
        need_numpy()
        self.depth = depth
        cdef ArrayFields *fields = <ArrayFields *> <PyObject *> o
        dtype = <object> fields.descr
        described = self.codec.described.get(dtype)
        if described is None:
            try:
                described = self.codec.describe_dtype(dtype)
            except Exception as error:
                if self.allow_pickle:
                    return self.pickled(o)
                self.refuse(type(o).__name__, str(error))
            if dtype.names is None and len(self.codec.described) < 1024:
                self.codec.described[dtype] = described
        cdef uint8_t head[4]
        head[0] = 0
        if type(o) is recarray:
            head[0] = F_RECARRAY
        elif dtype.names is not None and dtype.type is not numpy.void:
            head[0] = F_RECORD
        if not fields.flags & C_CONTIGUOUS:
            o = numpy.array(o, order="C", copy=True)
            fields = <ArrayFields *> <PyObject *> o
        cdef int64_t dims[MAX_DIMS]
        cdef size_t count = dtype.itemsize
        cdef int i
        for i in range(fields.nd):
            dims[i] = fields.dimensions[i]
            count *= fields.dimensions[i]
        head[1] = fields.nd
        head[2] = len(described) & 255
        head[3] = len(described) >> 8
        return self.leaf(X_ARRAY, head, fields.data, count, dims, fields.nd, described, o)

    cdef int leaf(
        self, int code, uint8_t *head, const void *source, size_t size, int64_t *dims, int ndim, bytes tail, owner
    ) except -1:
        """head (4 bytes) · segment (8, external only) · offset (8) · shape (8 each) · dtype description."""
        cdef size_t tail_size = PyBytes_GET_SIZE(tail)
        cdef size_t total = 12 + 8 * ndim + tail_size
        cdef object claim = None
        cdef uint64_t segment, offset
        cdef uint8_t *at
        if self.loans is not None and size > LARGE and source != NULL:
            claim = self.claimed(<size_t> source, size)
        if claim is not None:
            head[1 if code == X_TENSOR else 0] |= F_EXTERNAL
            segment, offset = claim
            self.external = True
            self.outside += size
            self.keep.append(owner)
            total += 8
        else:
            offset = self.place(source, size, owner)
        at = self.extension(code, total)
        memcpy(at, head, 4)
        at += 4
        if claim is not None:
            memcpy(at, &segment, 8)
            at += 8
        memcpy(at, &offset, 8)
        memcpy(at + 8, dims, 8 * ndim)
        memcpy(at + 8 + 8 * ndim, PyBytes_AS_STRING(tail), tail_size)
        return 0

    cdef object claimed(self, size_t address, size_t size):
        """Where lent memory lies; None for other memory, and for a loan that this payload holds already: two
        tensors that arrive must not share their bytes."""
        claim = self.loans.claim(address, size)
        if claim is None:
            return None
        for start, end in self.lent:
            if address < end and start < address + size:
                return None
        self.lent.append((address, address + size))
        return claim

    # -- results

    cdef int measure(self) except -1:
        cdef size_t size = self.head.size
        if size > MAX_HEADER_BYTES:
            raise CodecError(
                f"payload: its structure alone takes {size} bytes, more than the limit of {MAX_HEADER_BYTES}: "
                "send long runs of small objects as tensors or arrays"
            )
        self.start = PREFIX + size
        if self.area:
            self.start = (self.start + self.align - 1) & ~(self.align - 1)
        self.frame_size = self.start + self.area
        self.size = self.frame_size + self.outside
        return 0

    cdef size_t begin(self, char *target) noexcept:
        """Write prefix and header; returns how long they are."""
        cdef uint32_t header_size = self.head.size
        cdef uint64_t frame_size = self.frame_size
        memcpy(target, PyBytes_AS_STRING(MAGIC), 4)
        target[3] = <char> (FORMAT | (HOST_BIT if self.host else 0) | (ALIGNED_BIT if self.align == 64 else 0))
        memcpy(target + 4, &header_size, 4)
        memcpy(target + 8, &frame_size, 8)
        memcpy(target + PREFIX, self.head.bytes, header_size)
        return PREFIX + header_size

    cdef int write(self, char *target, size_t stream_from) except -1:
        """Everything up to `frame_size`."""
        cdef ofs_piece few[64]
        cdef ofs_piece *list_ = few
        cdef size_t i
        cdef size_t count = 0
        if self.count > 64:
            list_ = <ofs_piece *> malloc(self.count * sizeof(ofs_piece))
            if list_ == NULL:
                raise MemoryError("no memory for the list of buffers")
        self.begin(target)
        self.fill_gaps(target)
        for i in range(self.count):
            if self.pieces[i].source == NULL:
                continue  # a device is writing there
            list_[count].target = target + self.start + self.pieces[i].offset
            list_[count].source = self.pieces[i].source
            list_[count].size = self.pieces[i].size
            count += 1
        if self.area < 32768:
            ofs_copy_pieces(list_, count, OFS_STREAM_FROM)  # shorter than giving the GIL away and taking it back
        else:
            with nogil:
                ofs_copy_pieces(list_, count, stream_from)
        if list_ != few:
            free(list_)
        return 0

    def deferred_tensors(self):
        """The tensors that are deferred; flat, of uint8, each on its device."""
        return [flat for _, flat in self.waiting or ()]

    def take_deferred(self):
        """Leave what is deferred to the caller: `pack_into` writes all but these bytes from now on.

        Returns:
            A list of ``(offset in the frame, nbytes, tensor)``; the tensors are flat, of uint8, each on its device.
        """
        cdef list waiting = self.waiting or []
        self.taken = self.taken or self.deferred
        self.waiting = None
        self.deferred = False
        return [
            (self.start + self.pieces[<size_t> number].offset, self.pieces[<size_t> number].size, flat)
            for number, flat in waiting
        ]

    cdef int whole(self) except -1:
        """Bring what is deferred; for a frame that shall be complete."""
        if self.taken:
            raise CodecError("payload: its bytes on devices were left to the caller, the rest alone is no frame")
        if self.waiting is None:
            return 0
        for number, flat in self.waiting:
            try:
                host = self.codec.devices.fetch(flat)
            except Exception as error:
                raise CodecError(
                    f"payload: a tensor cannot be brought from {flat.device}: {type(error).__name__}: {error}"
                ) from error
            self.keep.append(host)
            self.pieces[<size_t> number].source = <void *> <size_t> host.data_ptr()
        self.waiting = None
        self.deferred = False
        return 0

    def pack_into(self, size_t address):
        """Write the frame; each payload byte is copied once, with the GIL released for all but short frames.

        Args:
            address: of `frame_size` writable bytes, 64-byte aligned so that the receiver's views are, too.
        """
        if self.waiting is not None:
            self.whole()
        self.write(<char *> address, OFS_STREAM_SHARED_FROM)

    def pack_part(self, size_t address, size_t part, size_t parts):
        """`pack_into` in `parts` parts, numbered from 0, which as many threads may write at once.

        Args:
            address: as for `pack_into`.
            part: which part: an equal share of the payload bytes, the first one with header and gaps.
            parts: how many there are.
        """
        cdef size_t low = self.share(part, parts)
        cdef size_t high = self.share(part + 1, parts)
        cdef char *target = <char *> address
        cdef ofs_piece few[64]
        cdef ofs_piece *list_ = few
        cdef size_t i, first, last
        cdef size_t at = 0
        if part >= parts:
            raise ValueError(f"there is no part {part} of {parts}")
        if self.waiting is not None:
            raise CodecError("payload: what is deferred has to be taken before several threads write the rest")
        if self.count > 64:
            list_ = <ofs_piece *> malloc(self.count * sizeof(ofs_piece))
            if list_ == NULL:
                raise MemoryError("no memory for the list of buffers")
        for i in range(self.count):
            first = max(low, self.pieces[i].offset)
            last = min(high, self.pieces[i].offset + self.pieces[i].size)
            if first < last and self.pieces[i].source != NULL:
                list_[at].target = target + self.start + first
                list_[at].source = <const char *> self.pieces[i].source + (first - self.pieces[i].offset)
                list_[at].size = last - first
                at += 1
        if part == 0:
            self.begin(target)
            self.fill_gaps(target)
        with nogil:
            ofs_copy_pieces(list_, at, OFS_STREAM_SHARED_FROM)
        if list_ != few:
            free(list_)

    cdef size_t share(self, size_t part, size_t parts) noexcept:
        """Where in the data area a part begins: on a page, so that no two threads write to one line."""
        return self.area if part >= parts else <size_t> (self.area // parts * part) & ~<size_t> 4095

    cdef void fill_gaps(self, char *target) noexcept:
        """Zeros: what lay there before must not travel along."""
        cdef size_t at = PREFIX + self.head.size
        cdef size_t i, next_
        for i in range(self.count):
            next_ = self.start + self.pieces[i].offset
            memset(target + at, 0, next_ - at)
            at = next_ + self.pieces[i].size
        memset(target + at, 0, self.frame_size - at)

    def gather(self, size_t direct_from):
        """The frame as a list of parts for a transport that collects them itself, so that large leaves are not copied here.

        Args:
            direct_from: leaves of at least that many bytes are named where they lie; everything else (header, small
                leaves, gaps) is copied together.

        Returns:
            ``(addresses, sizes, memory)``. In this order the parts make the frame, padded with zeros to a multiple of
            64 bytes. `memory` holds what was copied together: keep it, and this plan, until the parts were read.

        Raises:
            CodecError: some buffer is external, so the frame alone is not the payload.
        """
        cdef size_t total = (self.frame_size + 63) & ~(<size_t> 63)
        cdef size_t copied = total
        cdef size_t i
        if self.external:
            raise CodecError("payload: a loan in shared memory is part of it, it cannot be gathered")
        self.whole()
        for i in range(self.count):
            if self.pieces[i].size >= direct_from:
                copied -= self.pieces[i].size
        memory = PyBytes_FromStringAndSize(NULL, copied)
        cdef list addresses = []
        cdef list sizes = []
        cdef char *base = PyBytes_AS_STRING(memory)
        cdef char *run = base
        cdef char *end = base + self.begin(base)
        cdef size_t at = PREFIX + self.head.size
        cdef size_t next_
        for i in range(self.count):
            next_ = self.start + self.pieces[i].offset
            memset(end, 0, next_ - at)
            end += next_ - at
            at = next_ + self.pieces[i].size
            if self.pieces[i].size < direct_from:
                memcpy(end, self.pieces[i].source, self.pieces[i].size)
                end += self.pieces[i].size
                continue
            if end != run:
                addresses.append(<size_t> run)
                sizes.append(<size_t> (end - run))
            addresses.append(<size_t> self.pieces[i].source)
            sizes.append(self.pieces[i].size)
            run = end
        memset(end, 0, total - at)
        end += total - at
        if end != run:
            addresses.append(<size_t> run)
            sizes.append(<size_t> (end - run))
        return addresses, sizes, memory

    cdef bytes below(self, size_t limit):
        """`to_bytes` of a payload of less than `limit` bytes of serialized size, None for any other."""
        return self.to_bytes() if self.size < limit and not self.external else None

    cdef bint direct(self) noexcept:
        """Are all of its bytes in host memory, and none of them in loans?"""
        return not (self.external or self.deferred)

    cpdef bytes to_bytes(self):
        """The frame on its own memory.

        Returns:
            `frame_size` bytes.

        Raises:
            CodecError: some buffer is external, so the frame alone is not the payload.
        """
        if self.external:
            raise CodecError("payload: a loan in shared memory is part of it, it cannot travel as bytes")
        self.whole()
        data = PyBytes_FromStringAndSize(NULL, self.frame_size)
        self.write(PyBytes_AS_STRING(data), OFS_STREAM_FROM)
        return data


cdef inline uint64_t number_at(const uint8_t *data, int at) noexcept:
    """Read without assuming an alignment: extension values stand anywhere in a header."""
    cdef uint64_t value
    memcpy(&value, data + at, 8)
    return value


cdef inline bint plain_key(object key):
    """Does msgpack give it back as it is?"""
    cdef int overflow = 0
    if type(key) is str:
        return PyUnicode_IS_COMPACT_ASCII(key) or plain_text(key)
    if type(key) is not int:
        return False
    PyLong_AsLongLongAndOverflow(key, &overflow)
    return overflow == 0


cdef bint plain_text(str text):
    cdef Py_ssize_t size
    try:
        PyUnicode_AsUTF8AndSize(text, &size)
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- decoding

cdef list known_keys = [None] * KEY_SLOTS


@cython.final
cdef class _Reader:
    cdef Codec codec
    cdef const uint8_t *at
    cdef const uint8_t *end
    cdef const char *frame
    cdef size_t frame_size
    cdef size_t start
    cdef size_t taken
    cdef size_t left  # items that containers may still announce
    cdef bint constant  # nobody can change the frame's bytes while they are read
    cdef object source
    cdef object types
    cdef object placer  # where tensors go; None leaves all in host memory
    cdef list path      # of what is being read; None where the placer does not ask
    cdef int copy
    cdef bint writable
    cdef bint allow_pickle
    cdef bint host
    cdef size_t copy_below

    cdef int broken(self, object why) except -1:
        raise MetadataError(f"this is not a payload that the codec wrote: {why}")

    # -- msgpack

    cdef inline int need(self, size_t size) except -1:
        if <size_t> (self.end - self.at) < size:
            self.broken("its header ends in the middle of a value")
        return 0

    cdef inline size_t big(self, int width) except? 0xFFFFFFFFFFFFFFFF:
        """The next `width` bytes as an unsigned number; msgpack is big-endian."""
        cdef size_t value = 0
        cdef int i
        self.need(width)
        for i in range(width):
            value = value << 8 | self.at[i]
        self.at += width
        return value

    cdef object read(self, int depth):
        self.need(1)
        cdef uint8_t tag = self.at[0]
        cdef uint64_t bits
        cdef double number
        self.at += 1
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return <int> <int8_t> tag
        if tag < 0x90:
            return self.read_map(tag & 15, depth)
        if tag < 0xA0:
            return self.read_list(tag & 15, depth)
        if tag < 0xC0:
            return self.read_str(tag & 31)
        if tag == 0xC0:
            return None
        if tag == 0xC2:
            return False
        if tag == 0xC3:
            return True
        if 0xC4 <= tag <= 0xC6:
            return self.read_bytes(self.big(1 << (tag - 0xC4)))
        if 0xC7 <= tag <= 0xC9:
            return self.read_ext(self.big(1 << (tag - 0xC7)))
        if tag == 0xCB:
            bits = self.big(8)
            memcpy(&number, &bits, 8)
            return PyFloat_FromDouble(number)
        if 0xCC <= tag <= 0xCF:
            return self.big(1 << (tag - 0xCC))
        if tag == 0xD0:
            return <int> <int8_t> self.big(1)
        if tag == 0xD1:
            return <int> <int16_t> self.big(2)
        if tag == 0xD2:
            return <int> <int32_t> self.big(4)
        if tag == 0xD3:
            return PyLong_FromLongLong(<int64_t> self.big(8))
        if 0xD4 <= tag <= 0xD8:
            return self.read_ext(1 << (tag - 0xD4))
        if 0xD9 <= tag <= 0xDB:
            return self.read_str(self.big(1 << (tag - 0xD9)))
        if 0xDC <= tag <= 0xDD:
            return self.read_list(self.big(2 << (tag - 0xDC)), depth)
        if 0xDE <= tag <= 0xDF:
            return self.read_map(self.big(2 << (tag - 0xDE)), depth)
        self.broken(f"byte {tag:#x} starts no value")

    cdef object read_str(self, size_t size):
        self.need(size)
        text = PyUnicode_DecodeUTF8(<const char *> self.at, size, NULL)
        self.at += size
        return text

    cdef object read_bytes(self, size_t size):
        self.need(size)
        data = PyBytes_FromStringAndSize(<const char *> self.at, size)
        self.at += size
        return data

    cdef object read_key(self, int depth):
        """Short keys come back as the same string object each time, which saves making and hashing them."""
        self.need(1)
        cdef uint8_t tag = self.at[0]
        cdef size_t size = tag & 31
        cdef size_t slot, i
        cdef uint64_t[2] ends
        cdef PyObject *known
        if not 0xA0 <= tag <= 0xBF or size == 0:
            return self.read(depth)
        self.at += 1
        self.need(size)
        # Its ends tell most keys apart: to take in each byte would cost as much as the rest of a short value.
        if size >= 8:
            memcpy(&ends[0], self.at, 8)
            memcpy(&ends[1], self.at + size - 8, 8)
        else:
            ends[0] = ends[1] = 0
            for i in range(size):
                ends[0] = ends[0] << 8 | self.at[i]
        slot = <size_t> ((ends[0] ^ ends[1] * 31 ^ size) * <uint64_t> 0x9E3779B97F4A7C15 >> (64 - KEY_BITS))
        known = PyList_GET_ITEM(known_keys, slot)
        if known != <PyObject *> None:
            key = <object> known
            if PyUnicode_GET_LENGTH(key) == <Py_ssize_t> size and not memcmp(
                PyUnicode_1BYTE_DATA(key), self.at, size
            ):
                self.at += size
                return key
        key = PyUnicode_DecodeUTF8(<const char *> self.at, size, NULL)
        self.at += size
        if PyUnicode_IS_COMPACT_ASCII(key):
            known_keys[slot] = key
        return key

    cdef int expect(self, size_t count, int depth) except -1:
        """A container says that it holds so many items. Each takes a byte of the header, and no two share one: what all
        containers say together cannot be more than the header is long, so that lies do not add up to an allocation."""
        if depth >= STEPS or count > self.left or count > <size_t> (self.end - self.at):
            self.broken("a container is nested too deep or longer than the header")
        self.left -= count
        return 0

    cdef object read_map(self, size_t count, int depth):
        cdef dict out = {}
        cdef size_t i
        self.expect(2 * count, depth)
        for i in range(count):
            key = self.read_key(depth + 1)
            if type(key) is not str and type(key) is not int:
                if not self.host:
                    self.broken("a dict has a key of another kind than the codec writes")
                if type(key) is list:
                    key = frozen(key)
            out[key] = self.read(depth + 1) if self.path is None else self.read_below(key, True, depth + 1)
        if <size_t> len(out) != count:
            self.broken("a dict has a key twice")
        return out

    cdef object read_list(self, size_t count, int depth):
        cdef list out
        cdef size_t i
        self.expect(count, depth)
        if count and self.end - self.at >= 3 and self.at[0] == 0xD4 and self.at[1] == X_MARK:
            self.at += 3
            return self.read_marked((self.at - 1)[0], count - 1, depth)
        out = PyList_New(count)
        for i in range(count):
            item = self.read(depth + 1) if self.path is None else self.read_below(i, False, depth + 1)
            Py_INCREF(item)
            PyList_SET_ITEM(out, i, item)
        return out

    cdef object read_below(self, step, bint is_key, int depth):
        """The next value, which stands in its container under `step`; None where the container adds no step."""
        if step is not None:
            self.path.append((step, is_key))
        value = self.read(depth)
        if step is not None:
            self.path.pop()
        return value

    cdef object step_in(self, int mark, size_t i):
        """The step to item `i` of a marked list, as `Plan.path` names it."""
        if mark < M_DATACLASS:
            return i
        if i == 0 or mark == M_DATACLASS or mark == M_STRUCT or mark == M_ENUM:
            return None
        return i - 1 if mark == M_NAMEDTUPLE else STATE

    cdef object read_items(self, size_t count, int mark, int depth):
        cdef tuple out = PyTuple_New(count)
        cdef size_t i
        for i in range(count):
            if self.path is None:
                item = self.read(depth + 1)
            else:
                item = self.read_below(self.step_in(mark, i), mark > M_NAMEDTUPLE, depth + 1)
            Py_INCREF(item)
            PyTuple_SET_ITEM(out, i, item)
        return out

    cdef object read_marked(self, int mark, size_t count, int depth):
        cdef dict pairs
        cdef size_t i
        cdef tuple items
        if mark == M_DICT:
            if count & 1:
                self.broken("a dict has a key without a value")
            pairs = {}
            for i in range(count // 2):
                key = self.read(depth + 1)
                pairs[key] = self.read(depth + 1) if self.path is None else self.read_below(key, True, depth + 1)
            if <size_t> len(pairs) != count // 2:
                self.broken("a dict has a key twice")
            return pairs
        items = self.read_items(count, mark, depth)
        if mark == M_TUPLE:
            return items
        if mark == M_SET:
            return set(items)
        if mark == M_FROZENSET:
            return frozenset(items)
        if mark == M_SLICE and count == 3:
            return slice(items[0], items[1], items[2])
        if mark < M_DATACLASS or mark >= M_COUNT or not count or type(items[0]) is not str:
            self.broken(f"a list has the unknown mark {mark}")
        return self.codec.restore(mark, items[0], items[1:], self.types)

    # -- extension values

    cdef object read_ext(self, size_t size):
        self.need(size + 1)
        cdef int code = <int8_t> self.at[0]
        cdef const uint8_t *data = self.at + 1
        self.at = data + size
        if code == X_TENSOR:
            return self.read_tensor(data, size)
        if code == X_ARRAY:
            return self.read_array(data, size)
        if code == X_NUMBERS and size == 24:
            return self.read_numbers(data)
        if code == X_BLOB and size == 24:
            return self.read_blob(data)
        raw = PyBytes_FromStringAndSize(<const char *> data, size)
        if code == -1 and self.host:
            return decode_header(bytes([0xC7, size & 255, 0xFF]) + raw)  # a date with a time zone
        if code == X_BYTEARRAY:
            return bytearray(raw)
        if code == X_BIGINT and size:
            return int.from_bytes(raw, "little", signed=True)
        if code == X_COMPLEX and size == 16:
            return complex((<double *> PyBytes_AS_STRING(raw))[0], (<double *> PyBytes_AS_STRING(raw))[1])
        if code == X_SURROGATES:
            return raw.decode("utf-8", "surrogatepass")
        if code == X_SCALAR and size >= 4:
            return self.read_scalar(raw)
        if code == X_USER and size:
            return Ext(<int> <int8_t> data[0], raw[1:])
        if code == X_UNSET and not size:
            return UNSET
        self.broken(f"extension value {code} of {size} bytes is not known")

    cdef size_t locate(self, uint64_t offset, size_t size) except? 0xFFFFFFFFFFFFFFFF:
        """Where in the frame a leaf lies. Leaves come in order and never overlap, so no two results share bytes."""
        cdef size_t at = self.start + offset
        if size == 0:
            return 0
        if offset & 7 or offset > self.frame_size or size > self.frame_size or at < self.taken or at + size > self.frame_size:
            self.broken("a buffer lies outside of it, or in another buffer")
        self.taken = at + size
        return at

    cdef object read_numbers(self, const uint8_t *data):
        cdef int code = data[0]
        cdef uint64_t count = number_at(data, 16)
        cdef size_t width = 8 if code == 9 else code
        if code not in (1, 2, 4, 8, 9) or count > self.frame_size:
            self.broken("a list of numbers is longer than the payload")
        cdef const char *raw = self.frame + self.locate(number_at(data, 8), count * width)
        cdef object out = PyTuple_New(count) if data[1] else PyList_New(count)
        cdef bint is_tuple = data[1]
        cdef size_t i
        cdef int8_t one
        cdef int16_t two
        cdef int32_t four
        cdef int64_t eight
        cdef double real
        for i in range(count):
            # Copied out first: a frame given as part of a buffer may begin at any address.
            if code == 9:
                memcpy(&real, raw + 8 * i, 8)
                item = PyFloat_FromDouble(real)
            elif code == 1:
                memcpy(&one, raw + i, 1)
                item = <int> one
            elif code == 2:
                memcpy(&two, raw + 2 * i, 2)
                item = <int> two
            elif code == 4:
                memcpy(&four, raw + 4 * i, 4)
                item = <int> four
            else:
                memcpy(&eight, raw + 8 * i, 8)
                item = PyLong_FromLongLong(eight)
            Py_INCREF(item)
            if is_tuple:
                PyTuple_SET_ITEM(out, i, item)
            else:
                PyList_SET_ITEM(out, i, item)
        return out

    cdef object read_blob(self, const uint8_t *data):
        cdef int kind = data[0]
        cdef size_t size = number_at(data, 16)
        cdef const char *raw = self.frame + self.locate(number_at(data, 8), size)
        cdef char *target = NULL
        if kind == B_STR and self.constant:
            return PyUnicode_DecodeUTF8(raw, size, NULL)
        if kind == B_BYTEARRAY:
            out = PyByteArray_FromStringAndSize(NULL, size)
            target = PyByteArray_AS_STRING(out)
        elif kind == B_BYTES or kind == B_PICKLE or kind == B_STR:
            out = PyBytes_FromStringAndSize(NULL, size)
            target = PyBytes_AS_STRING(out)
        else:
            self.broken(f"blob of the unknown kind {kind}")
        with nogil:
            ofs_copy(target, raw, size)
        if kind == B_PICKLE:
            return self.unpickled(out)
        if kind == B_STR:
            # Python's decoder may look at a byte more than once, and sizes its result by the first look.
            return PyUnicode_DecodeUTF8(target, size, NULL)
        return out

    cdef object unpickled(self, bytes data):
        if not self.allow_pickle:
            raise CodecError("the payload holds a pickled object; set allow_pickle on the receiving side, too")
        import pickle

        try:
            return pickle.loads(data)
        except Exception as error:
            raise CodecError(f"a pickled object cannot be restored: {type(error).__name__}: {error}") from error

    cdef object read_scalar(self, bytes raw):
        need_numpy()
        size = int.from_bytes(raw[2:4], "little")
        dtype = self.dtype_of(raw[4 : 4 + size])
        data = raw[4 + size :]
        if raw[0] & F_TEXT:
            return numpy.str_(data.decode("utf-8", "surrogatepass")) if dtype.kind == "U" else numpy.bytes_(data)
        if len(data) != dtype.itemsize:
            self.broken("a NumPy scalar has the wrong size")
        if raw[0] & F_RECORD:
            dtype = numpy.dtype((numpy.record, dtype))
        value = numpy.ndarray((), dtype, bytearray(data))[()]
        return value

    cdef object dtype_of(self, bytes described):
        dtype = self.codec.parsed.get(described)
        if dtype is None:
            dtype = self.codec.parse_dtype(described)
            if len(self.codec.parsed) < 1024:
                self.codec.parsed[described] = dtype
        return dtype

    cdef int read_shape(self, const uint8_t *data, int ndim, size_t itemsize, size_t *count) except -1:
        """Check a shape; `count` gets the number of elements. Products must not wrap around."""
        cdef int i
        cdef int64_t size
        cdef size_t total = 1
        cdef bint empty = False
        for i in range(ndim):
            memcpy(&size, data + 8 * i, 8)
            if size < 0:
                self.broken("a shape has a negative size")
            if size == 0:
                empty = True
                continue
            if total > (<size_t> 1 << 62) // <size_t> size:
                self.broken("a shape is larger than memory")
            total *= size
        if itemsize and total > (<size_t> 1 << 62) // itemsize:
            self.broken("a shape is larger than memory")
        count[0] = 0 if empty else total
        return 0

    cdef inline bint private(self, size_t size, bint readonly_view_ok) noexcept:
        if self.source is None or self.copy == 1:
            return True
        if self.copy == 0:
            return False
        return size <= self.copy_below or not self.writable and not readonly_view_ok

    cdef object outside(self, uint64_t segment, uint64_t offset, size_t size, bint readonly):
        if self.source is None:
            self.broken("a buffer lies in a shared segment, but this came without one")
        return self.source.external(segment, offset, size, readonly)

    cdef object read_tensor(self, const uint8_t *data, size_t size):
        need_torch()
        if size < 12:
            self.broken("a tensor is cut short")
        cdef int code = data[0]
        cdef bint external = data[1] & F_EXTERNAL
        cdef int ndim = data[2]
        cdef size_t head = 20 if external else 12
        if code >= DTYPES or dtypes[code] is None:
            raise CodecError(f"this torch ({torch.__version__}) has no dtype for a tensor in the payload (number {code})")
        if ndim > MAX_DIMS or size != head + 8 * <size_t> ndim:
            self.broken("a tensor has a shape of the wrong length")
        cdef int64_t dims[MAX_DIMS]
        cdef size_t count
        self.read_shape(data + head, ndim, itemsizes[code], &count)
        memcpy(dims, data + head, 8 * ndim)
        cdef size_t nbytes = count * itemsizes[code]
        cdef uint64_t segment = 0
        cdef uint64_t offset
        cdef size_t at = 0
        target = None if self.placer is None else self.placer.target(self.path)
        cdef bint private = self.private(nbytes, False) and (target is None or self.source is None)
        if external:
            memcpy(&segment, data + 4, 8)
        memcpy(&offset, data + head - 8, 8)
        if not external:
            at = self.locate(offset, nbytes)
        if nbytes == 0:
            out = empty_tensor([dims[i] for i in range(ndim)], dtypes[code])
        elif private and not external:
            out = self.own_tensor(self.frame + at, code, ndim, dims, count)
        elif not private and not external and type(self.source) is quick_source:
            out = tensor_over_source(self.source, at, code, ndim, dims, count)
        else:
            if external:
                view = self.outside(segment, offset, nbytes, private)
            else:
                view = self.source.view(at, nbytes, False)
            if private:
                out = self.copied_tensor(view, code, ndim, dims, count)
            else:
                out = tensor_over(view, code, ndim, dims, count)
        if target is None:
            return out
        try:
            return self.placer.move(out, target)
        except Exception as error:
            # The payload is whole: it must not count as damaged, and can be got again.
            where = self.codec.devices.path_text(self.path)
            raise CodecError(f"{where}: the tensor cannot be moved to {target}: {type(error).__name__}: {error}") from error

    cdef object own_tensor(self, const void *raw, int code, int ndim, int64_t *dims, size_t count):
        cdef size_t nbytes = count * itemsizes[code]
        cdef Owner *owner = new_owner(ndim, nbytes)
        if nbytes < 32768:
            memcpy(owner.managed.tensor.data, raw, nbytes)
        else:
            with nogil:
                ofs_copy(owner.managed.tensor.data, raw, nbytes)
        return tensor_of(owner, code, ndim, dims, count)

    cdef object copied_tensor(self, view, int code, int ndim, int64_t *dims, size_t count):
        cdef Py_buffer buffer
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        try:
            if <size_t> buffer.len < count * itemsizes[code]:
                self.broken("a buffer is shorter than its shape")
            return self.own_tensor(buffer.buf, code, ndim, dims, count)
        finally:
            PyBuffer_Release(&buffer)

    cdef object read_array(self, const uint8_t *data, size_t size):
        need_numpy()
        if size < 12:
            self.broken("an array is cut short")
        cdef int flags = data[0]
        cdef bint external = flags & F_EXTERNAL
        cdef int ndim = data[1]
        cdef size_t described = data[2] | <size_t> data[3] << 8
        cdef size_t head = 20 if external else 12
        cdef int i
        if ndim > MAX_DIMS or size != head + 8 * <size_t> ndim + described:
            self.broken("an array has a shape of the wrong length")
        dtype = self.dtype_of(PyBytes_FromStringAndSize(<const char *> data + head + 8 * ndim, described))
        cdef size_t itemsize = dtype.itemsize
        cdef size_t count
        self.read_shape(data + head, ndim, itemsize, &count)
        cdef size_t nbytes = count * itemsize
        cdef int64_t number
        cdef uint64_t segment = 0
        cdef uint64_t offset
        cdef size_t at = 0
        cdef bint private = self.private(nbytes, True)
        cdef tuple shape = PyTuple_New(ndim)
        for i in range(ndim):
            memcpy(&number, data + head + 8 * i, 8)
            item = PyLong_FromLongLong(number)
            Py_INCREF(item)
            PyTuple_SET_ITEM(shape, i, item)
        if external:
            memcpy(&segment, data + 4, 8)
        memcpy(&offset, data + head - 8, 8)
        if not external:
            at = self.locate(offset, nbytes)
        if flags & F_RECORD:
            dtype = numpy.dtype((numpy.record, dtype))
        if nbytes == 0:
            out = ndarray(shape, dtype, bytearray())
        elif private and not external:
            out = np_empty(shape, dtype)
            self.fill_array(out, self.frame + at, nbytes)
        else:
            if external:
                view = self.outside(segment, offset, nbytes, not self.writable)
            else:
                view = self.source.view(at, nbytes, not self.writable)
            out = ndarray(shape, dtype, view)
            if private:
                out = out.copy()
        return out.view(recarray) if flags & F_RECARRAY else out

    cdef int fill_array(self, out, const void *raw, size_t size) except -1:
        cdef ArrayFields *fields = <ArrayFields *> <PyObject *> out
        if size < 32768:
            memcpy(fields.data, raw, size)
        else:
            with nogil:
                ofs_copy(fields.data, raw, size)
        return 0


cdef object frozen(list key):
    return tuple([frozen(item) if type(item) is list else item for item in key])


@cython.final
cdef class Codec:
    """A codec over the callbacks that know the rare types.

    Args:
        classify: ``(type, host) -> Kind``, asked once per type.
        restore: ``(mark, name, items, types) -> object`` for lists that stand for an object of a class.
        describe_dtype: NumPy dtype to bytes; raises TypeError for what cannot be carried.
        parse_dtype: the reverse; never returns a dtype that holds objects.
        devices: has ``flatten(tensor)``, the bytes of a tensor on a device as a flat uint8 tensor there, or None where
            the tensor shall be brought to the host at once; ``fetch(flat)``, these bytes on the host; and
            ``placing(device)``, what `decode` asks where a tensor goes (see `decode`).
    """

    cdef object classify
    cdef object restore
    cdef object describe_dtype
    cdef object parse_dtype
    cdef object devices
    cdef dict kinds
    cdef dict host_kinds
    cdef dict described
    cdef dict parsed

    def __cinit__(self, *, classify, restore, describe_dtype, parse_dtype, devices):
        self.classify = classify
        self.devices = devices
        self.restore = restore
        self.describe_dtype = describe_dtype
        self.parse_dtype = parse_dtype
        self.kinds, self.host_kinds, self.described, self.parsed = {}, {}, {}, {}

    def forget_types(self):
        """Ask `classify` again: a type was registered."""
        self.kinds.clear()
        self.host_kinds.clear()

    def plan(self, obj, *, wire="exact", bint allow_pickle=False, loans=None):
        """Take a payload apart and measure it; nothing is copied yet.

        Args:
            obj: the payload.
            wire: "exact" carries types as they are, "host" as the host's serializer would show them.
            allow_pickle: objects of unknown classes travel as pickles instead of being refused.
            loans: None, or an object with ``claim(address, nbytes)`` that answers ``(segment, offset)`` for
                memory it lent out and None for other memory. Asked for each tensor and array of more than
                `COPY_BELOW` bytes that lies on the CPU. A claim stands even if this call then fails.

        Returns:
            The plan. It keeps the payload's buffers alive; they must not be changed before `pack_into`.

        Raises:
            CodecError: something cannot be carried; the message starts with the path to it.
        """
        return self.planned(obj, is_host(wire), allow_pickle, loans)

    cdef Plan planned(self, obj, bint host, bint allow_pickle, loans):
        cdef Step steps[STEPS + 1]
        cdef Plan plan = Plan.__new__(Plan)
        plan.host = host
        plan.codec = self
        plan.kinds = self.host_kinds if plan.host else self.kinds
        plan.allow_pickle = allow_pickle
        plan.loans = loans
        plan.keep = []
        plan.lent = None if loans is None else []
        plan.align = 8
        plan.steps = steps
        plan.depth = plan.deepest = 0
        try:
            plan.walk(obj, 0)
            plan.measure()
        except (FastShmError, MemoryError):
            raise
        except RecursionError:
            raise CodecError(f"{plan.path()}: nested too deep for the stack that is left here") from None
        except Exception as error:
            raise CodecError(f"{plan.path()}: {type(error).__name__}: {error}") from error
        finally:
            plan.forget_path()
        plan.loans = None
        return plan

    def decode(
        self, frame, *, source=None, copy=None, bint writable=True, device=None, types=(), bint allow_pickle=False,
        wire="exact", size_t copy_below=LARGE
    ):
        """Read a frame back.

        Args:
            frame: the bytes; anything with the buffer protocol. Not looked at any more after the call.
            source: None makes all leaves private, writable memory. Else an object whose
                ``view(offset, nbytes, readonly)`` and ``external(segment, offset, nbytes, readonly)`` give
                buffers that keep the memory alive; large leaves are views over these.
            copy: None gives views for large leaves, True own memory for all, False views for all.
            writable: False where other takers see the same bytes: NumPy views are read-only then, tensors private
                copies unless `copy` is False.
            device: where tensors shall arrive: None, what ``torch.device`` takes, a dict by path (see
                ``docs/devices.md``), or an object with ``target(path)`` (None: stays), where a path is a list of
                ``(step, is it a key?)``, ``move(tensor, target)``, and ``done()``, called after the last tensor.
            types: "module:Class" names whose modules may be imported for decoding.
            allow_pickle: restore pickled objects.
            wire: the profile that both sides agreed on.
            copy_below: leaves of up to that many bytes get their own storage when `copy` is None.

        Returns:
            The payload. A view lives, and keeps its bytes, until the last tensor or array over it dies.

        Raises:
            MetadataError: the frame is cut short, damaged or foreign.
            CodecError: the payload is whole but holds something that this process cannot restore.
        """
        return self.decoder(types=types, allow_pickle=allow_pickle, wire=wire, copy_below=copy_below).read(
            frame, source, copy, writable, device
        )

    def decoder(self, *, types=(), bint allow_pickle=False, wire="exact", size_t copy_below=LARGE):
        """`decode` with what stays the same from one payload to the next settled once; see there.

        Raises:
            CodecError: `wire` is no profile.
        """
        cdef Decoder made = Decoder.__new__(Decoder)
        made.codec = self
        made.types = types
        made.allow_pickle = allow_pickle
        made.host = is_host(wire)
        made.copy_below = copy_below
        return made


@cython.final
cdef class Decoder:
    """Reads frames with settings that `Codec.decoder` was given."""

    cdef Codec codec
    cdef object types
    cdef bint allow_pickle
    cdef bint host
    cdef size_t copy_below

    def read(self, frame, source=None, copy=None, bint writable=True, device=None):
        """What `Codec.decode` does, with its arguments in this order."""
        return self.payload(frame, source, -1 if copy is None else 1 if copy else 0, writable, device)

    cdef object payload(self, frame, source, int copy, bint writable, device):
        cdef Py_buffer buffer
        cdef _Reader reader = _Reader.__new__(_Reader)
        reader.codec = self.codec
        reader.source = source
        reader.copy = copy
        reader.writable = writable
        reader.types = self.types
        reader.allow_pickle = self.allow_pickle
        reader.copy_below = self.copy_below
        reader.host = self.host
        if device is not None:
            reader.placer = self.codec.devices.placing(device)
            if reader.placer is not None:
                reader.path = []
        PyObject_GetBuffer(frame, &buffer, PyBUF_SIMPLE)
        try:
            data = decode_frame(reader, &buffer)
        finally:
            PyBuffer_Release(&buffer)
        if reader.placer is not None:
            reader.placer.done()
        return data


cdef object plan_of(codec, data, bint host, bint allow_pickle):
    return (<Codec?> codec).planned(data, host, allow_pickle, None)


cdef size_t size_of(plan) except? 0:
    return (<Plan?> plan).size


cdef bint is_direct(plan) except -1:
    return (<Plan?> plan).direct()


cdef bytes bytes_below(plan, size_t limit):
    return (<Plan?> plan).below(limit)


cdef object payload_of(decoder, bytes frame):
    return (<Decoder?> decoder).payload(frame, None, -1, True, None)


cdef bint is_host(object wire) except -1:
    if wire == "exact":
        return False
    if wire == "host":
        return True
    raise CodecError(f"wire is {wire!r}; it can be 'exact' or 'host'")


cdef object decode_frame(_Reader reader, Py_buffer *buffer):
    cdef const char *frame = <const char *> buffer.buf
    cdef size_t size = buffer.len
    cdef char prefix[16]
    cdef uint32_t header_size
    cdef uint64_t frame_size
    cdef bytes header = None
    if size < PREFIX:
        reader.broken("it does not start like one")
    # What is checked is what is used: in shared memory another process could change it in between. Hence one copy of
    # the prefix, and one of the header, before anything in them is looked at.
    memcpy(prefix, frame, PREFIX)
    if memcmp(prefix, PyBytes_AS_STRING(MAGIC), 3):
        reader.broken("it does not start like one")
    if prefix[3] & VERSION_BITS != FORMAT:
        reader.broken(f"format version {prefix[3] & VERSION_BITS}, this build reads {FORMAT}")
    if bool(prefix[3] & HOST_BIT) != reader.host:
        sent, here = ("host", "exact") if prefix[3] & HOST_BIT else ("exact", "host")
        raise MetadataError(f"the payload was sent with wire={sent!r} but is read with wire={here!r}: use one for both")
    memcpy(&header_size, prefix + 4, 4)
    memcpy(&frame_size, prefix + 8, 8)
    # No sum is formed before this: 32-bit header sizes near the end of their range would wrap to small ones.
    if (
        frame_size < PREFIX or frame_size > size or (reader.source is None and frame_size != size)
        or header_size > frame_size - PREFIX
    ):
        reader.broken(f"it says {frame_size} bytes with a header of {header_size}, but {size} came")
    reader.frame = frame
    reader.frame_size = frame_size
    reader.constant = type(<object> buffer.obj) is bytes
    if reader.constant:
        reader.at = <const uint8_t *> frame + PREFIX
    else:
        header = PyBytes_FromStringAndSize(frame + PREFIX, header_size)
        reader.at = <const uint8_t *> PyBytes_AS_STRING(header)
    reader.end = reader.at + header_size
    reader.left = header_size
    cdef size_t align = 64 if prefix[3] & ALIGNED_BIT else 8
    reader.start = (<size_t> PREFIX + header_size + align - 1) & ~(align - 1)
    reader.taken = reader.start
    try:
        out = reader.read(0)
        if reader.at != reader.end:
            reader.broken("its header goes on behind the payload")
    except (FastShmError, MemoryError):
        raise
    except Exception as error:
        raise MetadataError(
            f"this is not a payload that the codec wrote: {type(error).__name__}: {error}"
        ) from error
    return out
