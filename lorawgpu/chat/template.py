"""Chat templates: choosing one, and rendering it in a sandbox with the globals that published templates expect."""

import json
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorawgpu import guard
from lorawgpu.chat.arguments import RESERVED, Arguments, with_arguments
from lorawgpu.chat.builtin import BUILT_IN, FALLBACK
from lorawgpu.chat.content_independent import is_content_independent
from lorawgpu.chat.tool_calls import wants_objects, with_objects
from lorawgpu.errors import UserError
from lorawgpu.files.paths import expand
from lorawgpu.files.untrusted import decoded
from lorawgpu.guard.limits import RENDERING
from lorawgpu.util.suggest import nearest

MAX_TEMPLATE = 1 << 16  # characters; the longest published ones have some ten thousand
MAX_MESSAGE = 500  # characters of a template's own error message
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys that data sets use for a message's reasoning
PROBE = "\ue002probe\ue002"  # occurs in no template


class TemplateFailed(UserError):
    """The template raised, or hides a turn to train; the caller adds file and line."""


class ChatTemplate:
    """A Jinja template, rendered in a sandbox with the globals that published templates expect.

    `special_tokens` (bos_token, eos_token, ...) are variables of the template. `strftime_now` uses the time of
    creation, so that a conversation always renders the same. `tool_use`: the source of the model's template for
    conversations with tools, if it has another one. UserError if a source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: dict, now: datetime | None = None, tool_use: str | None = None):
        self.source, self.special_tokens = source, dict(special_tokens)
        self.now = datetime.now() if now is None else now
        self.tool_use = tool_use
        self._for_tools = None if tool_use is None else ChatTemplate(tool_use, special_tokens, self.now)
        if len(source) > MAX_TEMPLATE:
            raise UserError(f"the chat template has {len(source):,} characters; at most {MAX_TEMPLATE:,} are allowed")
        before = guard.doing(RENDERING)  # jinja2 computes constants when it compiles
        try:
            self._template = _environment(self.now).from_string(source)
            self._template.globals = dict(self._template.globals)  # each render copies them, and a ChainMap is slow
        except jinja2.TemplateSyntaxError as error:
            why = f"line {error.lineno}: {_cut(error.message)}"
            raise UserError(f"the chat template is not valid Jinja: {why}") from None
        except (RecursionError, SyntaxError, ValueError, ArithmeticError, LookupError) as error:  # of Python's compiler
            raise UserError(f"the chat template cannot be compiled: {_cut(error) or 'nested too deeply'}") from None
        guard.doing(before)

    def __reduce__(self):  # compiled templates do not pickle: worker processes compile their own
        return ChatTemplate, (self.source, self.special_tokens, self.now, self.tool_use)

    def at(self, now: datetime) -> "ChatTemplate":
        """The same template at another time."""
        return ChatTemplate(self.source, self.special_tokens, now, self.tool_use)

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
        """The conversation as a string. TemplateFailed with the template's own message if it raises.

        Contents are strings; a template that only shows lists of parts gets each one as a part of type text. Arguments
        of tool calls may be objects or JSON text; a template that shows objects gets objects.
        """
        if tools and self._for_tools:
            return self._for_tools.render(messages, tools, add_generation_prompt)
        if self._wants_parts:
            messages = [_in_parts(m) for m in messages]
        if any(m.get("tool_calls") for m in messages) and self._wants_objects:
            try:
                messages = [with_objects(_plain(m)) for m in messages]
            except ValueError as error:
                raise TemplateFailed(str(error)) from None
        return self._render(messages, tools, add_generation_prompt)

    @cached_property
    def _wants_objects(self) -> bool:
        """Whether arguments of tool calls have to be objects."""

        def render(messages: list[dict], tools: list[dict]) -> str | None:
            try:
                return self._render([_in_parts(m) for m in messages] if self._wants_parts else messages, tools, False)
            except TemplateFailed:
                return None

        return wants_objects(render)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows contents that are lists of parts, but not strings."""

        def shown(message: dict) -> bool:
            try:
                return PROBE in self._render([message], None, False)
            except TemplateFailed:
                return False

        question = {"role": "user", "content": PROBE}
        return not shown(question) and shown(_in_parts(question))

    @cached_property
    def variables(self) -> set[str]:
        """The variables that the template reads and that neither it nor every render sets."""
        environment = self._template.environment
        read = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        return read - {*RESERVED, *environment.globals, *self.special_tokens}

    @cached_property
    def content_independent(self) -> bool:
        """Whether the text around the contents depends on the roles alone (see lorawgpu.chat.content_independent)."""
        return is_content_independent(self._template.environment.parse(self.source))

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool) -> str:
        before = guard.doing(RENDERING)
        try:
            text = self._template.render(
                **self.special_tokens,
                messages=[_plain(m) for m in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is untrusted code: it can raise anything
            raise TemplateFailed(f"the chat template rejected the conversation: {_cut(error)}") from None
        guard.doing(before)
        return text


class GuardedTemplate(guard.Kept):
    """A `ChatTemplate` that is compiled and rendered in a worker process, with the same attributes and methods; sent to
    a worker, it arrives as the `ChatTemplate` itself. UserError, but not TemplateFailed, where it meets a limit."""

    def __init__(self, source: str, special_tokens: dict, now: datetime | None = None, tool_use: str | None = None):
        self.source, self.special_tokens, self.tool_use = source, dict(special_tokens), tool_use
        self.now = datetime.now() if now is None else now
        super().__init__(ChatTemplate, source, self.special_tokens, self.now, tool_use)
        self._call(_compiled)

    def at(self, now: datetime) -> "GuardedTemplate":
        return GuardedTemplate(self.source, self.special_tokens, now, self.tool_use)

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
        return self._call(ChatTemplate.render, messages, tools, add_generation_prompt)

    @cached_property
    def variables(self) -> set[str]:
        return self._call(getattr, "variables")

    @cached_property
    def content_independent(self) -> bool:
        return self._call(getattr, "content_independent")

    def _call(self, function, *args: object):
        try:
            return guard.call(function, self, *args)
        except guard.WorkerStopped as stopped:
            raise UserError(f"the chat template was stopped: {stopped}") from None


def _compiled(template: ChatTemplate) -> None:
    """Arriving is enough."""


def resolve_template(
    name: str | None,
    jinja: str | None,
    own: str | None,
    special_tokens: dict,
    arguments: Arguments | None = None,
    tool_use: str | None = None,
) -> GuardedTemplate | None:
    """The template to use: the built-in one called `name`, else `jinja` (a file or the source), else the model's `own`,
    or if it has none, the built-in one that a `name` with `FALLBACK` ends with;
    with `arguments` for its variables. `tool_use`: what goes with it for conversations with tools.

    None if there is none of them. UserError for an unknown name, if both `name` and `jinja` are given, and for an
    argument that the template does not read.
    """
    if name is not None and jinja is not None:
        raise UserError("set either `chat_template` or `chat_template_jinja`, not both")
    if name is not None and name.startswith(FALLBACK):
        name = None if own is not None else name.removeprefix(FALLBACK)
    if name is not None and name not in BUILT_IN:
        raise UserError(f"unknown chat_template `{name}`; wanted one of {', '.join(BUILT_IN)}")
    source = BUILT_IN[name] if name is not None else own if jinja is None else _text_or_file(jinja)
    if source is None:
        return None
    template = GuardedTemplate(source, special_tokens, None, tool_use)
    return _with_arguments(template, arguments) if arguments else template


def _with_arguments(template: GuardedTemplate, arguments: Arguments) -> GuardedTemplate:
    for name in arguments:
        if name not in template.variables:
            meant, others = nearest(name, template.variables), ", ".join(sorted(template.variables))
            hint = f"the nearest one is `{meant}`" if meant else f"it reads {others}" if others else "it reads none"
            raise UserError(f"chat_template_kwargs: the chat template does not read a variable `{name}`; {hint}")
    sources = [None if s is None else with_arguments(s, arguments) for s in (template.source, template.tool_use)]
    return GuardedTemplate(sources[0], template.special_tokens, template.now, sources[1])


def _cut(error: object) -> str:
    text = str(error)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = _tojson
    del env.globals["lipsum"]  # random text
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = now.strftime
    return env


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which other tools mask by: rendered as its contents."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's filter escapes HTML; published templates expect plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _in_parts(message: dict) -> dict:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _plain(message: dict) -> dict:
    """Without null keys, and with its reasoning under all the names that templates use, as transformers does it."""
    message = {k: v for k, v in message.items() if v is not None}
    reasoning = next((message[k] for k in REASONING if k in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _text_or_file(jinja: str) -> str:
    if "{" in jinja or "\n" in jinja:
        return jinja
    try:
        return decoded(expand(jinja).read_bytes()).replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"chat template {jinja}: not a readable file ({error}), and neither Jinja source nor a built-in template "
            f"({', '.join(BUILT_IN)})"
        ) from None
