"""The scenes catch broken kernels: each mutation is one bug, and none may pass."""

from __future__ import annotations

import multiprocessing
from itertools import product

import pytest
import torch

from kernels.cuda.backend import source_text
from tests.kernels import draw_scenes
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
    wide_kernels,
)
from tests.kernels.rowwise_scenes import check_all
from tests.kernels.scenes import check, check_moves, heads_error, scene, sinks_of
from tests.kernels.shim.backend import GPU, HOPPER, Shim, why_not

ATTENTION = {
    "no barrier before a tile": ("    __syncthreads();  // all copies of", "    // all copies of"),
    "the wait is one group too weak": ("copies_wait<STAGES - 2>", "copies_wait<STAGES - 1>"),
    "numbers of blocks are not waited for": (
        "  copies_wait<0>();\n  __syncthreads();  // the block numbers",
        "  __syncthreads();  // the block numbers",
    ),
    "numbers of blocks are those of another tile": (
        "find(tile + 2 * (STAGES - 1))",
        "find(tile + STAGES)",
    ),
    "every tile is whole": ("const bool is_whole =", "const bool is_whole = true ||"),
    "whole tiles end one key too late": (
        "position_of(warp_row) + 1 &&",
        "position_of(warp_row) + 2 &&",
    ),
    "positions are those of the first rows": (
        "first_position + (first_row + row) / group;",
        "first_position + row / group;",
    ),
    "the second matrix has the first's rows": ("q_row + m * 16 * LD", "q_row"),
    "one key too many": ("key > position ||", "key > position + 1 ||"),
    "another head": ("{ return kv_head * group + ", "{ return group + "),
    "minus infinity unguarded": ("now == MINUS_INFINITY ? 0.f : now", "now"),
    "the sum is not rescaled": ("sum[h] * shrink[h] + added", "sum[h] + added"),
    "the ring is one short": ("load(tile + STAGES - 1);\n      f", "load(tile + STAGES);\n      f"),
    "a ragged tail of keys is left out": (
        "tile * BN < num_keys; tile",
        "(tile + 1) * BN < num_keys; tile",
    ),
    "rows past the last are written": (
        "(it.count < BM ? it.count : BM)",
        "BM",
    ),
    "parts of many rows overlap": ("kv_head) * BM + row) * LDO;", "kv_head) * 16 + row) * LDO;"),
    "the last part is left out": ("row), num_slots, stride", "row), num_slots - 1, stride"),
    "late copies fall into results": (
        "  copies_wait<0>();\n  __syncthreads();\n#pragma unroll",
        "  __syncthreads();\n#pragma unroll",
    ),
    "no fence before a ticket": (
        "  __threadfence();  // others see what this thread published before the ticket",
        "",
    ),
    "the first to arrive combines": (
        "atomicInc(ticket, num_slots - 1) == num_slots - 1",
        "atomicInc(ticket, num_slots - 1) == 0",
    ),
    "tickets are not reset": ("atomicInc(ticket, num_slots - 1)", "atomicInc(ticket, 1u << 31)"),
    "every head has the first sink": ("a.sinks[head] * LOG2_E", "a.sinks[0] * LOG2_E"),
    "every part counts the sink": (
        "KEYS_W, WM * LDO, d, MINUS_INFINITY)",
        "KEYS_W, WM * LDO, d, sink_of(a, it.head(row)))",
    ),
    "scores are capped before they are scaled": (
        "capped(a, s[i / 4][i % 4] * scale);",
        "scale * capped(a, s[i / 4][i % 4]);",
    ),
    "offsets into the pool have 32 bits": (
        "(long long)block[n] * block_size +",
        "(u32)block[n] * (u32)block_size +",
    ),
}
HOPPER_ATTENTION = {
    "barriers are used before they are made": ("__syncthreads();  // the barriers", "// the"),
    "a slot is filled before it is free": (
        "      barrier_wait(empty + half, phase_of(tile) ^ 1);\n",
        "",
    ),
    "a slot is free in the other phase": ("phase_of(tile) ^ 1);", "phase_of(tile));"),
    "phases are those of a ring of one": ("tile / STAGES % 2", "tile % 2"),
    "two lanes of a warp give a slot back": ("if (lane == 0) b", "if (lane < 2) b"),
    "half the copies fill a slot": ("full + thread, COPYING", "full + thread, COPYING / 2"),
    "products do not see copies": ("    show_copies();\n", ""),
    "operands are touched before scores": (
        "ROW;\n    products_begin();\n",
        "ROW;\n",
    ),
    "scores are not waited for": ("products_wait<1>();", "products_wait<2>();"),
    "values are given back before they are added": (
        "    products_wait<0>();\n    products_done<D / 8>(o);\n    release(tile - 1, true);\n",
        "    release(tile - 1, true);\n    products_wait<0>();\n    products_done<D / 8>(o);\n",
    ),
    "sums are scaled while values are added": (
        "    products_wait<0>();\n    products_done<D / 8>(o);\n    r",
        "    products_wait<1>();\n    products_done<D / 8>(o);\n    r",
    ),
    "results replace what is multiplied": ("__syncthreads();  // nobody multiplies", "// nobody"),
    "tiles begin anywhere": ("shared + (0u - shared_address(shared)) % (8 * ROW)", "shared"),
    "chunks are not permuted": ("(chunk % 8 ^ first % 8) * 16", "chunk % 8 * 16"),
    "one panel": ("chunk / 8 * PANEL +", ""),
    "scores are added to the last ones": ("at, 0), d > 0);", "at, 0), true);"),
    "a row is in its neighbour's block": ("* CHUNKS + n);", "* CHUNKS + (n ^ 1));"),
    "values past the end": ("key < key_end ? row : NO_ROW", "row"),
    "offsets into the pool have 32 bits": ("keys) + (u64)row * D", "keys) + row * D"),
    "whole tiles end one key too late": ("BN <= lowest + 1 &&", "BN <= lowest + 2 &&"),
    "rows have the positions of those before": ("lane / 4 + 8)};", "lane / 4)};"),
}
KV = {
    "heads: offsets into the pool have 32 bits": (
        "(T*)a.pool + ((block << a.block_bits) + offset) * a.head_dim",
        "(T*)a.pool + (u32)(((block << a.block_bits) + offset) * a.head_dim)",
    ),
    "heads: every layer is the first": ("a.num_layers + a.layer;", "a.num_layers;"),
    "heads: values are rotated too": ("row >= a.num_heads + a.num_kv_heads;", "false;"),
    "heads: turned the other way": (
        "cosine.values[k] - y.values[k] * sine.values[k]",
        "cosine.values[k] + y.values[k] * sine.values[k]",
    ),
    "heads: the first token's angles": ("a.rotation + (long long)token * a.head_dim", "a.rotation"),
    "heads: tokens lie closely": ("token * a.stride", "token * num_rows * a.head_dim"),
    "heads: one thread too many of a head": ("&& i < units;", "&& i <= units;"),
    "heads: one weight for all": ("a.norm + row * a.head_dim", "a.norm"),
    "heads: half the threads of a head are summed": ("mask = a.lanes / 2;", "mask = a.lanes / 4;"),
    "heads: rounded before they are rotated": (
        "x.values[k] *= scale * to_x.values[k];",
        "x.values[k] = widen(narrow<T>(x.values[k] * scale * to_x.values[k]));",
    ),
    "move: offsets into the pool have 32 bits": (
        "(Wide<POOL, 8>*)a.pool + ((row << a.block_bits) + offset) * eights + i % eights",
        "(Wide<POOL, 8>*)a.pool + (int)(((row << a.block_bits) + offset) * eights + i % eights)",
    ),
    "move: past the last token": (
        "if (i >= a.num_tokens * eights)",
        "if (i > a.num_tokens * eights)",
    ),
    "move: heads are taken from the first on": ("a.first_head + blockIdx.y", "blockIdx.y"),
    "move: the segment is one row": ("(long long)blockIdx.y * a.num_tokens * eights + i", "i"),
}
ROWWISE = {
    "no barrier in the sum": ("  __syncthreads();\n", ""),
    "one warp is left out": ("lane < blockDim.x / 32 ?", "lane < blockDim.x / 32 - 1 ?"),
    "y is normed and not stored": ("      x[i] = here;\n", ""),
    "the sum is no mean": ("sum_of_block(squares) / a.size", "sum_of_block(squares)"),
    "only the first of a unit is squared": (
        "widen(here.values[k]) * widen(here.values[k])",
        "widen(here.values[0]) * widen(here.values[0])",
    ),
    "a unit too many": (
        "i = threadIdx.x; i < units; i += blockDim.x) {  //",
        "i = threadIdx.x; i <= units; i += blockDim.x) {  //",
    ),
    "one row a block": ("row += gridDim.y", "row += a.rows"),
    "a gate has no limit": ("      if (x > a.limit) x = a.limit;", "     "),
    "up has no limit": ("      if (factor > a.limit) factor = a.limit;\n", ""),
    "no shift": ("(factor + a.shift)", "factor"),
    "a sigmoid turned over": ("expf(-x ", "expf(x "),
    "a gate too many": ("if (i >= units)", "if (i > units)"),
}
SAMPLING = {
    "-0 is less than 0": (": magnitude ? ordered : 0x80000000", ": ordered"),
    "what is no number is ordered": ("magnitude > 0x7f800000 ? 0xffffffff : ", ""),
    "a word of bits too many": ("token / 32 < num_words && ", ""),
    "small weights are not cut off": ("x = x > -64.0 ? x : -64.0;\n", ""),
    "one term is left out": ("int k = 11; k >= 0", "int k = 10; k >= 0"),
    "one token is missing in each run": ("min(first + run, size);", "min(first + run, size - 1);"),
    "one warp has no largest": (
        "for (int warp = 0; warp < blockDim.x / 32; warp++) x =",
        "for (int warp = 1; warp < blockDim.x / 32; warp++) x =",
    ),
    "lanes before are left out": ("if (lane & mask) before += other;\n", ""),
    "one too few is enough": ("rest <= value)", "rest < value)"),
    "no barrier before what is found": (
        "    __syncthreads();\n    return {shared.thread",
        "    return {shared.thread",
    ),
    "sums by digit are not zeroed": ("shared.low[0][i] = shared.high[0][i] = 0;", ";"),
    "all digits are of one number": ("(u64)key >> (shift + DIGIT) != prefix", "false"),
    "no carry": (" + (before + low < before)", ""),
    "a column is left out": ("i < 32 && digit >= 0", "i < 31 && digit >= 0"),
    "top_p is of no weight": ("max(share_of(of.top_p, all), (u64)1)", "share_of(of.top_p, all)"),
    "what is under the threshold passes": ("key < least ? 0 : weight(key)", "weight(key)"),
    "a draw of 0 takes the first": ("share_of(of.uniform, all) + 1", "share_of(of.uniform, all)"),
    "the last of equals": ("32 | ~(u32)token", "32 | (u32)token"),
    "a tiny temperature is infinite": (", 1.7976931348623157e308);", ", 1.0 / 0.0);"),
    "rows have no stride": ("number * a.stride", "number * a.size"),
}
MUTATIONS = {
    f"{source}: {bug}": (source, *texts)
    for source, bugs in (
        ("attention", ATTENTION),
        ("attention_hopper", HOPPER_ATTENTION),
        ("kv", KV),
        ("rowwise", ROWWISE),
        ("sampling", SAMPLING),
    )
    for bug, texts in bugs.items()
}


