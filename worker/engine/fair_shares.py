"""Max-min fair shares of a step's prompt tokens among tenants.

A tenant with a thousand long prompts delays another tenant's first prompt by at most one step.
"""

from __future__ import annotations

from collections.abc import Mapping


class Shares:
    """The unused part of each tenant's share of one step."""

    def __init__(self, needs: Mapping[int, int], total: int) -> None:
        """Divide `total` tokens; `needs` maps each tenant to its number of uncomputed tokens."""
        self._left: dict[int, int] = {}
        self._spenders: set[int] = set()
        num_tenants = len(needs)
        # The smallest need first; the part of an equal share that it leaves goes to later tenants.
        for tenant, need in sorted(needs.items(), key=lambda item: item[1]):
            share = min(need, -(-total // num_tenants))
            self._left[tenant] = share
            total -= share
            num_tenants -= 1

    def left(self, tenant: int) -> int:
        """Return how many tokens of the tenant's share are unused; 0 for an unknown tenant."""
        return self._left.get(tenant, 0)

    def spend(self, tenant: int, num_tokens: int) -> None:
        self._left[tenant] -= num_tokens
        self._spenders.add(tenant)

    def has_spent(self, tenant: int) -> bool:
        return tenant in self._spenders
