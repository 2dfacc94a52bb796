"""The grammar of queries: words, and conditions such as ``status=failed reward>=0.5 "two words"``.

`run_search` and `rollout_search` say which names there are and what they are compared with.
"""

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement

from lorimer.errors import InvalidInput

_TOKEN = re.compile(r'(?:[^\s"]|"[^"]*")+')
_CONDITION = re.compile(r"([^=<>!]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    name: str
    sign: str
    value: str
    """Empty to ask whether there is one."""


def parse(query: str) -> Iterator[Condition | str]:
    """Yield the conditions and words of a query. What is in quotes as a whole is a word, whatever signs it has."""
    for token in _TOKEN.findall(query):
        is_quoted = token[0] == token[-1] == '"' and token.count('"') == 2
        found = None if is_quoted else _CONDITION.fullmatch(token)
        if found is None:
            yield _unquoted(token)
        else:
            yield Condition(_unquoted(found[1]), found[2], _unquoted(found[3]))


def _unquoted(text: str) -> str:
    return text.replace('"', "")


def compare(column: ColumnElement[Any], sign: str, value: Any, is_absent: bool) -> ColumnElement[bool]:
    """Compare, or with an empty value ask whether there is none."""
    if is_absent and sign == "=":
        return column.is_(None)
    if is_absent and sign == "!=":
        return column.is_not(None)
    compared: ColumnElement[bool] = _COMPARE[sign](column, value)
    return compared


def as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number - number == 0 else None  # neither NaN nor infinite


def required_number(condition: Condition) -> float | None:
    """Return the number of a condition; none if it asks whether there is one."""
    number = as_number(condition.value)
    if number is None and condition.value:
        raise InvalidInput(f"{condition.name} is compared with {condition.value[:80]!r}; a number is accepted")
    return number
