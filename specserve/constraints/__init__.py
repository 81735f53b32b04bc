"""Constrained answers, such as JSON mode, from a schema to the mask of a step.

In order: ``schemas`` refuses what can't be enforced, ``grammar`` makes grammars, ``marks`` writes marks in them,
``calls`` makes those of tool calls (``python_arguments`` and ``text_arguments`` if the arguments are not JSON) and of
answers after reasoning; in the engine ``matcher`` follows an answer through its grammar, ``thinking`` through its
budget, and ``masks`` says which tokens may follow the nodes of a step's trees. Which request fields ask for a
constraint is in ``server/protocol.py`` and ``frontend/tools.py``, what an answer asks for in all in
``frontend/answers.py``, and which steps wait for masks in ``scheduler/constraints.py``.
"""
