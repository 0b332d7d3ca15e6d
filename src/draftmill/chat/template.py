"""A target's chat template: found in its folder, compiled and rendered as transformers 5.24 does it (parity is a test).

Templates come from model repositories and are not trusted: they run in jinja2's immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import msgspec

from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Message, RowError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# What a template may raise on a conversation it does not take: its own raise_exception, and slips such as None + "".
_TEMPLATE_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
)
# For the engine's bookkeeping, never for the template.
_HIDDEN_KEYS = ("prompt_token_ids", "token_ids")


def read_template(folder: Path, config: Mapping[str, Any]) -> str:
    """The template's text, from its own file or from the tokenizer's configuration; InputError where there is none."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 text ({error}); fetch it again") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {e["name"]: e["template"] for e in found if isinstance(e, dict) and e.keys() >= {"name", "template"}}
        found = named.get("default")
        if found is None:
            raise InputError(
                f"{folder / TOKENIZER_CONFIG_FILE}: chat templates {sorted(named)}, but none is named 'default'"
            )
    if not isinstance(found, str):
        raise InputError(
            f"{folder} has no chat template (looked for {TEMPLATE_FILE} and for chat_template in "
            f"{TOKENIZER_CONFIG_FILE}): a base model cannot be asked as a chat; put the template its engine uses there "
            f"as {TEMPLATE_FILE}"
        )
    return found


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, as the template sees them; saved as text or as an object with it."""
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


@dataclass
class Clock:
    """What a template is told where it asks for the time, and whether it did."""

    today: date | None = None
    """None: the host's own time."""
    was_asked: bool = False

    def __call__(self, form: str) -> str:
        """The time in the form of `strftime`."""
        self.was_asked = True
        return (datetime.now() if self.today is None else datetime.combine(self.today, time())).strftime(form)


def template_environment(clock: Clock) -> jinja2.Environment:
    """What templates are parsed and rendered in: a sandbox with the functions that transformers gives them."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": clock,
        "namespace": _PlainNamespace,
    }
    return environment


def compile_template(text: str, environment: jinja2.Environment, where: str) -> jinja2.Template:
    """The template, ready to render; InputError naming its line where it is not jinja."""
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template of {where} is broken at line {error.lineno}: {error.message}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 5,000 deep
        raise InputError(f"the chat template of {where} cannot be read: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders its body; nothing relies on it, for stock templates have none."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(jinja2.utils.Namespace):
    """jinja2's namespace without underscore names, through which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        namespace, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML characters, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def render(template: jinja2.Template, messages: Sequence[Message], **variables: Any) -> str:
    """The conversation as text; RowError with the template's own words where it refuses the messages."""
    if not messages:
        raise RowError("no messages")
    try:
        return template.render(messages=[_as_template_sees(m) for m in messages], documents=None, **variables)
    except _TEMPLATE_FAILURES as error:
        raise RowError("the chat template refuses the row", f"{type(error).__name__}: {error}") from error


def _as_template_sees(message: Message) -> Message:
    """Without null keys (templates would print "None"), reasoning under every name, tool arguments as a mapping."""
    seen = {k: v for k, v in message.items() if v is not None and k not in _HIDDEN_KEYS}
    if "reasoning_content" in seen:
        seen = {"thinking": seen["reasoning_content"], **seen}
    if "tool_calls" in seen:
        seen["tool_calls"] = [_with_parsed_arguments(call) for call in seen["tool_calls"]]
    return seen


def _with_parsed_arguments(call: Any) -> Any:
    """The OpenAI form writes arguments as JSON text, templates want the mapping."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RowError("tool arguments are not JSON", str(error)) from error
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed
