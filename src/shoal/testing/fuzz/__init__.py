"""Fuzzer of every port of a run: what it sends, and what must hold of the run afterwards.

`fuzzed_run` finds the ports of a run and checks it; `port_fuzzer` chooses and sends; `odd_values` and `requests` make
values and HTTP requests; `clients` are the cheapest clients that there are, since a million messages share one core.

May import: everything in shoal.
"""
