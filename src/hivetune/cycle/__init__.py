"""The cycle: new rows are trained on, judged and promoted, by one straight function (stations.py)."""
