"""Drafts on the device: proposed, verified in the step, committed. Imports: runner."""
