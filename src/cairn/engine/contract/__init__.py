"""What the HTTP room knows of the engine: plain records, and small protocols.

    server --GenerateRequest--> EngineClient --wire--> Core (scheduler + runner)
           <--GenerateOutput--              <--wire--

`core.Core` is synchronous and lives wherever it is put (a thread, a process of its own); `EngineClient` is its
asynchronous face. All records are msgspec structs, so the process wire is their msgpack form and nothing else.
"""

from cairn.cache.view import MAX_SHOWN, CacheView
from cairn.engine.contract.client import EngineClient, TakeOutput
from cairn.engine.contract.config import (
    EngineConfig,
    EngineOptions,
    KvEventsConfig,
    KvTransferConfig,
    LeaseOptions,
    RequestLogConfig,
    TierOptions,
)
from cairn.engine.contract.info import (
    STEP_SIZES,
    CacheInfo,
    EngineInfo,
    EngineStats,
    ImageStats,
    PoolStats,
    PrefixCacheStats,
    QueueStats,
    SpecDecodeStats,
    StepStats,
    TierStats,
    TokenStats,
    TransferStats,
)
from cairn.engine.contract.output import (
    CacheReport,
    DraftReport,
    FinishReason,
    GenerateOutput,
    Timings,
    TokenLogprobs,
    TransferReport,
)
from cairn.engine.contract.request import (
    FREE_LOGPROBS,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_BREAKPOINTS,
    MAX_LOGPROB_ENTRIES,
    MAX_LOGPROBS,
    MAX_PATTERN_SIZE,
    MAX_RETAIN_SECONDS,
    RANGES,
    GenerateRequest,
    ImageInput,
    Pixels,
    RepetitionDetection,
    StopConditions,
    Structure,
    ThinkingBudget,
    check_token_ids,
)
from cairn.engine.contract.text import (
    SYSTEM_ROLES,
    Breakpoint,
    RenderedPrompt,
    TemplateValue,
    TextStream,
    TextTokenizer,
)
from cairn.scheduler.speculation import SpeculativeConfig
