"""Two processes under a planned load: the ring stays within the plan, and the simulator says what it did."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from support.child import Children

from omni_fastshm.config import load_omni_transfer_config
from omni_fastshm.simulation import Arrival, simulate
from omni_fastshm.sizing import Load, make_plan

SIZE, RATE, HOLD_S, SECONDS = 200_000, 100.0, 0.1, 3.0

PRODUCE = """
import pickle, time
out = open(path, 'wb', buffering=0)
data, sent = np.zeros(size, np.uint8), []
begin = time.monotonic()
for number, moment in enumerate(moments):
    time.sleep(max(begin + moment - time.monotonic(), 0))
    began = time.monotonic()
    ok, _, metadata = c.put('a', 'b', number, data)
    sent.append((began, ok))
    pickle.dump((number, metadata), out)
out.close()
result = sent
"""

# Looks after the views that are due before it waits for the next payload, as a stage's loop would.
CONSUME = """
import heapq, pickle, select, time
source = open(path, 'rb', buffering=0)
emit('open')
held, dropped, ended = [], {}, False
while held or not ended:
    left = max(held[0][0] - time.monotonic(), 0) if held else None
    if not ended and select.select([source], [], [], left)[0]:
        try:
            number, metadata = pickle.load(source)
        except EOFError:
            ended = True
            continue
        view = c.get('a', 'b', number, metadata)[0]
        heapq.heappush(held, (time.monotonic() + hold_s, number, view))
        del view
    elif ended and held:
        time.sleep(left)
    while held and held[0][0] <= time.monotonic():
        number = heapq.heappop(held)[1]
        dropped[number] = time.monotonic()
source.close()
result = dropped
"""


def test_the_plan_holds(children: Children, tmp_path: Path) -> None:
    file, path = tmp_path / "pipeline.json", str(tmp_path / "metadata")
    stages = [{"stage_id": "a"}, {"stage_id": "b", "engine_input_source": ["a"]}]
    file.write_text(json.dumps({"stage_args": stages}))
    plan = make_plan(load_omni_transfer_config(file), {("a", "b"): Load(RATE, HOLD_S, SIZE)}, risk=1e-4)
    (ring,) = plan.rings
    chosen = {key: ring.settings[key] for key in ("segment_bytes", "max_bytes", "put_timeout_s", "idle_segment_s")}
    chance, moments = random.Random(1), [0.0]
    while moments[-1] < SECONDS:
        moments.append(moments[-1] + chance.expovariate(RATE))

    os.mkfifo(path)
    producer, consumer = children.with_connector(**chosen), children.with_connector()
    producer.start(PRODUCE, path=path, size=SIZE, moments=moments)
    consumer.start(CONSUME, path=path, hold_s=HOLD_S)
    assert consumer.event() == "open"
    sent, dropped = producer.finish(), consumer.finish()
    health = producer.run("result = c.health()")

    assert [ok for _, ok in sent] == [True] * len(moments)
    assert health["refused"] == 0
    assert len(dropped) == len(moments)
    frame = health["bytes_transferred"] // len(moments)
    # What was really held, which on a busy machine is longer than planned: Little's law on what happened.
    holds = [dropped[number] - began for number, (began, _) in enumerate(sent)]
    lasted = max(dropped.values()) - sent[0][0]
    mean = sum(holds) / lasted
    assert mean * frame <= health["high_water_bytes"] <= ring.max_bytes
    result = replay(sent, holds, frame, chosen)
    # The producer finds free blocks a few at a time, when it puts: so many more can be in use for a moment.
    assert result.high_water <= health["high_water_bytes"] <= result.high_water + 12 * frame


def replay(sent: list[tuple[float, bool]], holds: list[float], size: int, settings: dict[str, Any]) -> Any:
    """The same arrivals and times against the simulator's ring."""
    first = sent[0][0]
    trace = [Arrival(began - first, ("a", "b"), size, hold) for (began, _), hold in zip(sent, holds, strict=True)]
    (result,) = simulate({("a", ("b",)): settings}, trace)
    assert result.edges["b"].refused == 0
    return result
