"""Fairness between tenants, and quotas of several routers, as processes: `python -m benchmarks.fairness`.

loads.py     what tenants send, what they got, and the bars; tests/simulation/fairness.py has the same in virtual time
quotas.py    a demand that moves between routers, and the windows in which a quota must hold
fleet.py     workers and routers as processes, and the clients
killed.py    eight routers that share a quota, and are killed
decision.py  the CPU time of a decision with 1,000 tenants, in one process
"""
