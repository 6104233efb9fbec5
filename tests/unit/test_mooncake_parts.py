"""The small parts under MooncakeConnector: names, records, settings, sentences for installations, addresses."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
from typing import Any

import pytest
from support.child import environment

from omni_fastshm.connectors import _mooncake_codes as codes
from omni_fastshm.connectors._mooncake_keys import POINTER_BYTES, Item, Names, read_pointer, unit, write_pointer
from omni_fastshm.connectors._mooncake_ledger import Ledger, Room
from omni_fastshm.connectors._mooncake_net import (
    is_own_address,
    own_address,
    shortest_timeout_s,
    split_address,
    wait_for_master,
)
from omni_fastshm.connectors._mooncake_settings import endpoint_of
from omni_fastshm.connectors.mooncake import SETTINGS, MooncakeConnector
from omni_fastshm.errors import ConfigError
from omni_fastshm.factory import ConnectorSpec, OmniConnectorFactory
from omni_fastshm.settings import parse_settings

ODD = [
    "r",
    "r/1",
    "r_to_b",
    "a b",
    "ü✓",
    "",
    "%2F",
    "x" * 150,
    "x" * 5000,
    "x" * 5001,
    "é" * 300,
    "a\x00b",
    "..",
    "!",
    "~",
    "^.*$",
]


def item(edge: tuple[str, str] = ("a", "b"), request: str = "r", takers: int = 1, **more: Any) -> Item:
    return Item(edge, request, more.pop("nonce", "0123456789abcdef"), more.pop("size", 100), takers)


class TestNames:
    def test_the_key_says_what_it_is(self) -> None:
        names = Names("ns")
        assert names.payload(item()) == "omnifs/ns/p/r/a_to_b/0123456789abcdef"
        assert names.pointer(("a", "b"), "r") == "omnifs/ns/k/r/a_to_b"
        assert names.tokens(item(takers=3)) == [f"omnifs/ns/t/r/a_to_b/0123456789abcdef/{n}" for n in (1, 2)]
        assert names.tokens(item()) == []

    def test_no_two_requests_or_edges_have_one_key(self) -> None:
        stages = ["a", "b", "a_to_b", "b_to_a", "a_to", "to_b", "_to_", "_", "a/b"]
        edges = [(one, two) for one in stages for two in stages if one != two]
        keys = {Names("n").pointer(edge, request) for edge in edges for request in ODD}
        assert len(keys) == len(edges) * len(ODD)
        assert max(map(len, keys)) < 700
        assert all(key.isascii() and key.isprintable() for key in keys)

    def test_a_pattern_finds_its_request_and_no_other(self) -> None:
        names = Names("a-b_c")
        for request in ODD:
            tokens, rest = (re.compile(pattern) for pattern in names.request_patterns(request))
            for other in ODD:
                one = item(request=other, takers=2)
                assert bool(tokens.search(names.tokens(one)[0])) == (request == other)
                assert bool(rest.search(names.payload(one))) == (request == other)
                assert bool(rest.search(names.pointer(one.edge, other))) == (request == other)
                assert not rest.search(names.tokens(one)[0])
                assert not rest.search(Names("a-b_cx").payload(one))

    def test_pointers(self) -> None:
        rng, names = random.Random(2), Names("n")
        for _ in range(200):
            one = item(nonce=names.new_nonce(), size=rng.randrange(2**62), takers=rng.randrange(1, 256))
            raw = write_pointer(one)
            assert len(raw) == POINTER_BYTES
            assert read_pointer(raw, one.edge, one.request) == one
            at = rng.randrange(44)
            assert (
                read_pointer(raw[:at] + bytes([raw[at] ^ (1 + rng.randrange(255))]) + raw[at + 1 :], *one[:2]) is None
            )
        assert read_pointer(raw[:-1], *one[:2]) is None

    def test_nonces_are_all_different(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "secrets.randbits", lambda bits: 2**64 - 70_000
        )  # the upper bits change, and the number ends
        names = Names("n")
        nonces = [names.new_nonce() for _ in range(140_000)]
        assert len(set(nonces)) == len(nonces)
        assert all(map(Names.is_nonce, nonces))
        assert nonces[0] == f"{2**64 - 70_000:016x}"

    def test_units(self) -> None:
        assert [unit(n) for n in (0, 1, 63, 64, 65, 2**62)] == [0, 64, 64, 64, 128, 2**62]


class TestLedger:
    def test_room_is_what_no_item_has(self) -> None:
        ledger = Ledger(Room(0), 1000)
        one = item(size=600)
        assert ledger.add(one, one.stored)
        assert not ledger.add(item(nonce="1" * 16, size=400), 448)
        assert (ledger.used, ledger.free, len(ledger)) == (one.stored, 1000 - one.stored, 1)
        assert ledger.drop([one.nonce, "other"]) == 1
        assert ledger.drop([one.nonce]) == 0
        assert (ledger.used, ledger.free, len(ledger)) == (0, 1000, 0)

    def test_what_is_on_its_way_has_room_and_is_not_looked_for(self) -> None:
        ledger = Ledger(Room(0), 1000)
        one, again = item(), item(nonce="2" * 16)
        ledger.under_way[one.nonce] = 1
        ledger.add(one, one.stored)
        assert (ledger.items(), ledger.used) == ([], one.stored)
        ledger.rename(one, again)
        assert (ledger.items(), ledger.used, len(ledger)) == ([], one.stored, 1)
        ledger.under_way.clear()
        assert ledger.items() == ledger.items("r") == [again]
        assert ledger.items("other") == []

    def test_who_waits_comes_before_who_comes_later(self) -> None:
        ledger = Ledger(Room(0), 1000)
        ledger.queue("first")
        ledger.queue("second")
        assert not ledger.add(item(), 10), "somebody waits"
        assert ledger.is_first("first")
        ledger.leave("first")
        assert ledger.is_first("second")
        assert ledger.add(item(), 10, in_line=True)
        ledger.leave("second")
        ledger.leave("second")
        assert ledger.add(item(nonce="3" * 16), 10)

    def test_connectors_of_one_client_fill_its_segment_together(self) -> None:
        room = Room(1000)
        one, other, with_limit, without = Ledger(room), Ledger(room), Ledger(room, 5000), Ledger(room, bounded=False)
        assert (one.most, other.most, with_limit.most, without.most) == (1000, 1000, 5000, None)
        assert one.add(item(), 600)
        assert not other.add(item(), 600)
        assert other.free == 400
        assert with_limit.add(item(), 4000), "it may use other nodes' memory: its limit says so"
        assert without.add(item(), 10**12)
        for ledger in (one, with_limit, without):
            ledger.drop([item().nonce])
            ledger.retire()
        assert other.add(item(), 1000)

    def test_nothing_stays_reserved_after_an_interruption(self) -> None:
        ledger = Ledger(Room(0), 1000)
        one = item(size=600)
        ledger._items[one.nonce] = one  # where a signal handler may raise in `add`
        ledger.drop([one.nonce])
        ledger.recount()
        assert (ledger.used, ledger.free) == (0, 1000)

    def test_looks_are_spread(self) -> None:
        ledger, looks = Ledger(Room(0)), 0
        for n in range(10_000):
            ledger.add(item(nonce=f"{n:016x}"), 128)
            if ledger.sweep_due:
                looks += 1
                ledger.swept()
        assert 5 < looks < 12


class TestSettings:
    def test_as_users_write_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NODE", "10.0.0.7")
        monkeypatch.setenv("SIZE", "2GiB")
        values = parse_settings(
            "M",
            SETTINGS,
            {"master": "$NODE:50051", "host": "${NODE}", "segment": "512MB", "localbuf": "$SIZE", "get_timeout_s": 5},
        )
        assert values["master"] == "10.0.0.7:50051"
        assert values["host"] == "10.0.0.7"
        assert values["segment"] == 512 << 20
        assert values["localbuf"] == 2 << 30
        assert values["metadata_server"] == "P2PHANDSHAKE"
        assert (values["proto"], values["rdma"], values["hard_pin"]) == ("tcp", "", True)

    @pytest.mark.parametrize(
        ("text", "size"),
        [("64k", 65536), ("1.5 MB", 3 << 19), ("16777216", 1 << 24), (1 << 24, 1 << 24), ("1TiB", 1 << 40), (0, 0)],
    )
    def test_sizes(self, text: Any, size: int) -> None:
        assert parse_settings("M", SETTINGS, {"segment": text})["segment"] == size

    @pytest.mark.parametrize("text", ["", "MB", "12 XB", "-5MB", "1e400", True, [1], "nan", "0x10"])
    def test_what_is_no_size(self, text: Any) -> None:
        with pytest.raises(ConfigError, match="segment"):
            parse_settings("M", SETTINGS, {"segment": text})

    def test_a_variable_that_is_not_set_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_SUCH", raising=False)
        monkeypatch.setenv("EMPTY", "")
        with pytest.raises(ConfigError, match="variable NO_SUCH, which is not set"):
            parse_settings("M", SETTINGS, {"master": "$NO_SUCH:1"})
        with pytest.raises(ConfigError, match="variable EMPTY"):
            parse_settings("M", SETTINGS, {"master": "${EMPTY}"})

    @pytest.mark.parametrize(
        ("extra", "word"),
        [
            ({}, "master: must be given"),
            ({"master": "h:1", "segment": "1MB"}, "the least is 16777216"),
            ({"master": "h:1", "localbuf": 0}, "localbuf: 0"),
            ({"master": "h:1", "proto": "udp"}, "proto"),
            ({"master": "h:1", "get_timeout_s": 0.5}, "get_timeout_s"),
            ({"master": "h:1", "sgement": 0}, "did you mean 'segment'"),
        ],
    )
    def test_what_cannot_be(self, extra: Any, word: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(word)):
            MooncakeConnector(extra)

    @pytest.mark.parametrize(
        ("host", "named", "warned"),
        [
            ("127.0.0.1", "127.0.0.1", False),
            ("127.0.0.1:23456", "127.0.0.1:23456", False),
            (" 127.0.0.1\n", "127.0.0.1", False),
            ("", "127.0.0.1", False),
            ("192.0.2.1", "192.0.2.1", True),
            ("192.0.2.1:1", "192.0.2.1:1", True),
        ],
    )
    def test_the_address_of_this_node(self, host: str, named: str, warned: bool, caplog: Any) -> None:
        settings = parse_settings("M", SETTINGS, {"master": "127.0.0.1:1", "host": host})
        assert endpoint_of(settings).host == named
        assert ("no address of this machine" in caplog.text) == warned

    def test_both_names_build_it_and_share_its_settings(self) -> None:
        for name in ("MooncakeConnector", "MooncakeStoreConnector"):
            assert OmniConnectorFactory.settings_of(name) is SETTINGS
            with pytest.raises(ConfigError, match="master: must be given"):
                OmniConnectorFactory.create_connector(ConnectorSpec(name))


class TestInstallation:
    """What a user reads when something is missing."""

    def sentence(
        self, error: ImportError, monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str] | None = None
    ) -> str:
        installed = {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"} if wheels is None else wheels

        def refuse(name: str) -> Any:
            raise error

        def version(name: str) -> str:
            if name not in installed:
                raise codes.importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(codes.importlib, "import_module", refuse)
        monkeypatch.setattr(codes.importlib.metadata, "version", version)
        with pytest.raises(ConfigError) as caught:
            codes.import_store()
        assert caught.value.__cause__ is error
        return str(caught.value)

    def test_nothing_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.sentence(ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), monkeypatch)
        assert text == (
            "MooncakeConnector: the package 'mooncake' is not installed: pip install 'omni-fastshm[mooncake]', "
            "in a checkout '.[mooncake]'"
        )

    @pytest.mark.parametrize("library", ["libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"])
    def test_a_library_of_the_system(self, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.sentence(
            ImportError(f"{library}: cannot open shared object file: No such file or directory"), monkeypatch
        )
        assert f"mooncake-transfer-engine-non-cuda 0.3.13.post1 needs {library}" in text
        assert "apt-get install libibverbs1 libnuma1 libcurl4" in text

    def test_the_cuda_wheel_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.sentence(
            ImportError("libcuda.so.1: cannot open shared object file: No such file or directory"),
            monkeypatch,
            {"mooncake-transfer-engine": "0.3.13.post1"},
        )
        assert "mooncake-transfer-engine 0.3.13.post1 needs NVIDIA's driver (libcuda.so.1)" in text
        assert "non-cuda" in text

    def test_the_broken_releases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.sentence(
            ImportError("libcudart.so.12: cannot open shared object file: No such file or directory"),
            monkeypatch,
            {"mooncake-transfer-engine-non-cuda": "0.3.12"},
        )
        assert "mooncake-transfer-engine-non-cuda 0.3.12 needs the CUDA runtime" in text
        assert ">=0.3.13.post1" in text

    def test_anything_else_is_told_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.sentence(ImportError("undefined symbol: x"), monkeypatch, {})
        assert text.endswith("the package 'mooncake' cannot be loaded: undefined symbol: x")
        text = self.sentence(
            ImportError("libfoo.so.3: cannot open shared object file: No such file or directory"), monkeypatch
        )
        assert "libfoo.so.3 of the system" in text

    def test_two_wheels_at_once_are_both_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both = {"mooncake-transfer-engine": "0.3.12", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
        assert " and " in self.sentence(ImportError("libcuda.so.1: cannot open shared object file"), monkeypatch, both)

    def test_a_release_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Old:
            def remove(self, key: str) -> int:
                """remove(self, arg0: str) -> int"""
                return 0

        module = type("module", (), {"MooncakeDistributedStore": Old})
        monkeypatch.setattr(codes.importlib, "import_module", lambda name: module)
        with pytest.raises(ConfigError, match="is too old"):
            codes.import_store()

    def test_the_module_imports_nothing_heavy(self) -> None:
        code = (
            "import sys, omni_fastshm.connectors.mooncake as m\n"
            "print(*[n for n in ('mooncake', 'torch', 'numpy', 'requests', 'aiohttp') if n in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=150, check=True
        )
        assert done.stdout.split() == []

    @pytest.mark.parametrize("release", ["0.3.10.post2", "0.3.11", "0.3.13.post1"])
    def test_pins_of_the_releases(self, release: str) -> None:
        from omni_fastshm.connectors._mooncake_session import _pin

        fields = {
            "0.3.10.post2": {"with_hard_pin": False, "with_soft_pin": False},
            "0.3.11": {"with_soft_pin": False},
            "0.3.13.post1": {"soft_pin_action": None},
        }[release]
        config = type("Config", (), dict(fields))()
        module = type("module", (), {"SoftPinAction": type("SoftPinAction", (), {"ENABLE": "enable"})})
        _pin(module, config)
        assert [getattr(config, name) for name in fields] in ([True, False], [True], ["enable"])


def test_what_is_set_for_one_process_is_not_the_users_in_its_children() -> None:
    """The store reads its timeouts from the environment, and stages are children of whoever had a connector."""
    code = (
        "import os, subprocess, sys\n"
        "from omni_fastshm.connectors._mooncake_net import prepare_environment\n"
        "prepare_environment(float(sys.argv[1]))\n"
        "print(os.environ['MC_TCP_STATUS_TIMEOUT_SEC'], os.environ['MC_RPC_TIMEOUT_MS'], flush=True)\n"
        "if sys.argv[2:]: subprocess.run([sys.executable, '-c', sys.argv[2], '1.5'], check=True)"
    )
    clean = {name: text for name, text in environment().items() if not name.startswith(("MC_", "OMNI_FASTSHM_SET"))}
    done = subprocess.run(
        [sys.executable, "-c", code, "30", code],
        env={**clean, "MC_RPC_TIMEOUT_MS": "777"},
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert [line.split() for line in done.stdout.splitlines()] == [["30", "777"], ["2", "777"]]


class TestNet:
    def test_the_shortest_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in (
            ("MC_RPC_TIMEOUT_MS", "2500"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "none"),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "4"),
        ):
            monkeypatch.setenv(name, text)
        assert shortest_timeout_s() == 2.5
        monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
        assert shortest_timeout_s() == 1
        monkeypatch.delenv("MC_TCP_STATUS_TIMEOUT_SEC")
        monkeypatch.delenv("MC_RPC_TIMEOUT_MS")
        assert shortest_timeout_s() > 0, "unknown, and everything is late at once"

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("127.0.0.1:50051", ("127.0.0.1", 50051)),
            ("host.example:1", ("host.example", 1)),
            ("[::1]:5", ("::1", 5)),
            ("etcd://a:1;b:2", None),
            ("host", None),
            ("host:0", None),
            ("host:99999", None),
            (":5", None),
        ],
    )
    def test_addresses(self, text: str, parts: Any) -> None:
        assert split_address(text) == parts

    @pytest.mark.parametrize("master", ["localhost", "http://localhost:50051", "a:b", "host:", ":50051", "h:1:2"])
    def test_a_master_that_is_not_host_and_port_is_told_at_once(self, master: str) -> None:
        with pytest.raises(ConfigError, match="host:port"):
            MooncakeConnector({"master": master})

    def test_the_own_address_is_the_one_towards_the_master(self) -> None:
        assert own_address("127.0.0.1:50051") == "127.0.0.1"
        assert own_address("no-such-host.invalid:1") == "127.0.0.1"
        assert is_own_address("127.0.0.1")
        assert not is_own_address("192.0.2.1")

    def test_a_port_that_nobody_listens_on(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert not wait_for_master(address, 0)
            listener.listen()
            assert wait_for_master(address, 0)
        assert wait_for_master("etcd://whatever", 0)
