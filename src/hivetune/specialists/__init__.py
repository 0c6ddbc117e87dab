"""Experts: domains are found, forked, trained, judged, routed to and retired. One station a file, no printing."""
