"""The keeper: a small process that holds what outlives the worker's process, and starts the worker again.

__main__.py      `python -m services.keeper ...`: the process, which runs the worker as its child
keeper.py        starts the worker, waits for its death, and decides what happens then
child.py         one process of the worker: its start, its signals, and its certain death
process.py       both ends of it: a process and the conversation with it, and one that is to follow another
conversation.py  what the worker asks to be kept, and its signs of life
fork_server.py   a process that has imported its code already, from which the next ones are forked
silence.py       how long it has given none although it could
memory.py        the file descriptors that are kept, by name; what a process that is to follow another may do with them
messages.py      the messages between the two
client.py        the worker's side

Nothing but Python's standard library is imported here: what cannot fail need not be restarted. The keeper never reads
or writes what it holds.
"""
