"""Fair shares of one step: how many prompt tokens each tenant may have read in it.

The tokens of a step are divided by max-min fairness: every tenant gets what it needs, up to an
equal share of the tokens, and what one tenant does not need is divided among the others.  So a
tenant with a thousand long prompts delays the first prompt of another by one step at most.
"""

from __future__ import annotations

from collections.abc import Mapping


class Shares:
    """The unused share of each tenant in one step."""

    def __init__(self, needs: Mapping[int, int], total: int) -> None:
        """Divide `total` tokens; `needs` are the tokens that each tenant has to have read."""
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
        """Return how many tokens the tenant may still have read; 0 for one that needs none."""
        return self._left.get(tenant, 0)

    def spend(self, tenant: int, num_tokens: int) -> None:
        """Take tokens off a tenant's share."""
        self._left[tenant] -= num_tokens
        self._spenders.add(tenant)

    def has_spent(self, tenant: int) -> bool:
        """Return whether the tenant has any prompt read in this step."""
        return tenant in self._spenders
