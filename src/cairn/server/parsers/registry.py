"""The parsers of a model's output, by name or by its chat template."""

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType

from cairn.errors import ConfigError
from cairn.server.parsers import gemma4_tool_parser
from cairn.server.parsers.gemma4_tool_parser import Gemma4ToolParser
from cairn.server.parsers.harmony import CHANNEL, REASONING_END, REASONING_START, HarmonyParser
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.lfm2_tool_parser import Lfm2ToolParser
from cairn.server.parsers.nemotron_tool_parser import NemotronToolParser
from cairn.server.parsers.output_parser import OutputParser, ToolParser, ToolSchemas
from cairn.server.parsers.pythonic_tool_parser import PythonicToolParser
from cairn.server.parsers.reasoning import THINK_END, THINK_START, ReasoningParser
from cairn.server.parsers.xml_tool_parser import XmlToolParser

TOOL_PARSERS: Mapping[str, type[ToolParser] | None] = MappingProxyType(
    {
        "gemma4": Gemma4ToolParser,
        "granite4": JsonToolParser,
        "hermes": JsonToolParser,
        "json": JsonToolParser,
        "lfm2": Lfm2ToolParser,
        "nemotron_json": NemotronToolParser,
        "none": None,
        "openai": HarmonyParser,
        "pythonic": PythonicToolParser,
        "qwen3_coder": XmlToolParser,
        "qwen3_xml": XmlToolParser,
        "xml": XmlToolParser,
    }
)
"""Names of `--tool-call-parser`, vLLM's among them, and Nemotron's own."""

_TEMPLATE_MARKS = (
    (CHANNEL, HarmonyParser),
    ("<function=", XmlToolParser),
    ("<|tool_call_start|>", Lfm2ToolParser),
    ("<|tool_call>", Gemma4ToolParser),
    ("<TOOLCALL>", NemotronToolParser),
    ("<tool_call>", JsonToolParser),
    ("List of tools: ", Lfm2ToolParser),  # LFM2's own templates write no calls
)
"""By what a chat template says, how the model writes calls; the first that is found counts."""

_TAKES_TOOLS = re.compile(r"\{[{%][^{}]{0,200}\btools\b")

HARMONY, GEMMA4 = "openai_gptoss", "gemma4"

THINK = THINK_START, THINK_END
CHANNELS = gemma4_tool_parser.REASONING_START, gemma4_tool_parser.REASONING_END
"""Marks of reasoning: of most models, and of Gemma 4."""

REASONING_PARSERS = ("deepseek_r1", GEMMA4, "nano_v3", "nemotron_v3", "none", HARMONY, "qwen3", "think")
"""Names of `--reasoning-parser`, vLLM's among them. All but `none`, harmony's and Gemma 4's parse `<think>`."""

logger = logging.getLogger(__name__)


class ParserFactory:
    """Makes the parser of each answer of one model. `tool_parser`: None if it writes no calls. `has_reasoning`: whether
    answers may have reasoning, between `marks`. `is_harmony`: whether answers are messages in harmony, whatever is
    parsed of them."""

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        *,
        has_reasoning: bool,
        is_harmony: bool | None = None,
        marks: tuple[str, str] = THINK,
    ) -> None:
        """`is_harmony` None: as calls are."""
        self.tool_parser = tool_parser
        self.has_reasoning = has_reasoning
        self.is_harmony = tool_parser is HarmonyParser if is_harmony is None else is_harmony
        self._marks = marks

    @property
    def reasoning_marks(self) -> tuple[str, str]:
        """What reasoning begins and ends with."""
        return (REASONING_START, REASONING_END) if self.is_harmony else self._marks

    def make_parser(
        self,
        tools: ToolSchemas | None,
        *,
        opened: bool,
        tool_parser: type[ToolParser] | None = None,
        calls_end_reasoning: bool = True,
    ) -> OutputParser:
        """`tools`: None if calls are not parsed. `opened`: the prompt ends within the reasoning. `tool_parser`: instead
        of the model's own. `calls_end_reasoning`: whether calls are looked for in the reasoning, too."""
        if self.is_harmony:
            return HarmonyParser(
                tools or {},
                opened=opened,
                parses_calls=tools is not None and self.tool_parser is not None,
                parses_reasoning=self.has_reasoning,
            )
        chosen = tool_parser or self.tool_parser
        parser = OutputParser() if tools is None or chosen is None else chosen(tools)
        if not self.has_reasoning:
            return parser
        return ReasoningParser(
            parser, opened=opened, calls_end_reasoning=calls_end_reasoning, marks=self.reasoning_marks
        )

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt with this end has opened the reasoning of the answer."""
        return self.has_reasoning and prompt_end.rstrip().endswith(self.reasoning_marks[0])

    def leaves_reasoning_open(self, answer_start: str) -> bool:
        """Whether this beginning of an answer, which is to be continued, ends within its reasoning."""
        start, end = self.reasoning_marks
        return self.has_reasoning and answer_start.rfind(start) > answer_start.rfind(end)


def select_parsers(template: str, tools: str | None, reasoning: str | None) -> ParserFactory:
    """The parsers of these names; None: the one that fits `template`, a chat template's text. A warning is logged where
    the template takes tools and none fits.

    Raises ConfigError naming the flag.
    """
    for flag, name, names in (
        ("--tool-call-parser", tools, [*TOOL_PARSERS]),
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
    ):
        if name is not None and name not in names:
            raise ConfigError(f"{flag}: there is no {name!r}; one of {', '.join(names)}")
    if reasoning == HARMONY or tools == "openai" or (CHANNEL in template and {tools, reasoning} <= {None, "none"}):
        return _harmony_parsers(tools, reasoning)
    # Templates that only cut earlier reasoning out of the history name its end alone.
    has_channels = CHANNELS[0] in template if reasoning is None else reasoning == GEMMA4
    writes_tags = has_channels or THINK_START in template or THINK_END in template
    has_reasoning = writes_tags if reasoning is None else reasoning != "none"
    marks = CHANNELS if has_channels else THINK
    if tools is not None:
        return ParserFactory(TOOL_PARSERS[tools], has_reasoning=has_reasoning, marks=marks)
    tool_parser = next((parser for mark, parser in _TEMPLATE_MARKS if mark in template), None)
    if tool_parser is None and _TAKES_TOOLS.search(template):
        logger.warning(
            "the chat template takes tools, but does not show how the model writes calls: they stay content; name the "
            "form with --tool-call-parser (one of %s)",
            ", ".join(TOOL_PARSERS),
        )
    return ParserFactory(tool_parser, has_reasoning=has_reasoning, marks=marks)


def _harmony_parsers(tools: str | None, reasoning: str | None) -> ParserFactory:
    """One parser finds both. Raises ConfigError where another one is named for either."""
    for flag, name, harmony in (("--tool-call-parser", tools, "openai"), ("--reasoning-parser", reasoning, HARMONY)):
        if name not in (None, "none", harmony):
            raise ConfigError(f"{flag} {name}: answers in harmony are parsed by {harmony} alone; take that, or none")
    parser = None if tools == "none" else HarmonyParser
    return ParserFactory(parser, has_reasoning=reasoning != "none", is_harmony=True)
