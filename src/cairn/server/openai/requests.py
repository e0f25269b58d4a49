"""The request bodies, as OpenAI and vLLM define them. The OpenAPI document is made of these types. The engine
checks the ranges of numbers (`RANGES`); here they are only documented.

Unknown fields are ignored, as vLLM does. Fields that would change the answer and are not supported yet are refused by
name, unless they hold a value that changes nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Tag,
    WithJsonSchema,
    with_config,
)
from typing_extensions import TypedDict

from cairn.engine.contract import MAX_BAD_WORDS, MAX_PATTERN_SIZE, RANGES
from cairn.engine.contract.request import MAX_IMAGE_AREA
from cairn.errors import InvalidRequest
from cairn.http.handover import CLIENT_FIELDS, find_release_key
from cairn.server.openai.field_types import (
    LENIENT,
    BadWord,
    BiasValue,
    CacheSalt,
    Choices,
    Int64,
    JsonSchema,
    ModelName,
    NumLogprobs,
    Prompts,
    Stops,
    Text,
    TokenIds,
    TokenKey,
    TruncateTo,
    Unicode,
    in_range,
    kind_discriminator,
)
from cairn.server.openai.messages import MAX_MESSAGES, Message, Prediction, ToolChoice, ToolList
from cairn.server.openai.structured_outputs import ResponseFormat, StructuredOutputs

MAX_DOCUMENTS = 1024
MAX_TEMPLATE_CHARS = 1 << 16

_NOTHING = "allowed_token_ids audio prediction prompt_embeds truncate_prompt_tokens"
_EMPTY = "bad_words functions logits_processors tools"
_EMPTY_OBJECT = "ec_transfer_params media_io_kwargs vllm_xargs"
_FALSE = "continue_final_message return_prompt_text use_beam_search watermarking"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_NOTHING.split(), (None,)),
        **dict.fromkeys(_EMPTY.split(), (None, [])),
        **dict.fromkeys(_EMPTY_OBJECT.split(), (None, {})),
        **dict.fromkeys(_FALSE.split(), (None, False)),
        "best_of": (None, 1),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "return_weight_versions": (None, False),
        "routed_experts_prompt_start": (None, 0),
        "suffix": (None, ""),
        "tool_choice": (None, "none"),
        "top_logprobs": (None, 0),
    }
)
"""Fields that are not supported yet, with the values that change nothing."""

NOT_VARIABLES = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Names that `chat_template_kwargs` may not have: other fields say it, or it is not the template that reads it."""

TemplateKwargs: TypeAlias = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(NOT_VARIABLES)}}}),
]
"""Variables of the chat template. How much they may hold is checked where they are given to it."""

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Documents: TypeAlias = Annotated[list[dict[Unicode, Unicode]], Field(max_length=MAX_DOCUMENTS)]


