"""One-line weakenings of the core. `KILLED`: each must make one of the named harnesses fail. `SURVIVORS`: none can
notice them here, with the reason.

A weakened ordering uses helpers that the real header does not have; test_mutants.py adds them to the copy it builds.
"""

from __future__ import annotations

from dataclasses import dataclass

TSAN = ("orderings:tsan",)
MODEL = ("model:model",)


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `file`; some harness of `killers` ("name:variant") must fail with `new` instead."""

    file: str
    old: str
    new: str
    killers: tuple[str, ...] = ()
    label: str = ""
    reason: str = ""


def plain(harness: str) -> tuple[str, ...]:
    return (f"{harness}:plain",)


FIELDS_64 = ("sequence", "edge", "request_high", "request_low", "offset", "frame_size", "total_size", "stamp")
FIELDS_32 = ("segment", "flags")


def _content() -> list[Mutant]:
    """Each field of a block, weakened on its own on either side."""
    made = []
    for field in (*FIELDS_64, "published_ns", *FIELDS_32):
        bits = 32 if field in FIELDS_32 else 64
        old = f"ofs_store{bits}_release(&block->{field}, "
        made.append(Mutant("ofs_block.c", old, old.replace("release", "relaxed"), TSAN, "content"))
        if field == "sequence":
            continue
        target = f"content->key.{field}" if field in ("edge", "request_high", "request_low") else f"content->{field}"
        old = f"{target} = ofs_load{bits}_acquire("
        made.append(Mutant("ofs_block.c", old, old.replace("acquire", "relaxed"), TSAN, "content"))
    for field in ("edge", "request_high", "request_low"):
        old = f"key->{field} = ofs_load64_acquire("
        made.append(Mutant("ofs_keys.c", old, old.replace("acquire", "relaxed"), TSAN, "content"))
    return made


def _weaker(file: str, old: str, killers: tuple[str, ...], label: str = "", to: str = "relaxed") -> Mutant:
    """`old` with the ordering in it replaced; the ordering is the part between `<` and `>`."""
    before, _, rest = old.partition("<")
    strong, _, after = rest.partition(">")
    return Mutant(file, before + strong + after, before + to + after, killers, label)


_SEQUENCE = "    ofs_store64_release(&block->sequence, sequence);\n"
_PUBLISH_TAIL = "    ofs_store32_release(&block->flags, content->flags);\n"
_FIELDS_BETWEEN = """    ofs_store64_release(&block->edge, content->key.edge);
    ofs_store64_release(&block->request_high, content->key.request_high);
    ofs_store64_release(&block->request_low, content->key.request_low);
    ofs_store64_release(&block->offset, content->offset);
    ofs_store64_release(&block->frame_size, content->frame_size);
    ofs_store64_release(&block->total_size, content->total_size);
    ofs_store64_release(&block->stamp, content->stamp);
    ofs_store64_release(&block->published_ns, content->published_ns);
    ofs_store32_release(&block->segment, content->segment);
