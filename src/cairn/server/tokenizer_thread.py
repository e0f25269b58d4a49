"""The tokenizer beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cairn.engine.contract import TextTokenizer

Result = TypeVar("Result")


class TokenizerThread:
    """A tokenizer and its thread. One alone: fast tokenizers refuse to be used from two at once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cairn-tokenizer")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self.apply(lambda tokenizer: tokenizer.encode(text, add_special_tokens))

    async def decode(self, token_ids: list[int]) -> str:
        return await self.apply(lambda tokenizer: tokenizer.decode(token_ids))

    async def apply(self, work: Callable[[TextTokenizer], Result]) -> Result:
        """Any work that uses the tokenizer."""
        return await self.run(lambda: work(self._tokenizer))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Work that is too long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
