"""How much memory the edges of a pipeline need, by Little's law: arrivals per second times the time that each stays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_fastshm._core import BLOCK_LIMIT, KEY_LIMIT, control_fixed_size, layout
from omni_fastshm.config import OmniTransferConfig
from omni_fastshm.connectors.shared_memory import SETTINGS
from omni_fastshm.directory import SIZE as DIRECTORY_SIZE
from omni_fastshm.errors import ConfigError
from omni_fastshm.factory import ConnectorSpec, OmniConnectorFactory
from omni_fastshm.settings import parse_settings

__all__ = [
    "LARGEST",
    "MOST_UNDER_WAY",
    "EdgePlan",
    "Load",
    "NodePlan",
    "Plan",
    "RingPlan",
    "make_plan",
    "never_fits",
    "places_needed",
    "rounded_down",
    "store_settings",
]

MIB = 1 << 20
LARGEST = {"per_s": 10**9, "hold_s": 10**9, "size": 1 << 47, "burst": 10**6}
"""What is beyond these is a slip of the pen: a payload each nanosecond, 31 years, all that a process can address."""
MOST_UNDER_WAY = 10**8
"""Payloads of one edge, on average; some hundred times what one producer can have. More would take long to add up."""
_ONE_SEGMENT = 256 * MIB  # up to here a ring is one segment: growing costs fresh pages, and shrinking gives them back
_GAPS = 1.1  # what first fit loses between payloads of different sizes
_SPARE = 1.1  # of the whole mount
_BLOCK = max(offset + size for name, _, offset, size in layout() if name == "ofs_block")
_CHUNK = 256  # descriptors that get memory at a time
_SHM, _LOCAL = "SharedMemoryConnector", "InProcessConnector"
_STORE = ("MooncakeConnector", "MooncakeStoreConnector")

Edge = tuple[str, str]


def rounded_down(most: float) -> str:
    """The largest value of something, as text: what is written so is not more."""
    return f"{math.floor(most):,}" if most >= 1 else f"{most * 0.995:.2g}"


@dataclass(frozen=True)
class Load:
    """What crosses an edge.

    Attributes:
        per_s: payloads per second.
        hold_s: seconds from the put of a payload until the last view of it is dropped.
        size: bytes of a payload.
        burst: so many arrive at the same moment; 1 for single ones.

    Raises:
        ConfigError: a number is negative, not finite, or larger than `LARGEST` allows, or more than `MOST_UNDER_WAY`
            payloads would be under way.
    """

    per_s: float
    hold_s: float
    size: int
    burst: int = 1

    def __post_init__(self) -> None:
        numbers = (self.per_s, self.hold_s, self.size, self.burst)
        if not all(0 <= number < math.inf for number in numbers) or self.burst < 1:
            raise ConfigError(f"a load needs finite numbers from 0 on, and a burst from 1 on, not {self}")
        for name, most in LARGEST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name}: {getattr(self, name):g} is too large: the most is {most:,}")
        if self.mean > MOST_UNDER_WAY:
            raise ConfigError(
                f"hold_s: {self.hold_s:g} at {self.per_s:g} per second keeps more than {MOST_UNDER_WAY:,} payloads "
                f"under way: the most is {rounded_down(MOST_UNDER_WAY / self.per_s)} at this rate"
            )

    @property
    def mean(self) -> float:
        """Payloads that are under way, on average."""
        return self.per_s * self.hold_s


def places_needed(load: Load, risk: float) -> int:
    """How many payloads must fit so that hardly any put finds no room.

    Arrivals at random moments that stay for some time are Poisson distributed in number, whatever the times are
    (M/G/∞); a burst counts as one arrival of several.

    Args:
        load: the edge's.
        risk: the share of puts that may find no room, above 0 and below 1.
    """
    if not 0 < risk < 1:
        raise ConfigError(f"risk: {risk} is not between 0 and 1")
    mean = load.mean / load.burst
    low, high = 0, 1
    while _tail(mean, high) > risk:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _tail(mean, middle) > risk else (low, middle)
    return high * load.burst


def _tail(mean: float, count: int) -> float:
    """Probability that a Poisson distributed number with this mean is at least `count`."""
    if mean <= 0:
        return 0.0 if count else 1.0
    if count <= mean:
        return 1.0 - sum(_terms(mean, count - 1, down=True))
    return sum(_terms(mean, count, down=False))


def _terms(mean: float, start: int, *, down: bool) -> list[float]:
    """Probabilities of `start` and of the numbers below, or above, for as long as they matter."""
    if start < 0:
        return []
    terms = [math.exp(start * math.log(mean) - mean - math.lgamma(start + 1))]
    number = start
    while terms[-1] > 1e-18 and number >= (1 if down else 0):
        terms.append(terms[-1] * (number / mean if down else mean / (number + 1)))
        number += -1 if down else 1
    return terms


@dataclass(frozen=True)
class EdgePlan:
    """What one edge needs.

    Attributes:
        from_stage, to_stage, connector: the edge and its backend.
        load: what crosses it.
        way: "ring", "inline" (in the metadata: no memory), "store" (Mooncake's) or "process" (of this process).
        mean: payloads under way, on average.
        peak: payloads that must fit.
        bytes: of these.
    """

    from_stage: str
    to_stage: str
    connector: str
    load: Load
    way: str
    mean: float
    peak: int
    bytes: int


@dataclass(frozen=True)
class RingPlan:
    """Settings for one producing connector: edges of one stage with equal settings share it.

    Attributes:
        from_stage: the stage that puts.
        to_stages: its receivers.
        segment_bytes, max_bytes: what to set.
        control_bytes: of its control segment.
        configured: what the file sets now; without what it does not set.
        settings: all settings of the connector, those above in place of its own.
    """

    from_stage: str
    to_stages: tuple[str, ...]
    segment_bytes: int
    max_bytes: int
    control_bytes: int
    configured: dict[str, int]
    settings: dict[str, Any]


@dataclass(frozen=True)
class NodePlan:
    """What one node needs.

    Attributes:
        name: the node's.
        stages: that run there.
        shm_bytes: size of /dev/shm.
        store_bytes: Mooncake's `segment` of the connectors that put here, in all; ordinary memory.
        receive_bytes: Mooncake's `localbuf` of those that get here.
        process_bytes: payloads of in-process edges; ordinary memory.
    """

    name: str
    stages: tuple[str, ...]
    shm_bytes: int
    store_bytes: int
    receive_bytes: int
    process_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a pipeline needs.

    Attributes:
        risk: the share of puts that may find no room.
        edges: one by one.
        rings: settings for the shared memory edges.
        nodes: memory by node.
        warnings: what does not fit together.
    """

    risk: float
    edges: tuple[EdgePlan, ...]
    rings: tuple[RingPlan, ...]
    nodes: tuple[NodePlan, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``omni-fastshm plan --json`` prints it."""
        return asdict(self)


def make_plan(
    config: OmniTransferConfig,
    loads: Mapping[Edge, Load],
    *,
    risk: float = 1e-4,
    nodes: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Say how much memory a pipeline needs.

    Args:
        config: its file.
        loads: what crosses each of its edges.
        risk: the share of puts that may find no room and have to wait.
        nodes: the stages of each node; None puts all on one.

    Raises:
        ConfigError: an edge has no load, a stage no node or two, or a number is out of range.
    """
    edges = []
    specs = {edge: _spec(spec) for edge, spec in config.connectors.items()}
    for edge, spec in specs.items():
        if edge not in loads:
            raise ConfigError(f"edge {edge[0]} -> {edge[1]} has no load")
        edges.append(_edge_plan(edge, config.connectors[edge].name, spec.extra, loads[edge], risk))
    where = _nodes(config, nodes)
    rings, warnings = _rings(specs, edges)
    for each in edges:
        if each.way != "inline":
            edge = each.from_stage, each.to_stage
            limits = store_settings(config, edge) if each.way == "store" else _limits(specs[edge])
            warnings += never_fits(edge, each.load.size, limits)
    for each in edges:
        if each.way in ("ring", "process") and where[each.from_stage] != where[each.to_stage]:
            warnings.append(
                f"edge {each.from_stage} -> {each.to_stage} is {each.connector}, but its stages are on the nodes "
                f"{where[each.from_stage]} and {where[each.to_stage]}: use MooncakeConnector for it"
            )
    names = dict.fromkeys(where.values())
    return Plan(risk, tuple(edges), tuple(rings), tuple(_node(n, where, edges, rings) for n in names), tuple(warnings))


def _spec(spec: ConnectorSpec) -> ConnectorSpec:
    """As it is in this package; vllm-omni finds by key what its names of ours carry, so that nothing is inline."""
    here = OmniConnectorFactory.spec_here(spec)
    return here if here is spec else ConnectorSpec(here.name, {**here.extra, "key_lookup": True})


def _edge_plan(edge: Edge, name: str, extra: Mapping[str, Any], load: Load, risk: float) -> EdgePlan:
    threshold = _setting(name, extra, "shm_threshold_bytes", 0)
    if OmniConnectorFactory.same_backend(name, _SHM):
        way = "ring"
    elif OmniConnectorFactory.same_backend(name, _LOCAL):
        way = "process"
    elif any(OmniConnectorFactory.same_backend(name, store) for store in _STORE):
        way = "store"
    else:
        way = "unknown"
    if way != "process" and load.size < threshold and not _setting(name, extra, "key_lookup", False):
        way = "inline"
    peak = places_needed(load, risk)
    taken = rounded(load.size) if way == "ring" else load.size
    memory = peak * taken if way in ("ring", "process", "store") else 0
    return EdgePlan(*edge, name, load, way, load.mean, peak, memory)


def rounded(size: int) -> int:
    """What a payload takes in a ring: whole cache lines."""
    return max(-(-size // 64) * 64, 64)


def never_fits(edge: Edge, size: int, settings: Mapping[str, Any]) -> list[str]:
    """A warning where not even an empty ring, or store, takes a payload of this size; else nothing.

    Args:
        edge: from and to.
        size: bytes of the payload.
        settings: `max_bytes`, which is None or missing where nothing limits it, and `fallback` where there is one.
    """
    limit = settings.get("max_bytes")
    if limit is None or size <= limit:
        return []
    what = "segment (or max_bytes)" if "segment" in settings else "max_bytes"
    instead = "travels inside the metadata" if settings.get("fallback") == "inline" else "is refused"
    return [
        f"edge {edge[0]} -> {edge[1]}: {what} {limit} of stage {edge[0]} is less than one payload of {size} bytes: it "
        f"never fits and {instead}; raise it"
    ]


def _limits(spec: ConnectorSpec) -> dict[str, Any]:
    """`max_bytes` and `fallback` as the file has them."""
    return {key: _setting(spec.name, spec.extra, key, None) for key in ("max_bytes", "fallback")}


def store_settings(config: OmniTransferConfig, edge: Edge) -> dict[str, Any]:
    """The settings of an edge through Mooncake's store, with the defaults; `max_bytes` is what limits it, None where
    nothing does.

    Args:
        config: the pipeline's file.
        edge: one of its edges, over a `MooncakeConnector`.
    """
    spec = _spec(config.connectors[edge])
    table = OmniConnectorFactory.settings_of(spec.name) or {}
    settings = parse_settings(spec.name, table, spec.extra)
    if settings["max_bytes"] is None and settings["hard_pin"]:
        settings["max_bytes"] = settings["segment"] or None
    return settings


def _setting(name: str, extra: Mapping[str, Any], key: str, default: Any) -> Any:
    table = OmniConnectorFactory.settings_of(name)
    if table is None or key not in table:
        return default
    return parse_settings(name, {key: table[key]}, {key: extra[key]} if key in extra else {})[key]


def _rings(specs: Mapping[Edge, ConnectorSpec], edges: list[EdgePlan]) -> tuple[list[RingPlan], list[str]]:
    shared: dict[tuple[str, str], list[EdgePlan]] = {}
    for each in edges:
        if each.way == "ring":
            extra = specs[each.from_stage, each.to_stage].extra
            key = repr(sorted((str(k), repr(v)) for k, v in extra.items()))
            shared.setdefault((each.from_stage, key), []).append(each)
    rings, warnings = [], []
    for (stage, _), members in shared.items():
        extra = specs[stage, members[0].to_stage].extra
        ring = _ring(stage, members, extra)
        rings.append(ring)
        has = ring.configured.get("max_bytes", ring.max_bytes)
        if has < ring.max_bytes:
            then = "send inside the metadata" if ring.settings["fallback"] == "inline" else "be refused"
            warnings.append(
                f"stage {stage}: the file sets max_bytes to {has}, {ring.max_bytes} are needed: puts will wait, and "
                f"{then} after put_timeout_s"
            )
        in_flight = sum(each.peak for each in members)
        if in_flight > BLOCK_LIMIT:
            warnings.append(
                f"stage {stage}: room for {in_flight} payloads is needed, but one connector can have {BLOCK_LIMIT} "
                "under way: give its edges connectors of their own, or send fewer and larger payloads"
            )
    return rings, warnings


def _ring(stage: str, members: list[EdgePlan], extra: Mapping[str, Any]) -> RingPlan:
    payloads = sum(each.bytes for each in members)
    largest = max(rounded(each.load.size) for each in members)
    count = max(-(-payloads // _ONE_SEGMENT), 1)
    if len({rounded(each.load.size) for each in members}) == 1:
        each = -(-(payloads // largest) // count)  # whole payloads in each
        segment, count = _up(each * largest), -(-(payloads // largest) // each)
    else:  # gaps remain between payloads of several sizes, and at the end of each segment
        segment = _up(int(payloads / count * _GAPS) + largest)
    limit = count * segment
    parsed = parse_settings(_SHM, SETTINGS, dict(extra))
    configured = {key: parsed[key] for key in ("segment_bytes", "max_bytes") if extra.get(key) is not None}
    in_flight = sum(each.peak for each in members)
    control = control_fixed_size(KEY_LIMIT if parsed["key_lookup"] else 0) + -(-in_flight // _CHUNK) * _CHUNK * _BLOCK
    settings = {**parsed, "segment_bytes": segment, "max_bytes": limit}
    return RingPlan(stage, tuple(each.to_stage for each in members), segment, limit, control, configured, settings)


def _up(size: int) -> int:
    """Whole MiB."""
    return max(-(-size // MIB), 1) * MIB


def _nodes(config: OmniTransferConfig, nodes: Mapping[str, Sequence[str]] | None) -> dict[str, str]:
    stages = list(config.stages) or list(dict.fromkeys(stage for edge in config.edges for stage in edge))
    if not nodes:
        return dict.fromkeys(stages, "node")
    where: dict[str, str] = {}
    for node, members in nodes.items():
        for stage in members:
            if stage not in stages:
                raise ConfigError(f"node {node}: there is no stage {stage!r}; there are {', '.join(stages)}")
            if stage in where:
                raise ConfigError(f"stage {stage} is on two nodes, {where[stage]} and {node}")
            where[stage] = node
    missing = [stage for stage in stages if stage not in where]
    if missing:
        raise ConfigError(f"no node has the stages {', '.join(missing)}")
    return where


def _node(name: str, where: Mapping[str, str], edges: list[EdgePlan], rings: list[RingPlan]) -> NodePlan:
    here = [each for each in rings if where[each.from_stage] == name]
    shm = sum(each.max_bytes + each.control_bytes for each in here) + (DIRECTORY_SIZE if here else 0)

    def total(way: str, end: str) -> int:
        return sum(each.bytes for each in edges if each.way == way and where[getattr(each, end)] == name)

    return NodePlan(
        name,
        tuple(stage for stage, node in where.items() if node == name),
        _up(int(shm * _SPARE)) if here else 0,
        _up(int(total("store", "from_stage") * _SPARE)) if total("store", "from_stage") else 0,
        _up(int(total("store", "to_stage") * _SPARE)) if total("store", "to_stage") else 0,
        total("process", "from_stage"),
    )
