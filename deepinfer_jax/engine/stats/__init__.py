"""What an engine counts and shows: metrics, histograms, Prometheus, profiles.

Imports: experts, runner, scheduler, config, environ.
"""
