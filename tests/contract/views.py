"""A view keeps its bytes, and gives its block back when the last of it dies."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.profile import Topic
from support import leftovers, payloads

from omni_fastshm.errors import CodecError, ConfigError

NBYTES = 100_000


def churn(producer: Any, consumer: Any, rounds: int = 60, nbytes: int = NBYTES) -> None:
    """Use the ring for other payloads, so that space given back too early would be overwritten."""
    for n in range(rounds):
        ok, _, metadata = producer.put("a", "b", f"churn-{n}", np.full(nbytes, 255, np.uint8))
        assert ok
        assert consumer.get("a", "b", f"churn-{n}", metadata)


class Lifetime(Topic):
    """Whatever happens meanwhile."""

    def view(self, takers: int = 1, **settings: Any) -> tuple[Any, Any, Any]:
        producer, consumer = self.pair(**settings)
        _, _, metadata = producer.put("a", "b", "r", {"a": payloads.array(NBYTES)}, consumers=takers)
        return producer, consumer, consumer.get("a", "b", "r", metadata)[0]

    def test_a_slice_keeps_its_bytes_after_everything_else_went(self) -> None:
        import torch

        producer, consumer, got = self.view()
        array = got.pop("a")
        part, shared = array[5:10], torch.from_numpy(array)
        reshaped = array[:100].reshape(10, 10).T
        del array, got
        producer.cleanup("r")
        churn(producer, consumer)
        consumer.close()
        producer.close()
        other, another = self.pair()
        churn(other, another, rounds=200)

        assert payloads.same(part, payloads.array(NBYTES)[5:10])
        assert torch.equal(shared, torch.from_numpy(payloads.array(NBYTES)))
        assert payloads.same(np.ascontiguousarray(reshaped.T).ravel(), payloads.array(NBYTES)[:100])
        del part, shared, reshaped

    def test_a_tensor_and_its_parts_keep_their_bytes(self) -> None:
        import torch

        producer, consumer = self.pair()
        sent = torch.arange(60_000).to(torch.bfloat16).view(300, 200)
        _, _, metadata = producer.put("a", "b", "r", [sent])
        tensor = consumer.get("a", "b", "r", metadata)[0][0]
        row, column, flat = tensor[7], tensor[:, 3], tensor.view(-1)[100:200].view(torch.int16)
        del tensor
        churn(producer, consumer)
        consumer.close()
        producer.close()

        assert torch.equal(row, sent[7])
        assert torch.equal(column, sent[:, 3])
        assert torch.equal(flat, sent.view(-1)[100:200].view(torch.int16))

    def test_bytes_keep_their_value(self) -> None:
        producer, consumer = self.pair()
        raw = bytes(range(256)) * 1000
        _, _, metadata = producer.put("a", "b", "r", {"raw": raw})
        got = consumer.get("a", "b", "r", metadata)[0]["raw"]
        churn(producer, consumer)
        assert got == raw
        assert type(got) is bytes

    def test_cleanup_and_a_new_payload_under_the_id_change_nothing(self) -> None:
        producer, consumer, got = self.view()
        consumer.cleanup("r")
        producer.put("a", "b", "r", {"a": payloads.array(NBYTES, 9)})
        churn(producer, consumer)
        assert payloads.same(got, {"a": payloads.array(NBYTES)})

    def test_names_removed_from_outside_change_nothing(self) -> None:
        producer, consumer, got = self.view()
        leftovers.remove(self.namespace)
        assert payloads.same(got, {"a": payloads.array(NBYTES)})
        del got
        consumer.close()
        producer.close()

    def test_many_views_at_once(self) -> None:
        producer, consumer = self.pair()
        held = []
        for n in range(40):
            _, _, metadata = producer.put("a", "b", n, payloads.array(NBYTES, n))
            held.append(consumer.get("a", "b", n, metadata)[0])
        churn(producer, consumer, rounds=30)
        assert all(payloads.same(view, payloads.array(NBYTES, n)) for n, view in enumerate(held))

    def test_a_view_can_be_pickled_and_copied(self) -> None:
        _, _, got = self.view()
        assert payloads.same(pickle.loads(pickle.dumps(got)), got)


class Release(Topic):
    """From reference counting alone, exactly when the last view dies."""

    def send(self, payload: Any, **options: Any) -> tuple[Any, Any, Callable[..., Any]]:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payload)
        return producer, consumer, lambda: consumer.get("a", "b", "r", metadata, **options)[0]

    def test_the_block_lives_as_long_as_the_last_view(self, no_gc: None) -> None:
        import torch

        producer, consumer, take = self.send({"a": payloads.array(NBYTES), "b": [payloads.array(NBYTES)]})
        got = take()
        assert consumer.health()["leases"] == 1
        part, shared = got["a"][3:4], torch.from_numpy(got["b"][0])[2:]
        del got
        assert consumer.health()["leases"] == 1
        assert producer.health()["live_blocks"] == 1
        del part
        assert producer.health()["live_blocks"] == 1
        del shared
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 0

    def test_a_whole_tree_makes_no_reference_cycles(self, no_gc: None) -> None:
        producer, consumer, take = self.send(payloads.tree())
        got = take()
        assert consumer.health()["leases"] == 1
        del got
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 0

    def test_a_payload_without_large_leaves_holds_nothing(self, no_gc: None) -> None:
        producer, consumer, take = self.send([payloads.array(3000, n) for n in range(30)])
        got = take()
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 0
        assert all(payloads.same(leaf, payloads.array(3000, n)) for n, leaf in enumerate(got))

    def test_a_kept_small_leaf_does_not_hold_the_block(self, no_gc: None) -> None:
        import torch

        _, consumer, take = self.send({"flag": torch.tensor([True]), "a": payloads.array(NBYTES)})
        flag = take()["flag"]
        assert consumer.health()["leases"] == 0
        assert flag.item() is True

    def test_small_leaves_have_a_storage_each(self) -> None:
        import torch

        _, _, take = self.send({"a": torch.zeros(10), "b": torch.zeros(10), "c": payloads.array(NBYTES)})
        got = take()
        assert got["a"].untyped_storage().nbytes() <= 64
        assert got["a"].untyped_storage().data_ptr() != got["b"].untyped_storage().data_ptr()

    def test_copy_true_gives_own_memory(self, no_gc: None) -> None:
        producer, consumer, take = self.send(payloads.tree(3), copy=True)
        got = take()
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 0
        churn(producer, consumer)
        assert payloads.same(got["large"], payloads.tree(3)["large"])
        got["large"][:] = 0
        assert got["large"].flags.writeable

    def test_copy_false_gives_views_also_for_small_leaves(self, no_gc: None) -> None:
        _, consumer, take = self.send({"flag": np.array([1, 2]), "a": payloads.array(NBYTES)}, copy=False)
        got = take()
        flag = got.pop("flag")
        del got
        assert consumer.health()["leases"] == 1
        assert flag.tolist() == [1, 2]
        del flag
        assert consumer.health()["leases"] == 0

    def test_copy_below_is_the_limit_of_what_is_copied(self, no_gc: None) -> None:
        payload = {"small": payloads.array(1000), "a": payloads.array(NBYTES)}
        for below, held in ((NBYTES, 0), (NBYTES - 1, 1), (0, 1)):
            consumer = self.make(copy_below=below)
            _, _, metadata = self.make().put("a", "b", "r", payload)
            got = consumer.get("a", "b", "r", metadata)[0]
            assert consumer.health()["leases"] == held
            small = got.pop("small")
            assert payloads.same(got.pop("a"), payloads.array(NBYTES))
            assert consumer.health()["leases"] == (1 if below == 0 else 0)
            del small

    def test_tensors_go_to_the_device_that_was_asked_for(self, no_gc: None) -> None:
        import torch

        producer, consumer, take = self.send({"t": torch.arange(50_000), "a": payloads.array(8)}, device="meta")
        got = take()
        assert got["t"].device.type == "meta"
        assert got["t"].shape == (50_000,)
        assert payloads.same(got["a"], payloads.array(8))
        assert consumer.health()["leases"] == 0, "an upload that is done still holds the block"
        assert producer.health()["live_blocks"] == 0
        _, _, metadata = producer.put("a", "b", "r", torch.arange(50_000))
        on_host = consumer.get("a", "b", "r", metadata, device="cpu")[0]
        assert torch.equal(on_host, torch.arange(50_000))

    def test_a_device_that_is_not_there_uses_nothing_up(self, no_gc: None) -> None:
        import torch

        producer, consumer, take = self.send({"t": torch.arange(50_000)}, device="no-device")
        for _ in range(3):
            with pytest.raises((ConfigError, CodecError), match="no-device"):
                take()
        gc.collect()
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 1
        consumer.cleanup("r")

    def test_one_lease_is_shared_by_all_takes_of_a_process(self, no_gc: None) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(NBYTES), consumers=3)
        held = [consumer.get("a", "b", "r", metadata)[0] for _ in range(3)]
        while held:
            assert producer.health()["live_blocks"] == 1
            assert payloads.same(held[-1], payloads.array(NBYTES))
            held.pop()
        assert producer.health()["live_blocks"] == 0
        assert consumer.health()["leases"] == 0

    def test_what_get_answers_with_an_error_holds_nothing(self, no_gc: None) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(NBYTES))
        for _ in range(20):
            with pytest.raises(ValueError):
                consumer.get("a", "b", "other", metadata)
        gc.collect()
        assert consumer.health()["leases"] == 0
        assert consumer.get("a", "b", "r", metadata)
        assert producer.health()["live_blocks"] == 0


class Writing(Topic):
    """One taker may write into what it got; several never see each other's changes."""

    def take(self, payload: Any, takers: int, **options: Any) -> list[Any]:
        producer, consumer = self.pair(shm_threshold_bytes=0)
        _, _, metadata = producer.put("a", "b", "r", payload, consumers=takers)
        return [consumer.get("a", "b", "r", metadata, **options)[0] for _ in range(takers)]

    @pytest.mark.parametrize("copy", [None, True, False])
    def test_one_taker_writes(self, copy: bool | None) -> None:
        import torch

        payload = [np.zeros(50_000), torch.zeros(50_000), np.zeros(3), torch.zeros(3)]
        got = self.take(payload, 1, copy=copy)[0]
        for leaf in got:
            leaf += 1
            assert bool((leaf == 1).all())
        got[1].add_(1)
        assert got[0].flags.writeable
        assert got[0].sum() == 50_000
        assert got[1].sum() == 100_000

    def test_of_several_takers_none_writes_into_an_array(self) -> None:
        first, second = self.take({"a": payloads.array(NBYTES)}, 2)
        with pytest.raises(ValueError, match="read-only"):
            first["a"][0] = 9
        assert payloads.same(second["a"], payloads.array(NBYTES))

    def test_an_array_of_several_takers_cannot_be_made_writable(self) -> None:
        first, _ = self.take({"a": payloads.array(NBYTES)}, 2)
        with pytest.raises(ValueError):
            first["a"].flags.writeable = True

    def test_several_takers_get_private_tensors(self) -> None:
        import torch

        first, second = self.take({"t": torch.arange(50_000)}, 2)
        first["t"].add_(1)
        assert torch.equal(second["t"], torch.arange(50_000))
        assert torch.equal(first["t"], torch.arange(50_000) + 1)

    def test_several_takers_may_ask_for_views_of_tensors(self) -> None:
        import torch

        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", {"t": torch.arange(50_000)}, consumers=2)
        got = consumer.get("a", "b", "r", metadata, copy=False)[0]
        assert consumer.health()["leases"] == 1
        assert torch.equal(got["t"], torch.arange(50_000))
        del got
        assert consumer.health()["leases"] == 0
        producer.cleanup("r")

    def test_several_takers_with_copies_write_each_for_itself(self) -> None:
        first, second = self.take({"a": payloads.array(NBYTES)}, 2, copy=True)
        first["a"][:] = 0
        assert payloads.same(second["a"], payloads.array(NBYTES))

    def test_what_a_taker_writes_does_not_come_back_to_the_sender(self) -> None:
        mine = payloads.array(NBYTES)
        got = self.take(mine, 1)[0]
        got[:] = 0
        assert payloads.same(mine, payloads.array(NBYTES))


TOPICS = [Lifetime, Release, Writing]
