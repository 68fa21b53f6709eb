"""Writes requests for OpenAI's ``/responses``, the only API of some models; ``responses_answer`` reads answers.

Nothing is stored on the server (``store: false``): each request has the whole conversation, as items. Reasoning arrives
encrypted and is sent back unchanged between the calls that it led to. So a sealed answer is sent as its original items.
"""

from __future__ import annotations

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import echoed, written, written_options
from batch_agent.backends.openai.chat import OpenAIServer
from batch_agent.backends.openai.models import reasons
from batch_agent.backends.openai.providers import Dialect
from batch_agent.backends.openai.responses_answer import WIRE, ResponseStream, read_response
from batch_agent.errors import SpecError
from batch_agent.messages import Content, Document, Message, MessageView, Part


def encode_head(shape: RequestShape, stream: bool, dialect: Dialect) -> bytes:
    """Return the body up to and including the bracket that opens the input. ``extra_body`` overrides other fields."""
    for name, value in {"seed": shape.seed, "stop": shape.stop or None}.items():
        if value is not None:
            raise SpecError(f"{name}: {shape.model} is served at /responses, which accepts no {name}; leave it out")
    fields: dict[str, object] = {
        "model": dialect.deployment or shape.model,
        "max_output_tokens": shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "store": False,
    }
    if dialect.openai_models and reasons(shape.model):
        fields["include"] = ["reasoning.encrypted_content"]  # a model without reasoning refuses this field
    if shape.tools:
        fields["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,  # the default is true, which would refuse the parameters
            }
            for tool in shape.tools
        ]
        fields["tool_choice"] = _tool_choice(shape.tool_choice)
    if shape.schema is not None:
        form = dialect.schema_form(shape.schema)
        schema = {"type": "json_schema", "name": shape.schema_name, "schema": form.schema, "strict": form.strict}
        fields["text"] = {"format": schema}
    if stream:
        fields["stream"] = True
    return written_options(shape, fields, ("input", "stream"))[:-1] + b',"input":['


def encode_items(message: Message) -> bytes:
    """Return the items of one message, separated by commas."""
    return written(_items(message))[1:-1]


class ItemView(MessageView):
    __slots__ = ()
    encode = staticmethod(encode_items)


def _items(message: Message) -> list[JsonValue]:
    sealed, content = message.sealed, message.content
    if sealed is not None and sealed.wire == WIRE and isinstance(sealed.value, list):
        return sealed.value
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": _content(content)}]
    calls: list[JsonValue] = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": echoed(call.arguments)}
        for call in message.tool_calls
    ]
    if calls and not content:
        return calls
    return [{"type": "message", "role": message.role, "content": _content(content)}, *calls]


def _content(content: Content) -> JsonValue:
    if isinstance(content, str):
        return content
    return [_part(part) for part in content]


def _part(part: Part) -> JsonValue:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, Document):
        return {"type": "input_file", "filename": part.name, "file_data": part.url}
    return {"type": "input_image", "image_url": part.url, "detail": "auto"}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "name": choice}
    return choice


class ResponsesBackend(OpenAIServer):
    path = "/responses"
    wire = WIRE
    read_whole = staticmethod(read_response)
    read_stream = ResponseStream
    view = ItemView

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        return encode_head(shape, streamed, self._dialect)
