"""The checks of `baton doctor`; each yields findings.

finding.py     a finding: its severity, one sentence, and a remedy
packages.py    Python, versions of packages, names that clash; the generated stubs
host.py        this machine: etcd, ports, shared memory, free memory; the GPUs, and what PyTorch can do with them
cluster.py     a running cluster: router, workers, KV layouts
deployment.py  which processes the files of a deployment start; the effective configuration of such a process
timeouts.py    the order of timeouts in a deployment
"""
