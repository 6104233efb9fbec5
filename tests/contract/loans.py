"""`allocate` lends memory to produce a payload in; `put` hands it over without a copy."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from contract.profile import Topic
from support import payloads

from omni_fastshm.errors import CodecError, ConfigError, ConnectorClosed, SegmentError

LONG = 25_000  # int64 elements: 200 kB


def filled(connector: Any, seed: int = 0) -> Any:
    loan = connector.allocate((LONG,), np.int64)
    loan[:] = payloads.array(8 * LONG, seed)
    return loan


def idle(connector: Any) -> bool:
    health = connector.health()
    return bool(health["live_blocks"] == 0 and health["used_bytes"] == 0)


class Loans(Topic):
    """Memory from `allocate`."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool", "complex64", "int64"])
    def test_a_torch_dtype_gives_a_tensor(self, dtype: str) -> None:
        import torch

        connector = self.make()
        loan = connector.allocate((100, 300), getattr(torch, dtype))
        assert type(loan) is torch.Tensor
        assert loan.dtype is getattr(torch, dtype)
        assert loan.shape == (100, 300)
        assert loan.is_contiguous()
        loan.fill_(1)
        _, _, metadata = connector.put("a", "b", "r", loan)
        del loan
        got = connector.get("a", "b", "r", metadata)[0]
        assert torch.equal(got, torch.ones(100, 300, dtype=getattr(torch, dtype)))

    @pytest.mark.parametrize("dtype", [np.float32, "int16", np.dtype("<f8"), "uint8", bool, "datetime64[s]"])
    def test_a_numpy_dtype_gives_an_array(self, dtype: Any) -> None:
        connector = self.make()
        loan = connector.allocate((50, 400), dtype)
        assert isinstance(loan, np.ndarray)
        assert loan.dtype == np.dtype(dtype)
        assert loan.shape == (50, 400)
        assert loan.flags.writeable
        assert loan.flags.c_contiguous
        loan[...] = np.ones((50, 400)).astype(dtype)
        want = loan.copy()
        _, _, metadata = connector.put("a", "b", "r", loan)
        del loan
        assert payloads.same(connector.get("a", "b", "r", metadata)[0], want)

    @pytest.mark.parametrize("shape", [7, (), (0,), (3, 0, 2), (1,), [5, 6], (1, 2, 3, 4, 5)], ids=repr)
    @pytest.mark.parametrize("kind", ["torch", "numpy"])
    def test_any_shape(self, shape: Any, kind: str) -> None:
        import torch

        connector = self.make(shm_threshold_bytes=0)
        loan = connector.allocate(shape, torch.float32 if kind == "torch" else np.float32)
        want = (shape,) if isinstance(shape, int) else tuple(shape)
        assert tuple(loan.shape) == want
        loan[...] = 2.5
        _, _, metadata = connector.put("a", "b", "r", {"x": loan})
        del loan
        got = connector.get("a", "b", "r", metadata)[0]["x"]
        assert tuple(got.shape) == want
        assert bool((got == 2.5).all())

    def test_it_is_handed_over_and_not_copied(self) -> None:
        producer, consumer = self.pair()
        loan = filled(producer)
        ok, size, metadata = producer.put("a", "b", "r", {"x": loan})
        assert ok
        # The promise forbids the sender to do this; here it shows that no copy was made.
        loan[3] = -77
        got, size_got = consumer.get("a", "b", "r", metadata)
        assert got["x"][3] == -77
        assert size == size_got
        assert size >= loan.nbytes

    def test_handing_over_takes_no_more_room(self) -> None:
        producer = self.make()
        loan = filled(producer)
        used = producer.health()["used_bytes"]
        assert used >= loan.nbytes
        producer.put("a", "b", "r", {"x": loan})
        assert producer.health()["used_bytes"] - used < 1000

    def test_size_counts_a_loan_like_any_buffer(self) -> None:
        connector = self.make()
        plain = connector.put("a", "b", "r", {"x": payloads.array(8 * LONG)})[1]
        lent = connector.put("a", "b", "r", {"x": filled(connector)})[1]
        assert lent >= 8 * LONG
        assert abs(lent - plain) < 200

    def test_anywhere_in_a_tree(self) -> None:
        import torch

        producer, consumer = self.pair()
        tensor = producer.allocate((300, 200), torch.bfloat16)
        tensor.fill_(3)
        tree = {"a": [1, (filled(producer, 1), payloads.array(90_000, 2))], "b": {"c": filled(producer, 3)}}
        _, _, metadata = producer.put("a", "b", "r", [tree, tensor, "end"])
        del tree, tensor

        got, tensor, end = consumer.get("a", "b", "r", metadata)[0]
        assert payloads.same(got["a"][1][0], payloads.array(8 * LONG, 1))
        assert payloads.same(got["a"][1][1], payloads.array(90_000, 2))
        assert payloads.same(got["b"]["c"], payloads.array(8 * LONG, 3))
        assert torch.equal(tensor, torch.full((300, 200), 3, dtype=torch.bfloat16))
        assert end == "end"
        del got, tensor
        assert idle(producer)

    def test_one_that_is_dropped_is_freed(self) -> None:
        connector = self.make()
        gc.disable()
        try:
            loan = filled(connector)
            part = loan[5:10]
            del loan
            assert not idle(connector)
            del part
            assert idle(connector)
        finally:
            gc.enable()
        for _ in range(500):  # 100 MB in all: more than the ring can hold at once
            filled(connector)
        assert idle(connector)

    def test_one_that_is_put_twice_is_copied_the_second_time(self) -> None:
        producer, consumer = self.pair()
        loan = filled(producer)
        one = producer.put("a", "b", "1", loan)[2]
        two = producer.put("a", "b", "2", loan)[2]
        del loan

        first = consumer.get("a", "b", "1", one)[0]
        first[:] = 0
        assert payloads.same(consumer.get("a", "b", "2", two)[0], payloads.array(8 * LONG))
        del first
        assert idle(producer)

    def test_one_that_stands_twice_in_one_payload(self) -> None:
        producer, consumer = self.pair()
        loan = filled(producer)
        _, _, metadata = producer.put("a", "b", "r", {"x": loan, "y": [loan]})
        del loan
        got = consumer.get("a", "b", "r", metadata)[0]
        assert payloads.same(got, {"x": payloads.array(8 * LONG), "y": [payloads.array(8 * LONG)]})
        del got
        assert idle(producer)

    def test_slices_of_loans(self) -> None:
        producer, consumer = self.pair()
        loan = filled(producer)
        want = payloads.array(8 * LONG)
        parts = [loan[100:20_000], loan[20_000:], loan[::2], loan[:12_000].reshape(100, 120).T]
        sent = [producer.put("a", "b", n, part)[2] for n, part in enumerate(parts)]
        del loan, parts
        filled(producer, 4)

        got = [consumer.get("a", "b", n, metadata)[0] for n, metadata in enumerate(sent)]
        assert payloads.same(got[0], want[100:20_000])
        assert payloads.same(got[1], want[20_000:])
        assert payloads.same(got[2], want[::2])
        assert np.array_equal(got[3], want[:12_000].reshape(100, 120).T)
        got.clear()
        assert idle(producer)

    def test_a_small_loan_arrives_too(self) -> None:
        producer, consumer = self.pair()
        loan = producer.allocate(10, "int64")
        loan[:] = range(10)
        _, _, metadata = producer.put("a", "b", "r", [loan])
        del loan
        assert consumer.get("a", "b", "r", metadata)[0][0].tolist() == list(range(10))
        assert idle(producer)

    def test_for_several_takers(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", filled(producer), consumers=2)
        got = [consumer.get("a", "b", "r", metadata)[0] for _ in range(2)]
        assert all(payloads.same(view, payloads.array(8 * LONG)) for view in got)
        assert consumer.get("a", "b", "r", metadata) is None
        got.clear()
        assert idle(producer)

    def test_through_another_connector_it_is_an_array_like_any_other(self) -> None:
        lender, sender = self.pair()
        loan = filled(lender)
        _, _, metadata = sender.put("a", "b", "r", loan)
        loan[:] = 0
        assert payloads.same(lender.get("a", "b", "r", metadata)[0], payloads.array(8 * LONG))
        del loan
        assert idle(lender)
        assert idle(sender)

    def test_a_received_view_can_be_sent_on(self) -> None:
        producer, consumer = self.pair()
        _, _, first = producer.put("a", "b", "r", filled(producer))
        view = consumer.get("a", "b", "r", first)[0]
        _, _, second = consumer.put("b", "c", "r", view)
        del view
        assert payloads.same(producer.get("b", "c", "r", second)[0], payloads.array(8 * LONG))
        assert idle(producer)
        assert idle(consumer)

    def test_after_a_refused_payload_it_is_still_a_loan(self) -> None:
        producer, consumer = self.pair()
        loan = filled(producer)
        with pytest.raises(CodecError):
            producer.put("a", "b", "r", [loan, object()])
        _, _, metadata = producer.put("a", "b", "r", loan)
        del loan
        got = consumer.get("a", "b", "r", metadata)[0]
        assert payloads.same(got, payloads.array(8 * LONG))
        del got
        assert idle(producer)

    def test_cleanup_frees_what_was_handed_over(self) -> None:
        producer, consumer = self.pair()
        producer.put("a", "b", "r", {"x": filled(producer), "y": filled(producer)})
        consumer.cleanup("r")
        assert idle(producer)

    def test_a_received_loan_keeps_its_bytes(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", {"x": filled(producer)})
        view = consumer.get("a", "b", "r", metadata)[0]["x"][10:20]
        for n in range(80):
            again = producer.put("a", "b", n, filled(producer, n))[2]
            assert consumer.get("a", "b", n, again)
        producer.close()
        consumer.close()
        assert payloads.same(view, payloads.array(8 * LONG)[10:20])

    def test_it_outlives_its_connector(self) -> None:
        connector = self.make()
        loan = filled(connector)
        connector.close()
        loan[:] = 7
        assert loan.sum() == 7 * LONG
        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", "r", loan)

    def test_no_room_is_an_error(self) -> None:
        connector = self.make(max_bytes=4 * payloads.MIB, put_timeout_s=0.1)
        with pytest.raises(SegmentError):
            connector.allocate(64 * payloads.MIB, np.uint8)
        assert idle(connector)

    def test_after_close_there_are_none(self) -> None:
        connector = self.make()
        connector.close()
        with pytest.raises(ConnectorClosed):
            connector.allocate(10, np.uint8)

    @pytest.mark.parametrize("shape", [-1, (2, -3), "ab", 1.5, (2.5,), None, True], ids=repr)
    def test_a_shape_that_is_none(self, shape: Any) -> None:
        with pytest.raises(ConfigError):
            self.make().allocate(shape, np.float32)

    @pytest.mark.parametrize("dtype", [object, "no dtype", "O", [("a", "O")], 7], ids=repr)
    def test_a_dtype_that_shared_memory_cannot_hold(self, dtype: Any) -> None:
        connector = self.make()
        with pytest.raises((ConfigError, CodecError)):
            connector.allocate(10, dtype)
        assert idle(connector)


TOPICS = [Loans]
