"""The door to shared memory: mapping, space, hand-over.

Each method checks its arguments, makes one or two C calls and answers. The GIL is what serialises the bookkeeping of one
process (which bytes are in use, how many leases a block has): no method below lets go of it between a change in shared
memory and the matching change here. Python objects are made before such a pair, never inside: making one can start the
garbage collector, and with it any code. All classes that hold leases are outside the garbage collector's reach
(`no_gc`), so that their parts are still there when they are taken down.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from posix.unistd cimport close as posix_close, getpid

from ofs cimport *

import errno
import os
import threading
import weakref

from omni_fastshm.errors import ForkedConnector, LiveViews, MetadataError, SegmentError

cdef uint32_t NO_SLOT = <uint32_t>-1
cdef uint64_t LOOK_NS = 100000  # one name is looked at no more often than this: a system call of half a microsecond
cdef long forks = 0  # how many forks lie between this process and the one that imported the module
_mapped = weakref.WeakSet()


def _after_fork_in_child():
    """Disown what was inherited: close the descriptors, whose locks would otherwise outlive the parent in the child."""
    global forks
    forks += 1
    for segment in list(_mapped):
        (<Segment>segment).forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


cdef int _check(int rc, str op, str what) except -1:
    """The one place where a status becomes an exception."""
    if rc < 0:
        raise SegmentError(f"{op} {what}: {os.strerror(-rc)}", errno=-rc, op=op, segment=what)
    return rc


cdef int _export(Py_buffer *buffer, owner, void *address, uint64_t size, bint readonly, int flags) except -1:
    """What a `__getbuffer__` answers."""
    cdef PyObject *first = <PyObject *>buffer.obj  # Cython puts a reference to None there, which the call writes over
    PyBuffer_FillInfo(buffer, owner, address, <Py_ssize_t>size, readonly, flags)
    if first == <PyObject *>None:
        Py_DECREF(None)
    return 0


cdef int _same_process(long born, str what) except -1:
    if born != forks:
        raise ForkedConnector(f"{what} was inherited through fork: build a connector of its own in the child", op="fork")
    return 0


cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object)
    const void *PyUnicode_DATA(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)


cdef enum:
    REMEMBERED = 512

cdef list hashed = [None] * REMEMBERED  # request ids, each in the place that Python's own hash of it says
cdef uint64_t[REMEMBERED][2] hashes


def text_hash(str text not None, uint32_t size):
    """BLAKE2b of a text in UTF-8, half a surrogate pair as if it were a character: `size` bytes, 1 to 64."""
    cdef unsigned char[OFS_HASH_LIMIT] digest
    cdef bytes data = text.encode("utf-8", "surrogatepass")
    if not 0 < size <= OFS_HASH_LIMIT:
        raise ValueError(f"a digest has 1 to {OFS_HASH_LIMIT} bytes, not {size}")
    ofs_hash(<const char *>data, len(data), digest, size)
    return (<const char *>digest)[:size]


cdef const uint64_t *request_hash_of(str request) except NULL:
    """Both halves of a request id's hash. Remembered, because readers poll the same ids over and over."""
    cdef uint64_t *found
    cdef size_t place = <size_t>hash(request) % REMEMBERED
    cdef object known = hashed[place]
    found = hashes[place]
    if known is request or known == request:
        return found
    if PyUnicode_IS_COMPACT_ASCII(request):
        ofs_hash(PyUnicode_DATA(request), PyUnicode_GET_LENGTH(request), found, 16)
    else:
        text = request.encode("utf-8", "surrogatepass")
        ofs_hash(<const char *><bytes>text, len(text), found, 16)
    hashed[place] = request
    return found


def request_hash(str request not None):
    """Both halves of a request id's hash, 64 bits each."""
    cdef const uint64_t *found = request_hash_of(request)
    return found[0], found[1]


def layout():
    """All fields in shared memory as ``(structure, field, offset, size)``, from the C compiler."""
    cdef size_t count
    cdef const ofs_field *fields = ofs_layout_fields(&count)
    return [(fields[i].structure.decode(), fields[i].name.decode(), fields[i].offset, fields[i].size)
            for i in range(count)]


LAYOUT_VERSION = OFS_LAYOUT_VERSION
READER_SLOTS = OFS_READER_SLOTS
BELLS = OFS_BELLS
BLOCK_LIMIT = OFS_BLOCK_LIMIT


CONTROL_SIZE = ofs_control_size()
KEY_LIMIT = OFS_KEY_LIMIT


def control_fixed_size(uint32_t key_slots):
    """Bytes of a control segment that need memory at once, with a key table of so many entries."""
    return ofs_control_fixed_size(key_slots)


