"""get with device=: where tensors go, when their bytes are there, and how long the lease lives."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.fake_device import FakeDevices
from support.waiting import until

from omni_fastshm import InProcessConnector, codec, register_type
from omni_fastshm._staging_parked import Parked
from omni_fastshm.errors import CodecError, ConfigError, DeviceError
from omni_fastshm.factory import ConnectorSpec, OmniConnectorFactory
from omni_fastshm.placement import ByPath, path_text
from omni_fastshm.staging import Staging, parked

BIG = torch.arange(60_000, dtype=torch.float32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_all_tensors_to_one_device(make: Any, fake: FakeDevices, seed: int, device: Any) -> None:
    fake.random.seed(seed)
    producer, consumer = make(), make()
    values = {"t": BIG, "u": [BIG.bool(), BIG.to(torch.bfloat16)[:3]], "empty": torch.empty(0, 3), "0": torch.tensor(7)}
    got, size = consumer.get("a", "b", "r", producer.put("a", "b", "r", {**values, "a": np.ones(3)})[2], device=device)
    assert size == codec.plan({**values, "a": np.ones(3)}).size
    assert torch.equal(fake.read(got["t"]), BIG)
    assert torch.equal(fake.read(got["u"][0]), BIG.bool())
    assert torch.equal(fake.read(got["u"][1]), BIG.to(torch.bfloat16)[:3])
    assert fake.read(got["0"]) == 7
    assert got["empty"].device.type == "meta"
    assert got["a"].tolist() == [1, 1, 1]
    fake.run_all()
    until(lambda: consumer._consumer.leases == 0)


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class Holder:
    x: Any
    y: Any


def test_each_by_its_path(make: Any, fake: FakeDevices) -> None:
    def value(n: int) -> Any:
        return BIG + n

    payload = {
        "inputs": {"hidden": [value(0), value(1)], "ids": value(2)},
        "inputs2": value(3),
        "odd key": (value(4), {7: value(5)}),
        "held": Holder(value(6), [value(7)]),
        "pair": Pair(value(8), value(9)),
        "more": {(1, 2): value(10)},
    }
    where = {
        "inputs": "meta:1",
        "inputs.hidden[1]": "cpu",
        "['odd key'][1][7]": "meta",
        "held.y": "meta",
        "pair": "meta:1",
    }
    producer, consumer = make(), make()
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", payload)[2], device=where)[0]
    leaves = {
        0: (got["inputs"]["hidden"][0], 1),
        1: (got["inputs"]["hidden"][1], None),
        2: (got["inputs"]["ids"], 1),
        3: (got["inputs2"], None),
        4: (got["odd key"][0], None),
        5: (got["odd key"][1][7], 0),
        6: (got["held"].x, None),
        7: (got["held"].y[0], 0),
        8: (got["pair"].one, 1),
        9: (got["pair"].two, 1),
        10: (got["more"][1, 2], None),
    }
    for n, (leaf, device) in leaves.items():
        if device is None:
            assert torch.equal(leaf, BIG + n), n
        else:
            assert fake.device_of(leaf) == device, n
            assert torch.equal(fake.read(leaf), BIG + n), n
    fake.run_all()
    until(lambda: not len(parked))
    assert consumer.health()["leases"] == 1, "the views on the host have it"
    del leaf, leaves, got
    until(lambda: consumer.health()["leases"] == 0)


def test_the_rest() -> None:
    where = ByPath({"a": "cpu", "*": "meta", "a.b": "meta:1"})
    paths = {"": "meta", "a": None, "a.b": "meta:1", "a.bc": None, "ab": "meta", "a[0]": None, "a.b[0].c": "meta:1"}
    steps = {
        "": [],
        "a": [("a", True)],
        "a.b": [("a", True), ("b", True)],
        "a.bc": [("a", True), ("bc", True)],
        "ab": [("ab", True)],
        "a[0]": [("a", True), (0, False)],
        "a.b[0].c": [("a", True), ("b", True), (0, False), ("c", True)],
    }
    for text, device in paths.items():
        assert path_text(steps[text]) == text
        assert where.target(steps[text]) == device, text


@pytest.mark.parametrize("wire", ["exact", "host"])
def test_paths_are_those_of_error_messages(wire: str) -> None:
    """What put's CodecError calls a place, `device` calls it, too."""

    class Mine:
        pass

    register_type(Mine, lambda _: {"in": BIG[:3]}, lambda state: state, name="a thing with a tensor")
    places: list[str] = []
    asked: list[int] = []

    class Asked:
        def target(self, path: Any) -> None:
            places.append(path_text(path))

        def done(self) -> None:
            asked.append(len(places))

    def shape(leaf: Any) -> dict[Any, Any]:
        return {"a": [leaf, (leaf,)], 1: {"b c": leaf}, "h": Holder(leaf, None), "p": Pair(None, leaf)}

    frame = codec.plan(shape(BIG[:2]), wire=wire).to_bytes()
    codec.decode(frame, device=Asked(), wire=wire, types=(f"{__name__}:Holder", f"{__name__}:Pair"))
    with pytest.raises(CodecError) as caught:
        codec.plan([object()], wire=wire)
    assert str(caught.value).startswith("[0]:")
    said = []
    for name in ("a[0]", "a[1][0]", "[1]['b c']", "h.x", "p[1]"):
        assert name in places or name == "p[1]", (name, places)
        said.append(name)
    assert len(places) == 5
    assert asked == [5]
    places.clear()
    codec.decode(codec.plan({"m": Mine()}).to_bytes(), device=Asked())
    assert places == ["m.state.in"]


