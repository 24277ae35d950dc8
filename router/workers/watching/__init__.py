"""One worker as its router watches it: is it well, does it answer, and how much has it to do.

health.py          WorkerHealth: the health that it reports and what checks of it find; suspensions
waiting_calls.py   WaitingCalls: the calls that wait for it, interrupted if it hangs or does not answer
corrected_load.py  CorrectedLoad: its load between its reports
report_stream.py   ReportStream: the loss of its reports, in the metrics and the log
"""