@cython.final
cdef class Segment:
    """One shared memory object, mapped. Owns the descriptor it is given and the mapping; both go with the object.

    Args:
        name: for messages.
        fd: descriptor; closed at once unless `keep`.
        populate: fill the page tables now, so that no page fault comes later.
        keep: keep the descriptor, for locks and for giving the memory back.
        room: how long it can get by `extend`; 0 for no longer than it is.
    """
    cdef readonly str name
    cdef readonly uint64_t size  # of the object when it was mapped, or extended here: beyond it nobody may look
    cdef readonly uint64_t room  # how much is mapped
    cdef readonly int fd
    cdef char *base
    cdef long born
    cdef object __weakref__

    def __cinit__(self, str name, int fd, bint populate=True, bint keep=False, uint64_t room=0):
        cdef ofs_stat found
        cdef void *base = NULL
        cdef int rc
        # Who keeps the descriptor of a data segment is who makes it.
        cdef ofs_fill fill = OFS_FILL_LATER if not populate else OFS_FILL_NEW if keep else OFS_FILL_WRITTEN
        self.name = name
        self.born = forks
        self.fd = fd
        _check(ofs_segment_stat(fd, &found), "inspect", name)
        room = max(room, found.size)
        if room:
            with nogil:
                rc = ofs_segment_map(fd, room, fill, keep, &base)
            _check(rc, "map", name)
        self.base = <char *>base
        self.size = found.size
        self.room = room
        if not keep:
            self.forget()
        _mapped.add(self)

    def close_descriptor(self):
        """Give up the descriptor, and with it all locks; the mapping stays."""
        self.forget()

    cdef void forget(self) noexcept:
        if self.fd >= 0:
            posix_close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        self.forget()
        if self.base != NULL:
            ofs_segment_unmap(self.base, self.room)

    def extend(self, uint64_t size):
        """Give it memory up to `size` bytes, at most its room, and fill the page tables: no room is an error now."""
        cdef uint64_t more
        cdef char *at = self.base + self.size
        cdef int rc
        _same_process(self.born, self.name)
        if not self.size <= size <= self.room or self.fd < 0:
            raise ValueError(f"{self.name} has {self.size} bytes and room for {self.room}, not for {size}")
        more = size - self.size
        with nogil:  # its length grows only after all of the memory is there: a reader never sees a hole
            rc = ofs_segment_reserve(self.fd, size - more, more) if more else 0
            if rc == 0:
                ofs_segment_populate(at, more)
        _check(rc, "reserve", self.name)
        self.size = size

    @staticmethod
    def inspect(int fd, str name):
        """``(size, allocated, uid, regular, linked)`` of what stands behind a descriptor."""
        cdef ofs_stat found
        _check(ofs_segment_stat(fd, &found), "inspect", name)
        return found.size, found.allocated, found.uid, found.regular, found.linked

    @staticmethod
    def reserve(int fd, str name, uint64_t size, uint64_t backed):
        """Give a new object its length, and memory for its first `backed` bytes: no room is an error now."""
        cdef int rc
        with nogil:  # in this order no part has a length without memory that a reader of a half-made one could die on
            rc = ofs_segment_reserve(fd, 0, backed)
            if rc == 0:
                rc = ofs_segment_resize(fd, size)
        _check(rc, "reserve", name)

    @staticmethod
    def lock(int fd, str name, int byte, bint exclusive=True):
        """Lock a byte of the file; False when another process has it. Dropped at `fd`'s end, also by a kill."""
        return _check(ofs_lock_try(fd, byte, exclusive), "lock", name) == OFS_OK

    @staticmethod
    def lock_wait(int fd, str name, int byte, bint exclusive=True):
        """Lock a byte, waiting for whoever has it; the kernel frees it when that process dies."""
        cdef int rc = OFS_INTERRUPTED
        while rc == OFS_INTERRUPTED:
            PyErr_CheckSignals()
            with nogil:
                rc = ofs_lock_wait(fd, byte, exclusive)
        _check(rc, "lock", name)

    @staticmethod
    def unlock(int fd, str name, int byte):
        _check(ofs_lock_drop(fd, byte), "unlock", name)

    @staticmethod
    def locked(int fd, str name, int byte):
        """Does another holder have the lock of this byte?"""
        return _check(ofs_lock_held(fd, byte), "test lock of", name) == 1

    @property
    def linked(self):
        """Does its name still exist? Objects without a descriptor of their own count as linked."""
        return _linked(self)

    @property
    def address(self):
        """Where it is mapped."""
        return <size_t>self.base

    def empty(self):
        """Give the memory back to the system whoever still has it mapped; nobody may look at it any more."""
        if self.fd >= 0 and self.born == forks:
            ofs_segment_resize(self.fd, 0)


cdef bint _inside(Segment segment, uint64_t offset, uint64_t size):
    return offset <= segment.size and size <= segment.size - offset


def segment_at(uint64_t address):
    """The mapped `Segment` of this process in which `address` lies, or None."""
    while True:
        try:
            mapped = list(_mapped)
            break
        except RuntimeError:  # another thread mapped one meanwhile
            continue
    for each in mapped:
        if 0 <= <int64_t>(address - <uint64_t>(<Segment>each).base) < <int64_t>(<Segment>each).room:
            return each
    return None


cdef bint _linked(Segment segment):
    cdef ofs_stat found
    return segment.fd < 0 or ofs_segment_stat(segment.fd, &found) != 0 or found.linked


LOCK_OWNER = OFS_LOCK_OWNER
LOCK_MAKER = OFS_LOCK_MAKER
LOCK_USERS = OFS_LOCK_USERS


@cython.final
@cython.no_gc
cdef class RingAllocator:
    """Which bytes of the data segments are in use; see ofs_ring.h. Knows numbers only, touches no memory."""
    cdef ofs_ring state

    def __dealloc__(self):
        ofs_ring_destroy(&self.state)

    def add(self, uint64_t size):
        """Add an arena of `size` bytes (a multiple of 64) and return its number."""
        cdef uint32_t arena
        if size % 64:
            raise ValueError(f"an arena's size must be a multiple of 64, got {size}")
        _check(ofs_ring_add(&self.state, size, &arena), "add", "arena")
        return arena

    def extend(self, uint32_t arena, uint64_t size):
        """The arena has `size` bytes (a multiple of 64) from now on, more than before."""
        if size % 64:
            raise ValueError(f"an arena's size must be a multiple of 64, got {size}")
        _check(ofs_ring_extend(&self.state, arena, size), "extend", f"arena {arena}")

    def remove(self, uint32_t arena):
        """Remove an arena without allocations."""
        _check(ofs_ring_remove(&self.state, arena), "remove", f"arena {arena}")

    def allocate(self, uint64_t size):
        """``(arena, offset)`` of `size` bytes, 64-byte aligned, or None when no gap is long enough."""
        cdef uint32_t arena
        cdef uint64_t offset
        if ofs_ring_take(&self.state, size, &arena, &offset) != OFS_OK:
            return None
        return arena, offset

    def free(self, uint32_t arena, uint64_t offset, uint64_t size):
        """Give back exactly what `allocate` gave."""
        _check(ofs_ring_give(&self.state, arena, offset, size), "free", f"arena {arena} [{offset}, +{size})")

    @property
    def used(self):
        return self.state.used

    @property
    def peak(self):
        """The most that ever was in use."""
        return self.state.peak

    @property
    def capacity(self):
        return self.state.size

    @property
    def longest(self):
        """The largest size that `allocate` would find room for now."""
        return ofs_ring_longest(&self.state)


cdef struct Place:  # where a descriptor's bytes are, and where it stands in the list of live ones
    uint64_t offset
    uint64_t size
    uint32_t arena
    uint32_t at
    bint published  # until then the word says "free", but the bytes are being written


