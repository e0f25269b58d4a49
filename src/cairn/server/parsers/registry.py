"""Which parsers a model's answers need: by name, or by what its chat template writes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cairn.errors import ConfigError
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.output_parser import Content, Event, OutputParser, Tools
from cairn.server.parsers.reasoning import CLOSE, OPEN, ReasoningParser
from cairn.server.parsers.xml_tool_parser import XmlToolParser


class PlainTextParser:
    """Implements `OutputParser`: everything is content."""

    @property
    def held(self) -> int:
        return 0

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        return []


class ChainedParser:
    """Implements `OutputParser`: what `first` takes for content goes on to `then`."""

    def __init__(self, first: OutputParser, then: OutputParser) -> None:
        self._first = first
        self._then = then

    @property
    def held(self) -> int:
        return self._first.held + self._then.held

    def push(self, text: str) -> list[Event]:
        return self._on(self._first.push(text))

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        return [*self._on(self._first.finish(cut_off=cut_off)), *self._then.finish(cut_off=cut_off)]

    def _on(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._then.push(event.text) if isinstance(event, Content) else [event]
        return found


TOOL_PARSERS: Mapping[str, str] = MappingProxyType(
    {
        "hermes": "json",
        "json": "json",
        "none": "none",
        "qwen3_coder": "xml",
        "qwen3_xml": "xml",
        "xml": "xml",
    }
)
"""Names of `--tool-call-parser`, vLLM's among them, and the form of calls that each reads."""

REASONING_PARSERS: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_r1": "think",
        "nano_v3": "think",
        "nemotron_v3": "think",
        "none": "none",
        "qwen3": "think",
        "think": "think",
    }
)
"""Names of `--reasoning-parser`, vLLM's among them."""

_MAKE_TOOLS: Mapping[str, Callable[[Tools], OutputParser]] = MappingProxyType(
    {"json": lambda tools: JsonToolParser(), "xml": XmlToolParser, "none": lambda tools: PlainTextParser()}
)


class ParserFactory:
    """Makes one parser for each answer of one model. `calls`, `reasoning`: the forms it has, "none" for none."""

    def __init__(self, calls: str, reasoning: str) -> None:
        self.calls = calls
        self.reasoning = reasoning

    def parser(self, tools: Tools | None, *, opened: bool, calls: str | None = None) -> OutputParser:
        """`tools`: None where calls are not looked for. `opened`: the prompt has opened the reasoning. `calls`: the
        form of calls where it is not the model's own."""
        then = PlainTextParser() if tools is None else _MAKE_TOOLS[calls or self.calls](tools)
        return ChainedParser(ReasoningParser(opened), then) if self.reasons else then

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning."""
        return self.reasoning != "none"

    def opens(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has opened the reasoning of what follows."""
        return self.reasons and prompt_end.rstrip().endswith(OPEN)

    def leaves_open(self, beginning: str) -> bool:
        """Whether the beginning of an answer, which is to be continued, ends within its reasoning."""
        return self.reasons and beginning.rfind(OPEN) > beginning.rfind(CLOSE)


def select_parsers(template: str, tools: str | None, reasoning: str | None) -> ParserFactory:
    """The parsers named, or those that `template`, a chat template's text, calls for where a name is None.

    Raises ConfigError naming the flag.
    """
    for flag, name, names in (
        ("--tool-call-parser", tools, TOOL_PARSERS),
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
    ):
        if name is not None and name not in names:
            raise ConfigError(f"{flag}: there is no {name!r}; one of {', '.join(names)}")
    form = "xml" if "<function=" in template else "json" if "<tool_call>" in template else "none"
    thinks = "think" if OPEN in template else "none"
    return ParserFactory(
        form if tools is None else TOOL_PARSERS[tools], thinks if reasoning is None else REASONING_PARSERS[reasoning]
    )