def test_the_bytes_are_there_for_what_comes_after(make: Any, fake: FakeDevices) -> None:
    """On the stream that is current at the get, default or the user's own."""
    producer, consumer = make(), make()
    for n, stream in enumerate([fake.current_stream(0), fake.stream(0, "mine")]):
        metadata = producer.put("a", "b", n, BIG + n)[2]
        with fake.held(), fake.using(stream):
            got = consumer.get("a", "b", n, metadata, device="meta")[0]
            copied = fake.flat(got.t())
            assert consumer._consumer.leases == 1
        fake.run_all()
        assert torch.equal(fake.fetch(copied).view(torch.float32), BIG + n)


@pytest.mark.parametrize("seed", range(8))
def test_a_result_that_dies_early_is_not_used_again_too_early(make: Any, fake: FakeDevices, seed: int) -> None:
    fake.random.seed(seed)
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", BIG)[2]
    with fake.held():
        got = consumer.get("a", "b", "r", metadata, device="meta")[0]
        kept = fake.tensor(torch.zeros_like(BIG))
        memory, target = fake._memory_of(got), fake._memory_of(kept)
        fake._enqueue(fake.current_stream(0), lambda: target.bytes.copy_(memory.bytes))
        del got
        gc.collect()
    assert torch.equal(fake.read(kept), BIG)


def test_the_lease_goes_when_the_upload_is_complete_without_another_call(make: Any, fake: FakeDevices) -> None:
    """The producer may be waiting for this very room."""
    producer, consumer = make(max_bytes=1 << 20, segment_bytes=1 << 20, put_timeout_s=20), make()
    large = torch.arange(200_000.0)
    metadata = producer.put("a", "b", 1, large)[2]
    with fake.held():
        got = consumer.get("a", "b", 1, metadata, device="meta")[0]
        assert consumer._consumer.leases == 1
        assert producer.health()["live_blocks"] == 1
        waiting = producer.put("a", "b", 2, large, wait=False)
        assert not waiting.done()
    assert waiting.result(20)[0]
    assert torch.equal(fake.read(got), large)
    producer.cleanup(2)


def test_what_is_inline(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", {"t": BIG[:5], "u": BIG[:3]})[2]
    with fake.held():
        got = consumer.get("a", "b", "r", metadata, device={"t": "meta"})[0]
        gc.collect()
    assert torch.equal(fake.read(got["t"]), BIG[:5])
    assert torch.equal(got["u"], BIG[:3])


def test_several_takers(make: Any, fake: FakeDevices) -> None:
    producer, consumers = make(), [make(), make()]
    metadata = producer.put("a", "b", "r", BIG, consumers=2)[2]
    for consumer, device in zip(consumers, ("meta", "meta:1"), strict=True):
        assert torch.equal(fake.read(consumer.get("a", "b", "r", metadata, device=device)[0]), BIG)


class Unknown:
    pass


def test_what_cannot_be_rebuilt_can_be_got_again(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    register_type(Unknown, lambda _: None, lambda _: Unknown(), name="soon unknown")
    metadata = producer.put("a", "b", "r", [BIG, Unknown()])[2]
    known = codec._by_name.pop("soon unknown")
    for _ in range(2):
        with pytest.raises(CodecError, match="soon unknown"):
            consumer.get("a", "b", "r", metadata, device="meta")
    codec._by_name["soon unknown"] = known
    got = consumer.get("a", "b", "r", metadata, device="meta")[0]
    assert torch.equal(fake.read(got[0]), BIG)


def test_a_device_that_is_not_there(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", BIG)[2]
    with pytest.raises(CodecError, match=r"cannot be moved to meta:7: .*no device 7"):
        consumer.get("a", "b", "r", metadata, device="meta:7")
    assert torch.equal(consumer.get("a", "b", "r", metadata)[0], BIG)


def test_cuda_where_there_is_none(make: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", {"x": [1, BIG]})[2]
    for device in ("cuda", {"x[1]": "cuda"}, {"*": "cuda"}):
        with pytest.raises(CodecError, match=r"^x\[1\]: the tensor cannot be moved to cuda: \w+: "):
            consumer.get("a", "b", "r", metadata, device=device)
    assert torch.equal(consumer.get("a", "b", "r", metadata)[0]["x"][1], BIG)
    with pytest.raises(CodecError, match=r"^payload: the tensor cannot be moved to cuda"):
        consumer.get("a", "b", "r", producer.put("a", "b", "r", BIG)[2], device="cuda")


@pytest.mark.parametrize("backend", ["SharedMemoryConnector", "InProcessConnector"])
def test_a_path_that_leads_to_no_tensor_is_said_once(
    backend: str, make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_fastshm.placement._told", set())
    with OmniConnectorFactory.create_connector(ConnectorSpec(backend)) as connector:

        def got(payload: Any, device: Any) -> Any:
            return connector.get("a", "b", "r", connector.put("a", "b", "r", payload)[2], device=device)[0]

        sent = {"hidden": BIG, "more": [BIG[:2]], "text": "t"}
        for _ in range(2):
            assert got(sent, {"hiden": "meta", "more": "meta"})["hidden"].device.type == "cpu"
        said = [record.getMessage() for record in caplog.records if "device" in record.getMessage()]
        assert said == ["device: no tensor is at 'hiden'; there are hidden, more[0]; said once"]
        caplog.clear()
        every = {"more": "meta", "more[0]": "meta:1", "hidden": "cpu", "*": "meta"}
        assert got(sent, every)["hidden"].device.type == "cpu"
        assert got("no tensor", {"hiddn": "meta"}) == "no tensor"
        assert not caplog.records


def test_who_takes_under_the_shared_slot_waits_for_the_copies(make: Any, fake: FakeDevices) -> None:
    frame = codec.plan({"t": BIG}).to_bytes()
    got = Staging("auto", 1 << 30).read(codec.decoder(), frame, None, None, True, "meta", True)
    assert not len(parked)
    assert not fake._flying
    assert torch.equal(fake.read(got["t"]), BIG)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"a": "no-device"}, r"device\['a'\]: 'no-device'"),
        ({"": "cpu"}, "is no path"),
        ({3: "cpu"}, "is no path"),
        ({"a": {"b": "cpu"}}, "write the whole path"),
        ({"a": 1.5}, r"device\['a'\]: 1.5"),
    ],
    ids=repr,
)
def test_what_is_no_device(make: Any, device: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().get("a", "b", "r", {}, device=device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), {}, {"*": "cpu"}, {"t": None}], ids=repr)
def test_the_host_is_a_place_for_views(make: Any, device: Any) -> None:
    producer, consumer = make(), make()
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", {"t": BIG})[2], device=device)[0]
    assert torch.equal(got["t"], BIG)
    assert consumer.health()["leases"] == 1


