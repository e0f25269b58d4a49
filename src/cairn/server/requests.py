"""The request bodies, as OpenAI and vLLM define them: types, ranges, and what is not supported yet.

Unknown fields are ignored, as vLLM does. Fields that would change the answer and are not supported yet are refused by
name, unless they hold a value that changes nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from cairn.engine.contract import MAX_ALLOWED_TOKENS, MAX_ANSWERS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from cairn.errors import InvalidRequest

_INT32 = 1 << 31
_INT64 = 1 << 63
_MAX_TOKENS = (1 << 31) - 1
_MAX_MESSAGES = 16_384
_MAX_TOOLS = 1024

_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": (None,),
        "audio": (None,),
        "bad_words": (None, []),
        "best_of": (None, 1),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "continue_final_message": (None, False),
        "documents": (None, []),
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "length_penalty": (None, 1, 1.0),
        "logits_processors": (None, []),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "prompt_embeds": (None,),
        "reasoning_effort": (None,),
        "return_token_strs": (None, False),
        "spaces_between_special_tokens": (None, True),
        "suffix": (None, ""),
        "tool_choice": (None, "none"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "truncate_prompt_tokens": (None,),
        "use_beam_search": (None, False),
    }
)
"""Fields that are not supported yet, with the values that ask for nothing."""

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
BadWord = Annotated[str, StringConstraints(pattern=r"\S", min_length=1, max_length=256)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(BaseModel):
    """What both ways of generating have in common. `priority`: a smaller one comes before others."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: Annotated[list[StopString], Field(max_length=16), BeforeValidator(_as_list)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: list[Any] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_BAD_WORDS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = Field(None, ge=-_INT32, lt=_INT32)
    cache_salt: str | None = Field(None, pattern=r"^\S+$", min_length=1, max_length=128)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]+$", max_length=128)


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either. `max_tokens` 0 only echoes."""

    prompt: Any
    max_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = True


class Message(BaseModel):
    """One message of a chat. `content`: text, or a list of parts. `reasoning`: another name of `reasoning_content`."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: Any = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[Any] | None = Field(None, max_length=_MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: Any = None
    reasoning: Any = None

    @property
    def parts(self) -> list[Any]:
        """The parts of its content; none where that is one text."""
        return self.content if isinstance(self.content, list) else []


class TemplateFields(BaseModel):
    """What goes into a chat's prompt besides its messages."""

    model_config = ConfigDict(extra="allow", strict=True)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: list[Any] | None = Field(None, max_length=_MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True


class TokenizeRequest(TemplateFields):
    """POST /tokenize: either `prompt` or `messages`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=_MAX_MESSAGES)
    add_special_tokens: bool | None = True


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[Any]


def refuse_unsupported(body: BaseModel) -> None:
    """Raises InvalidRequest for the first field that asks for something not supported yet."""
    for name, value in (body.model_extra or {}).items():
        neutral = _NEUTRAL.get(name)
        if neutral is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise InvalidRequest(f"{name} is not supported yet: leave it out", name)
