"""Pictures of Grafana's dashboards, drawn without Grafana from a run with a fault in it: `make dashboards`.

* `__main__`: the run, then the pictures
* `run`: a cluster of processes under load, one of whose decode workers is killed; what Prometheus then answers
* `drawing`: the panels of a dashboard, where Grafana would place them
"""
