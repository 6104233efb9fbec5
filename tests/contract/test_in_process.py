"""InProcessConnector keeps the contract, apart from what handing over by reference makes different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from contract.connector_contract import TOPICS, Profile, suite
from support import payloads

BY_REFERENCE = "InProcess hands over by reference: exempt from 'may overwrite'"
ITS_SIZE = "its `size` is the sum of buffer bytes"
THE_OBJECT_ITSELF = "the object itself is handed over: there is nothing that it cannot carry"
NO_SHARED_MEMORY = "the object itself is handed over: it has no ring, no segments and no leases"


class InProcess(Profile):
    target = "omni_fastshm.connectors.in_process:InProcessConnector"
    no_settings = frozenset({"shm_threshold_bytes", "segment_bytes", "busy_wait_us"})
    may_overwrite = False
    exempt: ClassVar[dict[str, str]] = {
        "test_after_put_the_caller_may_overwrite": BY_REFERENCE,
        "test_what_a_taker_writes_does_not_come_back_to_the_sender": BY_REFERENCE,
        "test_one_that_is_put_twice_is_copied_the_second_time": BY_REFERENCE,
        "test_through_another_connector_it_is_an_array_like_any_other": BY_REFERENCE,
        "test_an_array_of_several_takers_cannot_be_made_writable": BY_REFERENCE,
        "test_size_is_header_plus_buffers": ITS_SIZE,
        "test_size_counts_the_header_of_an_empty_payload": ITS_SIZE,
        "Refusals": THE_OBJECT_ITSELF,
        "test_what_cannot_be_carried_stops_it_and_leaves_the_rest": THE_OBJECT_ITSELF,
        "test_an_error_comes_out_of_the_future": THE_OBJECT_ITSELF,
        "test_after_a_refused_payload_it_is_still_a_loan": THE_OBJECT_ITSELF,
        "HostWire": THE_OBJECT_ITSELF,
        "Placement": NO_SHARED_MEMORY,
        "Release": NO_SHARED_MEMORY,
        "Growth": NO_SHARED_MEMORY,
        "test_several_takers_may_ask_for_views_of_tensors": NO_SHARED_MEMORY,
        "test_handing_over_takes_no_more_room": NO_SHARED_MEMORY,
        "test_one_that_is_dropped_is_freed": NO_SHARED_MEMORY,
        "test_no_room_is_an_error": NO_SHARED_MEMORY,
        "test_a_waiting_put_goes_on_when_a_view_dies": NO_SHARED_MEMORY,
        "test_after_it_leases_are_still_counted": NO_SHARED_MEMORY,
        "test_inline_bytes_with_one_byte_changed_or_cut_short": NO_SHARED_MEMORY,
        "test_busy_wait_may_be_zero": NO_SHARED_MEMORY,
        "test_numbers_in_the_forms_that_yaml_and_json_give": NO_SHARED_MEMORY,
        "test_a_null_threshold_is_the_default": NO_SHARED_MEMORY,
        "test_the_longest_namespace": NO_SHARED_MEMORY,
    }

    def puts_that_wait(self, connector: Any) -> int:
        return len(connector._queue)


globals().update(suite(InProcess, TOPICS))


class TestByReference:
    """What takes the place of the exempted promises."""

    def connector(self, connect: Callable[..., Any], **settings: Any) -> Any:
        from omni_fastshm.connectors.in_process import InProcessConnector

        return connect(InProcessConnector, **settings)

    def test_the_receiver_gets_the_very_object(self, connect: Callable[..., Any]) -> None:
        producer, consumer = self.connector(connect), self.connector(connect)
        payload = {"x": payloads.array(100_000), "anything": object()}
        _, _, metadata = producer.put("a", "b", "r", payload)
        assert consumer.get("a", "b", "r", metadata)[0] is payload

    def test_size_is_the_sum_of_buffer_bytes(self, connect: Callable[..., Any]) -> None:
        import torch

        connector = self.connector(connect)
        payload = [np.zeros(10), {"t": torch.zeros(4, 5, dtype=torch.bfloat16)}, b"abc", "text", 7]
        _, size, metadata = connector.put("a", "b", "r", payload)
        assert size == 80 + 40 + 3
        assert connector.get("a", "b", "r", metadata)[1] == size
        assert connector.put("a", "b", "r", {})[1] == 0

    def test_copy_true_gives_own_memory(self, connect: Callable[..., Any]) -> None:
        connector = self.connector(connect)
        mine = [payloads.array(100_000), [1, 2]]
        _, _, metadata = connector.put("a", "b", "r", mine)
        got = connector.get("a", "b", "r", metadata, copy=True)[0]
        got[0][:] = 0
        got[1].append(3)
        assert payloads.same(mine, [payloads.array(100_000), [1, 2]])

    def test_when_it_is_taken_the_connector_lets_go_of_it(self, connect: Callable[..., Any]) -> None:
        import weakref

        connector = self.connector(connect)
        array = payloads.array(100_000)
        watch = weakref.ref(array)
        _, _, metadata = connector.put("a", "b", "r", [array])
        del array
        got = connector.get("a", "b", "r", metadata)
        del got
        assert watch() is None
        connector.put("a", "b", "s", [payloads.array(8)])
        connector.cleanup("s")
        assert connector.health()["live_blocks"] == 0
