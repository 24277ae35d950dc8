"""Tools for people who develop or operate Baton.

bench/         load for a running cluster, and what came of it (`baton bench`)
doctor/        checks of an installation, a cluster or a deployment (`baton doctor`)
trace_viewer/  receives, stores and shows traces (`baton traces`), and checks one (`baton trace verify`)
"""
