"""The `baton` command.

__main__.py     runs one command, prints an error in one line, chooses the exit code
arguments/      the command line: every command and its options
commands/       the commands
request.py      the options of `baton generate` as a GenerateRequest
address.py      finds the router's address
connection.py   the client that a command uses, with certificates and token
timings.py      draws the timings of a request
outputs.py      files that a measurement writes, checked before it begins
failures.py     errors for a terminal
terminal.py     tables and consoles
local/          the cluster that `baton up` starts
"""
