"""What a reader in vllm-omni must see: our host profile, and the host's own serializer for what that does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from omni_fastshm.errors import CodecError

__all__ = ["Serializer", "Wire"]

# Dicts that the host's reader turns into something else. Any of these keys with a true value ...
_MARKERS = frozenset({"__tensor__", "__ndarray__", "__pil_image__"})
# ... or all of these keys. Of a result only the key that the others' dicts do not have is looked at: which class it
# becomes, if any, is for the host to decide.
_RESULTS = frozenset({"prompt_token_ids", "finish_reason", "final_output_type", "images"})
_TELLING = _MARKERS | _RESULTS


class Serializer(NamedTuple):
    """The host's serializer.

    Attributes:
        serialize: any object to bytes; raises for what it cannot carry.
        deserialize: the way back.
        revive: a decoded tree with the host's own classes in place of the dicts that stand for them.
    """

    serialize: Callable[[Any], bytes]
    deserialize: Callable[[Any], Any]
    revive: Callable[[Any], Any]


class Wire:
    """Payloads in an envelope: a list of the payload, or of the host's bytes for it and a mark.

    Args:
        serializer: the host's; None where it is not installed: then what our codec refuses is refused, and dicts stay
            dicts.
    """

    def __init__(self, serializer: Serializer | None) -> None:
        self._serializer = serializer

    def foreign(self, data: Any, refusal: CodecError) -> list[Any]:
        """The envelope of a payload that our codec has refused.

        Raises:
            CodecError: the host's serializer refuses it as well, or there is none.
        """
        why = f"payload{str(refusal).removeprefix('[0]')}"  # the place in the payload, not in its envelope
        if self._serializer is None:
            raise CodecError(why) from None
        try:
            return [self._serializer.serialize(data), True]
        except Exception as error:
            raise CodecError(f"{why}; the host's serializer: {type(error).__name__}: {error}") from None

    def open(self, envelope: Any) -> Any:
        """The payload out of its envelope, as the host's serializer would give it."""
        serializer = self._serializer
        if len(envelope) == 2:
            if serializer is None:
                raise CodecError("the payload was written by vllm-omni's serializer, which is not installed here")
            return serializer.deserialize(envelope[0])
        (data,) = envelope
        if serializer is not None and _stands_for_more(data):
            return serializer.revive(data)
        return data


def _stands_for_more(tree: Any) -> bool:
    """Is there a dict in it that the host's reader may turn into something else?"""
    waiting = [tree]
    for item in waiting:
        if type(item) is dict:
            if not _TELLING.isdisjoint(item):
                return True
            for value in item.values():
                if type(value) is dict or type(value) is list:
                    waiting.append(value)
        elif type(item) is list:
            kinds = set(map(type, item))  # token lists are long: look at each item only where it pays
            if dict in kinds or list in kinds:
                waiting += [each for each in item if type(each) is dict or type(each) is list]
    return False
