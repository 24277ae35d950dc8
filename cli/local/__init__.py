"""A whole cluster on this machine, in the background: `baton up` starts it and `baton down` stops it.

lifecycle.py   starts and stops the supervisor, from a command
supervisor.py  the background process, which keeps the others running
plan.py        from options to the command line of each process
readiness.py   waits until the cluster completes a request
state.py       the folder .baton: lock, state, address, logs
envoy.py       the configuration of Envoy
ports.py       chooses ports
"""