# A device that one thread block fills: no keys are split.
UNSPLIT = GPU._replace(multiprocessors=1)


def check_attention(text: str) -> None:
    names = attention_kernels(torch.bfloat16, 64, GPU)
    it = Shim({"attention": names}, texts={"attention": text})
    # The last two are of several tiles of many rows, whose keys are split.
    crowds = (
        [(70, 33), (129, 64), (17, 1)],
        [(700, 1), (66, 3)],
        [(700, 40)],
        [(900, 70), (513, 33)],
    )
    for lens in crowds:
        for window in (None, 24):
            check(scene(lens, head_dim=64, dtype=torch.bfloat16), window, it)
        # Six heads share two: tiles of many rows begin at any of them.
        made = scene(lens, num_heads=6, head_dim=64, dtype=torch.bfloat16)
        for cap, sinks in ((None, sinks_of(made)), (3.0, None), (30.0, sinks_of(made, 1))):
            check(made, None, it, cap=cap, sinks=sinks)
    # A row's window begins where a tile does; and tiles that are not split, copied at once.
    check(
        scene([(100, 12)], num_heads=16, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16), 40, it
    )
    for order, late in ((1, False), (2, True)):
        whole = Shim(
            {"attention": names}, order=order, late=late, gpu=UNSPLIT, texts={"attention": text}
        )
        check(scene([(700, 1), (330, 1)], head_dim=64, dtype=torch.bfloat16), None, whole)
    far = scene([(40, 20), (70, 1)], head_dim=64, dtype=torch.bfloat16, is_far=True)
    check(far, None, it)
    loud = scene([(700, 1), (700, 40)], head_dim=64, dtype=torch.bfloat16, first_key=8.0)
    check(loud, None, it)


