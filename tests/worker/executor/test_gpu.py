"""The executor of a GPU on the shim: its steps are begun before those before them are read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from msgspec import structs

from scripts.models.make_model import make_model
from tests.kernels.shim.backend import why_not
from tests.worker.engine.hashed import of_kind, run
from tests.worker.gpu_on_cpu import executor_of, gpu_on_cpu
from tests.worker.paged import Text, batch_of
from wire.options import Options, Structure
from worker.compute import graphs
from worker.compute.graphs import fill_in
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.batch import PromptScores, Scoring
from worker.executor.contract import Drawer
from worker.executor.registry import create

BLOCK_SIZE, MAX_LEN = 8, 128


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, max_position_embeddings=MAX_LEN, eos_token_id=[5, 6])


@pytest.fixture
def shim() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    with gpu_on_cpu():
        yield


def told(engine: Engine) -> dict[int, list[tuple[int, str | None]]]:
    """Requests of all kinds, which come while others generate; return what is said of each."""
    draw = np.random.default_rng(7)
    outputs = []
    for request_id in range(9):
        options = Options(
            stop_token_ids=tuple(range(0, 256, 8)) if request_id % 2 else (),
            logprobs=0 if request_id == 4 else None,
            temperature=0.9 if request_id in (2, 7) else 0.0,
            seed=request_id,
        )
        prompt = draw.integers(10, 200, int(draw.integers(1, 20))).tolist()
        engine.add(Sequence(request_id, prompt, options, int(draw.integers(1, 25))))
        for _ in range(4):
            outputs += engine.step()
    tokens = of_kind([*outputs, *run(engine)], Token)
    return {
        request_id: [
            (it.token_id, it.finish_reason) for it in tokens if it.request_id == request_id
        ]
        for request_id in range(9)
    }


@pytest.mark.usefixtures("shim")
def test_steps_in_flight_give_the_same_text(path: Path) -> None:
    waiting, ahead = (Engine(executor_of(path), num_blocks=64, block_size=8) for _ in range(2))
    assert vars(ahead)["_drawer"] is not None
    vars(waiting)["_drawer"] = None
    want = told(waiting)
    assert told(ahead) == want
    assert {it[-1][1] for it in want.values()} == {"length", "stop"}


@pytest.mark.usefixtures("shim")
def test_a_step_reads_what_the_one_before_has_drawn(path: Path) -> None:
    """Rows change places, one has a known token, and the step is a graph or not."""
    known, fed = executor_of(path), executor_of(path)
    for executor in (known, fed):
        executor.allocate(64, BLOCK_SIZE)
    texts = [Text([9 + index, 30, 40 + index], [index], request_id=index) for index in range(3)]
    first = batch_of([(text, 3) for text in texts], BLOCK_SIZE)
    tokens = [it.token_id for it in known.sample(known.forward(first), first)]
    drawn = fed.draw(fed.forward(first), first)
    for text in texts:
        text.computed = 3
    new = Text([50, 60], [4], request_id=3)
    for count in (1, 2):  # two tokens of the new one are no step for a graph
        new.computed = 2 - count
        order = [(new, count), (texts[2], 1), (texts[0], 1)]
        for text, token in zip(texts, tokens, strict=True):
            text.token_ids[3:] = [token]
        batch = batch_of(order, BLOCK_SIZE)
        want = known.forward(batch).clone()
        for row, text in enumerate(texts):
            text.token_ids[3:] = [~row]
        got = fed.forward(batch_of(order, BLOCK_SIZE))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [it.token_id for it in drawn()] == tokens


def test_rows_that_the_device_can_draw(path: Path) -> None:
    executor = executor_of(path)
    plain = Text([5, 6], [0], options=Options())
    drawn = Text([5, 6], [1], options=Options(temperature=0.5, top_k=3, top_p=0.9, seed=4))
    assert executor.can_draw(batch_of([(plain, 2), (drawn, 2)], BLOCK_SIZE))
    assert not executor.can_draw(batch_of([(plain, 1)], BLOCK_SIZE)), "there is nothing to draw"
    asked: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"presence_penalty": 1.0},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 1},
        {"allowed_token_ids": (5,)},
        {"bad_sequences": ((5,),)},
    ]
    for options in asked:
        other = Text([5, 6], [1], options=Options(**options))
        batch = batch_of([(plain, 2), (other, 2)], BLOCK_SIZE)
        assert not executor.can_draw(batch), options
    batch = batch_of([(plain, 2)], BLOCK_SIZE)
    structured = executor.structured(Structure("regex", "a*"), 2)
    for sampling in ({"drafts": (5,)}, {"structured": structured}):
        samplings = tuple(structs.replace(it, **sampling) for it in batch.samplings)
        assert not executor.can_draw(replace(batch, samplings=samplings)), sampling
    scoring = Scoring(PromptScores(2, 0), [6], 0)
    assert not executor.can_draw(replace(batch, scorings=(scoring,)))


@pytest.mark.usefixtures("shim")
def test_steps_are_recorded_while_it_prepares_and_forgotten_at_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "SIZES", (1, 2))
    executor = executor_of(path)
    executor.allocate(64, BLOCK_SIZE)
    executor.prepare()
    made = vars(executor)["_graphs"]
    assert vars(made)["_recorded"].keys() == {1, 2}
    ended = ref(made)
    del made
    executor.shutdown()
    gc.collect()
    assert ended() is None


def test_ids_that_stand_for_drawn_tokens_are_filled_in() -> None:
    token_ids = torch.tensor([~2, 7, ~0, ~0, 0], dtype=torch.int32)
    fill_in(token_ids, torch.tensor([50, 51, 52], dtype=torch.int32))
    assert token_ids.tolist() == [52, 7, 50, 50, 0]


def test_only_a_gpu_is_asked_to_draw(path: Path) -> None:
    settings = {"model_path": path, "model_name": "tiny", "fingerprint": ""}
    assert not isinstance(create("torch", **settings, device="cpu"), Drawer)
    assert isinstance(executor_of(path), Drawer)
