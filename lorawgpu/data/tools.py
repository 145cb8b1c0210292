"""Tools and tool calls of a record: JSON text where an object belongs is read, and the nulls of tables are dropped."""

import json

from lorawgpu.data.bad_line import SourceLine, bad_line

MEANT = ("default", "const", "example")  # keys of a JSON schema whose null has a meaning


def tool_calls_of(calls: object, tools: list[dict] | None, source: SourceLine, where: str) -> list:
    """The calls without nulls, which fill up tables and what is made of them. A null argument is dropped if the tool
    has no parameter of that name. UserError if they are no list."""
    calls = _from_text(calls, source, f"{where}.tool_calls")
    if not isinstance(calls, list):
        raise bad_line(*source, f"{where}: `tool_calls` must be a list, got {type(calls).__name__}", calls)
    return [_tool_call(call, tools) for call in calls]


def tools_of(record: dict, source: SourceLine) -> list[dict] | None:
    """The tools of a record without nulls, None if it has none. UserError if they are no list of objects."""
    tools = _from_text(record.get("tools") or None, source, "tools")
    if isinstance(tools, list):
        tools = [_from_text(tool, source, f"tools[{number}]") for number, tool in enumerate(tools)]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise bad_line(*source, "`tools` must be a list of objects", tools)
    return [_schema(tool) for tool in tools] if tools else None


def _tool_call(call: object, tools: list[dict] | None) -> object:
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        return call | {"function": _tool_call(call["function"], tools)}
    arguments = call.get("arguments")
    if isinstance(arguments, dict) and None in arguments.values():
        known = _parameters(call.get("name"), tools)
        if known is not None:
            call["arguments"] = {k: v for k, v in arguments.items() if v is not None or k in known}
    return call


def _parameters(name: object, tools: list[dict] | None) -> dict | None:
    """The parameters of a tool by name, None if there is no such tool."""
    functions = (tool.get("function", tool) for tool in tools or ())
    schemas = (f.get("parameters") for f in functions if isinstance(f, dict) and f.get("name") == name)
    found = next((schema.get("properties") for schema in schemas if isinstance(schema, dict)), None)
    return found if isinstance(found, dict) else None


def _schema(value: object, key: str = "") -> object:
    """A tool without nulls, which fill up tables; parameters that are JSON text as what the text says."""
    if key == "parameters" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: _schema(v, k) for k, v in value.items() if v is not None or k in MEANT}


def _from_text(value: object, source: SourceLine, key: str) -> object:
    """What a string says as JSON; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_line(*source, f"`{key}` is a string that is not valid JSON ({error})", value) from None
