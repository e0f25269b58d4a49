"""What the engine is asked, and how much at most."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cairn.errors import InvalidRequest
from cairn.types import Boundary, Keys, SamplingParams

MAX_BREAKPOINTS = 4
"""Places that one request may have retained, as at Anthropic."""

MAX_ANSWERS = 128
"""Most answers to one prompt."""

MAX_LOGPROBS = 1 << 20
"""More tokens than a vocabulary has."""

MAX_LOGPROB_ENTRIES = 1 << 20
"""Most tokens that are told of because of one prompt, and because of the answers to it where more than
`FREE_LOGPROBS` are told of with each token."""

FREE_LOGPROBS = 20
"""As many tokens may be told of with each token of an answer, however long that is."""

MAX_BAD_WORDS = 128
"""Most texts that one request may keep out of its answers; each is spelled in up to two ways."""

MAX_PATTERN_SIZE = 4096
"""Most tokens of a pattern that is looked for in an answer."""

MAX_IMAGE_AREA = 1 << 24
"""Most pixels that a request may have an image resized to, where its checkpoint does not allow more."""

MAX_RETAIN_SECONDS = 3600
"""The longest that a place may be retained without being used."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be, or how long a text or a list: from `low`, which is not allowed itself where it is `above`,
    to `high`. `lengths`: what is counted there, in words; None for numbers."""

    low: float
    high: float
    above: bool = False
    lengths: str | None = None

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"{self.low} to {self.high}" + (f" {self.lengths}" if self.lengths else "")

    def schema(self) -> dict[str, Any]:
        """The same as JSON schema."""
        if self.lengths is None:
            return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}
        unit = {"characters": "Length", "pairs": "Properties"}.get(self.lengths, "Items")
        return {f"min{unit}": self.low, f"max{unit}": self.high}


_INT31 = 1 << 31

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "request_id": Range(1, 256, lengths="characters"),
        "client": Range(0, 256, lengths="characters"),
        "session": Range(0, 64, lengths="characters"),
        "boundaries": Range(0, 1 << 16, lengths="places"),
        "prediction": Range(0, 8 << 24, lengths="bytes"),
        "kv_transfer_params": Range(0, 4 << 20, lengths="bytes"),
        "n": Range(1, MAX_ANSWERS),
        "max_tokens": Range(1, _INT31 - 1),
        "temperature": Range(0, 100),
        "top_k": Range(0, _INT31 - 1),
        "top_p": Range(0, 1, above=True),
        "min_p": Range(0, 1),
        "frequency_penalty": Range(-2, 2),
        "presence_penalty": Range(-2, 2),
        "repetition_penalty": Range(0, 100, above=True),
        "min_tokens": Range(0, _INT31 - 1),
        "logprobs": Range(0, MAX_LOGPROBS),
        "prompt_logprobs": Range(0, MAX_LOGPROBS),
        "logprob_token_ids": Range(0, 128, lengths="token ids"),
        "priority": Range(-_INT31, _INT31 - 1),
        "stop": Range(0, 16, lengths="texts"),
        "stop[]": Range(1, 1024, lengths="characters"),
        "stop_token_ids": Range(0, 64, lengths="token ids"),
        "logit_bias": Range(0, 1024, lengths="pairs"),
        "logit_bias.*": Range(-100, 100),
        "allowed_token_ids": Range(1, 1024, lengths="token ids"),
        "bad_words": Range(0, 2 * MAX_BAD_WORDS, lengths="spellings"),
        "cache_salt": Range(1, 1024, lengths="characters"),
    }
)
"""By field of GenerateRequest, or of its `sampling` or `stop_conditions`: what it may be where it is not None; `name[]`
and `name.*`: what is in it."""


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt: tokens [start, start + length) are its placeholders, one for each merged patch of `grid`
    (patches in time, height and width).

    `digest`: sha256 over pixels, size and processor settings. `rgb`: uint8 [height, width, 3], in row order. `bounds`:
    least and most pixels after resizing; None: the checkpoint's.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int, int]
    width: int
    height: int
    rgb: bytes
    bounds: tuple[int, int] | None = None


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded image on its way to a prompt. `rgb`: uint8 [height, width, 3], in row order. `bounds`: least and most
    pixels that the client wants it resized to, each None where the checkpoint says it."""

    width: int
    height: int
    rgb: bytes
    bounds: tuple[int | None, int | None] = (None, None)


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer has to have.

    `kind`: what `text` is: a JSON schema, a regular expression, a JSON list of texts to choose from, a grammar (Lark or
    GBNF), a structural tag as xgrammar has it, or `calls`: JSON, `{"tools": [{"name", "parameters", "place"}],
    "parallel"}`, one of which has to be called; `place`: its number in the request. `field`: where the client put it.
    `reasoning`: the form begins after the second of the `reasoning_marks`, because the prompt has `opened` the
    reasoning, or it is `possible` that the answer does. `is_harmony`: answers are messages in harmony, of which the
    last one has the form: `final`, or what calls a function.
    """

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag", "calls"]
    text: str
    field: str
    reasoning: Literal["none", "opened", "possible"] = "none"
    reasoning_marks: tuple[str, str] = ("<think>", "</think>")
    is_harmony: bool = False


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """An answer ends when a pattern of `min_pattern_size` to `max_pattern_size` tokens has come `min_count` times in a
    row. A `max_pattern_size` of 0 detects nothing."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The thinking at an answer's beginning, between the texts `start` and `end`, has at most `num_tokens` tokens: then
    `end` follows. `is_open`: the prompt ends within it, after its `start`. `call_heads`: texts, without whitespace,
    of which one ends the thinking, too; one that has begun when the tokens are used up may become complete."""

    num_tokens: int
    start: str
    end: str
    is_open: bool = False
    call_heads: list[str] = []


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends, besides at the end of the context.

    `max_tokens`: None for as many as fit. `min_tokens`: nothing but a full context ends the answer before so many
    tokens. `stop`: texts that end it; the answer has the one that ended it only with `include_stop_str_in_output`.
    `stop_token_ids`: tokens that end it besides the model's end-of-sequence tokens, which `ignore_eos` switches off.
    `repetition_detection`: None for none. `thinking`: when its thinking ends; None for whenever the model ends it.
    `prefill_only`: another server is going to give the answer. All of the request is checked, and here one answer ends
    after its first token, without log-probabilities.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    repetition_detection: RepetitionDetection | None = None
    thinking: ThinkingBudget | None = None
    prefill_only: bool = False


class PromptInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the model reads, and what the client knows of it.

    `prompt`: token ids as raw little-endian int64. `boundaries`: places where the leading system segment, messages and
    images end, and where clients have put breakpoints: ascending, each position in 1..n. `prediction`: a text that the
    client expects the answer to be much like, in the form of `prompt`; empty where it expects none.
    """

    prompt: bytes
    images: list[ImageInput] = []
    boundaries: list[Boundary] = []
    cache_salt: str | None = None
    prediction: bytes = b""


