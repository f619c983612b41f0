"""The operators on a CPU: attention and sampling are compiled, the others are the reference's.

Attention is the reference's too if the head size is no multiple of 16 or the pool has another
dtype.  Models of suitable sizes need few of these operators: they run as a `kernels.cpu.program`.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.contract import PagedBatch, Softmax
from kernels.cpu.attention import attend
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Program
from kernels.cpu.sampling import draw as draw
from kernels.cpu.simd import PANEL
from kernels.cpu.work_items import WorkItems
from kernels.reference import add_rms_norm as add_rms_norm
from kernels.reference import check_pool as check_pool
from kernels.reference import expert_mlp as expert_mlp
from kernels.reference import gate as gate
from kernels.reference import pack_kv as pack_kv
from kernels.reference import rms_norm as rms_norm
from kernels.reference import rotate_and_append as rotate_and_append
from kernels.reference import route as route
from kernels.reference import unpack_kv as unpack_kv


class StepItems(dict[int, WorkItems]):
    """The work items of a step, by the number of query heads that share a KV head."""


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, softmax: Softmax
) -> torch.Tensor:
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    if head_dim % PANEL or pool.dtype not in ELEMENTS:
        return reference.paged_attention(query, pool, layer, batch, softmax)
    out = torch.empty(query.shape)
    if len(query):
        shared, heads = query.shape[1] // num_kv_heads, query.float()
        if heads.stride(2) != 1:
            heads = heads.contiguous()
        step_items = batch.scratch.of(StepItems)
        items = step_items.get(shared)
        if items is None:
            items = step_items[shared] = WorkItems(shared)
            items.set(batch)
            Program([items.plan()]).run()
        Program([attend(heads, pool, layer, items, out, softmax)]).run()
    return out.to(query.dtype)
