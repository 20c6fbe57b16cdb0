"""Works out a line of arithmetic by itself, exactly where it can: it knows nothing of the planner."""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction
from typing import Any

_CALLS: dict[str, Any] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "sqrt": lambda value: Fraction(math.sqrt(value)),
    "ln": lambda value: Fraction(math.log(value)),
}


def worked_out(text: str) -> Fraction:
    """The value of an expression over numbers. Anything else raises ValueError."""
    return _value(ast.parse(re.sub(r"(?<=\d),(?=\d{3})", "", text), mode="eval").body, text)


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(repr(value))
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CALLS:
            return Fraction(_CALLS[name](*(_value(one, text) for one in arguments)))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, text), _value(right, text)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return a ** int(b) if b < 100 else Fraction(float(a) ** float(b))
    raise ValueError(f"{text}: {ast.dump(node)} is no arithmetic")
