"""An engine with steps in flight generates the texts of one that waits for each step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scripts.models.make_model import make_model
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from tests.worker.gpu_on_cpu import executor_of, gpu_on_cpu
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.gpu import create


def text_parts(settings: Settings) -> dict[str, Part]:
    """The same requests with steps in flight and without."""
    return {"steps in flight": partial(_texts, settings)}


@contextmanager
def _executor(settings: Settings) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = make_model(Path(scratch), seed=1)
        if settings.backend == "cuda":
            yield create(model_path=path, model_name="in flight", fingerprint="", device="cuda")
        else:
            with gpu_on_cpu():
                yield executor_of(path)


def _texts(settings: Settings) -> Figures:
    draw = settings.random("in flight")
    requests = [
        ([draw.randrange(10, 200) for _ in range(draw.randint(1, 20))], draw.randint(1, 25))
        for _ in range(settings.size(40, 5))
    ]
    texts: list[list[tuple[int, int]]] = []
    for waits in (True, False):
        with _executor(settings) as executor:
            engine = Engine(executor, num_blocks=200, block_size=16)
            if waits:
                vars(engine)["_drawer"] = None
            tokens: list[tuple[int, int]] = []
            for request_id, (prompt, limit) in enumerate(requests):
                stops = tuple(range(0, 256, 8)) if request_id % 2 else ()
                options = Options(ignore_eos=True, stop_token_ids=stops)
                engine.add(Sequence(request_id, prompt, options, limit))
                tokens += [it for _ in range(3) for it in _stepped(engine)]
            while engine.has_work():
                tokens += _stepped(engine)
        texts.append(sorted(tokens, key=lambda it: it[0]))
    if texts[0] != texts[1]:
        raise Wrong("the texts of an engine that does not wait for steps differ")
    return {"tokens": len(texts[0])}


def _stepped(engine: Engine) -> list[tuple[int, int]]:
    return [(it.request_id, it.token_id) for it in engine.step() if isinstance(it, Token)]
