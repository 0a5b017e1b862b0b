"""What can be held of a JSON schema that cannot be held as a whole: for tools that must be called and are not
strict, as OpenAI takes any schema for them. Pure.

No list says what cannot be held: the compiler is asked. A schema is taken apart into its constraints, each a
keyword at a place. The first constraint with which the schema cannot be compiled any more is left out, with
equal ones elsewhere, until the rest can be compiled. Leaving a constraint out allows more answers and forbids
none, because only those parts are taken apart in which that is so: not what is inside `not` or `if`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.structure.schema import NESTING, schemas_in

# With fewer constraints in these, fewer answers may be valid
_CLOSED = frozenset(("not", "if", "then", "else", "contains", "dependentSchemas"))

Place = tuple[str | int, ...]  # of a schema: the keys and indices that lead to it
Constraint = tuple[Place, str]  # a schema and a keyword in it


def loosened(
    schema: dict[str, Any], is_held: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, Any], list[str]]:
    """The schema without what cannot be held, and what that was: keywords with their places. `is_held`: of a
    schema without some of its constraints."""
    constraints = sorted(_constraints((), schema), key=_order)
    left_out: list[str] = []
    while not is_held(_part(schema, frozenset(constraints))):
        first = _first_too_many(schema, constraints, is_held)
        if first is None:
            return {}, [*left_out, "/"]
        place, keyword = constraints[first]
        value = _at(schema, place)[keyword]
        gone = [each for each in constraints if each[1] == keyword and _at(schema, each[0])[keyword] == value]
        left_out += ["/".join(("", *map(str, where), keyword)) for where, keyword in gone]
        constraints = [each for each in constraints if not any(_is_in(each, other) for other in gone)]
    return _part(schema, frozenset(constraints)), left_out


def _order(constraint: Constraint) -> tuple[int, int]:
    """What has schemas in it comes first, then references to these, so that what is asked about afterwards is
    a part of the whole. The compiler does not look at what nothing refers to."""
    place, keyword = constraint
    return (0 if keyword in NESTING - _CLOSED else 1 if keyword == "$ref" else 2), len(place)


def _first_too_many(
    schema: dict[str, Any], constraints: Sequence[Constraint], is_held: Callable[[dict[str, Any]], bool]
) -> int | None:
    """The constraints before it can be held, and with it they cannot. None: not even without any."""
    if not is_held({}):
        return None
    passing, failing = 0, len(constraints)  # numbers of constraints
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if is_held(_part(schema, frozenset(constraints[:middle]))):
            passing = middle
        else:
            failing = middle
    return failing - 1


def _constraints(place: Place, schema: dict[str, Any]) -> Iterator[Constraint]:
    for keyword, value in schema.items():
        yield place, keyword
        for key, inner in _inner(keyword, value):
            yield from _constraints((*place, keyword, *key), inner)


def _inner(keyword: str, value: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The schemas in the value of a keyword that are taken apart."""
    found = () if keyword in _CLOSED else schemas_in(keyword, value)
    return ((place, each) for place, each in found if isinstance(each, dict))


def _part(schema: dict[str, Any], kept: frozenset[Constraint], place: Place = ()) -> dict[str, Any]:
    """The schema with these constraints alone."""
    part: dict[str, Any] = {}
    for keyword, value in schema.items():
        if (place, keyword) not in kept:
            continue
        inner = {key: _part(each, kept, (*place, keyword, *key)) for key, each in _inner(keyword, value)}
        if () in inner:
            part[keyword] = inner[()]
        elif isinstance(value, list):
            part[keyword] = [inner.get((idx,), each) for idx, each in enumerate(value)]
        elif isinstance(value, dict):
            part[keyword] = {name: inner.get((name,), each) for name, each in value.items()}
        else:
            part[keyword] = value
    return part


def _at(schema: Any, place: Place) -> Any:
    for key in place:
        schema = schema[key]
    return schema


def _is_in(constraint: Constraint, other: Constraint) -> bool:
    """Whether it is the other one, or in its value."""
    whole, outer = (*constraint[0], constraint[1]), (*other[0], other[1])
    return whole[: len(outer)] == outer