def check_hopper_attention(text: str) -> None:
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        names = {
            "attention": attention_kernels(dtype, head_dim, HOPPER),
            "attention_hopper": wide_kernels(dtype, head_dim),
        }
        for order, late in ((2, True), (2, False), (1, False)):
            it = Shim(names, order=order, late=late, gpu=HOPPER, texts={"attention_hopper": text})
            # Tiles that are whole and ragged; shorter than a block; keys that are split.
            for lens in ([(700, 300)], [(10, 10), (129, 64)], [(900, 70), (513, 33)]):
                for window in (None, 24, 130):
                    check(scene(lens, head_dim=head_dim, dtype=dtype), window, it)
            made = scene([(300, 50)], num_heads=6, head_dim=head_dim, dtype=dtype, first_key=8.0)
            check(made, None, it, cap=3.0, sinks=sinks_of(made))
            # The first tile is whole but for the key before the window of a warp's last row.
            shared = scene([(400, 30)], num_heads=8, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
            check(shared, 200, it)
    far = scene([(140, 60)], head_dim=128, dtype=torch.float16, is_far=True)
    check(far, None, it)


def check_kv(text: str) -> None:
    names = kv_kernels(torch.bfloat16, torch.bfloat16)
    it = Shim({"kv": names}, texts={"kv": text})
    for is_far in (False, True):
        check_moves(it, torch.bfloat16, is_far=is_far)
    for is_normed, head_dim in product((False, True), (24, 64, 80)):
        assert heads_error(it, torch.bfloat16, head_dim, 21, (6, 2), is_normed=is_normed) <= 1


def check_rowwise(text: str) -> None:
    it = Shim({"rowwise": rowwise_kernels(torch.bfloat16)}, texts={"rowwise": text})
    for size in (7, 576, 4104):
        check_all(it, torch.bfloat16, size)


def check_sampling(text: str) -> None:
    it = Shim({"sampling": SAMPLING_KERNELS}, texts={"sampling": text})
    draw_scenes.check_all(it)
    wide = draw_scenes.logits_of("peaked", 3, 400, 2)
    draw_scenes.check(it, wide[:, 3:333], draw_scenes.settings_of(3, 1))


CHECKS = {
    "attention": check_attention,
    "attention_hopper": check_hopper_attention,
    "kv": check_kv,
    "rowwise": check_rowwise,
    "sampling": check_sampling,
}


def run_check(source: str, text: str) -> None:
    torch.set_num_threads(1)  # many small operations, which threads only slow down
    CHECKS[source](text)


def survives(source: str, text: str) -> bool:
    """Run the checks in a process of their own, for a broken kernel may abort.

    It is forked from one that has imported torch, which takes as long as most of the checks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=run_check, args=(source, text), daemon=True)
    process.start()
    process.join()
    return process.exitcode == 0


@pytest.mark.parametrize("source", CHECKS)
def test_the_scenes_pass_what_is_whole(source: str, pytestconfig: pytest.Config) -> None:
    if reason := why_not():
        pytest.skip(reason)
    if source.startswith("attention") and not pytestconfig.getoption("--full"):
        pytest.skip("test_backends.py shows as much in less time: with --full")
    assert survives(source, source_text(source))


def _bugs_of(source: str) -> list[str]:
    return [bug for bug, (where, _, _) in MUTATIONS.items() if where == source]


# Each takes a compilation of some seconds; all of them run with --full.
QUICK = {_bugs_of(source)[0] for source in CHECKS}


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_bug_is_caught(bug: str, pytestconfig: pytest.Config) -> None:
    source, old, new = MUTATIONS[bug]
    text = source_text(source)
    assert text.count(old) == 1, "the mutation no longer fits the source"
    if reason := why_not():
        pytest.skip(reason)
    if bug not in QUICK and not pytestconfig.getoption("--full"):
        pytest.skip("a compilation of several seconds: with --full")
    assert not survives(source, text.replace(old, new))
