"""The cycle: new rows are trained on, judged, promoted and told, by one straight function (stations.py)."""