def test_other_connectors_know_paths_as_well(namespace: str) -> None:
    with InProcessConnector({"namespace": namespace}) as connector:
        metadata = connector.put("a", "b", "r", {"t": BIG, "u": [BIG + 1, BIG + 2]})[2]
        got = connector.get("a", "b", "r", metadata, device={"u[1]": "meta"})[0]
    assert [got["t"].device.type, got["u"][0].device.type, got["u"][1].device.type] == ["cpu", "cpu", "meta"]
    frame = codec.plan({"t": BIG, "u": BIG}).to_bytes()
    assert codec.decode(frame, device={"t": "meta"})["t"].device.type == "meta"


def test_a_device_that_fails_at_an_upload(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", BIG)[2]
    fake.fail_enqueue = True
    with pytest.raises((CodecError, DeviceError), match="no more copies"):
        consumer.get("a", "b", "r", metadata, device="meta")
    fake.fail_enqueue = False
    fake.fail_copies = True
    got = consumer.get("a", "b", "r", metadata, device="meta")[0]
    assert got is not None, "the device says later that it failed, as with any copy that is asynchronous"
    fake.fail_copies = False
    fake.run_all()
    del got
    until(lambda: consumer._consumer.leases == 0)


def test_ctrl_c_between_two_devices(make: Any, fake: FakeDevices) -> None:
    """What both of them read stays until they are done."""
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", [BIG, BIG + 1])[2]
    with fake.held():
        fake.interrupt_at = {"wait_event": 1}
        try:
            consumer.get("a", "b", "r", metadata, device={"[0]": "meta:0", "[1]": "meta:1"})
            pytest.fail("no Ctrl-C came")
        except KeyboardInterrupt:
            pass
        gc.collect()
        assert len(parked) == 2
        assert consumer._consumer.leases == 1
    fake.run_all()
    until(lambda: consumer._consumer.leases == 0)


def test_ctrl_c_while_waiting_for_two_devices(make: Any, fake: FakeDevices) -> None:
    frame = codec.plan({"a": BIG, "b": BIG + 1}).to_bytes()
    where = {"a": "meta:0", "b": "meta:1"}
    with fake.held():
        fake.interrupt_at = {"synchronize": 1}
        with pytest.raises(KeyboardInterrupt):
            Staging("auto", 1 << 30).read(codec.decoder(), frame, None, None, True, where, True)
        assert len(parked) == 2
    fake.run_all()
    until(lambda: not len(parked))


def test_no_thread_to_let_go(fake: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` does it meanwhile, and the next one that is parked finds a thread again."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    own = Parked()
    side = fake.side_stream(0, "out")
    with fake.held():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            for _ in range(2):
                own.park(fake, fake.record(side, 0), object())
        assert len(own) == 2
    fake.run_all()
    own.poll()
    assert not len(own)
    own.park(fake, fake.record(side, 0), object())
    until(lambda: not len(own))
    until(lambda: own._thread is None)
