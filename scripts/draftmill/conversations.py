"""Raw rows of the shapes people have, as conversations of one shape.

A conversation is a list of messages {"role", "content", ...} with the roles system, user, assistant and
tool; tool calls and other keys are kept as they are.
"""

import hashlib
import json
import re
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
    except ValueError as error:
        raise MalformedRow(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise MalformedRow(f"a JSON {type(value).__name__} where an object is expected")
    messages = messages_of(value)
    if responses == "generate":
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    elif messages[-1]["role"] != "assistant":
        raise MalformedRow("no answer: the last turn is not the assistant's")
    if not any(m["role"] == "user" for m in messages):
        raise MalformedRow("no user turn")
    identity = next((value[k] for k in ("id", "question_id", "task_id") if k in value), number)
    return Conversation(str(identity), str(value.get("category") or "all"), messages)


def messages_of(value: dict) -> list[dict]:
    if "messages" in value or "conversations" in value:
        key = "messages" if "messages" in value else "conversations"
        turns = value[key]
        if not isinstance(turns, list) or not turns:
            raise MalformedRow(f"'{key}' is not a list of turns")
        return [message_of(turn, i) for i, turn in enumerate(turns)]
    if "prompt" in value:
        turns = [{"role": "user", "content": value["prompt"]}]
        if isinstance(value.get("system"), str):
            turns.insert(0, {"role": "system", "content": value["system"]})
        answer = next((value[k] for k in ("response", "completion") if k in value), None)
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        return [message_of(turn, i) for i, turn in enumerate(turns)]
    raise MalformedRow("none of the keys 'messages', 'conversations' and 'prompt'")


def message_of(turn: object, index: int) -> dict:
    if not isinstance(turn, dict):
        raise MalformedRow(f"turn {index} is not an object")
    turn = {k: v for k, v in turn.items() if v is not None}
    if "from" in turn:
        role = SHAREGPT_ROLES.get(turn.pop("from"))
        turn = {"role": role, "content": turn.pop("value", None), **turn}
    if turn.get("role") not in ROLES:
        raise MalformedRow(f"turn {index} has no known role")
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        turn["content"] = ""
    elif not isinstance(content, str | list):
        raise MalformedRow(f"turn {index} ({turn['role']}) has no text")
    elif not content or (isinstance(content, str) and not content.strip()):
        kind = (
            "an empty response" if turn["role"] == "assistant" else f"an empty {turn['role']} turn"
        )
        if not turn.get("tool_calls"):
            raise MalformedRow(f"{kind} (turn {index})")
    return turn


def prompt_key(messages: list[dict]) -> str:
    """What makes two prompts equal: the user turns without case, white space and punctuation."""
    texts = (m["content"] for m in messages if m["role"] == "user")
    words = re.findall(r"\w+", "\n".join(map(str, texts)).lower())
    words = words or [str(m["content"]) for m in messages]  # a prompt of symbols only
    return hashlib.blake2b(" ".join(words).encode(), digest_size=16).hexdigest()
