"""Prepares models, checks them, and converts them from one file format into another."""
