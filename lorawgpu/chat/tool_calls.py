"""Tool calls as a chat template wants them: data sets hold the arguments of a call as an object, or as JSON text."""

import json
from collections.abc import Callable

VALUE = "\ue002value\ue002"  # occurs in no template
ARGUMENTS = {"key": VALUE}
CALL_ID = "abcdefghi"  # Mistral's templates want nine characters
TOOL = {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]


def conversation(arguments: object) -> list[dict]:
    """A question, a call with these arguments, and its result."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": "probe", "tool_call_id": CALL_ID},
    ]


def wants_objects(render: Callable[[list[dict], list[dict]], str | None]) -> bool:
    """Whether a template shows arguments that are objects, and JSON text not as it is: encoded again, or not at all.

    `render`: the text of messages and tools, or None if the template rejects them.
    """
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    for count in (3, 2):  # some reject a conversation that ends with a result
        shown = render(conversation(ARGUMENTS)[:count], TOOLS)
        if shown is not None and VALUE in shown:
            return text not in (render(conversation(text)[:count], TOOLS) or "")
    return False


def with_objects(message: dict) -> dict:
    """The message with arguments that are JSON text as what the text says. ValueError if it is not JSON."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_object(call, i) for i, call in enumerate(message["tool_calls"])]}


def _with_object(call: object, number: int) -> object:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        name = function.get("name")
        raise ValueError(
            f"the arguments of tool_calls[{number}] ({name}) are not JSON, and the template shows objects"
        ) from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
