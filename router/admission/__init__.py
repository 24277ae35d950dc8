"""Admission control: which requests may run on workers, and when. docs/admission.md describes it.

controller.py  AdmissionController: quotas, queue and deadline of each request
quotas.py      token buckets and concurrency of each tenant
queue.py       the priority queue of each model
predictor.py   how long a request would take
"""