@with_config(ConfigDict(extra="forbid", strict=True))
class ExtraArgs(TypedDict, total=False):
    """vLLM's arguments for extensions. Those that are known here are names for a session."""

    session_id: str
    prompt_cache_key: str


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class RepetitionFields(BaseModel):
    """vLLM's: an answer ends when a pattern of so many tokens has come `min_count` times in a row."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Int64 | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_PATTERN_SIZE})
    min_pattern_size: Int64 | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_PATTERN_SIZE})
    min_count: Int64 | None = Field(None, json_schema_extra={"minimum": 0})


class SharedFields(BaseModel):
    """The fields that completions, chats and responses share. `priority`: smaller ones first."""

    model_config = LENIENT

    model: ModelName | None = None
    temperature: float | None = in_range("temperature")
    top_p: float | None = in_range("top_p")
    top_k: Int64 | None = Field(None, json_schema_extra={"minimum": -1, "maximum": RANGES["top_k"].high})
    min_p: float | None = in_range("min_p")
    seed: Int64 | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = in_range("stop_token_ids")
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    frequency_penalty: float | None = in_range("frequency_penalty")
    presence_penalty: float | None = in_range("presence_penalty")
    repetition_penalty: float | None = in_range("repetition_penalty")
    logit_bias: dict[TokenKey, BiasValue] | None = in_range("logit_bias")
    priority: Int64 | None = in_range("priority")
    cache_salt: CacheSalt | None = in_range("cache_salt")
    stream: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]+$", max_length=128)
    vllm_xargs: ExtraArgs | None = None


class SamplingFields(SharedFields):
    """Those that completions and chats share besides. `truncation_side`: which end of the prompt
    `truncate_prompt_tokens` cuts off, the left one unless given. `return_tokens_as_token_ids`: log-probabilities call a
    token `token_id:5`; as the server's flag says unless given. `stream_interval`: how many tokens of an answer are sent
    together; the first one and the last ones come at once. `logprob_token_ids`: tokens whose log-probabilities are told
    instead of those of the likeliest ones. `thinking_token_budget`: most tokens of the reasoning, which is then ended;
    -1 for no bound. `length_penalty` and `spaces_between_special_tokens` change nothing."""

    max_tokens: Int64 | None = in_range("max_tokens")
    spaces_between_special_tokens: bool | None = True
    length_penalty: float | None = None
    n: Int64 | None = in_range("n")
    min_tokens: Int64 | None = in_range("min_tokens")
    allowed_token_ids: TokenIds | None = in_range("allowed_token_ids")
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_BAD_WORDS)
    truncate_prompt_tokens: TruncateTo | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: TokenIds | None = in_range("logprob_token_ids")
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: JsonSchema = None
    guided_regex: Text | None = None
    guided_choice: Choices = None
    guided_grammar: Text | None = None
    repetition_detection: RepetitionFields | None = None
    thinking_token_budget: Int64 | None = Field(None, json_schema_extra={"minimum": -1, "maximum": (1 << 31) - 1})

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """With values for the fields that it does not have. Their `max_tokens` is a bound that holds for all."""
        updates = {
            name: value for name, value in defaults.items() if name != "max_tokens" and getattr(self, name) is None
        }
        most, limit = defaults.get("max_tokens"), self.get_max_tokens()
        if most is not None and (limit is None or limit > most):
            updates[self.max_tokens_field or "max_tokens"] = most
        return self.model_copy(update=updates) if updates else self

    @property
    def reused_prompt_ids(self) -> Any:
        """The prompt's token ids as a prefill server has had them, in nothing checked; None if there are none, or the
        prompt has more than text."""
        return (self.kv_transfer_params or {}).get("prompt_token_ids")

    @property
    def is_kv_export(self) -> bool:
        """Whether only the prompt is computed here: another server decodes it."""
        return (self.kv_transfer_params or {}).get("do_remote_decode") is True

    @property
    def is_prefill_only(self) -> bool:
        """Whether it comes from a proxy that lets nobody read the answer: the client's own fields are checked, and one
        token is computed."""
        return self.is_kv_export and CLIENT_FIELDS in (self.kv_transfer_params or {})

    @property
    def has_one_answer(self) -> bool:
        """Whether there is one whatever `n` says: a prompt for another server that was asked for without a proxy of
        ours, and whose answer is read here."""
        return self.is_kv_export and not self.is_prefill_only

    @property
    def release_key(self) -> str | None:
        """What the sender of a prompt that is to be handed over lets go of it by, before it knows what it is called."""
        return find_release_key(self.kv_transfer_params or {}) if self.is_kv_export else None

    def as_prefill(self) -> Self:
        """The body without the fields that make an answer long, for an answer that nobody reads."""
        fields = ("stream", "stream_options", "n", "echo", "logprobs", "top_logprobs", "prompt_logprobs")
        return self.model_copy(update={name: None for name in fields if name in type(self).model_fields})

    @property
    def max_tokens_field(self) -> str | None:
        """The field that the client limits the answer with; None if it sends none."""
        return None if self.max_tokens is None else "max_tokens"

    def get_max_tokens(self) -> int | None:
        """Tokens that the engine may generate; None: as many as fit. Raises InvalidRequest naming `max_tokens`."""
        return self.max_tokens

    def get_num_logprobs(self) -> int | None:
        """Most likely tokens given with each token's log-probability; None: no log-probabilities. Raises InvalidRequest
        naming `top_logprobs`."""
        return None


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either. `max_tokens` 0 only echoes."""

    prompt: Prompts
    max_tokens: Int64 | None = Field(None, json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"].high})
    echo: bool | None = False
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = True

    @property
    def reused_prompt_ids(self) -> Any:
        is_one = isinstance(self.prompt, str) or len(self.prompt) < 2 or isinstance(self.prompt[0], int)
        return super().reused_prompt_ids if is_one else None

    def get_max_tokens(self) -> int:
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidRequest("max_tokens is 0, and nothing is to be echoed: ask for at least 1", "max_tokens")
            return 1  # the engine cannot generate none; this one is dropped
        return 16 if self.max_tokens is None else self.max_tokens

    def get_num_logprobs(self) -> int | None:
        return self.logprobs


_Area: TypeAlias = Annotated[int, Field(ge=1, le=MAX_IMAGE_AREA)]


class ImageSize(BaseModel):
    """Bounds of an image's area after resizing, by transformers' names."""

    model_config = ConfigDict(extra="forbid")

    shortest_edge: _Area | None = None
    longest_edge: _Area | None = None


class ProcessorFields(BaseModel):
    """How the images of a request are resized: least and most pixels, as transformers' processors of Qwen have them."""

    model_config = ConfigDict(extra="forbid")

    min_pixels: _Area | None = None
    max_pixels: _Area | None = None
    size: ImageSize | None = None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Least and most pixels; None for the checkpoint's."""
        size = self.size or ImageSize()
        least = size.shortest_edge if self.min_pixels is None else self.min_pixels
        return least, size.longest_edge if self.max_pixels is None else self.max_pixels


class TemplateFields(BaseModel):
    """What a chat's prompt depends on besides its messages. `chat_template`: one in the checkpoint's stead, where the
    server trusts its clients so far."""

    model_config = LENIENT

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = False
    tools: ToolList | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template: Unicode | None = Field(None, max_length=MAX_TEMPLATE_CHARS)
    chat_template_kwargs: TemplateKwargs | None = None
    mm_processor_kwargs: ProcessorFields | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """POST /v1/chat/completions. Without `include_reasoning` the reasoning is left out of the answer, and so is what
    shows its tokens: log-probabilities and token ids."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Int64 | None = in_range("max_tokens")
    prediction: Prediction | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    echo: bool | None = False
    return_prompt_text: bool | None = False

    @property
    def echoed_text(self) -> str:
        """The last message's text where `echo` wants it before the answer, which goes on with it or is of the same
        role; else empty."""
        last = self.messages[-1]
        is_same_role = last.role == "assistant" or self.add_generation_prompt is False or self.continue_final_message
        if not (self.echo and is_same_role):
            return ""
        texts = [part["text"] for part in last.parts if part["type"] == "text"]
        return last.content if isinstance(last.content, str) else "".join(texts)

    @property
    def reused_prompt_ids(self) -> Any:
        has_images = any("image" in part["type"] for message in self.messages for part in message.parts)
        return None if has_images else super().reused_prompt_ids

    @property
    def max_tokens_field(self) -> str | None:
        return super().max_tokens_field if self.max_completion_tokens is None else "max_completion_tokens"

    def get_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def get_num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: send logprobs=true with it", "top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None


def _kind_of_invocation(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return COMPLETION_TAG if "prompt" in value and "messages" not in value else CHAT_TAG


CHAT_TAG, COMPLETION_TAG = "chat_request", "completion_request"
Invocation: TypeAlias = Annotated[
    Annotated[ChatRequest, Tag(CHAT_TAG)] | Annotated[CompletionRequest, Tag(COMPLETION_TAG)],
    kind_discriminator("an object with messages, or with prompt", _kind_of_invocation),
]
"""POST /invocations: the body of one or the other."""


class TokenizeRequest(TemplateFields):
    """POST /tokenize: either `prompt` or `messages`."""

    model: ModelName | None = None
    prompt: Unicode | None = Field(None, json_schema_extra={"minLength": 1})
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = LENIENT

    model: ModelName | None = None
    tokens: TokenIds


def refuse_unsupported(body: BaseModel, neutral_values: Mapping[str, tuple[Any, ...]] = _NEUTRAL) -> None:
    """Raises InvalidRequest for the first field that is not supported yet and would change something.

    `neutral_values`: by such a field, the values that change nothing."""
    for name, value in (body.model_extra or {}).items():
        neutral = neutral_values.get(name)
        if neutral is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise InvalidRequest(f"{name} is not supported yet: leave it out", name)
