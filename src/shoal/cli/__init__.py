"""The command line, `shoal`: options, verbs, and what they print.

May import: everything but `experiment` and `testing`.

`main` loads only the verb that is used, so `shoal --help` stays fast. A verb parses its options, calls `launch` or
`doctor`, and shows the result once, as text or with `--json` as data. Verbs that start a run share `foreground`, which
follows the run and passes signals on to it, and `background`, the supervisor process of a detached run.
"""
