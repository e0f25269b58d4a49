"""The response bodies of completions, chats and tokenizing."""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from cairn.server.responses import CacheUse, Count

FinishName: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class CompletionTokensDetails(TypedDict):
    """Tokens of the answers by what they are. Of tokens that were drafted, from a `prediction` or elsewhere: those that
    the model accepted, which are part of the answers, and those that it did not."""

    reasoning_tokens: NotRequired[Count]
    accepted_prediction_tokens: NotRequired[Count]
    rejected_prediction_tokens: NotRequired[Count]


class Usage(TypedDict):
    """Tokens of all prompts and answers. The details come when all answers have ended."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: NotRequired[dict[Literal["cached_tokens"], Count] | None]
    completion_tokens_details: NotRequired[CompletionTokensDetails | None]


class TokenLogprob(TypedDict):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class ChatLogprobs(TypedDict):
    """Of a chat's choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(TypedDict):
    """Of a completion's choice, by token; null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(TypedDict):
    """vLLM's, by token id."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class BaseChoice(TypedDict):
    """The fields of all choices."""

    index: Count
    finish_reason: FinishName | None


class WholeChoice(BaseChoice):
    """The fields of all complete choices."""

    stop_reason: str | int | None
    token_ids: list[Count] | None
    routed_experts: None


class CompletionChoice(WholeChoice):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[Count] | None


class CompletionChunkChoice(BaseChoice):
    """A piece of a text. `prompt_token_ids` come with the first one."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: str | int | None
    prompt_token_ids: list[Count] | None
    token_ids: list[Count] | None


class CallText(TypedDict):
    """A tool call's name and arguments, or what a stream adds to them."""

    name: NotRequired[str]
    arguments: str


class AnsweredCall(TypedDict):
    """A tool call, or what a stream adds to the one with this `index`."""

    index: NotRequired[Count]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallText


class Delta(TypedDict, total=False):
    """What a stream adds to a message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    reasoning: str
    tool_calls: list[AnsweredCall]


class AnswerMessage(TypedDict):
    """A whole message, with `tool_calls` if it has some."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: NotRequired[list[AnsweredCall]]


class ChatChoice(WholeChoice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(BaseChoice):
    """A piece of an answer of a chat. `token_ids` come with all but the first, `stop_reason` with the last."""

    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[Count] | None]
    stop_reason: NotRequired[str | int | None]


class BaseResponse(TypedDict):
    """The fields of all responses and chunks."""

    id: str
    created: Count
    model: str


class RequestMetrics(TypedDict):
    """What the time of one request went to, in milliseconds, with --enable-per-request-metrics: waiting, from there to
    the first token, and to the last one; between two tokens, of which there may be but one; and tokens a second."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]


class WholeResponse(BaseResponse):
    """The fields of both responses."""

    usage: Usage
    service_tier: None
    system_fingerprint: str
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None
    metrics: RequestMetrics | None
    cairn: CacheUse


class CompletionResponse(WholeResponse):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatResponse(WholeResponse):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[Count] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_text: str | None


class BaseChunk(BaseResponse):
    """The fields of all chunks; the optional ones come with the last chunks."""

    kv_transfer_params: NotRequired[dict[str, Any]]
    usage: NotRequired[Usage]
    system_fingerprint: NotRequired[str]
    metrics: NotRequired[RequestMetrics]
    cairn: NotRequired[CacheUse]


class CompletionChunk(BaseChunk):
    """One event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ChatChunk(BaseChunk):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[Count] | None]
    prompt_text: NotRequired[str | None]


class TokenizeResponse(TypedDict):
    """POST /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    """POST /detokenize."""

    prompt: str
