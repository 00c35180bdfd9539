"""What an engine counts and shows: metrics, histograms, Prometheus, profiles.

Imports: runner, scheduler, config, environ.
"""
