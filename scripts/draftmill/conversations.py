"""Raw rows of the shapes people have, as conversations of one shape.

A conversation is a list of messages {"role", "content", ...} with the roles system, user, assistant and
tool; tool calls and other keys are kept as they are.
"""

import hashlib
import json
import unicodedata
from dataclasses import dataclass

# ShareGPT's names for the speakers
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


class MalformedRow(ValueError):
    """The reason why a row is no conversation."""


@dataclass(frozen=True)
class Conversation:
    id: str
    category: str
    messages: list[dict]


def parse(row: bytes, number: int, responses: str) -> Conversation:
    """The conversation in a raw row.

    With `responses` "generate" it ends with what the target is to answer (a final assistant turn is
    dropped); with "given" it must end with an assistant turn that is not empty.

    Raises MalformedRow with the reason.
    """
    if not row.strip():
        raise MalformedRow("a blank line")
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise MalformedRow(f"a JSON {type(value).__name__} where an object is expected")
    value = {key: item for key, item in value.items() if item is not None}
    messages = [message_of(turn, i) for i, turn in enumerate(turns_of(value))]
    if not messages:
        raise MalformedRow("no turns")
    if responses == "generate":
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    elif messages[-1]["role"] != "assistant":
        raise MalformedRow("no answer: the last turn is not the assistant's")
    messages = [m for m in messages if m["role"] not in ("system", "developer") or has_text(m)]
    for index, message in enumerate(messages):
        check_text(message, index)
    roles = [m["role"] for m in messages]
    if "user" not in roles:
        raise MalformedRow("no user turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise MalformedRow("an answer stands before the first user turn")
    named = (value.get(k) for k in ("id", "question_id", "task_id"))
    identity = str(next((name for name in named if name is not None), number))
    category = str(value.get("category") or "all")
    try:
        json.dumps([identity, category, messages], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedRow("text with half a surrogate pair, which is no Unicode") from None
    return Conversation(identity, category, messages)


def turns_of(value: dict) -> list:
    if "messages" in value or "conversations" in value:
        key = "messages" if "messages" in value else "conversations"
        turns = value[key]
        if not isinstance(turns, list) or not turns:
            raise MalformedRow(f"'{key}' is not a list of turns")
        return turns
    if isinstance(value.get("prompt"), list):  # a list of messages, as some trainers write it
        return [*value["prompt"], *(value.get("completion") or [])]
    if "prompt" in value:
        turns = [{"role": "user", "content": value["prompt"]}]
        if isinstance(value.get("system"), str):
            turns.insert(0, {"role": "system", "content": value["system"]})
        answer = next((value[k] for k in ("response", "completion") if k in value), None)
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        return turns
    raise MalformedRow("none of the keys 'messages', 'conversations' and 'prompt'")


def message_of(turn: object, index: int) -> dict:
    if not isinstance(turn, dict):
        raise MalformedRow(f"turn {index} is not an object")
    turn = {k: v for k, v in turn.items() if v is not None}
    if "from" in turn:
        role = SHAREGPT_ROLES.get(str(turn.pop("from")))
        turn = {"role": role, "content": turn.pop("value", None), **turn}
    if turn.get("role") not in ROLES:
        raise MalformedRow(f"turn {index} has no known role")
    if turn.get("content") is None and turn.get("tool_calls"):
        turn["content"] = ""
    if isinstance(turn.get("content"), list):
        turn["content"] = joined_parts(turn["content"], index)
    return turn


def joined_parts(parts: list, index: int) -> str:
    """The text of content given in parts; templates differ in what they do with a list."""
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise MalformedRow(f"turn {index} has parts that are not text")
    return "".join(texts)


def has_text(message: dict) -> bool:
    content = message.get("content")
    return bool(content.strip()) if isinstance(content, str) else content is not None


def check_text(message: dict, index: int) -> None:
    role = message["role"]
    if not isinstance(message.get("content"), str):
        raise MalformedRow(f"turn {index} ({role}) has no text")
    if not has_text(message) and not message.get("tool_calls"):
        kind = "an empty response" if role == "assistant" else f"an empty {role} turn"
        raise MalformedRow(f"{kind} (turn {index})")


def prompt_key(messages: list[dict]) -> str:
    """What makes two prompts equal: the user turns without case, white space and punctuation.

    Symbols and combining marks count (C and C++ differ, and so do signs of Indic scripts), and so do the
    operators that Unicode files under punctuation.
    """
    texts = (m["content"] for m in messages if m["role"] == "user")
    text = unicodedata.normalize("NFC", "\n".join(map(str, texts)).casefold())
    kept = (c if c in "#%*/" or unicodedata.category(c)[0] not in "PZC" else " " for c in text)
    words = "".join(kept).split() or [text]
    return hashlib.blake2b(" ".join(words).encode(), digest_size=16).hexdigest()