@cython.final
@cython.no_gc
cdef class Extent:
    """Bytes of a data segment lent by `Outbox.lend`; given back when the loan and every payload with it are gone."""
    cdef Outbox outbox
    cdef Segment segment
    cdef readonly uint64_t address
    cdef readonly uint64_t size
    cdef uint64_t offset
    cdef uint32_t arena
    cdef readonly uint32_t number
    cdef uint32_t at      # in the outbox's list
    cdef bint claimed     # some payload has it, or is about to

    def __dealloc__(self):
        if self.outbox is not None and self.outbox.control.born == forks:
            self.outbox.forget_loan(self)
            ofs_ring_give(&self.outbox.ring.state, self.arena, self.offset, self.size)
            ofs_bell_ring_if_heard(ofs_control_space(self.outbox.shared))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        _export(buffer, self, <void *>self.address, self.size, False, flags)

    def claim(self, uint64_t address, uint64_t size):
        """``(segment, offset)`` of a piece of these bytes, or None when it lies elsewhere."""
        if address < self.address or size > self.size or address - self.address > self.size - size:
            return None
        return self.number, self.offset + (address - self.address)

    def unclaim(self):
        """The put that claimed it failed: the next one may."""
        self.claimed = False


@cython.final
@cython.no_gc
cdef class Reservation:
    """Room for one frame at `address`. Published once, or given back when it is dropped."""
    cdef Outbox outbox
    cdef uint32_t block
    cdef readonly uint64_t address
    cdef bint open

    def __dealloc__(self):
        if self.open and self.outbox.control.born == forks:
            self.outbox.give_back(self.block)


