"""What the engines of a server in parts counted of the KV cache that went between them.

A decode engine counts each prompt token once, by where its KV cache came from: fetched from a
prefill engine, found in its own prefix cache, or computed by itself. The last is what the
arrangement is there to prevent, and nothing but these counters shows it: the answer is the same.
"""

from __future__ import annotations

from math import ceil

from pydantic import BaseModel, ConfigDict, Field


class Transfer(BaseModel):
    """Sums over all decode engines; of a measurement, or since an engine started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transferred_tokens: int = Field(description="Prompt tokens fetched from a prefill engine.")
    cached_tokens: int = Field(description="Prompt tokens in a decode engine's own prefix cache.")
    computed_tokens: int = Field(description="Prompt tokens that a decode engine computed itself.")
    transfers: int = Field(description="Fetches that ended; one for each worker of a request.")
    bytes_moved: int = Field(description="By the decode engines' connectors.")
    failed: int = Field(description="Fetches that failed, handshakes and notices among them.")
    preempted: int = Field(
        default=0,
        description="Times that a decode engine took a request's room away. It computes the prompt "
        "again itself, which no counter of prompt tokens says (vLLM 0.32).",
    )
    block_size: int = Field(description="Tokens of a block.")
    block_bytes: int = Field(
        default=0, description="Of one block, all workers; 0 where no token went over yet."
    )

    def since(self, before: Transfer, block_bytes: int) -> Transfer:
        """What was added since `before`. Pure."""
        counted = {
            name: getattr(self, name) - getattr(before, name)
            for name in type(self).model_fields
            if name not in ("block_size", "block_bytes")
        }
        return Transfer(**counted, block_size=self.block_size, block_bytes=block_bytes)

    def plus(self, other: Transfer) -> Transfer:
        """Of two engines together. Pure."""
        counted = {
            name: getattr(self, name) + getattr(other, name)
            for name in type(self).model_fields
            if name not in ("block_size", "block_bytes")
        }
        return self.model_copy(update=counted)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts that got a first token."""
        return self.transferred_tokens + self.cached_tokens + self.computed_tokens

    @property
    def words(self) -> str:
        return (
            f"{self.transferred_tokens} prompt tokens transferred in {self.transfers} fetches of "
            f"{self.bytes_moved} bytes, {self.cached_tokens} cached, {self.computed_tokens} "
            f"computed again, {self.failed} fetches failed, {self.preempted} requests preempted"
        )


def untransferred(found: Transfer, *, whole_prompts: bool = True) -> list[str]:
    """Why these counters do not show that the prompts came by transfer; empty: they do. Pure.

    whole_prompts: every layer keeps the whole prompt, as full attention does. Then t tokens take at
    least ceil(t / size) blocks; more where prompts end within a block, and of requests that were
    broken off before their first token, which count no tokens. Windows and states take fewer.
    A fetch that failed is no reason: its request got an error, and counts as failed. Nor is a
    request that was preempted: that is what overload does, with one engine too. It is counted.
    """
    reasons = []
    if found.computed_tokens:
        reasons.append(f"decode engines computed {found.computed_tokens} prompt tokens themselves")
    if not found.transferred_tokens:
        if not found.cached_tokens:
            reasons.append("no prompt token was transferred")
        return reasons
    if not found.block_bytes or found.bytes_moved % found.block_bytes:
        reasons.append(
            f"{found.bytes_moved} bytes are no whole number of blocks of {found.block_bytes}"
        )
        return reasons
    blocks = found.bytes_moved // found.block_bytes
    least = ceil(found.transferred_tokens / found.block_size) if whole_prompts else 1
    if blocks < least:
        reasons.append(
            f"{blocks} blocks were moved for {found.transferred_tokens} tokens, which fill {least}"
        )
    return reasons


def blocks_of(prompt_tokens: list[int], block_size: int, cached_tokens: int = 0) -> int:
    """Blocks that prompts of these lengths move, where each layer keeps the whole prompt. Pure."""
    return sum(ceil(one / block_size) for one in prompt_tokens) - cached_tokens // block_size
