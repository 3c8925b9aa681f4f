"""Which code of the user's runs, instruction by instruction.

Comes in: what recorded forwards run (``covered_code``). Goes out: what a step's forwards reach
beyond that (``uncovered_code``), of which Python tells (``code_events``), in autograd's threads
as well. Start with ``covered_code``.
"""
