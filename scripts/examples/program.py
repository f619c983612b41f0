"""The engine in a program, without any network; run it in the root of a checkout:

python -m scripts.examples.program
"""

import asyncio

from scripts.examples.own_model import create
from wire.options import Options
from worker.embedded.serving import ServingEngine

prompt = [7, 8, 9, 10, 11, 7, 8]


async def main(serving: ServingEngine) -> None:
    result = await serving.submit_async(prompt, Options(max_tokens=5))
    print(result.finish_reason, result.token_ids)
    async for output in serving.stream(prompt, Options(max_tokens=5)):
        print(output.token_id, end=" ")
    print()


with ServingEngine(create()) as serving:  # a thread steps the engine
    asyncio.run(main(serving))

serving = ServingEngine(create())  # or you do
request_id = serving.submit(prompt, Options(max_tokens=5), callback=print)
while not serving.is_complete(request_id):
    serving.run_iteration()
print(serving.get_result(request_id), serving.metrics().executor.decode.p95_s)
