"""One worker as its router watches it: is it well, does it answer, and how much has it to do.

health.py          WorkerHealth: the health that it reports and what checks of it find; suspensions
waiting_calls.py   WaitingCalls: the calls that wait for it, interrupted if it hangs or does not answer
report_stream.py   ReportStream: the loss of its reports; CorrectedLoad: its load between them
"""
