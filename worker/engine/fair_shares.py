"""Max-min fair shares of a step's prompt tokens among tenants.

A tenant with a thousand long prompts delays the first prompt of another by one step at most.
"""

from __future__ import annotations

from collections.abc import Mapping


class Shares:
    """The unused share of each tenant in one step."""

    def __init__(self, needs: Mapping[int, int], total: int) -> None:
        """Divide `total` tokens; `needs` are the uncomputed prompt tokens of each tenant."""
        self._left: dict[int, int] = {}
        self._spenders: set[int] = set()
        num_tenants = len(needs)
        # The smallest need first: what it leaves of an equal share goes to those after it.
        for tenant, need in sorted(needs.items(), key=lambda item: item[1]):
            share = min(need, -(-total // num_tenants))
            self._left[tenant] = share
            total -= share
            num_tenants -= 1

    def left(self, tenant: int) -> int:
        """Return the rest of the tenant's share; 0 if it needs none."""
        return self._left.get(tenant, 0)

    def spend(self, tenant: int, num_tokens: int) -> None:
        self._left[tenant] -= num_tokens
        self._spenders.add(tenant)

    def has_spent(self, tenant: int) -> bool:
        return tenant in self._spenders