"""

ORDERINGS: list[Mutant] = [
    *_content(),
    # ofs_block.c
    _weaker("ofs_block.c", "ofs_store64_<release>(&control->magic", TSAN, "made"),
    _weaker("ofs_block.c", "ofs_load64_<acquire>(&control->magic", TSAN, "made"),
    _weaker("ofs_block.c", "ofs_store32_<release>(&control->blocks_ready", TSAN, "ready"),
    _weaker("ofs_block.c", "ofs_load32_<acquire>(&control->blocks_ready", TSAN, "ready"),
    _weaker("ofs_block.c", "ofs_store64_<release>(&block->word, generation", TSAN, "published"),
    _weaker("ofs_block.c", "(ofs_load64_<acquire>(&block->word) & PENDING_MASK) != 0", TSAN, "published"),
    _weaker("ofs_block.c", "((ofs_load64_<acquire>(&block->word) & PENDING_MASK) >> 32)", TSAN, "published"),
    _weaker("ofs_block.c", "return ofs_load64_<acquire>(&block->sequence);", TSAN, "content"),
    Mutant(
        "ofs_block.c",
        _SEQUENCE + _FIELDS_BETWEEN + _PUBLISH_TAIL,
        _FIELDS_BETWEEN + _PUBLISH_TAIL + _SEQUENCE,
        MODEL,
        "content",
    ),
    _weaker("ofs_block.c", "ofs_and64_<seq>(&block->word, ~bits)", TSAN, "released"),
    _weaker("ofs_block.c", "(ofs_load64_<seq>(&block->word) & IN_USE)", TSAN, "released"),
    _weaker("ofs_block.c", "ofs_and64_<seq>(&block->word, ~bits)", MODEL, "space", to="acqrel"),
    _weaker("ofs_block.c", "(ofs_load64_<seq>(&block->word) & IN_USE)", MODEL, "space", to="acquire"),
    _weaker("ofs_block.c", "ofs_cas64_<seq>(&block->word, &word, word & ~PENDING_MASK)", MODEL, "space", to="acqrel"),
    _weaker("ofs_block.c", "ofs_cas64_<seq>(&block->word, &word, word & ~PENDING_MASK)", TSAN, "released"),
    _weaker("ofs_block.c", "ofs_or32_<seq>(&control->readers", TSAN),
    _weaker("ofs_block.c", "ofs_and32_<acqrel>(&control->readers", TSAN),
    _weaker("ofs_block.c", "ofs_load32_<acquire>(&control->readers)", TSAN),
    _weaker("ofs_block.c", "ofs_add32_<release>(&control->retired", TSAN),
    _weaker("ofs_block.c", "ofs_load32_<acquire>(&control->retired", TSAN),
    _weaker("ofs_block.c", "ofs_store32_<release>(&control->closed", TSAN),
    _weaker("ofs_block.c", "ofs_load32_<acquire>(&control->closed", TSAN),
    # ofs_wait.c
    _weaker("ofs_wait.c", "ofs_cas32_<acqrel>(bell, &seen", TSAN, "arrival"),
    _weaker("ofs_wait.c", "ofs_cas32_<acqrel>(bell, &seen", MODEL, "arrival", to="acquire"),
    _weaker("ofs_wait.c", "return ofs_load32_<acquire>(bell); /* arrival */", TSAN, "arrival"),
    _weaker("ofs_wait.c", "return ofs_load32_<acquire>(bell); /* arrival */", MODEL, "arrival"),
    _weaker("ofs_wait.c", "if ((ofs_load32_<acquire>(bell) | ASLEEP)", TSAN, "arrival"),
    _weaker("ofs_wait.c", "if (ofs_load32_<seq>(bell) & ASLEEP)", MODEL, "space", to="acquire"),
    _weaker("ofs_wait.c", "ofs_or32_<seq>(bell, ASLEEP)", MODEL, "space", to="acqrel"),
    # ofs_keys.c
    _weaker("ofs_keys.c", "ofs_store64_<release>(place, entry_of", TSAN, "published"),
    Mutant(
        "ofs_keys.c",
        "uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);\n        struct ofs_found one;\n"
        "        if (seen == EMPTY)\n            break;\n        if (seen == DELETED",
        "uint64_t seen = ofs_load64_relaxed(&table[(hash + i) & mask]);\n        struct ofs_found one;\n"
        "        if (seen == EMPTY)\n            break;\n        if (seen == DELETED",
        TSAN,
        "published",
    ),
    Mutant(
        "ofs_keys.c",
        "uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);\n        struct ofs_found one;\n"
        "        if (seen == EMPTY)\n            break;\n        if (seen != DELETED",
        "uint64_t seen = ofs_load64_relaxed(&table[(hash + i) & mask]);\n        struct ofs_found one;\n"
        "        if (seen == EMPTY)\n            break;\n        if (seen != DELETED",
        TSAN,
        "published",
    ),
    _weaker("ofs_keys.c", "found->stamp = ofs_load64_<acquire>(&block->stamp)", MODEL, "content"),
    # ofs_directory.c
    _weaker("ofs_directory.c", "ofs_store64_<release>(&directory->magic", TSAN, "made"),
    _weaker("ofs_directory.c", "sizeof directory->magic && ofs_load64_<acquire>(&directory->magic)", TSAN, "made"),
    _weaker("ofs_directory.c", "size == sizeof *directory && ofs_load64_<acquire>(&directory->magic)", TSAN, "made"),
    _weaker("ofs_directory.c", "ofs_cas64_<acqrel>(&directory->endpoint[i], &nobody", TSAN, "entered"),
    _weaker("ofs_directory.c", "ofs_cas64_<acqrel>(&directory->endpoint[i], &expected", TSAN, "entered"),
    _weaker("ofs_directory.c", "uint64_t id = ofs_load64_<acquire>(", TSAN, "entered"),
    _weaker("ofs_directory.c", "return ofs_load32_<acquire>(&directory->epoch)", TSAN, "entered"),
    _weaker(
        "ofs_directory.c",
        "ofs_add32_<release>(&directory->epoch, 1); /* entered */\n            return OFS_OK",
        TSAN,
        "entered",
    ),
    _weaker(
        "ofs_directory.c",
        "ofs_add32_<release>(&directory->epoch, 1); /* entered */\n            return;",
        TSAN,
        "entered",
    ),
]

_HOLD_INDEX = "    if (index >= ofs_blocks_ready(control))\n        return OFS_GONE;\n"

BLOCK_CHECKS: list[Mutant] = [
    Mutant("ofs_block.c", "size < sizeof *control || ", "", ("layout:asan",)),
    Mutant("ofs_block.c", "control->version == OFS_LAYOUT_VERSION && ", "", plain("layout")),
    Mutant("ofs_block.c", "(slots & (slots - 1)) == 0 && ", "", plain("layout")),
    Mutant("ofs_block.c", " && slots <= OFS_KEY_LIMIT ?", " ?", plain("layout")),
    Mutant("ofs_block.c", "ofs_control_fixed_size(OFS_KEY_LIMIT) +", "ofs_control_fixed_size(64) +", plain("layout")),
    Mutant("ofs_block.c", "control->size == size && ", "", plain("layout")),
    Mutant("ofs_block.c", "ofs_control_size() == size;", "true;", plain("layout")),
    Mutant("ofs_block.c", "ready < OFS_BLOCK_LIMIT ? ready : OFS_BLOCK_LIMIT", "ready", plain("layout")),
    Mutant("ofs_block.c", "~IN_USE) + GENERATION_ONE", "~IN_USE)", plain("block")),
    Mutant("ofs_block.c", "if ((before & IN_USE & ~bits) == 0)", "if ((before & PENDING_MASK) == 0)", plain("block")),
    Mutant(
        "ofs_block.c",
        "if ((before & IN_USE & ~bits) == 0)",
        "if ((before & HOLDERS_MASK & ~bits) == 0)",
        plain("block"),
    ),
    Mutant("ofs_block.c", "if ((before & IN_USE & ~bits) == 0)", "if ((before & IN_USE) == 0)", plain("block") + MODEL),
    Mutant("ofs_block.c", _HOLD_INDEX, "", plain("block")),
    Mutant(
        "ofs_block.c",
        "uint64_t bit = (uint64_t)1 << slot;\n    uint64_t word",
        "uint64_t bit = (uint64_t)(1u << (slot & 15));\n    uint64_t word",
        plain("block"),
    ),
    Mutant(
        "ofs_block.c",
        "return OFS_GONE;\n    } while (!ofs_cas64_acqrel(&block->word, &word, word | bit))",
        "(void)0;\n    } while (!ofs_cas64_acqrel(&block->word, &word, word | bit))",
        plain("block"),
    ),
    Mutant(
        "ofs_block.c",
        "    if (ofs_load64_acquire(&block->sequence) != sequence) {",
        "    if (false) {",
        MODEL,
        "content",
    ),
    Mutant("ofs_block.c", "if (!(word & bit))", "if (false)", MODEL),
    Mutant("ofs_block.c", "if ((word & PENDING_MASK) == 0)\n", "if (false)\n", plain("block")),
    Mutant("ofs_block.c", "word - PENDING_ONE", "word & ~PENDING_MASK", plain("block")),
    Mutant(
        "ofs_block.c",
        "return OFS_GONE;\n    } while (!ofs_cas64_seq(",
        "(void)0;\n    } while (!ofs_cas64_seq(",
        plain("block"),
    ),
    Mutant("ofs_block.c", "word & ~PENDING_MASK)", "word - PENDING_ONE)", plain("block")),
    Mutant("ofs_block.c", "if ((word & HOLDERS_MASK) == 0)", "if (true)", plain("block")),
    Mutant("ofs_block.c", "if ((word & HOLDERS_MASK) == 0)", "if (false)", plain("block") + MODEL),
    # Looking at `pending` before the sequence is read: cancels a payload of another request.
    Mutant(
        "ofs_block.c",
        """        uint64_t sequence = ofs_load64_acquire(&block->sequence);
        if (!ofs_block_pending(block))
            continue;
        if (ofs_load64_acquire(&block->request_high)""",
        """        if (!ofs_block_pending(block))
            continue;
        uint64_t sequence = ofs_load64_acquire(&block->sequence);
        if (ofs_load64_acquire(&block->request_high)""",
        MODEL,
        "content",
    ),
    Mutant(
        "ofs_block.c",
        "ofs_load64_acquire(&block->request_high) == request_high &&",
        "request_high != 0 &&",
        plain("block"),
    ),
    Mutant(
        "ofs_block.c", "ofs_load64_acquire(&block->request_low) == request_low)", "request_low != 0)", plain("block")
    ),
    Mutant(
        "ofs_block.c",
        "cancelled += ofs_block_cancel(control, i, sequence) == OFS_OK",
        "cancelled += ofs_block_cancel(control, i, ofs_load64_acquire(&block->sequence)) == OFS_OK + 0 * (int)sequence",
        MODEL,
        "content",
    ),
    Mutant(
        "ofs_block.c",
        "for (uint32_t i = 0; i < ready; i++) {\n"
        "        struct ofs_block *block = ofs_block_at(control, i);\n"
        "        if (ofs_load64_acquire(&block->word) & bit)",
        "for (uint32_t i = 0; i <= ready; i++) {\n"
        "        struct ofs_block *block = ofs_block_at(control, i);\n"
        "        if (ofs_load64_acquire(&block->word) & bit)",
        plain("block"),
    ),
    Mutant("ofs_block.c", "&known, now) ? now : known", "&known, now) ? now : now", plain("block")),
]

KEY_CHECKS: list[Mutant] = [
    Mutant(
        "ofs_keys.c",
        "if (ofs_load64_relaxed(place) <= DELETED)",
        "if (ofs_load64_relaxed(place) == EMPTY)",
        plain("keys"),
    ),
    Mutant("ofs_keys.c", "if (ofs_load64_relaxed(place) <= DELETED)", "if (i < 9)", plain("keys")),
    Mutant(
        "ofs_keys.c",
        "while (ofs_load64_relaxed(&table[(at + 1) & mask]) == EMPTY && ofs_load64_relaxed(&table[at]) == DELETED)",
        "while (false)",
        plain("keys"),
    ),
    Mutant("ofs_keys.c", "== EMPTY && ofs_load64_relaxed(&table[at]) == DELETED", "== EMPTY", plain("keys")),
    Mutant("ofs_keys.c", "if (seen != entry)", "if ((seen ^ entry) >> 32)", plain("keys")),
    Mutant(
        "ofs_keys.c",
        "ofs_store64_release(&table[at], DELETED);",
        "ofs_store64_release(&table[at], EMPTY);",
        plain("keys"),
    ),
    Mutant("ofs_keys.c", "if (index >= ofs_blocks_ready(control))", "if (false)", plain("keys")),
    Mutant("ofs_keys.c", "if (!ofs_block_pending(block))", "if (false)", plain("keys")),
    Mutant("ofs_keys.c", "seen.edge == key->edge && ", "", plain("keys")),
    Mutant("ofs_keys.c", "seen.request_high == key->request_high && ", "", plain("keys")),
    Mutant("ofs_keys.c", "seen.request_low == key->request_low &&", "", plain("keys")),
    Mutant("ofs_keys.c", "ofs_load64_acquire(&block->sequence) == sequence;", "true;", MODEL, "content"),
    Mutant("ofs_keys.c", "(seen ^ hash) >> 32 != 0 || ", "", plain("keys")),
    Mutant("ofs_keys.c", "one.stamp > found->stamp", "one.stamp < found->stamp", plain("keys")),
    Mutant("ofs_keys.c", "rc == OFS_ABSENT || one.stamp > found->stamp", "rc == OFS_ABSENT", plain("keys")),
    Mutant("ofs_keys.c", "found->older + 1 : 0", "1 : 0", plain("keys")),
    Mutant("ofs_keys.c", "        found->older = one.older;\n", "", plain("keys")),
    Mutant("ofs_keys.c", "one.stamp < stamp)", "one.stamp <= stamp)", plain("keys")),
    Mutant(
        "ofs_keys.c",
        "i < slots; i++) {\n        uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);\n"
        "        struct ofs_found one;\n        if (seen == EMPTY)\n            break;\n        if (seen == DELETED",
        "; i++) {\n        uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);\n"
        "        struct ofs_found one;\n        if (seen == EMPTY)\n            break;\n        if (seen == DELETED",
        plain("keys"),
    ),
]

WAIT_CHECKS: list[Mutant] = [
    Mutant("ofs_wait.c", "(seen + 2) & ~ASLEEP", "seen + 2", plain("wait")),
    Mutant("ofs_wait.c", "(seen + 2) & ~ASLEEP", "seen & ~ASLEEP", plain("wait")),
    Mutant("ofs_wait.c", "if (seen & ASLEEP)\n        wake_all(bell);", "(void)wake_all;", plain("wait")),
    Mutant("ofs_wait.c", "FUTEX_WAKE, INT_MAX", "FUTEX_WAKE, 1 + 0 * INT_MAX", plain("wait")),
    Mutant("ofs_wait.c", "ofs_or32_seq(bell, ASLEEP) | ASLEEP", "ofs_or32_seq(bell, ASLEEP)", plain("wait")),
    Mutant("ofs_wait.c", "if (ofs_load32_seq(bell) & ASLEEP)", "if (true)", plain("block")),
    Mutant("ofs_wait.c", " || errno == EAGAIN", "", plain("wait")),
    Mutant("ofs_wait.c", "errno == ETIMEDOUT", "false", plain("wait")),
    Mutant("ofs_wait.c", "return errno == EINTR ? OFS_INTERRUPTED : -errno;", "return -errno;", plain("wait")),
    Mutant("ofs_wait.c", "? now + slice_ns : deadline_ns", "? deadline_ns : deadline_ns", plain("wait")),
    Mutant(
        "ofs_wait.c", "deadline_ns > now && deadline_ns - now > slice_ns", "deadline_ns - now > slice_ns", plain("wait")
    ),
    Mutant("ofs_wait.c", "now + spin_ns < until ? now + spin_ns : until", "now + spin_ns", plain("wait")),
    Mutant(
        "ofs_wait.c",
        "(ofs_load32_acquire(bell) | ASLEEP) != (seen | ASLEEP)",
        "ofs_load32_acquire(bell) != seen",
        plain("wait"),
    ),
    Mutant("ofs_wait.c", " && expected != (seen | ASLEEP)", "", plain("wait")),
    Mutant("ofs_wait.c", "&expected, seen | ASLEEP)", "&expected, seen)", plain("wait")),
]

RING_CHECKS: list[Mutant] = [
    Mutant("ofs_ring.c", "size == 0 ? OFS_ALIGN : ", "", plain("ring")),
    Mutant("ofs_ring.c", "(size + OFS_ALIGN - 1)", "(size + OFS_ALIGN)", plain("ring")),
    Mutant("ofs_ring.c", "arena->gap_count < arena->gap_room", "arena->gap_count <= arena->gap_room", ("ring:asan",)),
    Mutant(
        "ofs_ring.c",
        "if (number >= ring->arena_count || !ring->arenas[number].open)\n        return -EINVAL;\n"
        "    struct ofs_arena *arena = &ring->arenas[number];\n    if (arena->used",
        "struct ofs_arena *arena = &ring->arenas[number];\n    if (arena->used",
        plain("ring"),
    ),
    Mutant("ofs_ring.c", "if (arena->used != 0)", "if (false)", plain("ring")),
    Mutant("ofs_ring.c", "if (arena->gaps[g].size < size)", "if (false)", plain("ring")),
    Mutant("ofs_ring.c", "ring->used += size;", "", plain("ring")),
    Mutant("ofs_ring.c", "offset > arena->size || ", "", plain("ring")),
    Mutant("ofs_ring.c", " || size > arena->size - offset", "", plain("ring")),
    Mutant("ofs_ring.c", "(before && before->offset + before->size > offset) || ", "", plain("ring")),
    Mutant("ofs_ring.c", " || (after && offset + size > after->offset)", "", plain("ring")),
    Mutant(
        "ofs_ring.c",
        "bool joins_before = before && before->offset + before->size == offset;",
        "bool joins_before = false;",
        plain("ring"),
    ),
    Mutant(
        "ofs_ring.c",
        "bool joins_after = after && offset + size == after->offset;",
        "bool joins_after = false;",
        plain("ring"),
    ),
    Mutant("ofs_ring.c", "before->size += size + after->size;", "before->size += size;", plain("ring")),
    Mutant("ofs_ring.c", "gaps[middle].offset > offset", "gaps[middle].offset > offset + 64", plain("ring")),
    Mutant("ofs_ring.c", "gap->offset += size;", "", plain("ring")),
]

DIRECTORY_CHECKS: list[Mutant] = [
    Mutant("ofs_directory.c", "size >= sizeof directory->magic && ", "size > 0 && ", ("layout:asan",)),
    Mutant("ofs_directory.c", "size == sizeof *directory && ", "", ("layout:asan", "layout:plain")),
    Mutant("ofs_directory.c", "directory->version == OFS_LAYOUT_VERSION && ", "", plain("layout")),
    Mutant("ofs_directory.c", " && directory->size == size;", ";", plain("layout")),
    Mutant(
        "ofs_directory.c",
        "uint64_t nobody = 0;",
        "uint64_t nobody = ofs_load64_acquire(&directory->endpoint[i]);",
        plain("directory"),
    ),
    Mutant(
        "ofs_directory.c",
        "uint64_t expected = endpoint;",
        "uint64_t expected = endpoint ? ofs_load64_acquire(&directory->endpoint[i]) : 0;",
        plain("directory"),
    ),
    Mutant("ofs_directory.c", "if (id != 0)", "if (true)", plain("directory")),
    Mutant(
        "ofs_directory.c",
        "ofs_add64_relaxed(&directory->stamp, 1) + 1",
        "ofs_add64_relaxed(&directory->stamp, 1)",
        plain("directory"),
    ),
    Mutant("ofs_directory.c", "hash % OFS_BELLS", "hash & (2 * OFS_BELLS - 1)", plain("directory")),
]

CHOICE_CHECKS: list[Mutant] = [
    Mutant("ofs_choice.c", "zero == 0 || one == 0", "false", plain("choice")),
    Mutant("ofs_choice.c", "zero < one - one / 16", "zero < one", plain("choice")),
    Mutant("ofs_choice.c", "zero < one - one / 16", "zero + one / 16 < one - one / 16", plain("choice")),
    Mutant("ofs_choice.c", " ? 0 : 1;", " ? 1 : 0;", plain("choice")),
    Mutant("ofs_choice.c", "bool other = turn >= OFS_TRY;", "bool other = false;", plain("choice")),
    Mutant("ofs_choice.c", "turn % OFS_TRY >= OFS_TRY - OFS_TRY_JUDGED", "true", plain("choice")),
    Mutant("ofs_choice.c", "better != kept || rest == 0", "rest == 0", plain("choice")),
    Mutant("ofs_choice.c", "OFS_REST_LEAST : 2 * rest", "OFS_REST_LEAST : rest", plain("choice")),
    Mutant("ofs_choice.c", "rest < most ? rest : most", "rest < 2 * most ? rest : 2 * most", plain("choice")),
    Mutant("ofs_choice.c", "        ofs_store64_release(&choice->kept, better);\n", "", plain("choice")),
    Mutant("ofs_choice.c", "        ofs_store64_release(&choice->cheapest[0], 0);\n", "", plain("choice")),
    Mutant("ofs_choice.c", "        ofs_store64_release(&choice->cheapest[1], 0);\n", "", plain("choice")),
    Mutant("ofs_choice.c", "        ofs_store64_release(&choice->turn, 0);\n", "", plain("choice")),
    Mutant("ofs_choice.c", "seen == 0 || cost < seen", "seen == 0 || cost > seen", plain("choice")),
    Mutant("ofs_choice.c", "seen == 0 || cost < seen", "cost < seen", plain("choice")),
    Mutant("ofs_choice.c", "cost ? cost : 1", "cost", plain("choice")),
]
# Which way a copy went does not show in its bytes.
COPY_CHECKS: list[Mutant] = [
    Mutant("ofs_copy.c", "piece->size == 0", "false", ("copy:asan",)),
    Mutant("ofs_copy.c", "    memcpy(to, from, head);\n", "", plain("copy")),
    Mutant("ofs_copy.c", "    memcpy(to + body, from + body, size - body);\n", "", plain("copy")),
]

KILLED: list[Mutant] = [
    *ORDERINGS,
    *BLOCK_CHECKS,
    *KEY_CHECKS,
    *WAIT_CHECKS,
    *RING_CHECKS,
    *DIRECTORY_CHECKS,
    *CHOICE_CHECKS,
    *COPY_CHECKS,
]

_CARRIED = (
    "equivalent: the sequence number, stored with release and loaded with acquire on the same path, carries it too"
)
_BY_RELEASE = "equivalent: a taker still has its bit; what it did is ordered by the bit's release"
_ALONE = "equivalent: the value itself is all that passes, nothing else is read because of it"
_SPEED = "equivalent but slower: a later check gives the same answer"
_HARDWARE = "ordinary loads and stores of x86 and the sanitizers know nothing of streaming stores; needs a reviewer"


def _survivor(file: str, old: str, new: str, reason: str) -> Mutant:
    return Mutant(file, old, new, reason=reason)


SURVIVORS: list[Mutant] = [
    _survivor(
        "ofs_block.c",
        "ofs_load64_acquire(&block->word); /* published */",
        "ofs_load64_relaxed(&block->word);",
        _CARRIED,
    ),
    _survivor(
        "ofs_block.c",
        "ofs_cas64_acqrel(&block->word, &word, word | bit)",
        "ofs_cas64_relaxed(&block->word, &word, word | bit)",
        _CARRIED,
    ),
    _survivor(
        "ofs_block.c",
        "ofs_cas64_acqrel(&block->word, &word, word - PENDING_ONE)",
        "ofs_cas64_relaxed(&block->word, &word, word - PENDING_ONE)",
        _BY_RELEASE,
    ),
    _survivor(
        "ofs_block.c",
        "if (!(word & bit))",
        "if (true)",
        "equivalent: a block lives no new life while this process has its bit, and its calls do not overlap",
    ),
    _survivor("ofs_block.c", "        if (!ofs_block_pending(block))\n            continue;", "", _SPEED),
    _survivor("ofs_block.c", "if (ofs_load64_acquire(&block->word) & bit)", "if (true)", _SPEED),
    _survivor("ofs_block.c", "ofs_cas64_acqrel(&control->died_ns", "ofs_cas64_relaxed(&control->died_ns", _ALONE),
    _survivor(
        "ofs_block.c",
        "ofs_or32_seq(&control->readers",
        "ofs_or32_acqrel(&control->readers",
        "equivalent: release is enough, no later load of another word depends on it; there is no or with less",
    ),
    _survivor(
        "ofs_block.c",
        "ofs_store64_release(&control->reader[slot].pid",
        "ofs_store64_relaxed(&control->reader[slot].pid",
        "for people only: no decision rests on it",
    ),
    _survivor(
        "ofs_wait.c",
        "uint32_t seen = ofs_load32_acquire(bell);",
        "uint32_t seen = ofs_load32_relaxed(bell);",
        "equivalent: only the guess for the exchange that follows",
    ),
    _survivor(
        "ofs_wait.c",
        "!ofs_cas32_acqrel(bell, &expected",
        "!ofs_cas32_relaxed(bell, &expected",
        "equivalent: whoever waited reads the bell again before it looks",
    ),
    _survivor("ofs_wait.c", "spin_ns && ofs_now_ns() < spin_until", "ofs_now_ns() < spin_until", _SPEED),
    _survivor(
        "ofs_keys.c", "ofs_store64_release(&table[at], DELETED)", "ofs_store64_relaxed(&table[at], DELETED)", _ALONE
    ),
    _survivor("ofs_keys.c", "ofs_store64_release(&table[at], EMPTY)", "ofs_store64_relaxed(&table[at], EMPTY)", _ALONE),
    _survivor("ofs_keys.c", "        if (seen == EMPTY)\n            return;\n", "", _SPEED),
    _survivor(
        "ofs_keys.c",
        "if (seen == DELETED || ",
        "if (",
        "equivalent: the index of a deleted place is past all descriptors, and that is checked",
    ),
    _survivor(
        "ofs_ring.c",
        "size > arena->used || ",
        "",
        "equivalent: where less than that is in use there is a gap, and overlapping it is refused",
    ),
    _survivor("ofs_ring.c", "        if (arena->size - arena->used < size)\n            continue;\n", "", _SPEED),
    _survivor("ofs_copy.c", "    _mm_sfence();", "", _HARDWARE),
]
