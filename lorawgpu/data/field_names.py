"""Other names of a question, its answer and a conversation, by which data sets are recognized."""

from typing import NamedTuple

QUESTIONS = ("question", "query", "instruction", "prompt", "problem", "input", "user", "human")
ANSWERS = ("answer", "response", "output", "completion", "solution", "reply", "assistant", "bot")
CONTEXTS = ("input", "context")  # what a question is about; `input` alone is the question
SYSTEMS = ("system", "system_prompt")
CONVERSATIONS = ("conversation", "dialogue", "dialog", "turns")  # none is the name of a type


class Fields(NamedTuple):
    """The keys of a question and answer in a record; "" for one that it does not have."""

    question: str
    answer: str
    context: str
    system: str


ALPACA = Fields("instruction", "output", "input", "system")


def other_type(record: dict) -> str | None:
    """The type of a record by other names: "question/answer", or the key of its conversation. None if there is none, or
    if several keys could be the question or the answer."""
    turns = [key for key in CONVERSATIONS if isinstance(record.get(key), list)]
    questions, answers = candidates(record)
    if len(turns) == 1 and not (questions and answers):
        return turns[0]
    return f"{questions[0]}/{answers[0]}" if len(questions) == len(answers) == 1 and not turns else None


def candidates(record: dict) -> tuple[list[str], list[str]]:
    """The keys that may be the question, and those that may be the answer."""
    questions = [key for key in QUESTIONS if key in record]
    if len(questions) > 1:
        questions = [key for key in questions if key not in CONTEXTS]
    return questions, [key for key in ANSWERS if key in record]


def fields_of(kind: str, record: dict) -> Fields:
    """The keys of a record of a type "question/answer"."""
    question, answer = kind.split("/")
    context = next((key for key in CONTEXTS if key in record and key != question), "")
    return Fields(question, answer, context, next((key for key in SYSTEMS if key in record), ""))


def described(kind: str) -> str:
    """What a type by other names takes for what; "" for other types."""
    if kind in CONVERSATIONS:
        return f"`{kind}` is read as `conversations`"
    question, _, answer = kind.partition("/")
    return f"`{question}` is the user's turn, `{answer}` the assistant's" if answer else ""