@cython.final
@cython.no_gc
cdef class Outbox:
    """The producing side: one control segment and its data segments, used by one process."""
    cdef readonly Segment control
    cdef readonly RingAllocator ring
    cdef ofs_control *shared
    cdef Segment directory     # of the namespace
    cdef list segments         # by arena; None where there is none
    cdef uint32_t *numbers     # by arena: k of "….d<k>"
    cdef uint64_t *idle_since  # by arena: when it was last seen in use
    cdef Place *places         # by descriptor
    cdef uint32_t *live        # descriptors in use, in no order
    cdef uint32_t *spare       # descriptors not in use
    cdef uint32_t live_count, spare_count, ready, hand
    cdef uint64_t sequence
    cdef uint64_t looked_ns    # when a name was last looked at
    cdef uint32_t turn
    cdef readonly bint lost    # somebody else removed one of them: new consumers cannot find what is put here
    cdef dict extents          # descriptor -> the extents of its payload
    cdef void **loans          # all extents there are, borrowed; each takes itself out when it dies
    cdef readonly uint32_t lent  # how many
    cdef uint32_t loan_room

    def __cinit__(self, Segment control not None, uint64_t endpoint, uint32_t key_slots, uint64_t orphan_ttl_ns,
                  uint64_t first_sequence=1, Segment directory=None):
        self.control = control
        self.directory = directory
        self.shared = <ofs_control *>control.base
        self.ring = RingAllocator()
        self.segments = []
        self.extents = {}
        self.sequence = first_sequence
        if self.shared == NULL or control.size != ofs_control_size():
            raise ValueError(f"{control.name} has {control.size} bytes, a control segment has {ofs_control_size()}")
        ofs_control_make(self.shared, endpoint, key_slots, orphan_ttl_ns, getpid())

    def __dealloc__(self):
        free(self.numbers)
        free(self.idle_since)
        free(self.places)
        free(self.live)
        free(self.spare)
        free(self.loans)

    cdef int more_blocks(self) except -1:
        """Back another chunk of descriptors with memory; 0 when the limit is reached or the mount is full."""
        cdef uint32_t count = self.ready + OFS_BLOCK_CHUNK
        if count > OFS_BLOCK_LIMIT:
            return 0
        if ofs_segment_reserve(self.control.fd, ofs_block_offset(self.ready), ofs_block_offset(OFS_BLOCK_CHUNK) - ofs_block_offset(0)) != 0:
            return 0
        self.places = <Place *>_grown(self.places, count * sizeof(Place))
        self.live = <uint32_t *>_grown(self.live, count * sizeof(uint32_t))
        self.spare = <uint32_t *>_grown(self.spare, count * sizeof(uint32_t))
        for i in range(OFS_BLOCK_CHUNK):  # the lowest numbers on top: look-ups by request then touch few lines
            self.spare[self.spare_count] = count - 1 - i
            self.spare_count += 1
        self.ready = count
        ofs_blocks_extend(self.shared, count)
        return 1

    cdef int give_back(self, uint32_t block) except -1:
        cdef Place place = self.places[block]
        cdef uint32_t last = self.live[self.live_count - 1]
        self.live[place.at] = last
        self.places[last].at = place.at
        self.live_count -= 1
        self.spare[self.spare_count] = block
        self.spare_count += 1
        _check(ofs_ring_give(&self.ring.state, place.arena, place.offset, place.size), "free", self.control.name)
        if self.extents:
            self.extents.pop(block, None)
        return 0

    cdef int reclaim(self, uint32_t block) except -1:
        """Take back a block that nobody waits for or looks at; 1 if it was one."""
        cdef ofs_block *shared = ofs_block_at(self.shared, block)
        cdef ofs_key key
        if not self.places[block].published or not ofs_block_free(shared):
            return 0
        if ofs_control_key_slots(self.shared):
            ofs_block_key(shared, &key)
            ofs_keys_remove(self.shared, &key, block)
        self.give_back(block)
        return 1

    cpdef uint32_t sweep(self, uint32_t limit=0xffffffff) except? 0:
        """Take back up to all blocks that are free again, going round from where the last call stopped."""
        cdef uint32_t found = 0, looks = min(limit, self.live_count)
        while looks and self.live_count:
            looks -= 1
            if self.hand >= self.live_count:
                self.hand = 0
            if self.reclaim(self.live[self.hand]):
                found += 1  # another block has moved to this place: stay
            else:
                self.hand += 1
        return found

    cdef bint look_at_names(self):
        """Were names removed by somebody else? Asks the system about one name now and then, in turn."""
        cdef uint64_t now = ofs_now_ns()
        if not self.lost and now - self.looked_ns >= LOOK_NS:
            self.looked_ns = now
            self.turn += 1
            self.lost = not _linked(self.name_in_turn())
        return self.lost

    cdef Segment name_in_turn(self):
        cdef object found = None
        cdef uint32_t turn = self.turn % (<uint32_t>len(self.segments) + 2)
        if turn == 1:
            found = self.directory
        elif turn > 1:
            found = self.segments[turn - 2]
        return self.control if found is None else <Segment>found

    cpdef Reservation reserve(self, uint64_t size):
        """Room for a frame of `size` bytes, or None when there is none now, or never will be (`lost`)."""
        cdef Reservation made = Reservation.__new__(Reservation)
        cdef uint32_t block, arena
        cdef uint64_t offset
        _same_process(self.control.born, self.control.name)
        if self.look_at_names():
            return None
        self.sweep(4)
        if self.spare_count == 0 and not self.more_blocks() and not self.sweep():
            return None
        if (ofs_ring_take(&self.ring.state, size, &arena, &offset) != OFS_OK and
                (not self.sweep() or ofs_ring_take(&self.ring.state, size, &arena, &offset) != OFS_OK)):
            return None
        self.spare_count -= 1
        block = self.spare[self.spare_count]
        self.places[block] = Place(offset, size, arena, self.live_count, False)
        self.live[self.live_count] = block
        self.live_count += 1
        made.outbox = self
        made.block = block
        made.address = <uint64_t>((<Segment>self.segments[arena]).base) + offset
        made.open = True
        return made

    def publish(self, Reservation room, uint64_t edge, uint64_t high, uint64_t low, uint64_t total, uint32_t takers,
                uint64_t stamp=0, tuple extents=()):
        """Make the bytes written at `room` takable; ``(block, sequence)``. `extents` go with the payload."""
        self.reveal(room, ofs_key(edge, high, low), total, takers, stamp, extents)
        return room.block, self.sequence - 1

    cdef int reveal(self, Reservation room, ofs_key key, uint64_t total, uint32_t takers, uint64_t stamp,
                    tuple extents) except -1:
        cdef ofs_content content
        cdef uint32_t block
        cdef Place place
        if room is None or not room.open:
            raise ValueError("this reservation was published already")
        block = room.block
        place = self.places[block]
        if extents:
            self.extents[block] = extents
        content.key = key
        content.offset = place.offset
        content.frame_size = place.size
        content.total_size = total
        content.stamp = stamp
        content.published_ns = ofs_now_ns()
        content.segment = self.numbers[place.arena]
        content.flags = (OFS_FLAG_SHARED if takers > 1 else 0) | (OFS_FLAG_EXTERNAL if extents else 0)
        room.open = False
        self.places[block].published = True
        ofs_block_publish(ofs_block_at(self.shared, block), &content, self.sequence, takers)
        if ofs_control_key_slots(self.shared):
            ofs_keys_insert(self.shared, &content.key, block)
        self.sequence += 1
        return 0

    def lend(self, uint64_t size):
        """An `Extent` of `size` bytes, or None when there is no room now, or never will be (`lost`)."""
        cdef Extent made = Extent.__new__(Extent)
        cdef uint32_t arena
        cdef uint64_t offset
        _same_process(self.control.born, self.control.name)
        if self.look_at_names():
            return None
        if self.lent == self.loan_room:
            self.loans = <void **>_grown(self.loans, (self.loan_room + 64) * sizeof(void *))
            self.loan_room += 64
        if (ofs_ring_take(&self.ring.state, size, &arena, &offset) != OFS_OK and
                (not self.sweep() or ofs_ring_take(&self.ring.state, size, &arena, &offset) != OFS_OK)):
            return None
        made.arena = arena
        made.offset = offset
        made.size = size
        made.number = self.numbers[arena]
        made.segment = self.segments[arena]
        made.address = <uint64_t>made.segment.base + offset
        made.outbox = self
        made.at = self.lent
        self.loans[self.lent] = <void *>made
        self.lent += 1
        return made

    cdef void forget_loan(self, Extent extent) noexcept:
        self.lent -= 1
        self.loans[extent.at] = self.loans[self.lent]
        (<Extent>self.loans[extent.at]).at = extent.at

    def claim(self, uint64_t address, uint64_t size):
        """``(extent, segment, offset)`` when these bytes lie in a loan that no payload has, else None.

        The loan is the caller's from now on: another put copies it, unless this one fails and calls `unclaim`.
        """
        cdef Extent extent
        for i in range(self.lent):
            extent = <Extent>self.loans[i]
            if not extent.claimed and address >= extent.address and address - extent.address < extent.size:
                place = extent.claim(address, size)
                if place is not None:
                    extent.claimed = True
                    return extent, place[0], place[1]
        return None

    def extend_segment(self, Segment segment not None):
        """Use what a data segment has grown by; False when it is no longer in use."""
        for arena in range(len(self.segments)):
            if self.segments[arena] is segment:
                _check(ofs_ring_extend(&self.ring.state, arena, segment.size & ~<uint64_t>63), "extend", segment.name)
                return True
        return False

    def add_segment(self, Segment segment not None, uint32_t number):
        """Use another data segment."""
        cdef uint32_t arena = self.ring.add(segment.size & ~<uint64_t>63)
        self.numbers = <uint32_t *>_grown(self.numbers, (arena + 1) * sizeof(uint32_t)
                                          if arena == len(self.segments) else 0)
        self.idle_since = <uint64_t *>_grown(self.idle_since, (arena + 1) * sizeof(uint64_t)
                                             if arena == len(self.segments) else 0)
        if arena == len(self.segments):
            self.segments.append(segment)
        else:
            self.segments[arena] = segment
        self.numbers[arena] = number
        self.idle_since[arena] = ofs_now_ns()

    def idle_segments(self, uint64_t for_ns=0):
        """``(arena, number, segment)`` of those without a single byte in use, and that for `for_ns` already."""
        cdef list found = []
        cdef uint64_t now = ofs_now_ns()
        self.sweep()
        for arena in range(len(self.segments)):
            if self.segments[arena] is None:
                continue
            if self.ring.state.arenas[arena].used:
                self.idle_since[arena] = now
            elif now - self.idle_since[arena] >= for_ns:
                found.append((arena, self.numbers[arena], self.segments[arena]))
        return found

    def data_segments(self):
        """All data segments in use."""
        return [segment for segment in self.segments if segment is not None]

    def drop_segment(self, uint32_t arena, Segment segment not None):
        """Stop using an idle data segment and give its memory back to the system; False when it is in use again."""
        if self.segments[arena] is not segment or ofs_ring_remove(&self.ring.state, arena) != OFS_OK:
            return False
        self.segments[arena] = None
        segment.empty()
        ofs_segment_retired(self.shared)
        return True

    def cancel(self, uint32_t block, uint64_t sequence):
        """Drop the takes left of one publication; False when there were none."""
        return ofs_block_cancel(self.shared, block, sequence) == OFS_OK

    def cancel_request(self, uint64_t high, uint64_t low):
        """Drop the takes left of all payloads with this request id; returns how many payloads."""
        return ofs_request_cancel(self.shared, high, low)

    def cancel_all(self):
        """Drop everything untaken; returns how many payloads that were."""
        cdef uint32_t count = 0
        cdef ofs_block *block
        for i in range(self.live_count):
            block = ofs_block_at(self.shared, self.live[i])
            if ofs_block_pending(block):
                count += ofs_block_cancel(self.shared, self.live[i], ofs_block_sequence(block)) == OFS_OK
        return count

    def pending(self):
        """How many payloads still wait for a taker."""
        cdef uint32_t count = 0
        for i in range(self.live_count):
            count += ofs_block_pending(ofs_block_at(self.shared, self.live[i]))
        return count

    def reap(self):
        """Free what dead readers held; returns how many readers that were."""
        cdef int count = 0
        _same_process(self.control.born, self.control.name)
        for slot in range(OFS_READER_SLOTS):
            if ofs_readers(self.shared) >> slot & 1:
                count += _clear_reader(self.shared, self.control, slot)
        return count

    def announce(self):
        """Say that a put waits for room, before its last try; returns what to pass to `wait`."""
        return ofs_bell_announce(ofs_control_space(self.shared))

    def wait(self, uint32_t seen, uint64_t slice_ns, uint64_t deadline_ns):
        """Sleep until a block becomes free, a slice is over or the deadline has come."""
        return _sleep(self.control, ofs_control_space(self.shared), seen, 0, slice_ns, deadline_ns)

    def wake(self):
        """Wake waiting puts, to look around."""
        ofs_bell_ring(ofs_control_space(self.shared))

    def mark_closed(self):
        """Tell consumers that nothing more will come."""
        ofs_control_close(self.shared)

    def discard_extents(self):
        """The last thing: end the reference cycle of sent loans. No segment may be emptied after this, for readers
        may still look at these bytes."""
        self.extents.clear()

    @property
    def live_blocks(self):
        """Payloads in the ring: untaken or looked at, as far as the last sweep knows."""
        return self.live_count


