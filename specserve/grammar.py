"""Build grammars that constrain an answer: the values of ``SamplingParams.grammar``.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"city": {"type": "string"}}}))

Anything in a schema or an expression that can't be enforced is refused, never ignored.
"""

from specserve.constraints.grammar import choice, ebnf, json_object, json_schema, lark, regex, without

__all__ = ["choice", "ebnf", "json_object", "json_schema", "lark", "regex", "without"]
