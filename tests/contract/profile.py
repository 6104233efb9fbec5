"""What a connector brings along to be held to the contract."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest


class Profile:
    """A connector under test.

    Attributes:
        target: ``module:Class`` of the connector.
        base_settings: settings that keep the tests small and quick.
        no_settings: settings of the contract's tests that have no meaning for this connector; left out.
        may_overwrite: the caller may write to its data after `put`.
        exempt: names of topics or tests that do not apply, each with the promise's own words that exempt it.
    """

    target: ClassVar[str]
    base_settings: ClassVar[dict[str, Any]] = {}
    no_settings: ClassVar[frozenset[str]] = frozenset()
    may_overwrite: ClassVar[bool] = True
    exempt: ClassVar[dict[str, str]] = {}

    def puts_that_wait(self, connector: Any) -> int:
        """How many puts stand in line for room."""
        raise NotImplementedError


class Topic:
    """Base of the classes that hold the contract's tests; `suite` joins them with a profile."""

    target: ClassVar[str]
    base_settings: ClassVar[dict[str, Any]]
    no_settings: ClassVar[frozenset[str]]
    may_overwrite: ClassVar[bool]
    puts_that_wait: Callable[[Any], int]

    @pytest.fixture(autouse=True)
    def _bind(self, connect: Callable[..., Any], namespace: str) -> None:
        self._connect = connect
        self.namespace = namespace

    @classmethod
    def connector_class(cls) -> Any:
        module, name = cls.target.split(":")
        return getattr(importlib.import_module(module), name)

    def make(self, **settings: Any) -> Any:
        """A connector that is checked for leases and closed at the end of the test."""
        chosen = {name: value for name, value in settings.items() if name not in self.no_settings}
        return self._connect(self.connector_class(), **{**self.base_settings, **chosen})

    def pair(self, **settings: Any) -> tuple[Any, Any]:
        """A producing and a consuming endpoint."""
        return self.make(**settings), self.make(**settings)

    def keyed(self, **settings: Any) -> Any:
        """A connector whose payloads can be got by edge and request id alone."""
        return self.make(key_lookup=True, namespace=self.namespace, **settings)


def suite(profile: type[Profile], topics: list[type[Topic]]) -> dict[str, type]:
    """The test classes of one connector, by name.

    Raises:
        AssertionError: the profile exempts from a test that does not exist.
    """
    made: dict[str, type] = {}
    used: set[str] = set()
    for topic in topics:
        if topic.__name__ in profile.exempt:
            used.add(topic.__name__)
            continue
        # None in place of the inherited method is how pytest is told that a class does not have it.
        removed = {name: None for name in profile.exempt if hasattr(topic, name)}
        used |= set(removed)
        name = f"Test{topic.__name__}"
        made[name] = type(name, (profile, topic), removed)
    unknown = set(profile.exempt) - used
    assert not unknown, f"{profile.__name__} is exempt from what the contract does not have: {unknown}"
    return made