cdef uint32_t lent_of(outbox) except? 0xffffffff:
    return (<Outbox?>outbox).lent


cdef bint send(outbox, plan, uint64_t frame_size, uint64_t edge, str request, uint64_t total, uint64_t stamp,
               uint32_t *block, uint64_t *sequence) except -1:
    """`reserve`, the plan's `pack_into` and `publish` in one, for a single taker; False when there is no room now."""
    cdef Outbox self = <Outbox?>outbox
    cdef Reservation room = self.reserve(frame_size)
    cdef const uint64_t *key
    if room is None:
        return False
    plan.pack_into(room.address)
    key = request_hash_of(request)
    self.reveal(room, ofs_key(edge, key[0], key[1]), total, 1, stamp, ())
    block[0] = room.block
    sequence[0] = self.sequence - 1
    return True


cdef void *_grown(void *old, size_t size) except? NULL:
    cdef void *new
    if size == 0:
        return old
    new = realloc(old, size)
    if new == NULL:
        raise MemoryError
    return new


cdef int _clear_reader(ofs_control *shared, Segment control, uint32_t slot) except -1:
    """Clear the bits of a slot whose process is dead; the slot's lock keeps others from claiming it meanwhile."""
    if _check(ofs_lock_try(control.fd, OFS_LOCK_READER0 + slot, True), "lock", control.name) != OFS_OK:
        return 0
    ofs_reader_clear(shared, slot)
    ofs_reader_unmark(shared, slot)
    _check(ofs_lock_drop(control.fd, OFS_LOCK_READER0 + slot), "unlock", control.name)
    return 1


cdef int _sleep(Segment owner, ofs_u32 *bell, uint32_t seen, uint64_t spin_ns, uint64_t slice_ns,
                uint64_t deadline_ns) except -1:
    """Wait on a bell with the GIL released; a signal's Python handler runs, then the caller goes on."""
    cdef int rc
    _same_process(owner.born, owner.name)
    with nogil:
        rc = ofs_bell_wait(bell, seen, spin_ns, slice_ns, deadline_ns)
    if rc == OFS_INTERRUPTED:
        PyErr_CheckSignals()
    _check(rc, "wait on", owner.name)
    return rc == OFS_OK


@cython.final
@cython.no_gc
cdef class LeaseView:
    """Some bytes of a leased block through the buffer protocol; keeps the lease as long as it lives."""
    cdef Lease lease
    cdef Segment segment
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef readonly bint readonly

    def __dealloc__(self):
        if self.lease is not None:
            self.lease.views -= 1

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        _export(buffer, self, <void *>self.address, self.nbytes, self.readonly, flags)

    def __len__(self):
        return self.nbytes


