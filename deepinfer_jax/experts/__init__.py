"""Expert balance: which rank holds which expert, decided from what tokens chose.

Imports: runner, models, models.layers, scheduler, expert_options.
"""
