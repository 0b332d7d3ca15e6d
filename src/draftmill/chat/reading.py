"""What a template reads, found in its syntax tree: the keywords it takes, the keys it knows, the words it looks for.

Nothing is rendered here. Keywords and keys say which rows would lose text, or be printed as nobody asked for; the words
say which texts a template may treat in a way of their own (`'</think>' in content`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jinja2
from jinja2 import meta, nodes

from draftmill.chat.conversation import Conversation
from draftmill.contracts.rows import RowError

# Given to every template by whoever renders it.
_ALWAYS_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_REASONING_KEYS = {"reasoning_content", "thinking"}
# Keys of a message under which a template finds text; what it compares with any other (role, type) is no word.
_TEXT_KEYS = {"content", "text", "value", *_REASONING_KEYS}
# Their arguments are cut off or printed, never looked for.
_HARMLESS_FILTERS = {"trim", "default", "join"}
_WALKS_OVER_A_MAPPING = {"items", "dictsort"}


@dataclass(frozen=True)
class Reading:
    """What one template reads."""

    keywords: frozenset[str]
    """Variables it takes beside those that every template is given, e.g. `enable_thinking`."""
    takes_tools: bool
    names: frozenset[str]
    """Attributes and keys it mentions, e.g. `tool_calls`."""
    words: tuple[str, ...]
    """Literals that it compares texts with or hands to their methods, white space around them left out."""

    def refuse_unread(self, said: Conversation) -> None:
        """RowError where the template would not print all that was said, or is asked with what it does not know."""
        for name, value in said.template_kwargs.items():
            if name not in self.keywords:
                raise RowError("unknown template keyword", f"{name}; the template takes {sorted(self.keywords)}")
            if isinstance(value, str) and value.lower() in ("true", "false"):
                raise RowError("a template keyword is text", f"{name} is {value!r}; true or false is meant")
        if said.tools and not self.takes_tools:
            raise RowError("the template does not print tools")
        for message in said.messages:
            if message.get("tool_calls") and "tool_calls" not in self.names:
                raise RowError("the template does not print tool calls")
            if message.get("reasoning_content") and not self.names & _REASONING_KEYS:
                raise RowError("the template does not print reasoning")


def read(text: str, environment: jinja2.Environment) -> Reading:
    """What the template `text` reads."""
    tree = environment.parse(text)
    undeclared = meta.find_undeclared_variables(tree)
    keywords = frozenset(_keywords(tree, undeclared - _ALWAYS_GIVEN))
    words = {word.strip() for word in _Words(tree, keywords).of(tree)} - {""}
    return Reading(keywords, "tools" in undeclared, frozenset(_names(tree)), _shortest(words))


def _keywords(tree: nodes.Template, undeclared: Iterable[str]) -> Iterator[str]:
    """Undeclared variables; those that the template also sets itself only where it asks whether they are given."""
    own, arguments = _own_names(tree)
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [found.node for found in tree.find_all(nodes.Filter) if found.name == "default" and found.node]
    asked_names = {node.name for node in asked if isinstance(node, nodes.Name)}
    for name in undeclared:
        if not name.endswith("_token") and (name not in own or name in asked_names - arguments):
            yield name


def _own_names(tree: nodes.Template) -> tuple[set[str], set[str]]:
    """Variables that the template sets, and those of them that are arguments of its macros."""
    arguments = {argument.name for macro in tree.find_all(nodes.Macro) for argument in macro.args}
    return {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"} | arguments, arguments


def _names(tree: nodes.Template) -> Iterator[str]:
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _shortest(words: set[str]) -> tuple[str, ...]:
    """Without those that hold another: a text with the longer one has the shorter one too. `think>` is in both tags."""
    closed = {word[1:] for word in words if word.startswith("<") and f"</{word[1:]}" in words}
    kept: list[str] = []
    for word in sorted(words | closed, key=lambda word: (len(word), word)):
        if not any(shorter in word for shorter in kept):
            kept.append(word)
    return tuple(kept)


class _Words:
    """Finds the literals that may be compared with a text: all but those that are printed, keys, and roles."""

    def __init__(self, tree: nodes.Template, keywords: Iterable[str]) -> None:
        self._namespaces = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_call_of(assign.node, "namespace")
        }
        given = set(keywords) - _own_names(tree)[0]
        self._no_texts = given.union(*map(_walked_over, tree.find_all(nodes.For)))
        self._add_copies(tree)
        self._handed_on = set(_handed_on(tree))

    def _add_copies(self, tree: nodes.Template) -> None:
        """Variables that are only ever set to literals and to what is no text are no texts."""
        values: dict[str, list[nodes.Node]] = {}
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name):
                values.setdefault(assign.target.name, []).append(assign.node)
        for _ in values:
            for name, given in values.items():
                if all(isinstance(value, nodes.Const) or self._is_no_text(value) for value in given):
                    self._no_texts.add(name)

    def of(self, node: nodes.Node, *, is_printed: bool = False) -> Iterator[str]:
        """Literals in and below `node`."""
        match node:
            case nodes.Const():
                if isinstance(node.value, str) and not is_printed:
                    yield node.value
            case nodes.Output() | nodes.Add() | nodes.Concat():
                yield from self._each(node.iter_child_nodes(), is_printed or isinstance(node, nodes.Output))
            case nodes.CondExpr():
                yield from self.of(node.test)
                yield from self._each([node.expr1, node.expr2], is_printed)
            case nodes.Assign(node=nodes.Add() | nodes.Concat()):
                yield from self.of(node.node, is_printed=True)
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Const()) if name not in self._handed_on:
                return  # only ever printed
            case nodes.Getitem(arg=nodes.Const()):
                yield from self.of(node.node)
            case nodes.Call():
                yield from self._in_call(node)
            case nodes.Compare():
                sides = [node.expr, *(operand.expr for operand in node.ops)]
                if not any(map(self._is_no_text, sides)):
                    yield from self._each(sides)
            case nodes.Filter() if node.name in _HARMLESS_FILTERS:
                yield from self._each([node.node], is_printed)
            case _:
                yield from self._each(node.iter_child_nodes())

    def _each(self, children: Iterable[nodes.Node | None], is_printed: bool = False) -> Iterator[str]:
        for child in children:
            if child is not None:
                yield from self.of(child, is_printed=is_printed)

    def _in_call(self, call: nodes.Call) -> Iterator[str]:
        if _is_call_of(call, "raise_exception") or _is_call_of(call, "strftime_now"):
            return
        is_key = isinstance(call.node, nodes.Getattr) and call.node.attr == "get"
        yield from self.of(call.node)
        yield from self._each(call.args[1:] if is_key else call.args)
        yield from self._each(call.kwargs)

    def _is_no_text(self, side: nodes.Node) -> bool:
        match side:
            case nodes.Getattr(node=nodes.Name(name=owner)) if owner in self._namespaces:
                return False
            case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
                return key not in _TEXT_KEYS
            case nodes.Name():
                return side.name in self._no_texts
            case nodes.Filter(node=nodes.Expr() as filtered):
                return self._is_no_text(filtered)
            case _:
                return False


def _handed_on(tree: nodes.Template) -> Iterator[str]:
    """Variables that are compared, or handed to a call, a filter or a test."""
    for node in tree.find_all((nodes.Call, nodes.Filter, nodes.Test, nodes.Compare)):
        asked = [node.expr, *node.ops] if isinstance(node, nodes.Compare) else [*node.args, *node.kwargs]
        for part in asked:
            yield from (name.name for name in [part, *part.find_all(nodes.Name)] if isinstance(name, nodes.Name))


def _is_call_of(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def _walked_over(loop: nodes.For) -> set[str]:
    """Loop variables that are parts of a list or a mapping; of a text they would be single letters."""
    match loop.iter:
        case nodes.Name() | nodes.Getattr() | nodes.Getitem():
            is_parts = True
        case nodes.Filter(name=name) | nodes.Call(node=nodes.Getattr(attr=name)):
            is_parts = name in _WALKS_OVER_A_MAPPING
        case _:
            is_parts = False
    targets = [loop.target, *loop.target.find_all(nodes.Name)] if is_parts else []
    return {target.name for target in targets if isinstance(target, nodes.Name)}