@cython.final
@cython.no_gc
cdef class Lease:
    """A consumer's hold on one block: its bytes stay as they are until the lease and all its views are gone."""
    cdef Inbox inbox
    cdef Segment segment
    cdef ofs_content content
    cdef uint32_t block
    cdef uint32_t slot
    cdef readonly uint32_t views
    cdef bint held

    def __dealloc__(self):
        if self.held:
            self.inbox.drop(self.block, self.slot)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # Read-only, and only for as long as the header is read: leaves are handed out as views.
        self._open()
        _export(buffer, self, self.segment.base + self.content.offset, self.content.frame_size, True, flags)

    cdef int _open(self) except -1:
        if not self.held:
            raise ValueError("this lease was given back")
        return 0

    cdef LeaseView _view(self, Segment segment, uint64_t offset, uint64_t nbytes, bint readonly):
        cdef LeaseView view = LeaseView.__new__(LeaseView)
        self._open()
        view.segment = segment
        view.address = <uint64_t>segment.base + offset
        view.nbytes = nbytes
        view.readonly = readonly
        view.lease = self
        self.views += 1
        return view

    def view(self, uint64_t offset, uint64_t nbytes, bint readonly=False):
        """`nbytes` of the frame from `offset` on, as a buffer that keeps this lease."""
        self.check_part(offset, nbytes)
        return self._view(self.segment, self.content.offset + offset, nbytes, readonly)

    cdef int check_part(self, uint64_t offset, uint64_t nbytes) except -1:
        self._open()
        if offset > self.content.frame_size or nbytes > self.content.frame_size - offset:
            raise MetadataError(f"a leaf lies outside its frame: [{offset}, +{nbytes}) of {self.content.frame_size}",
                                op="get", segment=self.inbox.control.name)
        return 0

    def external(self, uint32_t number, uint64_t offset, uint64_t nbytes, bint readonly=False):
        """The same for a piece that stayed where it was lent, in data segment `number`."""
        cdef Segment segment
        if not self.content.flags & OFS_FLAG_EXTERNAL:
            raise MetadataError("the frame points outside itself, but has no pieces there", op="get",
                                segment=self.inbox.control.name)
        segment = self.inbox.data_segment(number, offset, nbytes)
        if not _inside(segment, offset, nbytes):
            raise MetadataError(f"a leaf lies outside its segment: [{offset}, +{nbytes}) of {segment.size}", op="get",
                                segment=segment.name)
        return self._view(segment, offset, nbytes, readonly)

    def take(self):
        """Use up one take; False when the payload was taken or cancelled meanwhile."""
        self._open()
        return ofs_block_take(self.inbox.shared, self.block) == OFS_OK

    def release(self):
        """Give the hold back now; raises LiveViews while tensors or arrays look at the block."""
        if self.views:
            raise LiveViews(f"{self.views} views of this lease are alive: drop them first", op="release",
                            segment=self.inbox.control.name)
        if self.held:
            self.held = False
            self.inbox.drop(self.block, self.slot)

    @property
    def key(self):
        """``(edge, request_high, request_low)`` as hashed by the producer."""
        return self.content.key.edge, self.content.key.request_high, self.content.key.request_low

    def belongs(self, uint64_t edge, uint64_t high, uint64_t low):
        """Is this its key?"""
        return (self.content.key.edge == edge and self.content.key.request_high == high
                and self.content.key.request_low == low)

    @property
    def size(self):
        """Serialized size of the payload, pieces outside the frame included."""
        return self.content.total_size

    @property
    def shared(self):
        """May others look at the same bytes?"""
        return bool(self.content.flags & OFS_FLAG_SHARED)

    @property
    def brief(self):
        """Taken under the slot that all late-comers share: copy, then release."""
        return self.slot == OFS_SHARED_SLOT


@cython.final
@cython.no_gc
cdef class Inbox:
    """The consuming side: one producer's control segment as this process sees it. One object per producer and process.

    Args:
        control: the mapped control segment, with its descriptor.
        open_segment: gives the mapped data segment for its number; a plain function, so that no cycle arises.
    """
    cdef readonly Segment control
    cdef ofs_control *shared
    cdef uint32_t slot
    cdef uint32_t *holds       # by descriptor: leases of this process
    cdef uint64_t *since       # by descriptor: when the first of them was taken
    cdef readonly uint32_t leases
    cdef uint32_t briefs       # of them, under the shared slot
    cdef uint32_t retired
    cdef readonly object late  # lock for `hold` until release, where `settled` is false
    cdef dict segments
    cdef object open_segment
    cdef object __weakref__

    def __cinit__(self, Segment control not None, open_segment):
        self.control = control
        self.slot = NO_SLOT  # before anything can fail: the end of this object must not unmark a slot it never had
        self.shared = <ofs_control *>control.base
        if self.shared == NULL or not ofs_control_valid(self.shared, control.size):
            raise MetadataError(f"{control.name} is not a control segment of layout {OFS_LAYOUT_VERSION}",
                                op="open", segment=control.name)
        self.late = threading.RLock()
        self.segments = {}
        self.open_segment = open_segment
        self.holds = <uint32_t *>calloc(OFS_BLOCK_LIMIT, sizeof(uint32_t))
        self.since = <uint64_t *>calloc(OFS_BLOCK_LIMIT, sizeof(uint64_t))  # takes memory only where it is written
        if self.holds == NULL or self.since == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.shared != NULL and self.control.born == forks and self.slot != NO_SLOT and self.control.fd >= 0:
            ofs_reader_unmark(self.shared, self.slot)  # no lease is left, so no bit; the lock goes with the descriptor
        free(self.holds)
        free(self.since)

    cdef uint32_t claim_slot(self) except? 0xffffffff:
        """A slot of this process, for good, or the shared one for a moment when all are taken."""
        cdef int rc = OFS_BUSY
        cdef uint32_t slot
        if self.briefs:
            return OFS_SHARED_SLOT  # inside another get of this process: the slot is ours already, and so are its bits
        for slot in range(OFS_SHARED_SLOT):
            rc = _check(ofs_lock_try(self.control.fd, OFS_LOCK_READER0 + slot, True), "lock", self.control.name)
            if rc == OFS_OK:
                self.slot = slot
                break
        else:
            slot = OFS_SHARED_SLOT
            Segment.lock_wait(self.control.fd, self.control.name, OFS_LOCK_READER0 + slot)
            if self.slot != NO_SLOT:  # a signal handler's get found a free one while this one waited
                _check(ofs_lock_drop(self.control.fd, OFS_LOCK_READER0 + slot), "unlock", self.control.name)
                return self.slot
        # Marked before the first bit and cleared of what a dead predecessor left: nobody else clears it from now on.
        ofs_reader_mark(self.shared, slot, getpid())
        ofs_reader_clear(self.shared, slot)
        return slot

    cdef void drop(self, uint32_t block, uint32_t slot) noexcept:
        if self.control.born != forks:
            return  # the bit belongs to the parent
        self.leases -= 1
        self.holds[block] -= 1
        if self.holds[block] == 0:
            ofs_block_release(self.shared, block, slot)
        if slot == OFS_SHARED_SLOT:
            self.briefs -= 1
            self.leave_shared_slot()

    cdef void leave_shared_slot(self) noexcept:
        if self.briefs == 0:
            ofs_reader_unmark(self.shared, OFS_SHARED_SLOT)
            ofs_lock_drop(self.control.fd, OFS_LOCK_READER0 + OFS_SHARED_SLOT)

    @property
    def settled(self):
        """Has this process a slot of its own? Otherwise `hold` under the lock `late`, and release before leaving it."""
        return self.slot != NO_SLOT

    cpdef Lease hold(self, uint32_t block, uint64_t sequence):
        """A `Lease` on that publication, or None when it has no take left."""
        cdef Lease lease = Lease.__new__(Lease)
        cdef uint32_t slot
        _same_process(self.control.born, self.control.name)
        if block >= ofs_blocks_ready(self.shared):
            raise MetadataError(f"block {block} does not exist in {self.control.name}", op="get",
                                segment=self.control.name)
        slot = self.slot if self.slot != NO_SLOT else self.claim_slot()
        lease.inbox = self
        lease.block = block
        lease.slot = slot
        if ofs_block_hold(self.shared, block, sequence, slot, &lease.content) != OFS_OK:
            if slot == OFS_SHARED_SLOT:
                self.leave_shared_slot()
            return None
        if self.holds[block] == 0:
            self.since[block] = ofs_about_now_ns()
        self.holds[block] += 1
        self.leases += 1
        self.briefs += slot == OFS_SHARED_SLOT
        lease.held = True
        lease.segment = self.data_segment(lease.content.segment, lease.content.offset, lease.content.frame_size)
        if not _inside(lease.segment, lease.content.offset, lease.content.frame_size):
            raise MetadataError(f"block {block} points outside {lease.segment.name}", op="get",
                                segment=lease.segment.name)
        return lease

    cdef object receive(self, uint32_t block, uint64_t sequence, uint64_t edge, str request, int64_t size, read):
        """Hold that publication, rebuild its payload and use up a take, for whoever has a slot of his own.

        Args:
            block, sequence: which publication.
            edge, request, size: what it must belong to, and its serialized size; negative where that is not known.
            read: `Decoder.read`.

        Returns:
            ``(payload, size)``; None when no take is left; NotImplemented, with nothing used up, for all that is
            unusual.
        """
        cdef Lease lease
        cdef const uint64_t *key
        if self.slot == NO_SLOT:
            return NotImplemented
        try:
            lease = self.hold(block, sequence)
            if lease is None:
                return None
            key = request_hash_of(request)
            if ((size >= 0 and lease.content.total_size != <uint64_t>size) or lease.content.key.edge != edge
                    or lease.content.key.request_high != key[0] or lease.content.key.request_low != key[1]):
                return NotImplemented
            try:
                payload = read(lease, lease, None, not lease.content.flags & OFS_FLAG_SHARED)
            except MetadataError:
                lease.take()  # bytes that nobody can read must not wait for a taker for ever
                raise
            return (payload, lease.content.total_size) if ofs_block_take(self.shared, block) == OFS_OK else None
        except SegmentError as error:
            if error.errno != errno.ENOENT:
                raise
            return None  # a segment of it went between the look and the hold

    def held(self):
        """``(block, sequence, seconds)`` of each block that leases of this process keep, and for how long they have."""
        cdef uint64_t now = ofs_about_now_ns()
        cdef uint32_t left = self.leases
        cdef list found = []
        for i in range(ofs_blocks_ready(self.shared)):
            if left == 0:
                break
            if self.holds[i]:
                left -= min(left, self.holds[i])
                found.append((i, ofs_block_sequence(ofs_block_at(self.shared, i)), (now - self.since[i]) / 1e9))
        return found

    cdef Segment data_segment(self, uint32_t number, uint64_t offset, uint64_t size):
        """The data segment with these bytes, or without them when it has none there."""
        cdef Segment segment
        cdef uint32_t retired = ofs_segments_retired(self.shared)
        if retired != self.retired:
            self.segments.clear()  # leases keep theirs; an unused mapping of a segment given up would be a leak
            self.retired = retired
        segment = self.segments.get(number)
        if segment is None or not _inside(segment, offset, size):  # it may have grown since
            segment = self.segments[number] = self.open_segment(number)
        return segment

    def forget_segments(self):
        """Unmap the data segments that no lease uses."""
        self.segments.clear()

    def cancel(self, uint32_t block, uint64_t sequence):
        """Drop the takes left of one publication; False when there were none."""
        return block < ofs_blocks_ready(self.shared) and ofs_block_cancel(self.shared, block, sequence) == OFS_OK

    def cancel_request(self, uint64_t high, uint64_t low):
        """Drop the takes left of all payloads with this request id; returns how many payloads."""
        return ofs_request_cancel(self.shared, high, low)

    @property
    def endpoint(self):
        return ofs_control_endpoint(self.shared)

    @property
    def closed(self):
        """Will nothing more come: did the producer close, or an heir tidy up after it?"""
        return ofs_control_closed(self.shared)

    def mark_closed(self):
        """As the owner's heir: tell consumers that nothing more will come, so that they let go of it."""
        ofs_control_close(self.shared)

    @property
    def owned(self):
        """Does a living process own this segment?"""
        return _check(ofs_lock_held(self.control.fd, OFS_LOCK_OWNER), "test lock of", self.control.name) == 1

    def orphan_age(self):
        """``(seconds since the producer was first found dead, seconds its payloads are kept after that)``."""
        cdef uint64_t died = ofs_control_died(self.shared)
        return (ofs_now_ns() - died) / 1e9, ofs_control_orphan_ttl(self.shared) / 1e9

    def blocks(self):
        """``(block, sequence, pending, holders, segment, external, size)`` of all blocks in use, for janitor and tools."""
        cdef list found = []
        cdef ofs_content content
        cdef ofs_block *block
        for i in range(ofs_blocks_ready(self.shared)):
            block = ofs_block_at(self.shared, i)
            if not ofs_block_free(block):
                ofs_block_read(block, &content)
                found.append((i, ofs_block_sequence(block), ofs_block_takes(block), ofs_block_holders(block),
                              content.segment, bool(content.flags & OFS_FLAG_EXTERNAL), content.total_size))
        return found

    def reap(self):
        """As the owner's heir: free what dead readers held."""
        cdef int count = 0
        for slot in range(OFS_READER_SLOTS):
            if ofs_readers(self.shared) >> slot & 1 and slot != self.slot:
                count += _clear_reader(self.shared, self.control, slot)
        return count


