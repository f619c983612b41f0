"""A prompt whose KV is over --max-kv-transfer-bytes is refused at once, and no worker sees it."""

from __future__ import annotations

from pathlib import Path

import httpx

from scripts.tcp_client import connect
from tests.cluster import Cluster
from wire.errors import ErrorCode
from wire.frames import ANY_RANK, DecodeRequest, Error, PrefillRequest
from wire.options import Options
from wire.payloads import ErrorDetail, decode_map, encode_prompt

TOKEN_BYTES = 64  # of the hash executor
LIMIT = 100 * TOKEN_BYTES


async def test_http_and_tcp_refuse_a_kv_cache_over_the_limit(tmp_path: Path) -> None:
    args = ("--max-kv-transfer-bytes", str(LIMIT))
    with Cluster(tmp_path, executor="hash", args=args) as cluster:
        body = {"prompt": [1] * 101, "max_tokens": 4, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
            response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "kv_transfer_too_large"
        assert str(101 * TOKEN_BYTES) in error["message"] and str(LIMIT) in error["message"]

        client = await connect(*cluster.tcp)
        client.send(PrefillRequest(7, 101, ANY_RANK), encode_prompt([1] * 101, Options()))
        client.send(DecodeRequest(7, 4))
        message = await anext(aiter(client))
        assert isinstance(message.frame, Error)
        assert message.frame.request_id == 7
        assert message.frame.code == ErrorCode.KV_TRANSFER_TOO_LARGE
        assert str(LIMIT) in decode_map(ErrorDetail, message.body()).message
        await client.close()

        status = cluster.until_idle()
        assert [worker["step"] for worker in status["workers"]] == [0, 0]

        body["prompt"] = [1] * 100
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
            assert (await http.post("/v1/completions", json=body)).status_code == 200
