"""A chat's answer as a response of OpenAI's Responses API, whole or as its events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from cairn.engine.contract import GenerateOutput
from cairn.errors import RequestError
from cairn.server.openai.response_writer import ChatWriter, Choice, count_cached_tokens, encode_event
from cairn.server.openai_responses.output_items import OutputItem, OutputMessage, OutputReasoning, open_call
from cairn.server.openai_responses.requests import ResponsesRequest
from cairn.server.openai_responses.tools import ToolTable

_TextItem = TypeVar("_TextItem", OutputMessage, OutputReasoning)

_Token: TypeAlias = tuple[bytes, dict[str, Any] | None]
"""A token's text, and its log-probabilities if they were asked for."""


@dataclass(slots=True)
class ResponsesWriter(ChatWriter):
    """POST /v1/responses: one answer.

    `asked`: the body as it was sent; `tools`: its tools; `seal`: encrypts reasoning, None if that is not asked for.
    `wall`: tells the time of the end, in seconds since 1970; `keep`: is given a response that has ended, as JSON; None
    if it is not to be stored. `items`: its output so far; `is_open`: whether the last one may grow;
    `events`: of a stream, not sent yet; `pending`: tokens that are in no item yet.
    """

    asked: ResponsesRequest = field(kw_only=True)
    tools: ToolTable = field(kw_only=True)
    seal: Callable[[str], str] | None = field(kw_only=True)
    wall: Callable[[], float] = field(kw_only=True)
    keep: Callable[[bytes], None] | None = field(kw_only=True)
    items: list[OutputItem] = field(init=False, default_factory=list)
    is_open: bool = field(init=False, default=False)
    events: list[bytes] = field(init=False, default_factory=list)
    num_events: int = field(init=False, default=0)
    pending: list[_Token] = field(init=False, default_factory=list)

    formats_at_end = False

    # -- the answer --------------------------------------------------------------------------------------------------

    def add(self, prompt: int, output: GenerateOutput) -> Choice:
        choice = ChatWriter.add(self, prompt, output)
        choice.message = message = choice.message or self.new_message()
        entries: list[Any] = [None] * len(output.token_ids)
        if output.logprobs is not None and self.body.get_num_logprobs() is not None:
            entries = self.formatter.chat(output.logprobs)["content"]
        self.pending += zip(map(self.formatter.spell, output.token_ids), entries, strict=False)
        if output.finish_reason == "stop" and self.pending and not output.text.encode().endswith(self.pending[-1][0]):
            del self.pending[-1]  # the token that ends an answer is no part of its text
        last = output.finish_reason is not None
        deltas = message.add_in_order(output.text, last=last, truncated=choice.is_truncated)
        for delta, taken in zip(deltas, self._take_tokens(deltas), strict=True):
            self._add_delta(delta, taken)
        return choice

    def _take_tokens(self, deltas: list[dict[str, Any]]) -> list[list[_Token]]:
        """The pending tokens that each delta's text was made of. Between them is markup; after the last one may be
        text that the parser has not let go yet."""
        spelled = b"".join(spelling for spelling, _ in self.pending) if deltas else b""
        ranges, end = list[tuple[int, int]](), len(spelled)
        for delta in reversed(deltas):
            text = str(delta.get("reasoning") or delta.get("content") or "").encode(errors="replace")
            start = spelled.rfind(text, 0, end)
            # What is no valid text in the tokens has been replaced in the delta.
            ranges.append((start, start + len(text)) if start >= 0 else (0, end))
            end = ranges[-1][0]
        ranges.reverse()
        taken: list[list[_Token]] = [[] for _ in deltas]
        rest, at = list[_Token](), 0
        for token in self.pending if deltas else ():
            after = at + len(token[0])
            place = next((i for i, (first, last) in enumerate(ranges) if at < last and after > first), None)
            if place is not None:
                taken[place].append(token)
            elif at >= ranges[-1][1]:
                rest.append(token)
            at = after
        if deltas:
            self.pending = [] if "tool_calls" in deltas[-1] else rest
        return taken

    def _add_delta(self, delta: dict[str, Any], tokens: list[_Token]) -> None:
        if (text := delta.get("reasoning")) and self.asked.include_reasoning is not False:
            body: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
            self._add_text(self._open_text(OutputReasoning, body), text)
        if text := delta.get("content"):
            item = self._open_text(OutputMessage, {"type": "message", "role": "assistant"})
            logprobs = [entry for _, entry in tokens if entry is not None]
            item.logprobs += logprobs
            self._add_text(item, text, logprobs=logprobs)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                tool = self.tools.find(call["function"]["name"])
                self._open_item(open_call(tool, call["id"], len(self.items)))
            if text := call["function"]["arguments"]:
                self._add_text(self.items[-1], text)

    def _add_text(self, item: OutputItem, text: str, **fields: Any) -> None:
        if (piece := item.add(text)) and item.delta_event is not None:
            self._note_delta(item, f"{item.delta_event}.delta", delta=piece, **fields)

    def _open_text(self, kind: type[_TextItem], body: dict[str, Any]) -> _TextItem:
        """The open item if it is of this kind, else a new one."""
        if self.is_open and isinstance(last := self.items[-1], kind):
            return last
        item = kind(body, len(self.items))
        self._open_item(item)
        return item

    def _status_of(self, item: OutputItem, text_status: str) -> str:
        """A call is completed if its arguments are all there; `text_status`: of anything else."""
        if "call_id" not in item.body:
            return text_status
        message = self.choices[0].message
        return "completed" if message is not None and message.is_complete(item.body["call_id"]) else "incomplete"

    def _open_item(self, item: OutputItem) -> None:
        self._close_item("completed")
        item.body = {"id": f"{item.prefix}_{self.id.removeprefix('resp_')}_{item.index}"} | item.body
        self.items.append(item)
        self.is_open = True
        self._note("response.output_item.added", output_index=item.index, item=item.open())
        if item.has_part:
            self._note_delta(item, "response.content_part.added", part=item.part())

    def _finish_item(self) -> None:
        """Nothing more comes for the last item."""
        if not self.is_open:
            return
        item = self.items[-1]
        if (piece := item.finish()) and item.delta_event is not None:
            self._note_delta(item, f"{item.delta_event}.delta", delta=piece)
        if self.seal is not None and item.kind == "reasoning":
            item.body["encrypted_content"] = self.seal(item.joined)

    def _close_item(self, text_status: str) -> None:
        self._finish_item()
        self._end_item(text_status)

    def _end_item(self, text_status: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        item = self.items[-1]
        if item.delta_event is not None:
            self._note_delta(item, f"{item.delta_event}.done", **item.done())
        if item.has_part:
            self._note_delta(item, "response.content_part.done", part=item.part())
        self._note(
            "response.output_item.done", output_index=item.index, item=item.write(self._status_of(item, text_status))
        )

    # -- the whole response ------------------------------------------------------------------------------------------

    def write_response(self) -> dict[str, Any]:
        response = self._write_ending()
        self._store(response)
        return response

    def _write_ending(self) -> dict[str, Any]:
        self._finish_item()
        params = self.kv_transfer_params
        reason = self.choices[0].finish_reason
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason or "stop", "completed")
        last_status = "completed" if status == "completed" else "incomplete"
        return self._write_state(status) | {
            "output": [
                item.write(self._status_of(item, last_status if item is self.items[-1] else "completed"))
                for item in self.items
            ],
            **self._write_raw_messages(),
            "completed_at": int(self.wall()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self.usage(),
            "kv_transfer_params": None if params is None else msgspec.Raw(params),
            **({} if (metrics := self.write_metrics()) is None else {"metrics": metrics}),
            "cairn": self.cache_use(),
        }

    def _write_raw_messages(self) -> dict[str, Any]:
        """What the model has read and written, as text and token ids, where that is asked for."""
        if not self.asked.enable_response_messages:
            return {}
        prompt, choice = self.prompts[0], self.choices[0]
        # What the model has written shows its reasoning.
        is_hidden = self.asked.include_reasoning is False and self.count_reasoning(choice) > 0
        written = [] if is_hidden else [_raw_message("".join(choice.texts), choice.token_ids)]
        return {"input_messages": [_raw_message(prompt.text or "", prompt.token_ids)], "output_messages": written}

    def _store(self, response: dict[str, Any]) -> bytes:
        encoded = msgspec.json.encode(response)
        if self.keep is not None:
            self.keep(encoded)
        return encoded

    def store_state(self, status: Literal["queued", "in_progress", "cancelled"]) -> bytes:
        """Keep the response as it is now, without its end; returns it as JSON."""
        return self._store(self._write_state(status) | self._write_broken_output())

    def store_failure(self, error: RequestError) -> None:
        """Keep the response as one that has failed."""
        self._store(self._write_failure(error) | {"store": True})

    def _write_failure(self, error: RequestError) -> dict[str, Any]:
        shown = error.message.encode(errors="backslashreplace").decode()
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        cause = {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": shown}
        return self._write_state("failed") | {"error": cause, "store": False} | self._write_broken_output()

    def _write_broken_output(self) -> dict[str, Any]:
        return {"output": [item.write("incomplete") for item in self.items]}

    def usage(self) -> dict[str, Any]:
        num_prompt, num_generated = len(self.prompts[0].token_ids), len(self.choices[0].token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": count_cached_tokens(self.caches[0]), "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": self.count_reasoning(self.choices[0])},
            "total_tokens": num_prompt + num_generated,
        }

    def _write_state(self, status: str) -> dict[str, Any]:
        """The response without its end: what was asked for, as OpenAI says it again."""
        asked, body = self.asked, self.body
        reasoning, text = asked.reasoning or {}, asked.text or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": bool(asked.background),
            "error": None,
            "incomplete_details": None,
            "input_messages": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [],
            "output_messages": None,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": self.keep is not None,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
            "tool_choice": asked.tool_choice or "auto",
            "tools": self.tools.described,
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None,
            "user": asked.user,
        }

    # -- events ------------------------------------------------------------------------------------------------------

    def opening_events(self) -> list[bytes]:
        for name in ("response.created", "response.in_progress"):
            self._note(name, response=self._write_state("in_progress"))
        return self._take_events()

    def output_events(self, prompt: int, output: GenerateOutput) -> list[bytes]:
        self.add(prompt, output)
        return self._take_events()

    def closing_events(self) -> list[bytes]:
        response = self._write_ending()
        self._store(response)
        status = response["status"]
        self._end_item("completed" if status == "completed" else "incomplete")
        name = "response.completed" if status == "completed" else "response.incomplete"
        self._note(name, response=response)
        return self._take_events()

    def error_events(self, error: RequestError) -> list[bytes]:
        shown = error.message.encode(errors="backslashreplace").decode()
        self._note("error", code=str(error.status), message=shown, param=error.param)
        self._note("response.failed", response=self._write_failure(error))
        return self._take_events()

    def _note_delta(self, item: OutputItem, event: str, /, **fields: Any) -> None:
        place: dict[str, Any] = {"item_id": item.body["id"], "output_index": item.index}
        if item.has_part:
            place["content_index"] = 0
        self._note(event, **place, **fields)

    def _note(self, event: str, /, **fields: Any) -> None:
        if self.body.stream:
            data = {"type": event, "sequence_number": self.num_events} | fields
            self.events.append(encode_event(msgspec.json.encode(data), event))
            self.num_events += 1

    def _take_events(self) -> list[bytes]:
        events, self.events = self.events, []
        return events


def _raw_message(text: str, token_ids: list[int]) -> dict[str, Any]:
    """vLLM's form."""
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}
