"""Chat templates: the jinja2 environment that published ones expect, in a sandbox, and the choice between them."""

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
import jinja2.ext

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.content_independent import is_blind
from lorawgpu.chat.sandbox import Budget, Sandbox
from lorawgpu.errors import UserError

MAX_TEMPLATE = 1 << 16  # characters; published ones have up to some ten thousand
MAX_MESSAGE = 500  # characters of what a template says when it raises
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys under which a message's thoughts are published


PROBE = "\ue002probe\ue002"  # no template has it


class TemplateFailed(UserError):
    """The template raised, or hides a turn that should be trained; the caller adds file and line."""


class ChatTemplate:
    """A jinja2 template rendered in a sandbox with the globals that published templates expect.

    `special_tokens` (bos_token, eos_token, ...) are variables of the template. `strftime_now` answers with the moment
    of creation, so that a conversation renders alike each time. UserError when the text is no template.
    """

    def __init__(self, source: str, special_tokens: dict, now: datetime | None = None):
        self.source, self.special_tokens = source, dict(special_tokens)
        self.now = datetime.now() if now is None else now
        if len(source) > MAX_TEMPLATE:
            raise UserError(f"the chat template has {len(source):,} characters; wanted at most {MAX_TEMPLATE:,}")
        try:
            with Budget(source):
                self._template = _environment(self.now).from_string(source)
            self._template.globals = dict(self._template.globals)  # every render copies them; of a ChainMap, slowly
        except jinja2.TemplateSyntaxError as error:
            why = f"line {error.lineno}: {_cut(error.message)}"
            raise UserError(f"the chat template is not valid jinja2: {why}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:  # Python's own compiler
            raise UserError(f"the chat template cannot be compiled: {_cut(error) or 'nested too deeply'}") from None

    def __reduce__(self):  # compiled templates do not pickle; worker processes compile their own
        return ChatTemplate, (self.source, self.special_tokens, self.now)

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
        """The conversation as one text. TemplateFailed with the template's own words when it refuses.

        A content is a string; for a template that shows nothing but lists of parts it becomes one part of type text.
        """
        return self._render(
            [_in_parts(m) for m in messages] if self._wants_parts else messages, tools, add_generation_prompt
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether a content is shown as a list of parts, and not as a string."""

        def shown(message: dict) -> bool:
            try:
                return PROBE in self._render([message], None, False)
            except TemplateFailed:
                return False

        asked = {"role": "user", "content": PROBE}
        return not shown(asked) and shown(_in_parts(asked))

    @cached_property
    def blind(self) -> bool:
        """Whether what it puts around the contents depends on the roles alone (lorawgpu.chat.content_independent)."""
        return is_blind(self._template.environment.parse(self.source))

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool) -> str:
        try:
            with Budget(messages, tools, self.source):
                return self._template.render(
                    **self.special_tokens,
                    messages=[_plain(m) for m in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )
        except Exception as error:  # a template is foreign code: it can raise anything
            raise TemplateFailed(f"the chat template refuses the conversation: {_cut(error)}") from None


def resolve_template(name: str | None, jinja: str | None, own: str | None, special_tokens: dict) -> ChatTemplate | None:
    """The template a config asks for: a built-in by `name`, else `jinja` (a file or the text), else the model's own.

    None when nothing is asked for and the model has none. UserError for an unknown name or both at once.
    """
    if name is not None and jinja is not None:
        raise UserError("give either `chat_template` or `chat_template_jinja`, not both")
    if name is not None and name not in BUILT_IN:
        raise UserError(f"chat_template `{name}` is unknown; wanted one of {', '.join(BUILT_IN)}")
    if name is not None:
        return ChatTemplate(BUILT_IN[name], special_tokens)
    if jinja is not None:
        return ChatTemplate(_text_or_file(jinja), special_tokens)
    return None if own is None else ChatTemplate(own, special_tokens)


def _cut(error: object) -> str:
    text = str(error)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _environment(now: datetime) -> Sandbox:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    env = Sandbox({"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = now.strftime
    return env


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: other tools' markers of what is trained. Shown as their inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes HTML; published templates expect plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _in_parts(message: dict) -> dict:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _plain(message: dict) -> dict:
    """Without empty keys, and with a reasoning under the names that templates read it by, as transformers does."""
    message = {k: v for k, v in message.items() if v is not None}
    thought = next((message[k] for k in REASONING if k in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _text_or_file(jinja: str) -> str:
    if "{" in jinja or "\n" in jinja:
        return jinja
    try:
        return Path(jinja).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"chat template {jinja}: neither a template, nor a file that can be read ({error}), nor a built-in one "
            f"({', '.join(BUILT_IN)})"
        ) from None
