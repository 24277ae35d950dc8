"""The `baton` command.

__main__.py     runs one command, prints an error in one line, chooses the exit code
arguments/      the command line: every command and its options
commands/       one module for each command
request.py      the options of `baton generate` as a GenerateRequest
address.py      finds the router's address
credentials.py  finds certificates and token
connection.py   the client that a command uses
tracing.py      the spans of `baton generate`
timings.py      draws the timings of a request
outputs.py      files that a measurement writes, checked before it begins
failures.py     errors for a terminal
terminal.py     tables and consoles
local/          the cluster that `baton up` starts
"""