cdef void *hold_part(lease, size_t offset, size_t nbytes) except NULL:
    cdef Lease self = <Lease?>lease
    self.check_part(offset, nbytes)
    self.views += 1
    Py_INCREF(self)
    return self.segment.base + self.content.offset + offset


cdef void drop_part(PyObject *lease) noexcept:
    cdef Lease self = <Lease>lease
    self.views -= 1
    Py_DECREF(self)


cdef object receive(inbox, uint32_t block, uint64_t sequence, uint64_t edge, str request, int64_t size, read):
    return (<Inbox?>inbox).receive(block, sequence, edge, request, size, read)


def cancel_older(tuple inboxes, uint64_t edge, uint64_t high, uint64_t low, uint64_t stamp):
    """Drop the takes left of payloads under a key that were put before `stamp`, at all of these producers.

    Returns:
        How many payloads that were.
    """
    cdef ofs_key key = ofs_key(edge, high, low)
    cdef Inbox inbox
    cdef uint32_t count = 0
    for inbox in inboxes:
        count += ofs_keys_cancel_older(inbox.shared, &key, stamp)
    return count


def supersede(tuple inboxes not None, uint64_t edge, str request not None, uint64_t stamp):
    """`cancel_older` for a payload that was just put with that stamp; True where one put later is there already."""
    cdef const uint64_t *hashed = request_hash_of(request)
    cdef ofs_key key = ofs_key(edge, hashed[0], hashed[1])
    cdef ofs_found best
    cdef Inbox inbox
    cdef bint older = False
    for inbox in inboxes:
        ofs_keys_cancel_older(inbox.shared, &key, stamp)
    return _newest(inboxes, key, &best, &older) is not None and best.stamp > stamp


def find_newest(tuple inboxes, uint64_t edge, uint64_t high, uint64_t low):
    """The newest untaken payload under a key among several producers.

    Returns:
        ``(inbox, block, sequence, stamp, older)`` or None; `older` tells whether there are others, which it replaces.
    """
    cdef ofs_found best
    cdef bint older = False
    cdef Inbox holder = _newest(inboxes, ofs_key(edge, high, low), &best, &older)
    return None if holder is None else (holder, best.index, best.sequence, best.stamp, older)


cdef Inbox _newest(tuple inboxes, ofs_key key, ofs_found *best, bint *older):
    cdef ofs_found found
    cdef Inbox inbox, holder = None
    best.stamp = 0
    for inbox in inboxes:
        if ofs_keys_find(inbox.shared, &key, &found) != OFS_OK:
            continue
        older[0] = older[0] or found.older or holder is not None
        if holder is None or found.stamp > best.stamp:
            best[0] = found
            holder = inbox
    return holder


def receive_newest(tuple inboxes not None, uint64_t edge, str request not None, read not None):
    """`find_newest` and `Inbox.receive` in one; NotImplemented also where there are older ones to be cancelled."""
    cdef ofs_found best
    cdef bint older = False
    cdef const uint64_t *key = request_hash_of(request)
    cdef Inbox holder = _newest(inboxes, ofs_key(edge, key[0], key[1]), &best, &older)
    if holder is None:
        return None
    return NotImplemented if older else holder.receive(best.index, best.sequence, edge, request, -1, read)


@cython.final
cdef class Directory:
    """A namespace's directory: its producers, the order of its payloads, its arrival bells.

    Args:
        segment: the mapped directory.
        make: fill a fresh segment; otherwise it must be a valid one.
    """
    cdef readonly Segment segment
    cdef ofs_directory *shared
    cdef uint64_t looked_ns
    cdef bint gone

    def __cinit__(self, Segment segment not None, bint make=False):
        self.segment = segment
        self.shared = <ofs_directory *>segment.base
        if make:
            ofs_directory_make(self.shared)

    @staticmethod
    def valid(Segment segment not None):
        """Is this a finished directory of our layout?"""
        return segment.base != NULL and ofs_directory_valid(<ofs_directory *>segment.base, segment.size)

    @staticmethod
    def made(Segment segment not None):
        """Was it ever finished, by whatever version?"""
        return segment.base != NULL and ofs_directory_made(<ofs_directory *>segment.base, segment.size)

    def enter(self, uint64_t endpoint):
        """Add a producer; False when the list is full."""
        return ofs_directory_enter(self.shared, endpoint) == OFS_OK

    def leave(self, uint64_t endpoint):
        ofs_directory_leave(self.shared, endpoint)

    def endpoints(self):
        """Ids of all producers."""
        cdef uint64_t[OFS_ENDPOINT_LIMIT] ids
        cdef uint32_t count = ofs_directory_list(self.shared, ids)
        return [ids[i] for i in range(count)]

    @property
    def epoch(self):
        """Changes whenever a producer came or went."""
        return ofs_directory_epoch(self.shared)

    def lost(self):
        """Did somebody else remove its name? Asks the system at most once in a while."""
        cdef uint64_t now = ofs_now_ns()
        if not self.gone and now - self.looked_ns >= LOOK_NS:
            self.looked_ns = now
            self.gone = not _linked(self.segment)
        return self.gone

    def stamp(self):
        """The next place in the order of all payloads."""
        return ofs_directory_stamp(self.shared)

    def listen(self, uint32_t stage):
        """What the bell of a receiving stage (by hash) shows now, for `wait`. Look for payloads after this."""
        return ofs_bell_read(ofs_directory_bell(self.shared, stage))

    def ring(self, uint32_t stage):
        """Something arrived for that stage."""
        ofs_bell_ring(ofs_directory_bell(self.shared, stage))

    def wait(self, uint32_t stage, uint32_t seen, uint64_t spin_ns, uint64_t slice_ns, uint64_t deadline_ns):
        """Sleep until the bell shows something else; False when the slice or the time is over."""
        return _sleep(self.segment, ofs_directory_bell(self.shared, stage), seen, spin_ns, slice_ns, deadline_ns)


cdef uint64_t stamp_of(directory) except? 0:
    return ofs_directory_stamp((<Directory?>directory).shared)


cdef int ring(directory, uint32_t stage) except -1:
    ofs_bell_ring(ofs_directory_bell((<Directory?>directory).shared, stage))
    return 0