class GenerateRequest(PromptInput, frozen=True, kw_only=True):
    """One prompt to be continued.

    `n`: how many answers; with seed s theirs are s, s + 1, and so on. `logprobs`: give the log-probability of each
    token, and of so many of the most likely ones; `prompt_logprobs`: the same of the prompt, from its second token on.
    `structure`: the form of the answers.

    `kv_transfer_params`: that JSON object of the request's body as it came, checked by the engine alone. `priority`: a
    smaller one comes before others. `client`: who asks, the API key's digest or the peer's address: what is held for
    other servers is bounded for each. `session`: the name of the conversation that it belongs to, 32 hexadecimal
    digits; empty where it has none.
    """

    request_id: str
    sampling: SamplingParams = SamplingParams()
    stop_conditions: StopConditions = StopConditions()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structure: Structure | None = None
    kv_transfer_params: bytes | None = None
    priority: int = 0
    client: Annotated[str, msgspec.Meta(max_length=64)] = ""
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def prefill_only(self) -> bool:
        """See `StopConditions`."""
        return self.stop_conditions.prefill_only

    @property
    def has_stop_strings(self) -> bool:
        """Whether a text may end its answers: then the core makes their text, else the client does."""
        return any(self.stop_conditions.stop)

    @property
    def num_answers(self) -> int:
        """How many are given here."""
        return 1 if self.prefill_only else self.n


def check_token_ids(tokens: Keys, vocab_size: int, name: str) -> None:
    """Raises InvalidRequest that names the first place of `name` where there is no token of the model."""
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if wrong.size:
        place = int(wrong[0])
        text = f"{name}[{place}] is {tokens[place]}, which is out of vocabulary: "
        text += f"token ids of this model are below {vocab_size}"
        raise InvalidRequest(text, name.partition("[")[0])
